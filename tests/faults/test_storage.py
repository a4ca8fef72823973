"""A disk that is full, closed or limited, and databases that are damaged or locked."""

import contextlib
import resource
import shutil
import subprocess
import threading
import time

import pytest

from sweep.trial.status import State
from tests.faults.damage import POINTS, Fault, lock_database, parameters
from tests.orchestration.clusters import IMPORTED, wait_until

ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EMFILE")
CASES = [(point, ERRORS[index % len(ERRORS)]) for index, point in enumerate(POINTS)]
CASES += [("checkpoint", error) for error in ERRORS] + [("state", error) for error in ERRORS]
CASES = list(dict.fromkeys(CASES))
SHORT = [("result", "EDQUOT")]


def run_refused(run):
    """Run a command that must say in one sentence what is full, and what to do."""
    run.output.unlink(missing_ok=True)
    code, text = run.run(), run.output.read_text()
    assert code in (0, 1) and "Traceback" not in text, text
    errors = [line for line in text.splitlines() if line.startswith("Error: ")]
    assert len(errors) == code and all("cannot be written" in line for line in errors), text
    states = {trial.read_status().state for trial in run.folder.trials()}
    assert states <= {State.COMPLETE, State.WAITING, State.RUNNING}
    return code


@pytest.mark.fault("disk full, closed or limited")
@pytest.mark.parametrize(("point", "error"), parameters(CASES, SHORT))
def test_a_full_disk_stops_the_sweep_and_it_resumes(
    scene, monkeypatch, tmp_path, count, point, error
):
    scene.enter("planned")
    fault = Fault(monkeypatch, tmp_path / "hits", point, 2, error, lasts=True)
    run_refused(scene.command())
    assert fault.has_happened()
    monkeypatch.delenv("FAULT")
    assert scene.command().run() == 0
    scene.judge()
    count("recovered")


@pytest.mark.fault("disk full, closed or limited")
@pytest.mark.slow
@pytest.mark.parametrize("limit", ["files", "size"])
def test_a_limit_of_the_system_stops_the_sweep_and_it_resumes(scene, monkeypatch, count, limit):
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    scene.enter("planned")
    number = {"files": resource.RLIMIT_NOFILE, "size": resource.RLIMIT_FSIZE}[limit]
    _, most = resource.getrlimit(number)
    run = scene.command()
    run.output.unlink(missing_ok=True)
    run.start()
    resource.prlimit(run.process.pid, number, (18 if limit == "files" else 9000, most))
    code = run.process.wait()
    assert code in (0, 1) and "Traceback" not in run.output.read_text(), run.output.read_text()
    assert scene.command().run() == 0
    scene.judge()
    count("recovered")


@pytest.mark.fault("disk full, closed or limited")
@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1 << 13, 1 << 15, 1 << 17, 1 << 19])
@pytest.mark.parametrize("after", ["sweep.lock", "trials/*/lease.json", "mlflow.db"])
def test_a_sweep_resumes_after_its_file_system_was_full(
    tmp_path, monkeypatch, mount, scene, count, left, after
):
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    folder = scene.enter("planned")
    kept = scene.kept("planned", folder.path)
    mount("tmpfs", folder.path, "-t", "tmpfs", "-o", "size=40m")
    subprocess.run(["cp", "-r", f"{kept}/.", str(folder.path)], check=True)
    run = scene.command()
    run.output.unlink(missing_ok=True)
    run.start()
    wait_until(lambda: any(folder.path.glob(after)))
    filler = folder.path / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while shutil.disk_usage(folder.path).free > left:
            file.write(bytes(4096))
    code, text = run.process.wait(), run.output.read_text()
    assert code in (0, 1) and "Traceback" not in text, text
    errors = [line for line in text.splitlines() if line.startswith("Error: ")]
    assert len(errors) == code, text
    filler.unlink()
    assert scene.command().run() == 0
    scene.judge()
    count("recovered")


@pytest.mark.fault("database locked")
@pytest.mark.parametrize("seconds", parameters([2, 90], [2]))
def test_a_locked_database_is_waited_for(scene, count, caplog, seconds):
    scene.enter("finished")
    trial = scene.folder.trials()[0]
    trial.result_path.unlink()  # it runs again
    connection = lock_database(scene.folder.path / "mlflow.db")
    released = []

    def release() -> None:  # `seconds` after the command says that it waits
        while "locked" not in caplog.text:
            time.sleep(0.1)
        time.sleep(seconds)
        released.append(True)
        connection.close()

    threading.Thread(target=release, daemon=True).start()
    assert scene.run() == 0
    assert released
    scene.judge()
    count("recovered")


@pytest.mark.fault("database removed")
def test_a_database_that_is_removed_is_written_again(scene, count):
    folder = scene.enter("interrupted")
    assert scene.run() == 0
    (folder.path / "mlflow.db").unlink()
    assert scene.run() == 0
    scene.judge()
    count("recovered")
