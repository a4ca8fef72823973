"""What the report proposes is what a command trains, and its plan has no obstacle."""

import shlex
import shutil
from collections import Counter

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.analysis.next_step import read_records
from sweep.analysis.results import load_sweep
from sweep.cli import sweep as command_line
from sweep.cli.commands.running import run
from sweep.decision.proposal import propose_answer
from sweep.orchestration.budgets import make_plans
from sweep.orchestration.looks import read_trial_record, trials_after_look
from sweep.orchestration.planning import Planned, make_plan
from sweep.orchestration.request import Request, read_request
from sweep.orchestration.runner import rows_to_run
from sweep.plan.commands import parse_command
from sweep.plan.growth import grow_plan
from sweep.plan.plan import build_plan, requested_ids
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import SweepFolder
from tests.analysis.made_up_sweeps import (
    CPU,
    MAXIMIZED,
    Inputs,
    write_clear_results,
    write_clear_sweep,
    write_made_up_sweep,
)
from tests.commands import COMMAND, SCRIPT

SWEEPS = range(40)


def request_of(command):
    words = shlex.split(command)
    assert words[:2] == ["sweep", "run"]
    context = run.make_context("run", words[2:])
    options = {"out", "json", "yes", "dry_run", "quiet", "verbose", "only", "retry", "experiment"}
    values = {name: value for name, value in context.params.items() if name not in options}
    return read_request(context.params["experiment"], values, context.params["out"])


def plan_command(command, sweep):
    """Plan a proposed command as the command line does.

    Except that a new folder is not probed, and the made-up workload of a user is not imported.
    """
    request = request_of(command)
    workload = sweep.plan.settings.workload
    if workload == MAXIMIZED:  # as the user's code would declare it
        experiment = request.experiment.model_copy(update={"workload": workload})
        request = Request(experiment, request.execution, request.folder, command=request.command)
    if not request.folder.plan_path.exists():
        plan = build_plan(request.experiment, CPU, Inputs())
        return Planned(plan, tuple(str(row.id) for row in plan.known_trials), request.experiment)
    if workload != MAXIMIZED:
        return make_plan(request)

    new = build_plan(request.experiment, CPU, Inputs(), old=sweep.plan)
    plan = grow_plan(sweep.plan, new)
    waiting = [row for row in new.trials if row.id is None]
    plan = plan.model_copy(update={"trials": (*plan.known_trials, *waiting)})
    return Planned(plan, requested_ids(plan, new, request.experiment), request.experiment)


def rows_of_command(command):
    """Return the rows that a command trains in its folder."""
    request = request_of(command)
    return rows_to_run(make_plan(request).command_rows(), request.folder)


def check_proposal(path):
    sweep = load_sweep(path)
    folder, objective = SweepFolder(path), sweep.plan.settings.objective
    of_folders = [read_trial_record(folder, row, objective) for row in sweep.plan.known_trials]
    assert repr(read_records(sweep)) == repr(of_folders)  # NaN is not equal to itself
    answer = sweep.answer()
    if answer is None:
        return "no answer"
    is_open = answer.provisional or not answer.decided
    if answer.settle is None:
        assert answer.settle_reason or not is_open
        return "reason" if is_open else "settled"
    assert sweep.plan.execution.microbatch_bound is None  # a bound makes a made-up sweep's misfit
    planned = plan_command(answer.settle, sweep)
    new_folder = request_of(answer.settle).folder
    finals = [row for row in planned.command_rows().trials if row.stage == "final"]
    assert planned.plan.can_compare({row.tokens for row in finals})
    assert {row.batch_size for row in finals} >= {row.batch_size for row in answer.batch_sizes}
    rows = rows_to_run(planned.command_rows(), new_folder)
    if not rows:  # only seeds follow, which a limit must not forbid
        rows = trials_after_look(planned.plan, planned.experiment, new_folder)
        hours = planned.experiment.answer.max_hours
        assert hours is None or hours > 0.01
    assert rows
    proposed = [(r.stage, r.arm, r.seed, r.learning_rate) for r in sweep.next_step.trials]
    assert Counter(proposed) == Counter((r.stage, r.arm, r.seed, r.learning_rate) for r in rows)
    return "elsewhere" if new_folder.path != path else "same folder"


@pytest.mark.parametrize("number", SWEEPS)
def test_a_proposed_command_has_no_obstacle_and_trains_what_the_report_says(number, tmp_path):
    write_made_up_sweep(tmp_path / "s", number)
    assert check_proposal(tmp_path / "s")


@pytest.mark.parametrize("number", range(12))
def test_the_command_for_longer_trainings_plans_budgets_with_this_one(number, tmp_path):
    write_made_up_sweep(tmp_path / "s", number)
    loaded = load_sweep(tmp_path / "s")
    answer = loaded.answer()
    if answer is None or loaded.plan.settings.workload == MAXIMIZED:
        return
    command = answer.settle_longer
    if loaded.plan.settings.target is not None or loaded.plan.execution.misfit:
        assert command is None
        return
    budgets = [plan.plan.token_budget for plan in make_plans(request_of(command))]
    assert len(budgets) == 4 and loaded.plan.token_budget in budgets


