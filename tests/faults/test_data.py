"""Wrong bytes in prepared tokens and in texts, and texts that are too large for their files."""

import gzip
import json
import os
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sweep.config.trial import TokenizerSettings
from sweep.data import plain_text, tables
from sweep.data.describe import describe_data
from sweep.data.sources import identify_data
from sweep.data.tokens import prepare_data
from sweep.errors import SweepError
from tests.faults.damage import WRONG_BYTES, damage

BYTES = TokenizerSettings(kind="bytes", vocabulary=256)
BPE = TokenizerSettings(kind="bpe", vocabulary=300)
FILES = ("train.bin", "valid.bin", "tokenizer.json", "data.json")


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    stories = (f"Story {i} of {i * i} words." for i in range(200))
    path.write_text("\n<|endoftext|>\n".join(stories))
    return path


@pytest.mark.fault("wrong bytes in prepared tokens")
@pytest.mark.parametrize("name", FILES)
def test_damaged_tokens_are_prepared_again_and_that_is_said(text, count, name):
    identity, rng = identify_data(str(text)), random.Random(name)
    whole = prepare_data(identity, str(text), BPE)
    expected = [whole.train.tobytes(), whole.valid.tobytes(), whole.tokenizer_path.read_bytes()]
    path = whole.tokenizer_path.with_name(name)
    content = path.read_bytes()
    for fault in WRONG_BYTES:
        path.write_bytes(content)
        damage(path, fault, rng)
        messages = []
        text_again = prepare_data(identity, str(text), BPE, messages.append)
        files = (text_again.train, text_again.valid)
        actual = [*(tokens.tobytes() for tokens in files), text_again.tokenizer_path.read_bytes()]
        assert actual == expected and "damaged" in messages[0]
        count("recovered")


@pytest.mark.fault("wrong bytes in prepared tokens")
def test_the_tokens_of_another_text_are_prepared_again(text, count):
    other = text.with_name("other.txt")
    other.write_text(text.read_text().replace("Story", "Tales"))
    expected = prepare_data(identify_data(str(text)), str(text), BPE)
    tokens = expected.train.tobytes()
    stranger = prepare_data(identify_data(str(other)), str(other), BPE).tokenizer_path.parent
    shutil.copytree(stranger, expected.tokenizer_path.parent, dirs_exist_ok=True)
    messages = []
    again = prepare_data(identify_data(str(text)), str(text), BPE, messages.append)
    assert again.train.tobytes() == tokens and "damaged" in messages[0]
    count("recovered")


@pytest.mark.fault("text changed in place")
def test_a_text_that_changed_with_its_size_and_time_is_noticed(text, count, tmp_path):
    identity, before = identify_data(str(text)), text.stat()
    text.write_text(text.read_text().replace("Story 7 ", "Story 8 "))
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert text.stat().st_size == before.st_size
    with pytest.raises(SweepError, match="has changed"):
        prepare_data(identity, str(text), BYTES)
    assert identify_data(str(text)) != identity
    count("refused")


def test_a_text_that_changes_while_it_is_tokenized_is_noticed(text):
    identity = identify_data(str(text))

    def change(work):
        if work == "Tokenizing train":
            text.write_text(text.read_text().replace("Story 7 ", "Story 8 "))

    with pytest.raises(SweepError, match="has changed"):
        prepare_data(identity, str(text), BYTES, change)
    assert not describe_data(str(text), BYTES)["prepared"]


@pytest.mark.fault("text too large for its file")
def test_a_text_that_expands_without_end_is_refused(text, count, monkeypatch):
    monkeypatch.setattr(plain_text, "MAX_CHARACTERS", 1 << 20)
    path = text.with_name("bomb.txt.gz")
    with gzip.open(path, "wt") as file:
        file.writelines(f"{i % 2} {'a' * 2**16}\n<|endoftext|>\n" for i in range(200))
    with pytest.raises(SweepError, match="characters per byte"):
        prepare_data(identify_data(str(path)), str(path), BYTES)
    count("refused")


@pytest.mark.fault("text too large for its file")
@pytest.mark.parametrize("name", ["bomb.parquet", "bomb.jsonl.gz"])
def test_a_table_that_expands_without_end_is_refused(text, count, monkeypatch, name):
    monkeypatch.setattr(plain_text, "MAX_CHARACTERS", 1 << 20)
    path = text.with_name(name)
    if name.endswith("parquet"):
        columns = pa.table({"text": ["a" * 2**16 + str(number % 2) for number in range(200)]})
        pq.write_table(columns, path, compression="gzip", use_dictionary=False)
    else:
        path.write_bytes(gzip.compress(b"\n" * 2**24))
    with pytest.raises(SweepError, match="characters per byte"):
        prepare_data(identify_data(str(path)), str(path), BYTES)
    count("refused")


@pytest.mark.fault("text too large for its file")
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_line_that_is_too_long_is_refused(text, count, monkeypatch, suffix):
    monkeypatch.setattr(tables, "MAX_LINE_CHARACTERS", 1 << 16)
    path = text.with_name(f"long{suffix}")
    lines = [json.dumps({"text": "short"}), json.dumps({"text": "a" * 2**17})]
    opener = gzip.open if suffix.endswith("gz") else open
    with opener(path, "wt") as file:
        file.write("\n".join(lines))
    with pytest.raises(SweepError, match="lines of at most"):
        prepare_data(identify_data(str(path)), str(path), BYTES)
    count("refused")


@pytest.mark.fault("nonsense in JSON lines")
@pytest.mark.parametrize(
    "line",
    [
        '{"text": "\\ud800"}',
        '{"text": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"text": "a", "x": ' + "[" * 100_000,
        '{"text": 1e999}',
        '{"text": null}',
        '{"other": 1}',
        "[]",
        "nonsense",
        "\x00",
    ],
    ids=range(10),
)
def test_nonsense_in_json_lines_is_refused_in_one_sentence(text, count, line):
    path = text.with_name("lines.jsonl")
    path.write_text('{"text": "first"}\n{"text": "second"}\n' + line + "\n")
    with pytest.raises(SweepError, match=r"\A[^\n]+\Z"):
        prepare_data(identify_data(str(path)), str(path), BYTES)
    count("refused")
