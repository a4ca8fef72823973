import errno
import fcntl
import gzip
import json
import os
import signal
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config.trial import TokenizerSettings
from sweep.data import tokens
from sweep.data.describe import describe_data, summarize_data
from sweep.data.plain_text import Piece, read_text
from sweep.data.sources import identify_data
from sweep.data.tokens import (
    SequenceStream,
    TextTokenizer,
    find_prepared,
    prepare_data,
    prepared_folder,
    refuse_small_vocabulary,
    train_bpe,
    write_tokens,
)
from sweep.errors import SweepError
from sweep.trial.files import sha256_of
from sweep.workloads.build import build_workload
from sweep.workloads.pretrain import document_of_targets, gather
from tests.data.conftest import BYTES, PYTHON, STORIES, json_lines
from tests.workloads.trials import CPU, trial_config

BPE = TokenizerSettings(kind="bpe", vocabulary=300)

PREPARE = """
import hashlib, sys, time
from sweep.config.trial import TokenizerSettings
from sweep.data.sources import identify_data
from sweep.data.tokens import prepare_data

stages = []
def on_progress(stage):
    stages.append(stage)
    if sys.argv[2:] == ["stop"] and stage == "Tokenizing train":
        print("stopped", flush=True)
        time.sleep(60)

text = prepare_data(identify_data(sys.argv[1]), sys.argv[1],
                    TokenizerSettings(kind="bpe", vocabulary=300), on_progress)
"""

DIGEST = """
digest = hashlib.sha256(text.train.tobytes() + text.valid.tobytes()).hexdigest()
print(digest, "Tokenizing train" in stages)
"""


def prepare(source, tokenizer=BPE):
    return prepare_data(identify_data(str(source)), str(source), tokenizer)


def files_of(cache):
    return sorted(p.name for p in cache.glob("tokens/*") if not p.name.endswith(".lock"))


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
def test_tokens_are_the_documents_each_ended_by_a_separator(story_file, tokenizer):
    text = prepare(story_file, tokenizer)
    assert text.train.dtype == np.dtype("<u2")
    assert isinstance(text.train, np.memmap)
    assert text.train_documents + text.valid_documents == len(STORIES)
    both = np.concatenate([text.train, text.valid])
    documents = np.split(both, np.flatnonzero(both == 0) + 1)
    assert len(documents.pop()) == 0
    assert sorted(text.tokenizer.decode(ids[:-1]) for ids in documents) == sorted(STORIES)
    assert both.max() < text.tokenizer.vocabulary_used
    assert text.valid_bytes == len(text.tokenizer.decode(text.valid[text.valid != 0]).encode())


@pytest.mark.parametrize(("batch", "dtype"), [(1, "<u2"), (100, "<u4"), (5000, "<u2")])
def test_tokenizing_in_batches_equals_tokenizing_at_once(
    story_file, tmp_path, monkeypatch, batch, dtype
):
    tokenizer = prepare(story_file).tokenizer
    for name, characters in (("whole", 10**9), ("parts", batch)):
        monkeypatch.setattr(tokens, "BATCH_CHARACTERS", characters)
        counts = write_tokens(read_text(story_file), tokenizer, tmp_path / name, dtype)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()
    assert (tmp_path / "whole").stat().st_size == counts["tokens"] * np.dtype(dtype).itemsize


def test_preparing_again_reads_the_cache_and_the_text_may_be_gone(story_file, cache):
    identity = identify_data(str(story_file))
    assert find_prepared(identity, BPE) is None
    first = prepare_data(identity, str(story_file), BPE)
    prepare(story_file, BYTES)
    story_file.unlink()
    again = prepare_data(json.loads(json.dumps(identity)), str(story_file), BPE)
    np.testing.assert_array_equal(first.train, again.train)
    assert find_prepared(identity, BPE) is not None
    assert find_prepared(identity, BPE.model_copy(update={"vocabulary": 301})) is None
    more_rows = BYTES.model_copy(update={"vocabulary": 512})  # of the model; the tokens are equal
    assert find_prepared(identity, more_rows) is not None
    assert len(files_of(cache)) == 2


def test_a_description_writes_nothing_and_counts_prepared_data(story_file, cache):
    described = describe_data(str(story_file), BYTES)
    assert described["prepared"] is False
    assert find_prepared(described["identity"], BYTES) is None
    assert not cache.exists()
    prepare(story_file, BYTES)
    described = describe_data(str(story_file), BYTES)
    counts = described["counts"]
    assert counts["train_documents"] + counts["valid_documents"] == len(STORIES)
    json.dumps(described)


