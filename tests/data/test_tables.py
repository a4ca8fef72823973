import gzip

import pandas as pd
import pytest

from sweep.data.sources import identify_data, read_files
from sweep.data.tokens import prepare_data
from sweep.errors import SweepError
from tests.data.conftest import BYTES, json_lines


def write_table(path, texts):
    table = pd.DataFrame({"id": range(len(texts)), "text": texts})
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_json(path, orient="records", lines=path.suffix != ".json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a[1].csv", "a.parquet", "a.json"])
def test_every_row_of_a_table_is_a_document(tmp_path, stories, name):
    texts = ["NA", "007", " with spaces\n", *stories]
    write_table(tmp_path / name, texts)
    pieces = list(read_files([tmp_path / name]))
    assert [piece.text for piece in pieces] == [text.strip() for text in texts]
    assert all(piece.ends_document for piece in pieces)


def test_a_folder_may_hold_tables(tmp_path, stories):
    folder = tmp_path / "tables"
    folder.mkdir()
    write_table(folder / "train.jsonl", stories[:150])
    write_table(folder / "validation.parquet", stories[150:])
    text = prepare_data(identify_data(str(folder)), str(folder), BYTES)
    assert (text.train_documents, text.valid_documents) == (150, 50)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("other.jsonl", b'{"text": "a"}\n{"story": "b"}\n'),
        ("number.jsonl", b'{"text": 3}\n'),
        ("nul.jsonl", b'{"text": "a\\u0000b"}\n'),
        ("broken.jsonl", b'{"text": \n'),
        ("other.csv", b"a,b\n1,2\n"),
        ("empty.csv", b""),
        ("latin.csv", "text\ncafé\n".encode("latin-1")),
        ("damaged.parquet", b"PAR1"),
        ("damaged.jsonl.gz", gzip.compress(json_lines(["a"] * 9999), mtime=0)[:50]),
    ],
)
def test_a_table_without_text_is_refused_in_one_sentence(tmp_path, cache, capfd, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SweepError) as caught:
        prepare_data(identify_data(str(path)), str(path), BYTES)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert [entry for entry in cache.glob("tokens/*") if entry.suffix != ".lock"] == []
    assert capfd.readouterr().err == ""
