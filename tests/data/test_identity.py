import json
import os
import shutil

import pytest

from sweep.data import cache as data_cache
from sweep.data.cache import hash_file
from sweep.data.identity import identify_data
from sweep.errors import SweepError


def test_named_sets_are_identified_without_network_or_disk(cache):
    stories = identify_data("tinystories")
    assert stories["revision"] == "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    assert {key: value[:8] for key, value in stories["sha256"].items()} == {
        "train": "6418d412",
        "valid": "6874bae9",
    }
    assert set(identify_data("synthetic")) == {"name", "grammar_version", "seed", "documents"}
    assert not cache.exists()


def test_a_path_is_identified_by_content_not_by_name(story_file, tmp_path):
    first = identify_data(str(story_file))
    copy = tmp_path / "elsewhere" / "renamed.txt"
    copy.parent.mkdir()
    shutil.copy(story_file, copy)
    assert identify_data(str(copy)) == first
    assert first["split"]["valid_fraction"] == 0.05
    assert json.loads(json.dumps(first)) == first
    copy.write_text("another story")
    assert identify_data(str(copy)) != first


def test_equal_bytes_read_in_another_way_are_other_data(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    assert identify_data(str(tmp_path / "a.txt")) != identify_data(str(tmp_path / "a.jsonl"))


def test_a_pair_has_no_split_rule(story_file, tmp_path):
    pair = tmp_path / "pair"
    pair.mkdir()
    for name in ("train.txt", "valid.txt"):
        shutil.copy(story_file, pair / name)
    identity = identify_data(str(pair))
    assert set(identity["sha256"]) == {"train", "valid"}
    assert "split" not in identity


@pytest.mark.parametrize("source", ["tinystory", "", "wikitext"])
def test_an_unknown_name_lists_the_choices(source):
    with pytest.raises(SweepError, match=r"must be tinystories, synthetic, or the path"):
        identify_data(source)


def test_a_file_is_hashed_once_until_it_changes(story_file, monkeypatch):
    first = hash_file(story_file)
    monkeypatch.setattr(data_cache, "sha256_of_file", lambda path: "hashed again")
    assert hash_file(story_file) == first
    os.utime(story_file, ns=(1, 1))
    assert hash_file(story_file) == "hashed again"


def test_a_damaged_entry_of_the_cache_is_not_believed(story_file, cache):
    first = hash_file(story_file)
    [entry] = (cache / "hashes").iterdir()
    entry.write_text(entry.read_text().replace(first, "0" * 64))
    assert hash_file(story_file) == first


def test_a_cache_that_cannot_be_written_only_costs_time(story_file, cache):
    cache.write_text("a file where the folder should be")
    assert len(hash_file(story_file)) == 64
