"""The mirror on a real MLflow server that is down, killed or slow: all is there, and once."""

import contextlib
import socket
import threading
import time

from sweep.analysis.frames import load_stored_sweep
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import connect, is_mirrored
from sweep.trial.folder import State


def assert_stored_once(sweep, uri, *indices):
    sweep.assert_mirrored(*indices, uri=uri)
    assert len(sweep.runs(uri)) == 1 + len(indices)
    run_id = sweep.runs(uri)["parent"].info.run_id
    stored = load_stored_sweep(uri, "words", run_id).trials.set_index("id")
    for index in indices:
        result = sweep.trial(index).read_result()
        assert stored.loc[sweep.ids[index], "final_valid_loss"] == result["final_valid_loss"]


def test_a_server_that_is_down_comes_is_killed_and_comes_back(sweep, server, until):
    mirror = Mirror(sweep.folder, sweep.plan, server.uri)
    mirror.start()
    sweep.set_state(0, State.RUNNING)
    sweep.write_lines(0, 400)
    time.sleep(1)  # passes that fail
    server.start()
    until(lambda: sweep.ids[0] in sweep.runs(server.uri))
    until(lambda: sweep.run(0, server.uri).data.metrics)

    sweep.write_lines(0, 2000)
    before = sweep.run(0, server.uri).data.metrics["train/loss"]
    until(lambda: sweep.run(0, server.uri).data.metrics["train/loss"] != before)
    server.die()  # between two requests, or during one
    sweep.finish(0)
    sweep.train(1, 50)
    assert "Nothing is lost" in mirror.close(1.0)
    assert not is_mirrored(sweep.folder, None)

    server.start()
    following = Mirror(sweep.folder, sweep.plan, None)  # the address is in tracking.json
    following.start()
    assert following.close(60) == ""
    assert_stored_once(sweep, server.uri, 0, 1)
    artifacts = connect(server.uri).list_artifacts(sweep.run(0, server.uri).info.run_id)
    files = {"config.json", "result.json", "metrics.jsonl", "valid_losses.npy", "log.txt"}
    assert {file.path for file in artifacts} == files


class SlowProxy:
    """Forwards bytes to a server, each answer after a pause, and drops some answers."""

    def __init__(self, port: int, seconds: float) -> None:
        self.target, self.seconds, self.dropped = port, seconds, 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            self._open += [client, server]
            for source, target, seconds in ((client, server, 0), (server, client, self.seconds)):
                arguments = (source, target, seconds)
                threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, seconds: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(seconds)
                if seconds and self.dropped:
                    self.dropped -= 1
                    break  # the server has done what it was asked, but the client never learns it
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_server_that_never_answers_does_not_hold_up_the_command(sweep):
    sweep.train(0, 10)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mirror = Mirror(sweep.folder, sweep.plan, f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        mirror.start()
        assert mirror.close(0.5)
        assert time.monotonic() - begin < 20  # less than one request's limit


def test_a_slow_server_whose_answers_get_lost_has_everything_once(sweep, server, until):
    server.start()
    proxy = SlowProxy(server.port, 0.05)
    for index in range(2):
        sweep.train(index, 300)
    mirror = Mirror(sweep.folder, sweep.plan, proxy.uri)
    mirror.start()
    for answers in range(1, 5):  # the first answers of several passes
        proxy.dropped = answers % 2 + 1
        until(lambda: not proxy.dropped)
    assert mirror.close(60) == ""
    assert_stored_once(sweep, server.uri, 0, 1)
    proxy.close()


def test_a_password_in_the_address_is_used_and_neither_stored_nor_shown(sweep, server, down):
    def with_password(port):
        return f"http://user:secret@127.0.0.1:{port}"

    server.start()
    sweep.train(0, 3)
    sentence = Mirror(sweep.folder, sweep.plan, with_password(down.port)).deliver()
    assert sentence and "secret" not in sentence
    sweep.sync(with_password(server.port))
    stored = with_password(server.port).replace(":secret", "")
    assert sweep.record["tracking_uri"] == stored
    assert is_mirrored(sweep.folder, with_password(server.port))
    assert b"secret" not in b"".join(p.read_bytes() for p in sweep.folder.path.rglob("*.json"))
    assert_stored_once(sweep, server.uri, 0)
