import hashlib

import pytest

from sweep.data import hub
from sweep.data.hub import REVISION, PinnedFile, download, tinystories_identity
from sweep.data.sources import open_data
from sweep.errors import SweepError

CONTENT = b"a cat sat\n<|endoftext|>\n" * 500
FILE = PinnedFile("stories.txt", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())

DOWNLOAD = f"""
from sweep.data.hub import PinnedFile, download
try:
    path = download(PinnedFile(*{tuple(FILE)!r}), "someone/stories", {"ab" * 20!r})
    print(json.dumps([str(path), path.read_text()]))
except SweepError as error:
    print(json.dumps([str(error)]))
"""


def test_the_identity_is_the_pinned_revision_and_hashes():
    assert tinystories_identity() == {
        "name": "tinystories",
        "revision": REVISION,
        "sha256": {"train": hub.TRAIN.sha256, "valid": hub.VALID.sha256},
    }
    assert REVISION == "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    assert (hub.TRAIN.size, hub.TRAIN.sha256[:8]) == (2_227_753_162, "6418d412")
    assert (hub.VALID.size, hub.VALID.sha256[:8]) == (22_502_601, "6874bae9")


def test_a_file_is_downloaded_once_into_the_library_s_cache(hub, tmp_path):
    hub.files["stories.txt"] = CONTENT
    path, text = hub.run(DOWNLOAD)
    assert text.encode() == CONTENT
    assert path.startswith(str(tmp_path / "hugging_face"))
    count = len(hub.requests)
    assert hub.run(DOWNLOAD) == [path, text]
    assert len(hub.requests) == count


def test_other_content_is_refused_with_the_file_to_remove(hub):
    hub.files["stories.txt"] = CONTENT.replace(b"cat", b"bat")
    [message] = hub.run(DOWNLOAD)
    assert "sha256" in message
    assert str(hub.environment["HF_HOME"]) in message


def test_a_file_that_the_hub_does_not_have_is_one_sentence_with_remedies(hub, cache):
    [message] = hub.run(DOWNLOAD)
    assert "\n" not in message
    for remedy in ("--data PATH", "--data synthetic", str(cache / "tinystories" / "stories.txt")):
        assert remedy in message


def test_without_network_the_message_is_the_same(hub):
    hub.environment["HF_HUB_OFFLINE"] = "1"
    [message] = hub.run(DOWNLOAD)
    assert "someone/stories/stories.txt" in message and "--data synthetic" in message


def test_a_file_in_our_cache_is_checked_and_used_without_network(cache):
    (cache / "tinystories").mkdir(parents=True)
    path = cache / "tinystories" / "stories.txt"
    path.write_bytes(CONTENT)
    assert download(FILE) == path
    path.write_bytes(CONTENT.replace(b"cat", b"bat"))
    with pytest.raises(SweepError, match="sha256"):
        download(FILE)


def test_both_files_are_read_as_plain_text(cache, monkeypatch):
    (cache / "tinystories").mkdir(parents=True)
    for name in ("TRAIN", "VALID"):
        pinned = FILE._replace(name=f"{name}.txt")
        monkeypatch.setattr(f"sweep.data.sources.{name}", pinned)
        (cache / "tinystories" / pinned.name).write_bytes(CONTENT)
    readers = open_data(tinystories_identity(), None, lambda work, fraction: None)
    assert [len(list(readers[split]())) for split in ("train", "valid")] == [500, 500]
