import gzip
import json

import pandas as pd
import pytest

from sweep.config.trial import TokenizerSettings
from sweep.data.hub import read_table, resolve_revision
from sweep.data.sources import identify_data
from sweep.data.tokens import prepare_data
from sweep.errors import SweepError

BYTES = TokenizerSettings(kind="bytes", vocabulary=256)
HUB = """
from sweep.data.sources import identify_data, open_data
try:
    identity = identify_data("hf:someone/stories")
    readers = open_data(identity, None, lambda work, fraction: None)
    texts = {split: [piece.text for piece in read()] for split, read in readers.items()}
    print(json.dumps([identity, texts]))
except SweepError as error:
    print(json.dumps([str(error)]))
"""


def json_lines(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_table(path, texts):
    table = pd.DataFrame({"id": range(len(texts)), "text": texts})
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path, index=False)
    elif path.suffix == ".json":
        table.to_json(path, orient="records")
    else:
        data = json_lines(texts)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a[1].csv", "a.parquet", "a.json"])
def test_every_row_of_a_table_is_a_document(tmp_path, stories, name):
    texts = ["NA", "007", " with spaces\n", *stories]
    write_table(tmp_path / name, texts)
    pieces = list(read_table(tmp_path / name))
    assert [piece.text for piece in pieces] == [text.strip() for text in texts]
    assert all(piece.ends_document for piece in pieces)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_table_has_the_tokens_of_the_same_text(tmp_path, stories, story_file, name):
    write_table(tmp_path / name, stories)
    text, table = (
        prepare_data(identify_data(str(path)), str(path), BYTES)
        for path in (story_file, tmp_path / name)
    )
    assert table.train.tobytes() == text.train.tobytes()
    assert table.valid.tobytes() == text.valid.tobytes()


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


def test_a_data_set_of_the_hub_is_identified_by_its_commit(hub, stories):
    hub.files = {"train.jsonl": json_lines(stories[:9]), "validation.jsonl": json_lines(["a"])}
    identity, texts = hub.run(HUB)
    assert (identity["name"], identity["repository"]) == ("hf", "someone/stories")
    assert identity["revision"] == "ab" * 20
    assert texts == {"train": stories[:9], "valid": ["a"]}


def test_a_data_set_of_the_hub_without_validation_is_split_by_document(hub, stories):
    hub.files = {"train.jsonl": json_lines(stories)}
    _, texts = hub.run(HUB)
    assert sorted(texts["train"] + texts["valid"]) == sorted(stories)
    assert len(texts["valid"]) == 10


def test_a_data_set_that_the_hub_does_not_have_is_refused_in_one_sentence(hub):
    [message] = hub.run(HUB.replace("someone/stories", "someone/else"))
    assert "hf:someone/else" in message
    assert "\n" not in message


def test_a_commit_needs_no_network():
    assert resolve_revision("someone/stories", "ab" * 20) == "ab" * 20


@pytest.mark.parametrize("source", ["hf:", "hf:stories", "hf:a/b/c", "hf:a/b@"])
def test_a_malformed_name_is_refused(source):
    with pytest.raises(SweepError, match="OWNER/NAME"):
        identify_data(source)


def test_a_local_folder_is_never_read_as_a_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "stories").mkdir(parents=True)
    identity = identify_data(f"hf:someone/stories@{'ab' * 20}")
    with pytest.raises(SweepError, match="local path"):
        prepare_data(identity, None, BYTES)
