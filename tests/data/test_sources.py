import gzip
import json
import os
import shutil

import pytest

from sweep.data import sources
from sweep.data.sources import (
    check_text_length,
    estimate_training_bytes,
    find_files,
    hash_file,
    identify_data,
    is_path,
)
from sweep.errors import SweepError

TEXT = "a cat\n<|endoftext|>\na dog\n"


def put(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return str(folder)


def roles(source):
    return {role: [path.name for path in paths] for role, paths in find_files(source).items()}


def test_built_in_sets_are_identified_without_network_or_disk(cache):
    assert set(identify_data("tinystories")) == {"name", "revision", "sha256"}
    assert set(identify_data("synthetic")) == {"name", "grammar_version", "seed", "documents"}
    assert not cache.exists()
    sources = ("tinystories", "synthetic", "hf:a/b", "a/b", "text.txt")
    assert [is_path(source) for source in sources] == [False, False, False, True, True]


def test_a_path_is_identified_by_content_not_by_name(story_file, tmp_path):
    first = identify_data(str(story_file))
    copy = tmp_path / "elsewhere" / "renamed.txt"
    copy.parent.mkdir()
    shutil.copy(story_file, copy)
    assert identify_data(str(copy)) == identify_data(str(copy.parent)) == first
    assert first["split"]["valid_fraction"] == 0.05
    assert json.loads(json.dumps(first)) == first
    copy.write_text("another story")
    assert identify_data(str(copy)) != first


def test_equal_bytes_in_another_format_are_other_data(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    assert identify_data(str(tmp_path / "a.txt")) != identify_data(str(tmp_path / "a.jsonl"))


def test_the_identity_of_several_files_depends_on_their_order_and_contents(tmp_path):
    identities = [
        identify_data(put(tmp_path / name, **files))
        for name, files in {
            "one": {"a__txt": "a", "b__md": "b"},
            "same": {"c__txt": "a", "d__txt": "b"},
            "order": {"a__txt": "b", "b__txt": "a"},
            "kind": {"a__txt": "a", "b__csv": "b"},
            "joined": {"a__txt": "ab"},
        }.items()
    ]
    assert identities[0] == identities[1]
    assert len({json.dumps(identity) for identity in identities}) == 4


def test_a_folder_with_train_and_valid_is_a_pair_without_a_split(tmp_path):
    folder = put(tmp_path, train__txt=TEXT, valid__jsonl='{"text": "a"}\n', other__txt=TEXT)
    assert roles(folder) == {"train": ["train.txt"], "valid": ["valid.jsonl"]}
    identity = identify_data(folder)
    assert identity["kind"] == {"train": "text", "valid": "json"}
    assert "split" not in identity


@pytest.mark.parametrize("name", ["validation.txt", "val.txt.gz", "VALID.md"])
def test_other_names_of_the_validation_file_are_understood(tmp_path, name):
    data = TEXT.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert roles(put(tmp_path, train__txt=TEXT))["valid"] == [name]


def test_a_folder_with_only_a_train_file_uses_that_alone(tmp_path):
    assert roles(put(tmp_path, train__txt=TEXT, more__txt=TEXT)) == {"text": ["train.txt"]}


def test_a_folder_of_other_files_uses_all_in_sorted_order_but_not_the_readme(tmp_path):
    folder = put(tmp_path, b__txt=TEXT, a__py=TEXT, c=TEXT, README__txt="about", __hidden="no")
    assert roles(folder) == {"text": ["a.py", "b.txt", "c"]}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n \n", "at least 1 byte"),
        ("bom.txt", b"\xef\xbb\xbf \n", "at least 1 byte"),
        ("empty.csv", b"", "empty"),
        ("nul.txt", b"abc\0def", "UTF-8 text"),
        ("latin.txt", "café".encode("latin-1"), "UTF-8 text"),
        ("cut.txt", "é".encode()[:1], "UTF-8 text"),
        ("text.txt.gz", b"this is not gzip", "whole gzip file"),
        ("cut.txt.gz", gzip.compress(os.urandom(999))[:500], "whole gzip file"),
    ],
)
@pytest.mark.parametrize("is_in_folder", [False, True])
def test_a_file_that_cannot_be_text_is_refused_in_one_sentence(
    tmp_path, name, content, says, is_in_folder
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SweepError, match=says) as caught:
        find_files(str(tmp_path if is_in_folder else tmp_path / name))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "got none"),
        ({"README__md": TEXT}, "got none"),
        ({"valid__txt": TEXT}, "got valid.txt"),
        ({"train__txt": TEXT, "train__jsonl": '{"text": "a"}'}, "got train.jsonl, train.txt"),
        ({"a__txt": TEXT, "b__png": b"\x89PNG\0"}, "b.png"),
    ],
)
def test_folders_without_usable_files_are_refused(tmp_path, files, says):
    with pytest.raises(SweepError, match=says):
        find_files(put(tmp_path / "folder", **files))


