"""A cache for every test of data, a small text, and a server that answers as the hub does."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sweep.config.trial import TokenizerSettings

STORIES = [
    f"Story {i} is about a cat that had {i * 7} hats.\nIt met the dog number {i % 13}. “Hello!”"
    for i in range(200)
]
COMMIT = "ab" * 20
BYTES = TokenizerSettings(kind="bytes", vocabulary=256)
PYTHON = [sys.executable, "-W", "error", "-c"]


def json_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture(scope="session", autouse=True)
def hugging_face_home(tmp_path_factory):
    # Read when the libraries are first imported.
    os.environ.setdefault("HF_HOME", str(tmp_path_factory.mktemp("hugging_face")))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SWEEP_CACHE", str(folder))
    return folder


@pytest.fixture
def story_file(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("".join(f"{story}\n<|endoftext|>\n" for story in STORIES), encoding="utf-8")
    return path


class Hub:
    def __init__(self, home: Path) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                path = self.path.partition("?")[0]
                if match := re.fullmatch(
                    rf"(?:/datasets)?/someone/\w+/resolve/{COMMIT}/(.+)", path
                ):
                    content = hub.files.get(match[1])
                    self.answer(content, {"X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"})
                elif re.match(r"/api/\w+/someone/(stories|tiny)/tree", path):
                    self.answer_json([entry(name, data) for name, data in hub.files.items()])
                elif match := re.match(r"/api/\w+/(someone/(?:stories|tiny))", path):
                    names = [{"rfilename": name} for name in hub.files]
                    self.answer_json({"id": match[1], "sha": COMMIT, "siblings": names})
                else:
                    self.answer(None, {"X-Error-Code": "RepoNotFound"})

            do_HEAD = do_GET

            def answer_json(self, document) -> None:
                self.answer(json.dumps(document).encode(), {"Content-Type": "application/json"})

            def answer(self, content: bytes | None, headers: dict[str, str]) -> None:
                body = content or b""
                self.send_response(404 if content is None else 200)
                etag = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
                for name, value in {**headers, **etag, "Content-Length": str(len(body))}.items():
                    if content is None or name != "X-Error-Code":
                        self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        def entry(name, data):
            oid = hashlib.sha1(data).hexdigest()
            return {"type": "file", "path": name, "size": len(data), "oid": oid}

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
        }
        self.environment |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_address[1]}",
            "HF_HOME": str(home),
            "PYTHONPATH": os.getcwd(),
        }

    def run(self, script: str) -> list:
        start = "import json\nfrom sweep.errors import SweepError\n"
        done = subprocess.run(
            [*PYTHON, start + script],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return json.loads(done.stdout)


@pytest.fixture
def hub(tmp_path):
    hub = Hub(tmp_path / "hugging_face")
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.02,))
    thread.start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()
    thread.join()
