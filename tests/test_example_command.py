"""A script that trains as we do gives our losses, by its command."""

import os
import sys
from pathlib import Path

from studies.outside.study import COMMAND, ROOT, TOLERANCE, compare, run_both
from sweep.orchestration.check import check_command
from sweep.orchestration.planning import read_request


def test_a_script_that_trains_as_we_do_gives_the_same_losses(tmp_path):
    run_both(tmp_path, "--lr", "5e-3", "--budget", "4096", "--batches", "4,16", "--quiet")
    trials = compare(tmp_path)
    assert list(trials["batch_size"]) == [4, 16]
    assert (trials["difference"] <= TOLERANCE).all()


def test_the_example_keeps_what_sweep_check_asks_for(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    settings = {"command": COMMAND, "context": 64, "budget": 65536, "batches": "4,16"}
    document = check_command(read_request(None, settings, tmp_path), lambda title: None)
    statuses = {name: check["status"] for name, check in document["checks"].items()}
    assert statuses == dict.fromkeys(statuses, "PASS"), document
