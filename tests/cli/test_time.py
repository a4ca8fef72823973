"""`sweep time`: its table, its document, and what it refuses without writing anything."""

import json
import sys

import pytest

from sweep.cli.show import print_times
from sweep.config.arms import Arm
from sweep.plan.plan import load_plan
from sweep.trial.files import read_json
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import Lease
from tests.fakes.times import timing_of

PLAN = ("quadratic", "--batches", "4,8", "--budget", "400", "--device", "cpu")
BRIEFLY = ("--threads", "1", "--seconds", "0.05")


@pytest.fixture
def folder(call, tmp_path):
    """The folder of a sweep that was planned."""
    assert call("plan", *PLAN, "--out", tmp_path / "s")[0] == 0
    return SweepFolder(tmp_path / "s")


def test_the_document_is_the_file_that_is_written(call, folder):
    code, out = call("time", folder.path, *BRIEFLY, "--json")
    document = json.loads(out)
    assert code == 0 and document["rounds"] == document["rounds_needed"] == 7
    assert [(arm["batch_size"], arm["microbatch_size"]) for arm in document["arms"]] == [
        (4, 4),
        (8, 8),
    ]
    written = read_json(folder.timing_path)
    assert document == {key: value for key, value in written.items() if key != "format_version"}
    code, out = call("time", *BRIEFLY, folder.path)
    assert code == 0 and str(folder.timing_path) in out


def test_the_table_has_intervals_rates_and_times_relative_to_the_fastest(folder, capsys):
    rounds = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    times = {Arm(None, 4): rounds, Arm(None, 8): [2 * seconds * 0.75 for seconds in rounds]}
    print_times(timing_of(times), load_plan(folder), folder)
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[2:4]}
    assert cells["4"] == "4 1.3 (1 to 1.6) 3 1.333 (1.333 to 1.333)"
    assert cells["8"] == "8 1.95 (1.5 to 2.4) 4 1"


@pytest.mark.parametrize(("share", "marks"), [(1.0, set()), (0.5, {"loaded"}), (None, {"unknown"})])
def test_each_batch_size_is_marked_if_it_was_loaded(folder, capsys, share, marks):
    times = {Arm(None, 4): [1.0] * 7, Arm(None, 8): [1.0] * 7}
    print_times(timing_of(times, cpu_share=share), load_plan(folder), folder)
    _, heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split()[-1] == "load"
    for row in rows[:2]:
        assert {"loaded", "unknown"} & {*row.split()} == marks


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--device", "cuda:99"), "device must be auto or one of this machine's"),
        (("--threads", "0"), "--threads"),
        (("--seconds", "0"), "--seconds"),
    ],
)
def test_bad_options_are_refused_and_nothing_is_written(call, folder, options, says):
    before = {path.name for path in folder.path.iterdir()}
    assert call("time", folder.path, *options)[0] == 2
    assert says in call.stderr and len(call.stderr.splitlines()) == 1
    assert {path.name for path in folder.path.iterdir()} == before


def test_a_folder_without_a_plan_or_in_use_is_refused(call, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    assert call("time", tmp_path / "empty")[0] == 2 and "has no plan.json" in call.stderr
    with Lease(tmp_path / "empty" / "sweep.lock"):
        assert call("status", tmp_path / "empty")[0] == 2
        assert "no plan.json yet, because a command is still" in call.stderr
    with Lease(folder.lock_path):
        assert call("time", folder.path)[0] == 2 and "in use by a command" in call.stderr
    assert not folder.timing_path.exists()


def test_user_code_runs_only_after_its_name_was_shown_and_may_be_refused(
    call, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    code = "from sweep.workloads.quadratic import NoisyQuadratic\n"
    (tmp_path / "mine.py").write_text(f"{code}\nclass Mine(NoisyQuadratic):\n    pass\n")
    plan = ("--workload", "mine:Mine", "--lr", "0.1", *PLAN[1:], "--out", "own")
    assert call("plan", *plan)[0] == 0, call.stderr
    assert call("time", "own", "--no-user-code")[0] == 2
    assert "--no-user-code refuses mine:Mine" in call.stderr
    assert call("time", "own", *BRIEFLY)[0] == 0
    assert "This runs your code: mine:Mine" in call.stderr
