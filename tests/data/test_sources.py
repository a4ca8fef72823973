import gzip
import json
import os

import pytest

from sweep.data.sources import SAMPLE_BYTES, check_text_length, find_text_files
from sweep.errors import SweepError

TEXT = "a cat\n<|endoftext|>\na dog\n"


def put(folder, **files):
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return str(folder)


def roles(source):
    return [(file.role, file.path.name, file.kind) for file in find_text_files(source)]


def test_a_folder_with_train_and_valid_is_a_pair(tmp_path):
    folder = put(tmp_path, train__txt=TEXT, valid__jsonl='{"text": "a"}\n', other__txt=TEXT)
    assert roles(folder) == [("train", "train.txt", "text"), ("valid", "valid.jsonl", "jsonl")]


@pytest.mark.parametrize("name", ["validation.txt", "val.txt.gz"])
def test_other_names_of_the_validation_file_are_understood(tmp_path, name):
    data = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert roles(put(tmp_path, train__txt=TEXT))[1] == ("valid", name, "text")


def test_a_folder_with_only_a_train_file_uses_that_alone(tmp_path):
    folder = put(tmp_path, train__txt=TEXT, more__txt=TEXT)
    assert roles(folder) == [("text", "train.txt", "text")]


def test_a_folder_of_other_text_files_uses_all_in_sorted_order_but_not_the_readme(tmp_path):
    folder = put(tmp_path, b__txt=TEXT, a__txt=TEXT, README__txt="about", LICENSE__txt="law")
    assert [name for _, name, _ in roles(folder)] == ["a.txt", "b.txt"]


def test_any_file_with_plain_text_is_accepted(tmp_path):
    put(tmp_path, story__md=TEXT, noname=TEXT)
    assert roles(str(tmp_path / "story.md")) == [("text", "story.md", "text")]
    assert roles(str(tmp_path / "noname")) == [("text", "noname", "text")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "must not be empty"),
        ("blank.txt", b" \n \n", "only white space"),
        ("nul.txt", b"abc\0def", "UTF-8 text"),
        ("latin.txt", "café".encode("latin-1"), "UTF-8 text"),
        ("late.txt", b"a" * (3 * SAMPLE_BYTES) + b"\xff\xfe", "UTF-8 text"),
        ("cut.txt", "é".encode()[:1], "UTF-8 text"),
        ("table.csv", b"a,b\n", "got a .csv file"),
        ("data.parquet", b"PAR1", "got a .parquet file"),
        ("text.txt.gz", b"this is not gzip", "whole gzip file"),
        ("cut.txt.gz", gzip.compress(os.urandom(999))[:500], "whole gzip file"),
        ("other.jsonl", b'{"text": "a"}\n{"story": "b"}\n', "line 2 of"),
        ("list.jsonl", b'["a"]\n', "field text"),
        ("broken.jsonl", b'{"text": \n', "JSON object"),
        ("number.jsonl", b'{"text": 3}\n', "field text"),
    ],
)
def test_what_cannot_be_text_is_refused_in_one_sentence_with_a_remedy(
    tmp_path, name, content, said
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SweepError, match=said) as caught:
        find_text_files(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "got none"),
        ({"notes__pdf": TEXT}, "got none"),
        ({"valid__txt": TEXT}, "must hold a train file"),
        ({"train__txt": TEXT, "train__jsonl": '{"text": "a"}'}, "one train file"),
    ],
)
def test_folders_without_usable_files_are_refused(tmp_path, files, said):
    with pytest.raises(SweepError, match=said):
        find_text_files(put(tmp_path, **files))


def test_a_missing_path_is_named():
    with pytest.raises(SweepError, match=r"existing file or folder, got './not-there'"):
        find_text_files("./not-there")


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_characters_across_the_ends_of_the_samples_are_no_damage(tmp_path, offset):
    (tmp_path / "a.txt").write_text("x" * offset + "😀" * (SAMPLE_BYTES // 2), encoding="utf-8")
    assert len(find_text_files(str(tmp_path / "a.txt"))) == 1


def test_text_shorter_than_a_window_is_refused_without_tokenizing(tmp_path, cache):
    folder = put(tmp_path, train__txt="abc " * 100, valid__txt="x" * 64)
    check_text_length(folder, 63)
    with pytest.raises(SweepError, match=r"the valid data .* context \+ 1 = 65 tokens, got 64"):
        check_text_length(folder, 64)
    check_text_length("synthetic", 64)
    assert not cache.exists()


def test_the_length_of_compressed_text_is_that_of_the_text(tmp_path):
    line = json.dumps({"text": "a" * 5000})
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    check_text_length(str(tmp_path / "a.jsonl.gz"), 5000)
    with pytest.raises(SweepError, match="got 50"):
        check_text_length(str(tmp_path / "a.jsonl.gz"), 6000)
