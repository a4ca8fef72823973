"""The examples of scripts and workloads, with fewer steps, and their committed reports."""

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.studies.outside.study import COMMAND, ROOT, TOLERANCE, compare, run_both
from sweep.orchestration.check import check_command
from sweep.orchestration.request import read_request

EXAMPLES = ROOT / "experiments" / "examples"


def run_of(example: str) -> list[str]:
    """Return the words of the `sweep run` in an example's README."""
    text = (EXAMPLES / example / "README.md").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    assigned = next((line.partition("=")[2] for line in lines if line.startswith("C=")), "")
    line = next(line for line in lines if line.startswith("sweep run"))
    command = shlex.split(assigned)[0] if assigned else ""
    return [word.replace("$C", command) for word in shlex.split(line)]


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize(("example", "small"), [("command", "2048"), ("cnn", "512")])
def test_the_example_runs(example, small, environment, tmp_path):
    (tmp_path / "valid.txt").write_text("Once upon a time there was a little cat. " * 500)
    words = [word.replace("FOLDER", str(tmp_path)) for word in run_of(example)[1:]]
    for flag, value in {"--budget": small, "--batches": "16,64", "--lr": "1e-3"}.items():
        words[words.index(flag) + 1] = value
    if "--tune-centre" in words:
        del words[(index := words.index("--tune-centre")) : index + 2]
    words += ["--seeds", "1", "--device", "cpu", "--yes", "--quiet", "--json"]
    words[words.index("--out") + 1] = str(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-m", "sweep", *words],
        cwd=EXAMPLES / example,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["state"] == "COMPLETE"
    assert document["unit"] == "examples"


@pytest.mark.parametrize("example", ["command", "cnn"])
def test_the_committed_report_is_of_the_command_in_the_readme(example):
    words, report = run_of(example), EXAMPLES / example / "report"
    with (report / "trials.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["stage"] == "final"]
    assert {row["batch_size"] for row in rows} == {*words[words.index("--batches") + 1].split(",")}
    assert {row["state"] for row in rows} == {"COMPLETE"}
    answer = json.loads((report / "answer.json").read_text())
    assert answer["policy"] == words[words.index("--lr") + 1] == "tuned"
    assert answer["recommended"] in {int(row["batch_size"]) for row in rows}


@pytest.mark.slow
def test_a_script_that_trains_as_we_do_gives_the_same_losses(tmp_path):
    run_both(tmp_path, "--lr", "5e-3", "--budget", "4096", "--batches", "4,16", "--quiet")
    trials = compare(tmp_path)
    assert list(trials["batch_size"]) == [4, 16]
    assert (trials["difference"] <= TOLERANCE).all()


@pytest.mark.slow
def test_a_careful_script_passes_what_sweep_check_asks_for(environment, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = {"command": COMMAND, "context": 64, "budget": 65536, "batches": "4,16"}
    document = check_command(read_request(None, settings, tmp_path), lambda title: None, 24)
    statuses = {name: check["status"] for name, check in document["checks"].items()}
    assert statuses == dict.fromkeys(statuses, "PASS"), document
