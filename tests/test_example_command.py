"""A script that trains as we do gives our losses, by its command."""

from studies.outside import study
from studies.outside.study import TOLERANCE, compare, run_both
from sweep.analysis.checks import PASS, checks_of_command
from sweep.orchestration.check import check_command
from sweep.orchestration.planning import read_request


def test_a_script_that_trains_as_we_do_gives_the_same_losses(tmp_path):
    run_both(tmp_path, "--lr", "5e-3", "--budget", "4096", "--quiet")
    trials = compare(tmp_path)
    assert list(trials["batch_size"]) == [4, 16]
    assert (trials["difference"] <= TOLERANCE).all()


def test_the_example_keeps_what_sweep_check_asks_for(tmp_path, monkeypatch):
    monkeypatch.chdir(study.ROOT)
    settings = {"command": study.COMMAND, "context": 64, "budget": 65536, "batches": "4,16"}
    document = check_command(read_request(None, settings, tmp_path), lambda title: None)
    checks = checks_of_command(document, "")
    assert {check.code: check.status for check in checks} == dict.fromkeys(document["checks"], PASS)