def test_merges_are_learned_from_the_training_split_only(tmp_path):
    for name, valid in (("a", "zebra zebra"), ("b", "qqqq " * 50)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text("\n".join(STORIES), encoding="utf-8")
        (tmp_path / name / "valid.txt").write_text(valid)
    paths = [prepare(tmp_path / name).tokenizer_path for name in "ab"]
    assert paths[0] != paths[1]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "data.json"])
def test_damaged_prepared_data_is_prepared_again(story_file, damage):
    text = prepare(story_file)
    expected, folder = text.train.tobytes(), text.tokenizer_path.parent
    if damage == "truncated":
        os.truncate(folder / "train.bin", 100)
    else:
        (folder / damage).unlink()
    assert find_prepared(identify_data(str(story_file)), BPE) is None
    assert prepare(story_file).train.tobytes() == expected


def test_text_that_changed_since_it_was_planned_is_refused(story_file, cache):
    identity = identify_data(str(story_file))
    story_file.write_text("something else\n<|endoftext|>\nand more")
    with pytest.raises(SweepError, match="has changed since"):
        prepare_data(identity, str(story_file), BPE)
    assert files_of(cache) == []


def test_a_cache_that_cannot_be_written_names_its_variable(story_file, monkeypatch):
    monkeypatch.setenv("SWEEP_CACHE", str(story_file))
    with pytest.raises(SweepError, match="SWEEP_CACHE"):
        prepare(story_file)


@pytest.mark.parametrize(("kind", "tokens_format"), [("text", 4), ("csv+json", 4), ("csv+tsv", 5)])
def test_only_tables_with_tabs_are_read_anew(cache, kind, tokens_format):
    identity = {"name": "path", "sha256": {"text": "ab"}, "kind": {"text": kind}}
    key = {"identity": identity, "tokenizer": {"kind": "bytes"}, "format": tokens_format}
    assert prepared_folder(identity, BYTES).name == sha256_of(key)[:24]


def test_a_cache_without_locks_is_not_one_that_cannot_be_written(story_file, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(SweepError, match=r"locks \(flock\).*SWEEP_CACHE"):
        prepare(story_file)


def test_a_split_shorter_than_a_window_is_refused(story_file):
    text = prepare(story_file, BYTES)
    text.refuse_short_splits(100)
    context = len(text.valid)
    with pytest.raises(SweepError, match=rf"valid split .* = {context + 1} tokens, got {context}"):
        text.refuse_short_splits(context)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "must contain text, got empty files"),
        ("bom.txt", b"\xef\xbb\xbf \n", "must contain text, got empty files"),
        ("copies.txt", b"one\n<|endoftext|>\none\n", "at least two different documents, got 1"),
        ("nul.txt", b"abc\0def", "UTF-8 text"),
        ("late.txt", b"a" * 10**6 + b"\0", "UTF-8 text"),
        ("latin.txt", "café".encode("latin-1"), "UTF-8 text"),
        ("cut.txt", "é".encode()[:1], "UTF-8 text"),
        ("text.txt.gz", b"this is not gzip", "whole gzip file"),
        ("cut.txt.gz", gzip.compress(os.urandom(999))[:500], "whole gzip file"),
        ("folder/train.txt", b"<|endoftext|>\n \n", "train data of .* must contain text"),
    ],
)
def test_a_file_that_is_not_text_is_refused_and_leaves_nothing(
    tmp_path, cache, name, content, says
):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if name.startswith("folder"):
        (path.parent / "valid.txt").write_text("a")
        path = path.parent
    with pytest.raises(SweepError, match=says) as caught:
        prepare(path)
    assert "\n" not in str(caught.value)
    assert files_of(cache) == []


def test_two_processes_at_once_tokenize_once_and_agree(story_file, cache):
    command = [*PYTHON, PREPARE + DIGEST, str(story_file)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].split() for process in started]
    assert outputs[0][0] == outputs[1][0]
    assert sorted(output[1] for output in outputs) == ["False", "True"]
    assert len(files_of(cache)) == 1


