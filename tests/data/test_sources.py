"""What `--data` can name: built-in sets, files, folders and data sets of the hub."""

import gzip
import hashlib
import json
import os
import shutil

import pytest

from sweep.config.trial import TokenizerSettings
from sweep.data import sources
from sweep.data.sources import (
    download,
    find_files,
    identify_data,
    is_path,
    open_data,
)
from sweep.data.tokens import prepare_data
from sweep.errors import SweepError

BYTES = TokenizerSettings(kind="bytes", vocabulary=256)
COMMIT = "ab" * 20
TEXT = "a cat\n<|endoftext|>\na dog\n"
CONTENT = b"a cat sat\n<|endoftext|>\n" * 500


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return str(folder)


def roles(source):
    return {role: [path.name for path in paths] for role, paths in find_files(source).items()}


def test_built_in_sets_are_identified_without_network_or_disk(cache):
    assert identify_data("tinystories") == {
        "name": "tinystories",
        "revision": "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64",
        "sha256": {
            "train": "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
            "valid": "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
        },
    }
    assert set(identify_data("synthetic")) == {"name", "grammar_version", "seed", "documents"}
    assert identify_data(f"hf:someone/stories@{COMMIT}")["revision"] == COMMIT
    assert not cache.exists()
    names = ("tinystories", "synthetic", "hf:a/b", "a/b", "text.txt")
    assert [is_path(name) for name in names] == [False, False, False, True, True]


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


def test_the_identity_of_files_depends_on_their_order_contents_and_formats(tmp_path):
    identities = [
        identify_data(put(tmp_path / name, **files))
        for name, files in {
            "one": {"a__txt": "a", "b__md": "b"},
            "same": {"c__txt": "a", "d__txt": "b"},
            "order": {"a__txt": "b", "b__txt": "a"},
            "kind": {"a__txt": "a", "b__csv": "b"},
            "joined": {"a__txt": "ab"},
            "table": {"a__jsonl": "ab"},
        }.items()
    ]
    assert identities[0] == identities[1]
    assert len({json.dumps(identity) for identity in identities}) == 5


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


def test_a_folder_of_other_files_uses_all_in_sorted_order_but_not_the_readme(tmp_path):
    folder = put(tmp_path, b__txt=TEXT, a__py=TEXT, c=TEXT, README__txt="about", __hidden="no")
    assert roles(folder) == {"text": ["a.py", "b.txt", "c"]}
    assert roles(put(tmp_path, train__txt=TEXT)) == {"text": ["train.txt"]}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "empty"),
        ("blank.txt", b" \n \n", "empty"),
        ("bom.txt", b"\xef\xbb\xbf \n", "empty"),
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


HUB = """
from sweep.data.sources import identify_data, open_data
try:
    identity = identify_data("hf:someone/stories")
    readers = open_data(identity, None)
    texts = {split: [piece.text for piece in read()] for split, read in readers.items()}
    print(json.dumps([identity, texts]))
except SweepError as error:
    print(json.dumps([str(error)]))
"""


def json_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def test_a_data_set_of_the_hub_is_identified_by_its_commit(hub, stories):
    hub.files = {"train.jsonl": json_lines(stories[:9]), "validation.jsonl": json_lines(["a"])}
    identity, texts = hub.run(HUB)
    assert (identity["name"], identity["repository"]) == ("hf", "someone/stories")
    assert identity["revision"] == COMMIT
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


@pytest.mark.parametrize("source", ["hf:", "hf:stories", "hf:a/b/c", "hf:a/b@"])
def test_a_malformed_name_is_refused(source):
    with pytest.raises(SweepError, match="OWNER/NAME"):
        identify_data(source)


def test_a_local_folder_is_never_read_as_a_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "stories").mkdir(parents=True)
    with pytest.raises(SweepError, match="local path"):
        prepare_data(identify_data(f"hf:someone/stories@{COMMIT}"), None, BYTES)


DOWNLOAD = f"""
from sweep.data import sources
sources.REPOSITORY, sources.REVISION = "someone/stories", {COMMIT!r}
sources.TINYSTORIES = {{"train": {hashlib.sha256(CONTENT).hexdigest()!r}}}
try:
    path = sources.download("train")
    print(json.dumps([str(path), path.read_text()]))
except SweepError as error:
    print(json.dumps([str(error)]))
"""
TRAIN_FILE = "TinyStoriesV2-GPT4-train.txt"


def test_tinystories_is_downloaded_once_into_the_library_s_cache(hub, tmp_path):
    hub.files[TRAIN_FILE] = CONTENT
    path, text = hub.run(DOWNLOAD)
    assert text.encode() == CONTENT
    assert path.startswith(str(tmp_path / "hugging_face"))
    count = len(hub.requests)
    assert hub.run(DOWNLOAD) == [path, text]
    assert len(hub.requests) == count


def test_other_content_of_tinystories_is_refused_with_the_file_to_remove(hub):
    hub.files[TRAIN_FILE] = CONTENT.replace(b"cat", b"bat")
    [message] = hub.run(DOWNLOAD)
    assert "sha256" in message
    assert str(hub.environment["HF_HOME"]) in message


def test_a_failed_download_is_one_sentence_with_remedies(hub, cache):
    hub.environment["HF_HUB_OFFLINE"] = "1"
    [message] = hub.run(DOWNLOAD)
    assert "\n" not in message
    for remedy in ("--data PATH", "--data synthetic", str(cache / "tinystories" / TRAIN_FILE)):
        assert remedy in message


def test_copied_files_of_tinystories_are_checked_and_read_without_network(cache, monkeypatch):
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(sources, "TINYSTORIES", {"train": digest, "valid": digest})
    for split in ("train", "valid"):
        put(cache / "tinystories", **{f"TinyStoriesV2-GPT4-{split}.txt": CONTENT})
    readers = open_data(identify_data("tinystories"), None)
    assert [len(list(readers[split]())) for split in ("train", "valid")] == [500, 500]
    put(cache / "tinystories", **{TRAIN_FILE: CONTENT.replace(b"cat", b"bat")})
    with pytest.raises(SweepError, match="sha256"):
        download("train")