@settings(max_examples=20, deadline=None)
@given(number=st.integers(1000, 2**32))
def test_any_made_up_sweep_has_a_next_step_without_obstacle(number, tmp_path_factory):
    path = tmp_path_factory.mktemp("made-up") / "s"
    write_made_up_sweep(path, number)
    assert check_proposal(path)


def next_command(path):
    sweep = load_sweep(path)
    assert sweep.answer().settle, sweep.answer().settle_reason
    return sweep.answer().settle


def flags_of(command):
    context = run.make_context("run", shlex.split(command)[2:])
    return context.params


OBSTACLES = {
    "a fixed rate": {"lr": "0.1", "seeds": 3},
    "unequal tokens": {"levels": {7: 1.0, 16: 1.1, 1700: 1.2}},
    "unequal tokens at a fixed rate": {"lr": "0.1", "levels": {7: 1.0, 16: 1.1, 1700: 1.2}},
    "too few seeds": {"seeds": 2},
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_sweep_plan_shows_no_obstacle_in_a_proposed_command(name, tmp_path):
    settings = dict(OBSTACLES[name])
    levels = settings.pop("levels", {4: 1.0, 16: 1.1})
    write_clear_sweep(tmp_path / "s", levels, **settings)
    command = next_command(tmp_path / "s")
    done = CliRunner().invoke(command_line, ["plan", *shlex.split(command)[2:]])
    assert done.exit_code == 0, done.output
    planned = make_plan(request_of(command))
    assert propose_answer(planned.command_rows()) is None
    assert planned.plan.tokens_are_common
    assert "cannot tell" not in done.output and "No claim" not in done.output


def test_sweep_plan_proposes_no_command_whose_steps_do_not_fit(tmp_path):
    words = "plan --model quick --data synthetic --budget 100k --batches 4,8 --device cpu"
    words = f"{words} --device-memory 1MiB --out {tmp_path / 's'}"
    done = CliRunner().invoke(command_line, words.split())
    assert done.exit_code == 0, done.output
    assert "sweep run" not in done.output and "Raise --device-memory" in done.output
    assert "e+0" not in done.output


def test_a_larger_batch_size_is_added_if_the_best_is_the_largest(tmp_path):
    write_clear_sweep(tmp_path / "s", {4: 1.2, 16: 1.1, 64: 1.0}, budget=12_800)
    flags = flags_of(next_command(tmp_path / "s"))
    assert flags["batches"] == "4,16,64,128" and flags["out"] == tmp_path / "s"


def test_a_batch_size_that_changes_the_common_tokens_is_compared_in_a_new_sweep(tmp_path):
    write_clear_sweep(tmp_path / "s", {4: 1.2, 16: 1.1, 64: 1.0}, budget=1984)
    flags = flags_of(next_command(tmp_path / "s"))
    assert flags["batches"] == "4,16,64,128" and flags["out"] == tmp_path / "s-2"
    assert int(flags["budget"]) % 128 == 0


def test_a_batch_size_with_too_few_steps_is_not_added(tmp_path):
    write_clear_sweep(tmp_path / "s", {4: 1.2, 16: 1.1, 64: 1.0}, budget=640)
    answer = load_sweep(tmp_path / "s").answer()
    assert answer.decided and answer.settle is None
    assert "Batch size 128 would take 5 steps" in answer.settle_reason


def test_a_batch_size_that_devices_or_groups_cannot_share_is_not_added(tmp_path):
    write_clear_sweep(tmp_path / "s", {3: 1.0, 6: 1.1, 12: 1.2})
    assert flags_of(next_command(tmp_path / "s"))["batches"] == "1,3,6,12"
    path = tmp_path / "two"
    plan = write_clear_sweep(path, {6: 1.0, 12: 1.1}, budget=7200)
    on_two = plan.execution.model_copy(update={"devices": 2})
    stored = SweepFolder(path).read_plan() | {"execution": on_two.model_dump(mode="json")}
    write_json(SweepFolder(path).plan_path, stored)
    answer = load_sweep(path).answer()
    assert answer.settle is None and "multiple of devices" in answer.settle_reason


def test_a_copy_of_a_sweep_proposes_commands_for_itself(tmp_path):
    write_clear_sweep(tmp_path / "s", {4: 1.0, 16: 1.1}, lr="0.1")
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    assert flags_of(next_command(tmp_path / "copy"))["out"] == tmp_path / "copy"
    (tmp_path / "copy-2").mkdir()
    shutil.copytree(tmp_path / "s", tmp_path / "u")
    write_clear_sweep(tmp_path / "v", {7: 1.0, 16: 1.1, 1700: 1.2}, lr="0.1")
    (tmp_path / "v-2").mkdir()
    assert flags_of(next_command(tmp_path / "v"))["out"] == tmp_path / "v-3"


def test_a_limit_of_hours_that_has_been_reached_is_raised(tmp_path):
    levels = {4: 1.0, 16: 1.0}
    write_clear_sweep(tmp_path / "s", levels, noise=0.002, seeds="auto", max_hours=1e-6)
    flags = flags_of(next_command(tmp_path / "s"))
    assert flags["seeds"] == "auto" and float(flags["max_hours"]) >= 0.1


def test_settings_that_only_python_can_give_are_named_in_place_of_a_command(tmp_path):
    write_clear_sweep(tmp_path / "s", {4: 1.0, 16: 1.1}, lr="0.1", evaluation={"points": 5})
    answer = load_sweep(tmp_path / "s").answer()
    assert answer.provisional and answer.settle is None
    assert "evaluation" in answer.settle_reason and "lr='tuned'" in answer.settle_reason


def test_an_address_with_a_password_is_not_in_the_command_and_is_asked_for(tmp_path):
    storage = "postgresql://me:secret@host/studies"
    write_clear_sweep(tmp_path / "s", {4: 1.0, 16: 1.1}, lr="0.1", storage=storage)
    answer = load_sweep(tmp_path / "s").answer()
    assert "--storage" in answer.settle_reason and "--storage" not in answer.settle
    assert "secret" not in SweepFolder(tmp_path / "s").plan_path.read_text()


SERVICES = {
    "executor": "slurm",
    "slurm": "partition=gpu,time=4h",
    "tracking_uri": "http://host:5000",
    "stall_minutes": 5.0,
    "no_user_code": True,
}


def test_the_executor_and_the_stores_are_kept(tmp_path):
    write_clear_sweep(tmp_path / "s", {4: 1.0, 16: 1.1}, lr="0.1", **SERVICES)
    flags = flags_of(next_command(tmp_path / "s"))
    assert {name: str(flags[name]) for name in SERVICES} == {n: str(v) for n, v in SERVICES.items()}


def test_settings_of_the_environment_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_RUN_EXECUTOR", "ray")
    monkeypatch.setenv("SWEEP_RUN_BATCHES", "4,8")
    context = run.make_context("run", ["quadratic"], auto_envvar_prefix="SWEEP_RUN")
    names = ("executor", "batches", "budget", "lr")
    request = read_request("quadratic", {name: context.params[name] for name in names})
    assert parse_command(request.command) == ("quadratic", {"batches": "4,8", "executor": "ray"})


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A folder with a training script, which is the current one."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)


def plan_script(lr, seeds):
    given = {"command": COMMAND, "batches": "4,8", "budget": 400, "lr": lr, "seeds": seeds}
    return make_plan(read_request(None, {**given, "device": "cpu"}, "results/s"))


def test_a_command_with_fixed_rates_is_tuned_next(script, tmp_path):
    path = tmp_path / "results" / "s"
    write_clear_results(path, plan_script("0.1", 3).plan, {4: 1.0, 8: 1.1})
    command = next_command(path)
    flags = flags_of(command)
    assert (flags["command"], flags["lr"], flags["seeds"]) == (COMMAND, "tuned", "auto")
    assert rows_of_command(command)


def test_a_command_with_too_few_seeds_gets_more(script, tmp_path):
    path = tmp_path / "results" / "s"
    write_clear_results(path, plan_script("tuned", 2).plan, {4: 1.0, 8: 1.1})
    command = next_command(path)
    assert flags_of(command)["seeds"] == "auto"
    assert rows_of_command(command)


def test_a_command_whose_answer_is_clear_is_checked_next(script, tmp_path):
    path = tmp_path / "results" / "s"
    plan = write_clear_results(path, plan_script("tuned", 3).plan, {4: 1.0, 8: 1.1})
    sweep = load_sweep(path)
    assert sweep.answer().decided and sweep.answer().settle.startswith("sweep check --command")
    checked = {"command": COMMAND, "code": plan.code, "checks": {}, "not_checked": []}
    names = ("command_repeats", "command_accumulation", "command_resumes")
    checked["checks"] = {name: {"status": "PASS", "evidence": ""} for name in names}
    write_json(SweepFolder(path).check_path, checked)
    assert flags_of(next_command(path))["batches"] == "2,4,8"


def test_seeds_that_give_equal_results_are_named_as_the_reason(tmp_path):
    plan = write_clear_sweep(tmp_path / "s", {4: 1.0, 16: 1.001})
    for row in plan.trials:
        trial = SweepFolder(tmp_path / "s").trial(row.id)
        if row.stage == "final":
            write_json(trial.result_path, read_json(trial.result_path) | {"final_valid_loss": 1.5})
    answer = load_sweep(tmp_path / "s").answer()
    assert answer.provisional and answer.settle is None
    assert "same result at batch size 4 and 16" in answer.settle_reason


def test_trainings_that_missed_their_budget_of_time_are_repeated_in_another_folder():
    sweep = load_sweep("results/published/one-minute")
    assert "Trainings were to take 60 s, but took" in sweep.answer().reasons[0]
    command = sweep.next_step.command
    assert "--budget 60s" in command and command.endswith("--out results/one-minute-2")
