"""MLflow servers that are absent, slow, wrong or killed: the sweep ends, and nothing is lost."""

import random
import time
from pathlib import Path

import pytest

from sweep.config.execution import Services
from tests.faults.judge import Scene
from tests.orchestration.clusters import IMPORTED, wait_until
from tests.servers import MlflowServer, Proxy

pytestmark = [pytest.mark.fault("MLflow server absent, slow, wrong or killed"), pytest.mark.slow]
ANSWERS = {
    "error": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops",
    "busy": b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    "forbidden": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno",
    "another service": b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n<html>Hi</html>",
    "other JSON": b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}',
    "a page without end": b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n" + b"x" * 9999,
    "junk": random.Random(0).randbytes(3000),
    "nothing": b"",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = MlflowServer(tmp_path_factory.mktemp("server"))
    made.start()
    yield made
    made.die()


@pytest.fixture
def scene(server, tmp_path, request):
    proxy = Proxy(server.port)
    request.addfinalizer(proxy.close)
    made = Scene(tmp_path / Path(request.node.name).name, Services(tracking_uri=proxy.uri))
    made.enter("planned")
    made.proxy = proxy
    return made


@pytest.mark.parametrize("fault", [*ANSWERS, "absent", "silent", "slow", "drops answers", "killed"])
def test_a_faulty_server_costs_nothing(scene, server, monkeypatch, count, fault):
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    proxy = scene.proxy
    match fault:
        case "absent":
            server.die()
        case "silent":
            proxy.seconds = 1e6
        case "slow":
            proxy.seconds = 0.5
        case "drops answers":
            proxy.dropped = 5
        case "killed":
            pass
        case _:
            proxy.answer = ANSWERS[fault]
    run = scene.command()
    run.start()
    if fault == "killed":
        wait_until(lambda: any(trial.read_result() for trial in scene.folder.trials()), run)
        server.die()
        time.sleep(2)
        server.start()
    assert run.wait() == 0
    text = run.output.read_text()
    assert "Traceback" not in text and len(text) < 3000
    if fault in ("absent", "silent", *ANSWERS):
        assert "lacks" in text
    proxy.seconds, proxy.dropped, proxy.answer = 0.0, 0, None
    server.start()
    assert scene.command().run() == 0
    scene.judge()
    count("recovered")
