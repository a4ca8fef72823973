"""What the report proposes is what a command trains, and its plan has no obstacle."""

import shlex
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.analysis.next_step import read_records
from sweep.analysis.results import load_sweep
from sweep.cli.commands import run
from sweep.orchestration.looks import next_trials, read_record
from sweep.orchestration.planning import Planned, Request, make_plan, read_request
from sweep.orchestration.runner import rows_to_run
from sweep.plan.plan import build_plan
from sweep.trial.folder import SweepFolder
from tests.analysis.made_up_sweeps import CPU, Inputs, write_made_up_sweep

SWEEPS = range(60)


def request_of(command):
    words = shlex.split(command)
    assert words[:2] == ["sweep", "run"]
    context = run.make_context("run", words[2:])
    options = {"out", "json", "yes", "dry_run", "quiet", "verbose", "only", "retry", "experiment"}
    values = {name: value for name, value in context.params.items() if name not in options}
    return read_request(context.params["experiment"], values, context.params["out"])


def plan_command(command, sweep):
    """Plan a proposed command as the command line does, except that a new folder is not probed."""
    request = request_of(command)
    declared = sweep.plan.settings.declared
    if declared:  # as the user's code would declare it
        experiment = request.experiment.model_copy(update={"declared": declared})
        request = Request(experiment, request.execution, request.folder, command=request.command)
    if request.folder.plan_path.exists():
        return make_plan(request)
    plan = build_plan(request.experiment, CPU, Inputs())
    return Planned(plan, tuple(str(row.id) for row in plan.known_trials), request)


def check_proposal(path):
    sweep = load_sweep(path)
    answer = sweep.answer()
    if answer is None:
        return "no answer"
    is_open = answer.provisional or not answer.decided
    if answer.settle is None:
        assert answer.settle_reason or not is_open
        return "reason" if is_open else "settled"
    planned = plan_command(answer.settle, sweep)
    reports = [row for row in planned.command_rows().trials if row.stage == "report"]
    assert len({row.tokens for row in reports}) == 1 or sweep.plan.settings.target is not None
    assert {row.batch_size for row in reports} >= {row.batch_size for row in answer.batch_sizes}
    rows = rows_to_run(planned) or next_trials(planned, planned.plan)
    assert rows
    proposed = [(r.stage, r.cell, r.seed, r.learning_rate) for r in sweep.next_step.trials]
    assert Counter(proposed) == Counter((r.stage, r.cell, r.seed, r.learning_rate) for r in rows)
    return "elsewhere" if planned.request.folder.path != path else "same folder"


@pytest.mark.parametrize("number", SWEEPS)
def test_a_proposed_command_has_no_obstacle_and_trains_what_the_report_says(number, tmp_path):
    write_made_up_sweep(tmp_path / "s", number)
    assert check_proposal(tmp_path / "s")


@pytest.mark.parametrize("number", SWEEPS)
def test_the_table_of_trials_and_their_folders_give_the_same_records(number, tmp_path):
    plan = write_made_up_sweep(tmp_path / "s", number)
    folder, objective = SweepFolder(tmp_path / "s"), plan.settings.objective
    of_table = read_records(load_sweep(folder.path))
    of_folders = [read_record(folder, row, objective) for row in plan.known_trials]
    assert repr(of_table) == repr(of_folders)  # NaN for a pruned trial is not equal to itself


@settings(max_examples=20, deadline=None)
@given(number=st.integers(1000, 2**32))
def test_any_made_up_sweep_has_a_next_step_without_obstacle(number, tmp_path_factory):
    path = tmp_path_factory.mktemp("made-up") / "s"
    write_made_up_sweep(path, number)
    assert check_proposal(path)