def test_a_killed_preparation_looks_unfinished_and_is_repeated(story_file, cache):
    command = [*PYTHON, PREPARE, str(story_file), "stop"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stopped\n"
        process.send_signal(signal.SIGKILL)
    leftover = files_of(cache)
    assert find_prepared(identify_data(str(story_file)), BPE) is None
    assert len(prepare(story_file).train) > 0
    assert files_of(cache) == leftover


PEAK = """
import pathlib, resource, sys
status = pathlib.Path("/proc/self/status")  # ru_maxrss would include the parent's peak on Linux
if status.exists():
    print(next(line for line in status.open() if line.startswith("VmHWM")).split()[1] + "000")
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("separator", "size"),
    [("\n<|endoftext|>\n", 200_000_000), ("\n", 60_000_000)],
    ids=["many documents", "one document"],
)
def test_memory_stays_bounded_on_a_large_file(tmp_path, separator, size):
    path = tmp_path / "large.txt"
    block = len(separator.join(["0000 ", *STORIES]).encode())
    with path.open("w", encoding="utf-8") as file:
        for i in range(size // block):
            file.write(separator.join(f"{i} {story}" for story in STORIES) + separator)
    assert path.stat().st_size > 0.9 * size
    output = subprocess.check_output([*PYTHON, PREPARE + PEAK, str(path)], text=True)
    assert int(output.split()[-1]) < 300e6  # bytes at the peak
    path.unlink()


ODD_TEXT = "Tabs\t, two  spaces, “quotes”, 日本語, 😀, <|endoftext|> inside,\r\n\n and an end \n"


@pytest.fixture
def bpe(tmp_path):
    train_bpe(map(Piece, STORIES), 400, tmp_path / "tokenizer.json")
    return TextTokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_decoding_what_was_encoded_gives_the_text_back(kind, bpe):
    tokenizer = bpe if kind == "bpe" else TextTokenizer(None)
    for text in (ODD_TEXT, "", " ", "a"):
        [ids] = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids.tolist()) == text
        assert 0 not in ids.tolist()
        assert all(i < tokenizer.vocabulary_used for i in ids.tolist())


def test_separators_decode_visibly_and_unused_ids_to_nothing(bpe):
    a = bpe.encode_batch(["a"])[0].tolist()
    assert bpe.decode([*a, 0, *a, 399_999]) == "a<|endoftext|>a"
    assert TextTokenizer(None).decode([97, 300, 98]) == "ab"


def test_a_text_cut_where_pieces_are_cut_gives_the_same_tokens(bpe):
    text = ODD_TEXT + "It's the dog's 12 hats!  They're\n\nnice ... " * 3
    [whole] = bpe.encode_batch([text])
    cuts = [i for i in range(1, len(text)) if text[i] in " \n" and not text[i - 1].isspace()]
    assert len(cuts) > 20
    for cut in cuts:
        parts = bpe.encode_batch([text[:cut], text[cut:]])
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_training_takes_merges_from_the_text_up_to_the_vocabulary(bpe, tmp_path):
    assert bpe.vocabulary_used == 400
    assert len(bpe.encode_batch([STORIES[0]])[0]) < len(STORIES[0].encode()) / 2
    train_bpe([Piece("ab ab")], 400, tmp_path / "small.json")
    assert 257 <= TextTokenizer(tmp_path / "small.json").vocabulary_used < 262


def test_training_is_deterministic_across_processes_and_threads(story_file, tmp_path):
    outputs = set()
    for value in ("true", "false"):
        cache = {"TOKENIZERS_PARALLELISM": value, "SWEEP_CACHE": str(tmp_path / value)}
        command = [*PYTHON, PREPARE + DIGEST, str(story_file)]
        outputs.add(subprocess.check_output(command, env=os.environ | cache))
    assert len(outputs) == 1


@pytest.mark.parametrize(("kind", "least"), [("bpe", 257), ("bytes", 256)])
def test_a_vocabulary_that_cannot_hold_all_bytes_names_the_minimum(kind, least):
    refuse_small_vocabulary(TokenizerSettings(kind=kind, vocabulary=least))
    small = TokenizerSettings(kind=kind, vocabulary=least - 1)
    with pytest.raises(SweepError, match=f"at least {least}, got {least - 1}"):
        prepare_data({"name": "synthetic"}, None, small)


def test_every_epoch_is_a_permutation_of_all_windows():
    stream = SequenceStream(100, seed=3)
    for epoch in range(4):
        assert sorted(stream.indices(epoch * 100, 100)) == list(range(100))
    first, second = stream.indices(0, 100), stream.indices(100, 100)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50, 99, 100, 101, 333])
def test_any_slice_equals_the_slice_of_the_whole_stream(count):
    whole = SequenceStream(100, seed=1).indices(0, 1000)
    stream = SequenceStream(100, seed=1)
    starts = np.random.default_rng(count).integers(0, 1000 - count, 20)
    for start in starts.tolist():
        part = stream.indices(start, count)
        assert part.dtype == np.int64
        np.testing.assert_array_equal(part, whole[start : start + count])


def test_seeds_give_different_streams_that_are_fixed_forever():
    streams = [SequenceStream(50, seed).indices(0, 50).tolist() for seed in (0, 1, 0)]
    assert streams[0] == streams[2] != streams[1]
    assert SequenceStream(8, seed=0).indices(6, 4).tolist() == [1, 7, 1, 3]


@pytest.mark.parametrize("count", [9, 16, 17, 18])
def test_the_last_window_has_its_last_target(count):
    workload = build_workload(trial_config("quick"), CPU)
    workload.text, workload.tokens_per_sequence = SimpleNamespace(train=range(count)), 8
    windows = gather(np.arange(count), np.arange(workload.train_sequences), 8)
    assert windows.max() <= count - 1
    assert count - 1 - windows.max() < 8


def test_windows_overlap_by_the_one_token_between_input_and_target():
    tokens = np.arange(1000, dtype=np.uint16)
    windows = gather(tokens, np.array([2, 0]), context=8)
    assert windows.dtype == np.int64
    np.testing.assert_array_equal(windows, [np.arange(16, 25), np.arange(0, 9)])


def test_a_target_belongs_to_its_document_and_a_separator_to_the_one_it_ends():
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 0])  # documents: 5 6 | 7 | (empty) | 8
    assert document_of_targets(tokens, 0).tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert document_of_targets(tokens, 8).tolist() == [0, 0, 0, 0, 0, 0, 1]


def prepared_summary(source, tokenizer=BYTES):
    prepare(source, tokenizer)
    return summarize_data(identify_data(str(source)), str(source), tokenizer)


def numbers_of(summary):
    return {f.file: (f.role, f.rows, f.documents, f.empty) for f in summary.files}


def test_rows_documents_and_empty_rows_are_counted_per_file(tmp_path):
    (tmp_path / "train-0-of-2.jsonl").write_bytes(json_lines(["a", " \n", "b", ""]))
    (tmp_path / "train-1-of-2.jsonl").write_bytes(json_lines(["c"]))
    (tmp_path / "valid.txt").write_text("d\n<|endoftext|>\n<|endoftext|>\ne\n<|endoftext|>\n")
    (tmp_path / "test.txt").write_text("f")
    before = summarize_data(identify_data(str(tmp_path)), str(tmp_path), BYTES)
    assert [file.rows for file in before.files] == [None] * 3
    summary = prepared_summary(tmp_path)
    assert numbers_of(summary) == {
        "train-0-of-2.jsonl": ("train", 4, 2, 2),
        "train-1-of-2.jsonl": ("train", 1, 1, 0),
        "valid.txt": ("valid", 3, 2, 1),
    }
    assert summary.left_out == {"cache": "a sub-folder", "test.txt": "named like test data"}
    document = describe_data(str(tmp_path), BYTES)
    assert [file["documents"] for file in document["files"]] == [2, 1, 2]
    assert document["counts"]["train_documents"] == 3
    assert json.loads(json.dumps(document)) == document


def test_equal_contents_share_tokens_and_keep_their_own_names(tmp_path, cache):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("one\n<|endoftext|>\ntwo\n")
        assert numbers_of(prepared_summary(tmp_path / name)) == {name: ("text", 2, 2, 0)}
    assert len(files_of(cache)) == 1


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_separators_inside_lines_are_counted_and_said(tmp_path, name):
    texts = ["one<|endoftext|>two<|endoftext|>", "three"]
    content = "\n<|endoftext|>\n".join(texts).encode() if name == "a.txt" else json_lines(texts)
    (tmp_path / name).write_bytes(content)
    summary = prepared_summary(tmp_path / name)
    assert [file.inner_separators for file in summary.files] == [2]
    assert any("<|endoftext|>" in note for note in summary.notes)
    assert not prepared_summary(story_of(tmp_path)).notes


@pytest.mark.parametrize(
    "line", ["</s>", "<eos>", "<|end_of_text|>", "<|EndOfText|>", "[EOS]", "<|eot_id|>"]
)
def test_lines_that_separate_documents_elsewhere_are_counted_and_said(tmp_path, line):
    path = tmp_path / "a.txt"
    path.write_text(f"one\n{line}\ntwo {line}\n{line} \nthree\n<|endoftext|>\nfour\n")
    summary = prepared_summary(path)
    assert [file.other_separators for file in summary.files] == [2]
    assert [file.documents for file in summary.files] == [2]
    assert len(summary.notes) == 1


def test_files_with_the_same_content_are_said_also_if_one_is_compressed(tmp_path):
    content = b"one\n<|endoftext|>\ntwo\n"
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(content)
    (folder / "other.txt").write_bytes(content[::-1])
    (folder / "empty.txt").touch()
    (folder / "also_empty.txt").touch()
    identity = identify_data(str(folder))
    assert not summarize_data(identity, str(folder), BYTES).notes
    (folder / "a copy.txt").write_bytes(content)
    (folder / "b.txt.gz").write_bytes(gzip.compress(content))
    [note] = summarize_data(identify_data(str(folder)), str(folder), BYTES).notes
    assert "a copy.txt, a.txt, b.txt.gz" in note and "3 times" in note


def story_of(folder):
    path = folder / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(STORIES))
    return path


def test_validation_documents_that_are_training_documents_are_counted(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(json_lines(["a", "b", "c"]))
    (tmp_path / "valid.jsonl").write_bytes(json_lines(["c", "d", " c "]))
    summary = prepared_summary(tmp_path)
    assert any("2 of 3 validation documents" in note for note in summary.notes)
    assert describe_data(str(tmp_path), BYTES)["counts"]["valid_documents_in_train"] == 2
    split = tmp_path / "split.jsonl"
    split.write_bytes(json_lines(["a", "b", "c"] * 5))
    prepared_summary(split)
    assert describe_data(str(split), BYTES)["counts"]["valid_documents_in_train"] == 0


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("<!DOCTYPE html><p>a", "HTML"),
        ("<?xml version='1.0'?>", "XML"),
        ('{"text": "a"}', "JSON"),
        ('[{"text": "a"}]', "JSON"),
        ("{curly} text", None),
        ("a < b", None),
    ],
)
def test_plain_text_that_looks_like_markup_is_said(tmp_path, content, kind):
    path = tmp_path / "a.txt"
    path.write_text(f"{content}\n<|endoftext|>\nmore\n")
    summary = prepared_summary(path)
    assert [file.looks_like for file in summary.files] == [kind]
    assert bool(summary.notes) == (kind is not None)


def test_an_unknown_extension_is_read_as_plain_text_and_named(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n<|endoftext|>\ny = 2\n")
    assert any("a.py" in note for note in prepared_summary(tmp_path).notes)


@pytest.mark.parametrize(
    ("texts", "cause"),
    [(["a"] * 40, "got 1, which occurs 40 times"), (["", " "], "all 2 in a.jsonl are empty")],
)
def test_too_few_documents_are_refused_with_their_cause(tmp_path, texts, cause):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(texts))
    with pytest.raises(SweepError, match=f"at least two different documents, .*{cause}"):
        prepare(path)


def test_an_empty_validation_file_is_refused_with_its_cause(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(json_lines(["a", "b"]))
    (tmp_path / "valid.jsonl").write_bytes(json_lines(["", " "]))
    with pytest.raises(SweepError, match="valid data must hold a document, got 2 that are all"):
        prepare(tmp_path)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".csv", ".jsonl", ".json"])
@pytest.mark.parametrize(
    ("encoding", "says"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
        ("cp1252", "WINDOWS-1252"),
    ],
)
def test_another_encoding_is_refused_with_its_place_and_the_command_that_converts_it(
    tmp_path, suffix, encoding, says
):
    path = tmp_path / f"a{suffix}"
    content = "text\na first line\ncafé and more\n".encode(encoding)
    path.write_bytes(gzip.compress(content) if suffix == ".txt.gz" else content)
    with pytest.raises(SweepError, match=rf"UTF-8 text.*iconv -f {says} -t UTF-8") as caught:
        prepare(path)
    assert encoding != "cp1252" or "0xe9 in line 3 (byte 22" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"PK\x03\x04\xff", "zip"), (gzip.compress(b"a", mtime=0), ".gz"), (b"%PDF-1.7\n\xff", "PDF")],
)
def test_a_binary_file_with_a_name_of_text_is_named(tmp_path, content, says):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(SweepError, match=says):
        prepare(path)


@given(st.binary(max_size=40), st.integers(0, 40))
def test_the_first_byte_that_is_not_utf8_is_found(tmp_path_factory, content, position):
    text = ("é\n" * 20).encode()[:position] + content
    path = tmp_path_factory.mktemp("bytes") / "a.txt"
    path.write_bytes(text)
    try:
        bad = len(text) if (nul := text.find(b"\0")) < 0 else nul
        text[:bad].decode()
    except UnicodeDecodeError as error:
        bad = error.start
    if bad == len(text):
        list(read_text(path))
        return
    with pytest.raises(SweepError, match="UTF-8 text") as caught:
        list(read_text(path))
    if "(byte " in str(caught.value):  # not if the beginning tells the format
        place = f"line {text.count(10, 0, bad) + 1} (byte {bad + 1} of the file)"
        assert place in str(caught.value)
