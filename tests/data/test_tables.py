"""Texts of tables: read exactly, or refused with the line and the reason."""

import csv
import gzip
import io
import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.data import tables
from sweep.data.sources import identify_data, read_files
from sweep.errors import SweepError
from tests.data.conftest import STORIES, json_lines


def read(path, column="text"):
    return [piece.text for piece in read_files([path], column)()]


def refusal(path, column="text"):
    with pytest.raises(SweepError, match=r"\A[^\n]+\Z") as caught:
        read(path, column)
    assert path.name in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


def delimited(texts, **dialect):
    file = io.StringIO()
    writer = csv.writer(file, **dialect)
    writer.writerow(["id", "text"])
    writer.writerows(enumerate(texts))
    return file.getvalue().encode()


def joined(texts, mark):
    return mark.join(texts).encode()


def parquet(texts, kind):
    file = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(texts, kind)}), file)
    return file.getvalue()


WRITERS = {
    "excel.csv": delimited,
    "unix.csv": lambda texts: delimited(texts, dialect="unix"),
    "lines.csv": lambda texts: delimited(texts, lineterminator="\n"),
    "mac.csv": lambda texts: delimited(texts, lineterminator="\r", quoting=csv.QUOTE_ALL),
    "unquoted.csv": lambda texts: b"text\n" + joined(texts, "\n"),
    "commas.csv": lambda texts: b"text,n\n" + joined([f"{text},1" for text in texts], "\n"),
    "pandas.csv": lambda texts: pd.DataFrame({"text": texts}).to_csv(index=False).encode(),
    "pandas.tsv": lambda texts: pd.DataFrame({"text": texts}).to_csv(sep="\t").encode(),
    "excel.tsv": lambda texts: delimited(texts, dialect="excel-tab"),
    "a.jsonl": json_lines,
    "a.ndjson.gz": lambda texts: gzip.compress(json_lines(texts), mtime=0),
    "unicode.jsonl": lambda texts: joined(
        [json.dumps({"text": text}, ensure_ascii=False) for text in texts], "\n"
    ),
    "array.json": lambda texts: json.dumps([{"text": text, "n": [1]} for text in texts]).encode(),
    "indented.json": lambda texts: json.dumps([{"text": t} for t in texts], indent=1).encode(),
    "a.parquet": lambda texts: parquet(texts, pa.string()),
    "large.parquet": lambda texts: parquet(texts, pa.large_string()),
    "plain.txt": lambda texts: joined(texts, "\n<|endoftext|>\n"),
}
CHARACTERS = "ab ,;\t\"'\n\r\\|{}[]:#é😀\u2028\x85\x1c\ufeff\0"
WORDS = ["NA", "null", "007", "1e5", "\r\n", '""', "\\n", "<|endoftext|>", '", "', "a b c"]
TEXTS = st.lists(
    st.lists(st.sampled_from([*CHARACTERS, *WORDS]), max_size=8).map("".join),
    min_size=1,
    max_size=5,
)


@given(TEXTS, st.sampled_from(sorted(WRITERS)))
def test_the_documents_are_the_texts_or_the_file_is_refused(tmp_path_factory, texts, name):
    path = tmp_path_factory.mktemp("texts") / name
    path.write_bytes(WRITERS[name](texts))
    expected = [text.strip() for text in texts if text.strip()]
    if name == "plain.txt":  # its own rules: line ends, and separators
        expected = [text.replace("\r\n", "\n").replace("\r", "\n") for text in expected]
        if any("<|endoftext|>" in text for text in texts) or "\ufeff" in texts[0][:1]:
            return
    if name == "unquoted.csv" and any(set(text) & set('\n\r"') for text in texts):
        return  # such lines are a valid table of other texts
    if name == "commas.csv" and any(set(text) & set('\n\r"') for text in texts):
        return
    try:
        documents = read(path)
    except SweepError as error:
        assert "\n" not in str(error)
        return
    assert documents == expected


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_each_format_holds_ordinary_texts(tmp_path, name):
    texts = [*STORIES, "NA", "007", "  spaces "]
    if name in ("unquoted.csv", "commas.csv", "pandas.tsv", "excel.tsv"):
        texts = [text.replace("\n", " ") for text in texts]
    path = tmp_path / name
    path.write_bytes(WRITERS[name](texts))
    assert read(path) == [text.strip() for text in texts]


