"""Folders, texts and tables from strangers run no code and reach no file outside their folder."""

import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from sweep.report.report import write_report
from sweep.tracking.store import read_record, ui_command
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import Cause, State, SweepFolder, TrialStatus
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.faults.damage import parameters

pytestmark = pytest.mark.fault("folder, text or table from a stranger")
IDS = ("../../victim", "/victim", "..", "victim")
LINKS = ("figures", "trials", "trials/ID", "trials/ID/log.txt", "plan.json")
READING = ("status", "report", "clean", "stop", "log")


@pytest.fixture
def stranger(tmp_path):
    write_fake_sweep(tmp_path / "stranger", batches="4,8", seeds=1)
    return SweepFolder(tmp_path / "stranger")


def sweep(*words, folder=None, module="sweep", **environment):
    """Run the command line in a process of its own; return exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("trial_id", parameters(IDS, IDS[:1]))
def test_an_id_is_no_path(stranger, tmp_path, count, trial_id):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / ".state.json.1.part").touch()
    plan = read_json(stranger.plan_path)
    plan["trials"][0]["id"] = trial_id
    write_json(stranger.plan_path, plan)
    for command in READING:
        code, _, stderr = sweep(command, stranger.path, *(["x"] if command == "log" else []))
        assert code == 2 and stderr.count("\n") == 1, stderr
    assert sweep("clean", stranger.path, "--yes")[0] == 2
    assert (victim / ".state.json.1.part").exists()
    count("refused")


@pytest.mark.parametrize("link", parameters(LINKS, LINKS[:1]))
def test_links_that_leave_the_folder_are_refused(stranger, tmp_path, count, link):
    trial = stranger.trials()[0]
    path = stranger.path / link.replace("ID", trial.id)
    outside = tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.mkdir()
    path.symlink_to(outside)
    for command in READING:
        code, _, stderr = sweep(command, stranger.path, *([trial.id] if command == "log" else []))
        assert code == 2 and "link" in stderr and stderr.count("\n") == 1, stderr
    code, _, stderr = sweep("run", "quick", "--batches", "4,8", "--out", stranger.path, "--yes")
    assert code == 2 and "link" in stderr
    count("refused")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lease.json", "log.txt"])
def test_a_worker_writes_through_no_link(stranger, tmp_path, count, name):
    trial, victim = stranger.trials()[0], tmp_path / "victim"
    trial.result_path.unlink()
    victim.write_text("untouched")
    (trial.path / name).unlink(missing_ok=True)
    (trial.path / name).symlink_to(victim)
    code, _, stderr = sweep(trial.path, module="sweep.training")
    assert code == 2 and "link" in stderr and victim.read_text() == "untouched"
    count("refused")


@pytest.mark.slow
def test_a_recorded_database_outside_the_folder_is_not_opened(stranger, tmp_path, count):
    victim = tmp_path / "victim.db"
    sqlite3.connect(victim).close()
    record = read_record(stranger) | {"is_default": False, "tracking_uri": f"sqlite:///{victim}"}
    write_json(stranger.tracking_path, record)
    for command in ("report", "ui"):
        code, _, stderr = sweep(command, stranger.path)
        assert code == 2 and "--tracking-uri" in stderr
    assert victim.read_bytes() == b""
    write_json(stranger.tracking_path, record | {"tracking_uri": 5})
    assert sweep("report", stranger.path)[0] == 2
    count("refused")


HOSTILE = "=cmd() <script>alert(1)</script> ![x](../../secret.png) \x1b[2J\u202e | `a`\n# heading"


def test_texts_are_escaped_on_the_page_in_the_table_and_on_the_terminal(stranger, tmp_path, count):
    (tmp_path / "secret.png").write_bytes(b"SECRET")
    trial = stranger.trials()[0]
    trial.result_path.unlink()
    trial.write_status(TrialStatus(State.FAILED, Cause.ERROR, HOSTILE, 1, 1))
    write_report(stranger.path)
    page = (stranger.path / "report.html").read_text()
    text = (stranger.path / "report.md").read_text()
    assert "<script" not in page and "U0VDUkVU" not in page and "\n# heading" not in text
    table = (stranger.path / "trials.csv").read_text()
    assert re.search(r'[,"]=cmd', table) is None and "'=cmd" in table
    _, stdout, _ = sweep("status", stranger.path)
    assert "=cmd" in stdout
    worker = sweep(trial.path, module="sweep.training")[1]
    words = ("plan", "quadratic", "--workload", "mod\x1b[2J:obj")
    for output in (page, text, stdout, worker, *sweep(*words)[1:]):
        assert "\x1b" not in output and "\u202e" not in output
    count("recovered")


@pytest.mark.slow
@pytest.mark.parametrize(
    "executor",
    [
        (),
        pytest.param(("--executor", "slurm", "--slurm", "cluster=local"), marks=pytest.mark.slurm),
    ],
    ids=["local", "slurm"],
)
def test_the_current_folder_hides_no_library(tmp_path, count, executor):
    for name in ("json", "torch", "numpy", "sweep", "pickle", "random", "tomllib", "mlflow"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a')")
    words = ("quadratic", "--batches", "4", "--budget", "400", "--device", "cpu", "--out", "s")
    assert sweep("run", *words, "--yes", *executor, folder=tmp_path)[0] == 0
    assert ui_command(SweepFolder(tmp_path / "s"), 5000)[1] == "-P"
    assert not (tmp_path / "ran").exists()
    count("recovered")


MODULE = """
from pathlib import Path
from sweep.workloads.quadratic import NoisyQuadratic as Own
Path(__file__).with_name("imported").touch()
"""


@pytest.mark.slow
def test_code_runs_only_after_a_notice_and_is_not_imported_to_read(tmp_path, count):
    (tmp_path / "own.py").write_text(MODULE)
    words = ("quadratic", "--workload", "own:Own", "--batches", "4", "--budget", "400")
    words += ("--device", "cpu", "--out", "s")
    code, _, stderr = sweep("run", *words, "--no-user-code", folder=tmp_path)
    assert code == 2 and "own:Own" in stderr and not (tmp_path / "imported").exists()
    code, _, stderr = sweep("run", *words, "--yes", folder=tmp_path)
    assert code == 0 and stderr.startswith("This runs your code: own:Own (") and "sha256" in stderr
    (tmp_path / "imported").unlink()
    for command in READING:
        trial = SweepFolder(tmp_path / "s").trials()[0].id
        code, *_ = sweep(command, "s", *([trial] if command == "log" else []), folder=tmp_path)
        assert code == 0
    assert not (tmp_path / "imported").exists()
    count("recovered")


@pytest.mark.slow
@pytest.mark.parametrize(
    "address", ["http://u:SECRET@{}", "http://SECRET@{}/", "http://{}/?jwt=SECRET#x=SECRET"]
)
def test_no_secret_of_an_address_is_kept_or_shown(tmp_path, count, address):
    uri = address.format("127.0.0.1:9")
    words = ("quadratic", "--batches", "4", "--budget", "400", "--device", "cpu", "--out", "s")
    code, stdout, stderr = sweep("run", *words, "--yes", "--tracking-uri", uri, folder=tmp_path)
    assert code == 0 and "lacks" in stderr
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"SECRET" not in written and "SECRET" not in stdout + stderr
    count("recovered")