@pytest.mark.parametrize("source", ["./not-there", "tinystory", "", "wikitext"])
def test_an_unknown_source_lists_the_choices(source):
    with pytest.raises(SweepError, match=r"tinystories, synthetic, hf:OWNER/NAME.*got"):
        identify_data(source)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_character_across_the_end_of_the_sample_is_no_damage(tmp_path, offset):
    (tmp_path / "a.txt").write_text("x" * offset + "😀" * (1 << 19), encoding="utf-8")
    assert roles(str(tmp_path / "a.txt")) == {"text": ["a.txt"]}


def test_a_large_file_is_hashed_once_until_it_changes(story_file, cache, monkeypatch):
    expected = hash_file(story_file)
    assert not cache.exists()
    monkeypatch.setattr(sources, "MEMO_BYTES", 0)
    assert hash_file(story_file) == expected
    monkeypatch.setattr(sources, "sha256_of_file", lambda path: "hashed again")
    assert hash_file(story_file) == expected
    [memo] = (cache / "hashes").iterdir()
    memo.write_text(memo.read_text().replace(expected, "0" * 64))  # damaged
    assert hash_file(story_file) == "hashed again"
    os.utime(story_file, ns=(1, 1))
    assert hash_file(story_file) == "hashed again"


def test_without_a_writable_cache_a_large_file_is_hashed_again(story_file, cache, monkeypatch):
    monkeypatch.setattr(sources, "MEMO_BYTES", 0)
    cache.write_text("a file where the folder should be")
    assert len(hash_file(story_file)) == 64


def test_text_shorter_than_a_window_is_refused_without_tokenizing(tmp_path, cache):
    folder = put(tmp_path / "data", train__txt="abc " * 100, valid__txt="x" * 64)
    check_text_length(folder, 63)
    with pytest.raises(SweepError, match=r"the valid data .* at least 65 bytes of text, got 64"):
        check_text_length(folder, 64)
    check_text_length("synthetic", 64)
    check_text_length("hf:owner/name", 64)
    assert not cache.exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.md.gz"])
def test_the_length_of_compressed_text_is_that_of_the_text(tmp_path, name):
    line = json.dumps({"text": "a" * 5000})
    (tmp_path / name).write_bytes(gzip.compress(line.encode()))
    check_text_length(str(tmp_path / name), 5000)
    with pytest.raises(SweepError, match="got 50"):
        check_text_length(str(tmp_path / name), 6000)


def test_the_size_of_the_training_text_is_estimated_before_it_is_prepared(tmp_path):
    folder = put(tmp_path / "data", train__txt=TEXT, valid__txt="x" * 64)
    assert estimate_training_bytes(identify_data(folder), folder) == len(TEXT)
    assert estimate_training_bytes(identify_data("tinystories"), None) == 2_227_753_162
    assert 1e6 < estimate_training_bytes(identify_data("synthetic"), None) < 2e6
    assert estimate_training_bytes({"name": "hf"}, None) is None
