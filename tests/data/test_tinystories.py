import hashlib
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sweep.data import tokens
from sweep.data.tinystories import TINYSTORIES, HubDataset, HubFile, download_dataset
from sweep.errors import SweepError

CONTENT = {
    "train.txt": b"a cat sat\n<|endoftext|>\n" * 500,
    "valid.txt": b"a dog ran\n<|endoftext|>\n" * 50,
}


def pinned(name: str) -> HubFile:
    content = CONTENT[name]
    return HubFile(name, len(content), hashlib.sha256(content).hexdigest())


DATASET = HubDataset("stories", "someone/stories", "abc", pinned("train.txt"), pinned("valid.txt"))


class Hub:
    """A server that speaks enough of the hub's protocol to serve two small files."""

    def __init__(self) -> None:
        self.content = dict(CONTENT)
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.drop_after: int | None = None  # bytes of the next GET, then the connection is cut
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(False)

            def do_GET(self) -> None:
                self.answer(True)

            def answer(self, with_body: bool) -> None:
                asked = self.headers.get("Range")
                hub.requests.append((self.command, self.path, asked))
                prefix = "/datasets/someone/stories/resolve/abc/"
                body = hub.content.get(self.path.removeprefix(prefix))
                if body is None:
                    self.send_error(404)
                    return
                start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
                self.send_response(206 if start else 200)
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.send_header("X-Repo-Commit", "abc")
                self.send_header("Content-Length", str(len(body) - start))
                if start:
                    size = len(body)
                    self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
                self.end_headers()
                if with_body:
                    stop, hub.drop_after = hub.drop_after, None
                    self.wfile.write(body[start:] if stop is None else body[start : start + stop])
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.delenv(variable, raising=False)
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.02,))
    thread.start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()


def test_both_files_are_downloaded_once_and_used_from_then_on(hub, cache):
    train, valid = download_dataset(DATASET, hub.endpoint)
    assert train == cache / "stories" / "train.txt"
    assert train.read_bytes() == CONTENT["train.txt"]
    assert valid.read_bytes() == CONTENT["valid.txt"]
    asked = len(hub.requests)
    assert download_dataset(DATASET, hub.endpoint) == (train, valid)
    assert len(hub.requests) == asked


def test_progress_is_told_up_to_the_end(hub):
    told: list[tuple[str, float]] = []
    download_dataset(DATASET, hub.endpoint, lambda stage, fraction: told.append((stage, fraction)))
    assert ("downloading train.txt", 1.0) in told
    assert all(0 <= fraction <= 1 for _, fraction in told)


def test_an_interrupted_download_goes_on_where_it_stopped(hub, cache):
    part = cache / "stories" / "train.txt.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT["train.txt"][:1000])
    train, _ = download_dataset(DATASET, hub.endpoint)
    assert train.read_bytes() == CONTENT["train.txt"]
    assert [r for method, path, r in hub.requests if method == "GET" and "train" in path] == [
        "bytes=1000-"
    ]
    assert not part.exists()


def test_a_dropped_connection_goes_on_by_itself(hub, caplog):
    caplog.set_level(logging.CRITICAL, logger="huggingface_hub")
    hub.drop_after = 300
    _, valid = download_dataset(DATASET, hub.endpoint)
    assert valid.read_bytes() == CONTENT["valid.txt"]
    asked = [path for method, path, _ in hub.requests if method == "GET"]
    assert [path.rpartition("/")[2] for path in asked] == ["valid.txt", "valid.txt", "train.txt"]


def test_other_content_of_the_same_size_fails_the_checksum_and_is_not_kept(hub, cache):
    hub.content["train.txt"] = CONTENT["train.txt"].replace(b"cat", b"bat")
    with pytest.raises(SweepError, match=r"train.txt must be the pinned .* Download it again"):
        download_dataset(DATASET, hub.endpoint)
    assert sorted(p.name for p in (cache / "stories").iterdir()) == ["download.lock", "valid.txt"]


def test_another_size_is_refused_before_downloading(hub):
    hub.content["valid.txt"] += b"more"
    with pytest.raises(SweepError, match="got one of 1,204 bytes"):
        download_dataset(DATASET, hub.endpoint)
    assert [method for method, _, _ in hub.requests] == ["HEAD"]


def test_files_put_there_by_hand_are_checked_and_used_without_network(cache):
    folder = cache / "stories"
    folder.mkdir(parents=True)
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    download_dataset(DATASET, "http://127.0.0.1:1")
    (folder / "train.txt").write_bytes(CONTENT["train.txt"].replace(b"cat", b"bat"))
    with pytest.raises(SweepError, match="Remove that file"):
        download_dataset(DATASET, "http://127.0.0.1:1")


def test_without_network_one_sentence_names_the_ways_on(cache):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(SweepError) as caught:
        download_dataset(DATASET, f"http://127.0.0.1:{port}")
    message = str(caught.value)
    assert "\n" not in message
    for way in ("--data PATH", "--data synthetic", "train.txt and valid.txt", str(cache)):
        assert way in message


def test_a_file_that_the_hub_does_not_have_is_one_sentence(hub):
    with pytest.raises(SweepError, match="the hub cannot be used"):
        download_dataset(replace(DATASET, revision="gone"), hub.endpoint)


def test_the_named_data_set_is_tokenized_from_the_download(hub, monkeypatch):
    def download(on_progress):
        return download_dataset(DATASET, hub.endpoint, on_progress)

    monkeypatch.setattr(tokens, "download_dataset", download)
    settings = tokens.TokenizerSettings(kind="bytes", vocabulary=256)
    text = tokens.prepare_data(TINYSTORIES.identity(), None, settings)
    assert (text.train_documents, text.valid_documents) == (500, 50)
