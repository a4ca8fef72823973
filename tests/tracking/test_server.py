"""The mirror on a real MLflow server that is down, killed, slow: nothing lost, nothing twice."""

import contextlib
import socket
import threading
import time
from collections import Counter

import pytest

from sweep.tracking import mirror as mirror_module
from sweep.tracking.mirror import Mirror
from sweep.tracking.reader import read_store
from sweep.tracking.record import is_mirrored, is_recorded
from sweep.tracking.store import connect
from sweep.trial.files import read_json
from sweep.trial.folder import State


def assert_held_once(sweep, uri, points, indices):
    stored, client = read_store(uri, "words"), connect(uri)
    record = read_json(sweep.folder.tracking_path)
    trials, experiment = record["trials"], [record["experiment_id"]]
    for index in indices:
        assert stored.curves[sweep.ids[index]] == sweep.lines(index)
        assert stored.results[index] == sweep.trial(index).read_result()
        held = points(client, trials[sweep.ids[index]]["run_id"])
        assert max(Counter(held).values()) == 1
    for tag, value, count in (
        ("sweep.uid", record["sweep_uid"], 1),
        ("mlflow.parentRunId", record["parent_run_id"], len(indices)),
    ):
        assert len(client.search_runs(experiment, f"tags.`{tag}` = '{value}'")) == count


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(mirror_module, "PAUSES", (0.2, 1.0))


def test_a_server_that_is_down_comes_killed_and_comes_back(sweep, server, points, until):
    mirror = Mirror(sweep.folder, sweep.plan, server.uri)
    mirror.start()
    sweep.set_state(0, State.RUNNING)
    sweep.write_lines(0, 400)
    until(lambda: mirror.status.error)
    assert "API request" in str(mirror.status) and mirror.status.trials == 1
    server.start()
    until(lambda: mirror.status.is_complete)
    assert read_store(server.uri, "words").curves[sweep.ids[0]] == sweep.lines(0)

    sweep.write_lines(0, 2000)
    mirror.wake()
    until(lambda: read_json(sweep.folder.tracking_path)["trials"][sweep.ids[0]]["offset"] > 0)
    server.kill()  # between two batches, or in one
    sweep.finish(0)
    sweep.train(1, 50)
    mirror.wake()
    until(lambda: mirror.status.error)
    status = mirror.close(1.0)
    assert not status.is_complete and status.trials == 2 and "Nothing is lost" in str(status)
    assert not is_mirrored(sweep.folder)

    server.start()
    following = Mirror(sweep.folder, sweep.plan, None)  # the address is in tracking.json
    assert following.close(60).is_complete
    assert_held_once(sweep, server.uri, points, [0, 1])
    run_id = read_json(sweep.folder.tracking_path)["trials"][sweep.ids[0]]["run_id"]
    names = {file.path for file in connect(server.uri).list_artifacts(run_id)}
    assert names == {"config.json", "result.json", "valid_losses.npy", "log.txt"}


class SlowProxy:
    """Passes bytes on to a server, each answer after a pause; some answers never."""

    def __init__(self, port: int, seconds: float) -> None:
        self.target, self.seconds, self.lost = port, seconds, 0
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
            threading.Thread(target=self._pass, args=(client, server, 0), daemon=True).start()
            threading.Thread(
                target=self._pass, args=(server, client, self.seconds), daemon=True
            ).start()

    def _pass(self, source: socket.socket, target: socket.socket, seconds: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(seconds)
                if seconds and self.lost:
                    self.lost -= 1
                    break  # the server did what was asked, and nobody hears of it
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_whoever_trains_waits_for_no_server(sweep):
    """Of one that accepts and never answers every call would last for minutes."""
    sweep.train(0, 10)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mirror = Mirror(sweep.folder, sweep.plan, f"http://127.0.0.1:{silent.getsockname()[1]}")
        mirror.start()
        mirror.wake()
        assert not mirror.close(0.5).is_complete


def test_a_slow_server_whose_answers_get_lost_has_everything_once(sweep, server, points, until):
    server.start()
    proxy = SlowProxy(server.port, 0.05)
    for index in range(2):
        sweep.train(index, 300)
    mirror = Mirror(sweep.folder, sweep.plan, proxy.uri)
    mirror.start()
    mirror.wake()
    for answers in range(1, 5):  # lost: the first answers of several passes
        proxy.lost = answers % 2 + 1
        until(lambda: not proxy.lost)
    assert mirror.close(60).is_complete
    assert_held_once(sweep, server.uri, points, [0, 1])
    proxy.close()


def test_a_patient_end_lasts_as_long_as_the_store_takes_something(sweep, server, points):
    server.start()
    proxy = SlowProxy(server.port, 0.1)
    for index in range(3):
        sweep.train(index, 300)
    mirror, begin = Mirror(sweep.folder, sweep.plan, proxy.uri), time.monotonic()
    mirror.log_report()
    assert mirror.close(6.0, is_hurried=False).is_complete
    assert time.monotonic() - begin > 6.0  # else it proves nothing
    assert_held_once(sweep, server.uri, points, [0, 1, 2])
    proxy.close()


@pytest.mark.slow
def test_each_single_lost_answer_of_a_pass_makes_nothing_twice(sweep, server, points):
    server.start()
    sweep.train(0, 100)
    proxy = SlowProxy(server.port, 0.01)
    for nth in range(1, 25):
        timer = threading.Timer(0.05 * nth, lambda: setattr(proxy, "lost", 1))
        timer.start()
        sweep.sync(proxy.uri)  # another address: from the start
        timer.join()
        proxy.lost = 0
        sweep.sync(server.uri)
        assert_held_once(sweep, server.uri, points, [0])
    proxy.close()


def test_a_password_in_the_address_is_used_and_neither_kept_nor_shown(
    sweep, server, free_port, points
):
    def with_password(port):
        return f"http://user:secret@127.0.0.1:{port}"

    server.start()
    sweep.train(0, 3)
    nobody = Mirror(sweep.folder, sweep.plan, with_password(free_port)).close(1.0)
    assert nobody.error and "secret" not in str(nobody)
    sweep.sync(with_password(server.port))
    assert read_json(sweep.folder.tracking_path)["tracking_uri"] == with_password(
        server.port
    ).replace(":secret", "")
    assert is_recorded(sweep.folder, with_password(server.port))
    assert b"secret" not in b"".join(p.read_bytes() for p in sweep.folder.path.rglob("*.json"))
    assert_held_once(sweep, server.uri, points, [0])