@pytest.mark.parametrize(
    ("name", "content", "place", "reason"),
    [
        ("a.csv", "id,text\n1,a\n2,b, c\n", "line 3", "2 fields like the header, got 3"),
        ("a.csv", 'id,text\n1,"a\nb"\n2\n', "line 4", "got 1"),
        ("a.csv", 'id,text\n1,"a" b\n', "line 2", "expected after"),
        ("a.csv", 'id,text\n1,a\n2,"b\n3,c\n', "lines 3 to 4", "unexpected end"),
        ("a.csv", "text\na\rb\n", "line 2", "new-line"),
        ("a.tsv", "id\ttext\n1\ta\tb\n", "line 2", "got 3"),
        ("a.csv", "", "line 1", "header"),
        ("a.jsonl", '{"text": "a"}\n\n{"text": 7}\n', "line 3", "got 7"),
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2", "character 11"),
        ("a.jsonl", '{"text": "a"} {"text": "b"}\n', "line 1", "Extra data"),
        ("a.jsonl", '{"text": "a", "text": "b"}\n', "line 1", "'text' occurs twice"),
        ("a.ndjson", '{"text": ["a"]}\n', "line 1", 'got ["a"]'),
        ("a.jsonl", '{"text": "a"}\n"b"\n', "line 2", "must be an object"),
        ("a.jsonl", '{"text": "a"}\n{"other": "b"}\n', "line 2", "got other"),
        ("a.jsonl", '{"text": null}\n', "line 1", "got null"),
        ("a.jsonl", '{"text": "\\u0000"}\n', "line 1", "NUL"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "line 1", "not Unicode"),
        ("a.json", '[{"text": "a"},\n {"text": 7}]', "element 2", "got 7"),
        ("a.json", '[{"text": "a"},\n {"text"', "line 2", "delimiter"),
        ("a.json", '{"rows": [{"text": "a"}]}', "line 1", "got rows"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_its_line(tmp_path, name, content, place, reason):
    path = tmp_path / name
    path.write_bytes(content.encode())
    message = refusal(path)
    assert place in message and reason in message


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2]),
        pa.array([None, None]),
        pa.array([b"a", b"b"]),
        pa.array([["a"], ["b"]]),
        pa.array(["a", None]),
        pa.array([{"text": "a"}, {"text": "b"}]),
    ],
    ids=str,
)
def test_a_column_of_another_type_is_refused(tmp_path, column):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path)
    assert "text" in refusal(path)


def test_a_dictionary_of_strings_is_text(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), path)
    assert read(path) == ["a", "b", "a"]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet"])
def test_another_column_is_read_and_an_unknown_one_names_the_columns(tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"id": [1], "story": ["a"]}), path)
    elif "json" in name:
        path.write_text(json.dumps({"id": 1, "story": "a"}))
    else:
        mark = tables.DELIMITERS[name[2:]]
        path.write_text(f"id{mark}story\n1{mark}a\n")
    assert identify_data(str(path), "story")["column"] == "story"
    assert read(path, "story") == ["a"]
    message = refusal(path)
    assert "must have the column 'text', got id, story" in message and "--text-column" in message


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('1\t"hello\n2\tbye\tsay "x"\n', "line 2"),  # as quoted fields, one row of three lines
        ('1\ta\n2\t"b"\n', "line 3"),
        ('"1"\ta\n', "line 2"),
    ],
)
def test_a_field_of_a_tsv_file_that_may_be_quoted_is_refused_with_its_line(tmp_path, rows, line):
    path = tmp_path / "a.tsv"
    path.write_text(f"id\ttext\n{rows}")
    message = refusal(path)
    assert line in message and "double quote" in message and ".jsonl" in message
    path.write_text('"id"\t"text"\n1\ta\n')
    assert "line 1" in refusal(path)


def test_quotes_within_the_fields_of_a_tsv_file_are_ordinary_text(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('id\ttext\n1\tsay "x"\n2\t5" or 6"\n3\t\n')
    assert read(path) == ['say "x"', '5" or 6"']


def test_a_column_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,text\na,b\n")
    assert "one column 'text', got 2" in refusal(path)
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "a.parquet")
    assert "one column 'text', got 2" in refusal(tmp_path / "a.parquet")


def test_other_separators_than_commas_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id;text\n1;a\n")
    assert "by commas" in refusal(path)


def test_a_long_field_is_read_and_the_limit_of_the_csv_module_stays(tmp_path):
    path = tmp_path / "a.csv"
    limit = csv.field_size_limit()
    path.write_text(f"text\n{'a' * 2 * limit}\n")
    assert read(path) == ["a" * 2 * limit]
    assert csv.field_size_limit() == limit


def test_an_array_that_is_too_large_is_refused_with_the_command_that_divides_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tables, "MAX_ARRAY_CHARACTERS", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a" * 100}]))
    assert "jq" in refusal(path)


def test_a_message_shows_little_of_a_large_value(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": ["a" * 10_000]}))
    refusal(path)
    path.write_text(json.dumps({f"column {i} {'a' * 1000}": 1 for i in range(1000)}))
    refusal(path)
