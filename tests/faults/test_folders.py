"""Rival commands on one folder, and folders that are copied, moved and shared."""

import shutil
import subprocess
import sys
import time

import pytest

from sweep.orchestration.runner import run_plan
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import is_locked
from tests.faults.damage import hash_files
from tests.orchestration.clusters import IMPORTED, Command, planned, wait_until


@pytest.mark.fault("four rival commands")
@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_one_of_four_rivals_runs_and_the_others_are_refused(scene, monkeypatch, count, number):
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    scene.enter(("planned", "interrupted")[number % 2])
    rivals = [scene.command() for _ in range(4)]
    for rival, name in zip(rivals, "abcd", strict=True):
        rival.output = rival.output.with_name(f"output-{name}.txt")
        rival.output.unlink(missing_ok=True)
        rival.start()
    codes = [rival.wait() for rival in rivals]
    assert codes.count(0) >= 1 and set(codes) <= {0, 2}
    for rival, code in zip(rivals, codes, strict=True):
        lines = rival.output.read_text().splitlines()
        if code == 2:
            assert len(lines) == 1 and lines[0].startswith("Error: ") and "in use" in lines[0]
    scene.judge()
    count("recovered")
    count("refused", codes.count(2))


@pytest.mark.fault("killed while rivals wait")
@pytest.mark.slow
def test_a_rival_continues_after_a_kill(scene, monkeypatch, count):
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    scene.enter("planned")
    first, second = scene.command(), scene.command()
    first.start()
    wait_until(lambda: is_locked(scene.folder.trials()[0].lease_path), first)
    assert second.run() == 2
    first.kill()
    assert second.run() == 0  # while the worker of the first may still end
    scene.judge()
    count("recovered")


@pytest.mark.fault("folder copied")
@pytest.mark.slow
@pytest.mark.parametrize("state", ["planned", "interrupted", "finished"])
def test_a_copy_and_its_original_both_end_as_one(scene, tmp_path, count, state):
    folder = scene.enter(state)
    shutil.copy(folder.path.parent / "question.toml", tmp_path)
    copy = SweepFolder(tmp_path / "sweep")
    shutil.copytree(folder.path, copy.path)
    before = hash_files(folder.path)
    assert run_plan(planned(copy), copy).exit_code == 0
    assert hash_files(folder.path) == before
    scene.judge(folder=copy)
    assert scene.run() == 0
    scene.judge()
    scene.judge(folder=copy)
    count("recovered")


@pytest.mark.fault("folder moved")
@pytest.mark.slow
@pytest.mark.parametrize("state", ["planned", "interrupted", "finished", "running"])
def test_a_moved_folder_ends_as_if_it_had_stayed(scene, tmp_path, monkeypatch, count, state):
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    folder = scene.enter("planned" if state == "running" else state)
    shutil.copy(folder.path.parent / "question.toml", tmp_path)
    moved = SweepFolder(tmp_path / "sweep")
    run = scene.command()
    run.output.unlink(missing_ok=True)
    if state == "running":
        run.start()
        wait_until(lambda: any(trial.checkpoints() for trial in folder.trials()), run)
    folder.path.rename(moved.path)
    if state == "running":
        assert run.wait() in (1, 2)
        text = run.output.read_text()
        assert "Traceback" not in text
        assert [line for line in text.splitlines() if line.startswith("Error: ")], text
        assert not folder.path.exists(), list(folder.path.rglob("*"))
        wait_until(lambda: not any(is_locked(trial.lease_path) for trial in moved.trials()))
    assert Command(moved, "--device", "cpu").run() == 0
    scene.judge(folder=moved)
    count("recovered")


@pytest.mark.fault("folder shared")
@pytest.mark.slow
@pytest.mark.parametrize("state", ["planned", "interrupted", "finished"])
def test_a_reader_of_a_folder_changes_nothing(scene, tmp_path, monkeypatch, mount, count, state):
    """Also while the sweep runs."""
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    folder, shared = scene.enter(state), tmp_path / "shared"
    shared.mkdir()
    mount(folder.path, shared, "-o", "bind,ro")

    def call(command, *words):
        words = [sys.executable, "-m", "sweep", command, str(shared), *words]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr

    before = hash_files(folder.path)
    call("status", "--json")
    if state != "planned":
        call("log", folder.trials()[0].id)
    call("report", "--out", str(tmp_path / "report"))
    assert hash_files(folder.path) == before
    run = scene.command()
    run.start()
    while run.process.poll() is None:
        call("status")
        time.sleep(0.2)
    assert run.wait() == 0
    scene.judge()
    count("recovered")
