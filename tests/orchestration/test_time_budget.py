"""Sweeps with a budget of time: steps are timed once, before plan.json is written."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading

import pytest

import sweep
from sweep.analysis.next_step import read_records
from sweep.config.arms import Arm
from sweep.config.execution import Execution, Services
from sweep.config.load import load_experiment
from sweep.decision.next import next_trials
from sweep.errors import SweepError
from sweep.orchestration import timing as measuring
from sweep.orchestration.looks import read_trial_record, trials_after_look
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import Request, read_request
from sweep.orchestration.runner import finished_summary, run_plan
from sweep.orchestration.timing import fix_tokens, load_timing
from sweep.plan.plan import load_plan
from sweep.report.report import write_report
from sweep.training.device import has_compiler
from sweep.trial.files import read_json, read_metrics, write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.timing import read_timing, write_timing
from tests.fakes.times import timing_of
from tests.orchestration.clusters import ON_CPU, assert_same, wait_until

FOUR, EIGHT = (Arm(None, size) for size in (4, 8))
LOCAL = Services()


@pytest.fixture
def timed_briefly(monkeypatch):
    monkeypatch.setattr(measuring, "SECONDS_PER_ARM", 0.1)


def plan_in(path, services=LOCAL, experiment="quadratic", **settings):
    question = load_experiment(experiment, {"batches": "4,8", "budget": "1s", **settings})
    folder = SweepFolder(path)
    return make_plan(Request(question, ON_CPU, folder, services)), folder


def test_tokens_are_fixed_once_and_a_later_command_trains_nothing_more(tmp_path, timed_briefly):
    planned, folder = plan_in(tmp_path / "s")
    assert planned.plan.awaits_times and finished_summary(planned, folder) is None
    planned = fix_tokens(planned, folder, LOCAL)
    assert not folder.path.exists()  # timing steps writes nothing
    assert run_plan(planned, folder).exit_code == 0

    plan = load_plan(folder)
    timing = read_timing(folder, plan.sweep_uid)
    medians = {times.arm: sorted(times.seconds_per_step)[10] for times in timing.arms}
    assert timing.rounds == 21 and timing.rounds_needed == 7
    assert {row.arm: row.steps for row in plan.trials} == {
        arm: int(1 / seconds) for arm, seconds in medians.items()
    }
    again, _ = plan_in(tmp_path / "s")
    assert fix_tokens(again, folder, LOCAL) is again
    assert finished_summary(again, folder).exit_code == 0
    assert again.requested == tuple(row.id for row in plan.trials)


def test_a_tuned_sweep_that_was_interrupted_keeps_the_tokens_of_all_batch_sizes(
    tmp_path, timed_briefly
):
    planned, folder = plan_in(tmp_path / "s", lr="tuned")
    fixed = fix_tokens(planned, folder, LOCAL)
    save_plan(fixed.plan, folder, fixed.timing)
    tokens = {row.arm: row.tokens for row in fixed.plan.trials}
    assert {row.arm: row.tokens for row in load_plan(folder).trials} == tokens
    again, _ = plan_in(tmp_path / "s", lr="tuned")
    assert not again.plan.awaits_times
    assert {row.arm: row.tokens for row in again.plan.trials} == tokens


def test_the_answer_compares_losses_at_equal_time(tmp_path, timed_briefly):
    planned, folder = plan_in(tmp_path / "s", seeds=3)
    run_plan(fix_tokens(planned, folder, LOCAL), folder)
    write_report(folder.path)
    result = sweep.load_sweep(folder.path).leading
    answer = result.answer
    assert (answer.time_budget_seconds, answer.pursues) == (1.0, "time")
    assert answer.fewest_tokens.batch_size is None and "equal time" in answer.fewest_tokens.reason
    assert answer.soonest.batch_size == answer.recommended
    assert "after 1 s of training" in answer.headline and "1 s of training steps" in answer.scope
    codes = {check.code for check in result.checks}
    assert not codes & {"tokens_differ", "equal_steps_not_tokens"} and "diverged" in codes
    assert not any(row.dominated for row in answer.batch_sizes)
    of_table = sweep.answer(folder.path / "trials.csv")
    assert of_table.time_budget_seconds == 1.0
    assert of_table.fewest_tokens.batch_size is None


def test_trainings_at_a_fixed_rate_that_missed_their_time_are_repeated_elsewhere(
    tmp_path, timed_briefly
):
    settings = {"batches": "4,8", "budget": "1s", "device": "cpu"}
    request = read_request("quadratic", settings, tmp_path / "s")
    folder = request.folder
    run_plan(fix_tokens(make_plan(request), folder, LOCAL), folder)
    for seconds, out in ((1.01, "s"), (1.1, "s-2")):
        for trial in folder.trials():
            changed = read_json(trial.result_path) | {"seconds_training": seconds}
            write_json(trial.result_path, changed)
        results = sweep.load_sweep(folder.path)
        words = shlex.split(results.next_step.command)
        assert words[words.index("--lr") + 1] == "tuned"
        assert words[words.index("--out") + 1] == str(tmp_path / out)
    assert results.answer().soonest.settle is None


def test_a_killed_sweep_is_continued_with_the_same_tokens_and_ends_in_the_same_bits(tmp_path):
    folder = SweepFolder(tmp_path / "killed")
    words = [sys.executable, "-m", "sweep", "run", "quick", "--budget", "2s", "--batches", "4,8"]
    words += ["--quiet", "--yes", "--device", "cpu", "--out"]
    process = subprocess.Popen([*words, str(folder.path)], start_new_session=True)

    def has_trained():
        if not folder.plan_path.exists():
            return False
        return any(read_metrics(trial.metrics_path) for trial in folder.trials())

    try:
        wait_until(has_trained)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    fixed = load_plan(folder)
    timing = folder.timing_path.read_bytes()
    subprocess.run([*words, str(folder.path)], check=True)
    assert [row.tokens for row in load_plan(folder).trials] == [row.tokens for row in fixed.trials]
    assert folder.timing_path.read_bytes() == timing

    whole = SweepFolder(tmp_path / "whole")
    by_file = ("--timing", str(folder.timing_path))
    subprocess.run([*words, str(whole.path), *by_file], check=True)
    assert {trial.id for trial in whole.trials()} == {trial.id for trial in folder.trials()}
    assert_same(folder, whole)


def timing_for(plan, seconds=0.001, **fields):
    values = {
        "execution": plan.execution,
        "precision": plan.settings.precision,
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "tokens_per_sequence": plan.tokens_per_sequence,
        "workload": plan.settings.workload.name,
        "optimizers": plan.settings.optimizer_names,
    }
    return timing_of({FOUR: [seconds] * 7, EIGHT: [2 * seconds] * 7}, **{**values, **fields})


def test_a_file_of_times_is_not_read_once_tokens_are_fixed(tmp_path, timed_briefly, caplog):
    planned, folder = plan_in(tmp_path / "s")
    run_plan(fix_tokens(planned, folder, LOCAL), folder)
    again, _ = plan_in(tmp_path / "s")
    with caplog.at_level("INFO", "sweep"):
        assert fix_tokens(again, folder, Services(timing=str(tmp_path / "missing"))) is again
    assert "missing is not read: the tokens of all trials are fixed already" in caplog.text


def test_a_file_of_times_fixes_the_tokens_where_steps_cannot_be_timed(tmp_path):
    planned, _ = plan_in(tmp_path / "s")
    write_timing(SweepFolder(tmp_path), timing_for(planned.plan))
    services = Services(timing=str(tmp_path / "timing.json"), executor="slurm")
    fixed = fix_tokens(planned, SweepFolder(tmp_path / "s"), services).plan
    assert {row.arm: row.steps for row in fixed.trials} == {FOUR: 1000, EIGHT: 500}

    with pytest.raises(SweepError, match=r"got the executor 'slurm'\. Call `sweep time` there"):
        fix_tokens(planned, SweepFolder(tmp_path / "s"), Services(executor="slurm"))


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"model": "small"}, "model is small there and quadratic here"),
        ({"model": None}, "model is None there"),
        ({"tokens_per_sequence": 128}, "tokens_per_sequence is 128 there and 1 here"),
        ({"optimizers": ("muon",)}, "optimizers is"),
        ({"workload": "grpo"}, "workload is grpo there"),
        ({"precision": "bf16"}, "precision is bf16 there and fp32 here"),
        ({"execution": Execution(device="cpu", threads=99)}, "threads is 99 there"),
        ({"microbatch_sizes": {FOUR: 4, EIGHT: 4}}, "at batch size 8 the microbatch is 4 there"),
    ],
)
def test_a_file_of_other_steps_is_refused(tmp_path, fields, difference):
    plan = plan_in(tmp_path / "s")[0].plan
    write_timing(SweepFolder(tmp_path), timing_for(plan, **fields))
    with pytest.raises(SweepError, match=difference):
        load_timing(tmp_path / "timing.json", plan)


def test_steps_are_compiled_if_those_of_the_file_were(tmp_path):
    plan = plan_in(tmp_path / "s")[0].plan
    execution = plan.execution.model_copy(update={"compile": True})
    write_timing(SweepFolder(tmp_path), timing_for(plan, execution=execution))
    assert not plan.execution.compile and has_compiler("cpu")
    compiled, _ = load_timing(tmp_path / "timing.json", plan)
    assert compiled.execution.compile
    assert "as the steps were timed" in compiled.execution.compile_reason

    write_timing(SweepFolder(tmp_path), timing_for(plan))
    eager, _ = load_timing(tmp_path / "timing.json", compiled)
    assert not eager.execution.compile


def test_a_file_that_lacks_a_batch_size_or_rounds_or_is_missing_is_refused(tmp_path):
    plan = plan_in(tmp_path / "s", batches="4,8,16")[0].plan
    with pytest.raises(SweepError, match=r"must exist\. Write it by `sweep time`"):
        load_timing(tmp_path / "timing.json", plan)
    write_timing(SweepFolder(tmp_path), timing_for(plan))
    with pytest.raises(SweepError, match="it lacks batch size 16"):
        load_timing(tmp_path / "timing.json", plan)
    empty = timing_of({FOUR: [], EIGHT: []}, reason="too short")
    write_timing(SweepFolder(tmp_path), empty)
    with pytest.raises(SweepError, match="it has no rounds: too short"):
        load_timing(tmp_path / "timing.json", plan)


def test_several_devices_and_a_file_without_a_budget_of_time_are_refused(tmp_path):
    experiment = load_experiment("quick", {"batches": "4,8", "budget": "1min"})
    folder = SweepFolder(tmp_path / "s")
    planned = make_plan(Request(experiment, Execution(device="cpu", devices=2), folder))
    with pytest.raises(SweepError, match="got 2 devices per trial"):
        fix_tokens(planned, folder, LOCAL)
    with pytest.raises(SweepError, match="--timing needs a --budget of time"):
        read_request("quick", {"timing": "timing.json"}, folder.path)


def test_a_plan_before_steps_are_timed_is_printed_with_nulls_and_not_written(tmp_path):
    words = [sys.executable, "-m", "sweep", "plan", "quick", "--budget", "1min", "--batches", "4,8"]
    printed = subprocess.run([*words, "--json"], capture_output=True, check=True, cwd=tmp_path)
    document = json.loads(printed.stdout)
    assert document["token_budget"] is None and document["settings"]["budget"] == "1min"
    row = document["trials"][0]
    assert (row["tokens"], row["steps"], row["id"]) == (None, None, None)
    assert row["forecast_seconds"] >= 60
    refused = subprocess.run([*words, "--out", "s"], capture_output=True, text=True, cwd=tmp_path)
    assert refused.returncode == 2 and "Name a --timing" in refused.stderr
    assert not (tmp_path / "s").exists()


def test_sweep_stop_ends_the_timing_of_steps_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "SECONDS_PER_ARM", 100.0)
    planned, folder = plan_in(tmp_path / "s", budget="1h")

    has_ended = threading.Event()

    def ask_to_stop():
        while not has_ended.wait(0.1):  # again, as `sweep stop` does: a new command forgets it
            with contextlib.suppress(FileNotFoundError):
                folder.stop_path.touch()

    thread = threading.Thread(target=ask_to_stop)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fix_tokens(planned, folder, LOCAL)
    finally:
        has_ended.set()
        thread.join()
    assert not folder.path.exists()


def test_a_file_of_another_device_is_refused_where_trials_run_here(tmp_path):
    planned, folder = plan_in(tmp_path / "s")
    write_timing(SweepFolder(tmp_path), timing_for(planned.plan))  # on an "Example CPU"
    with pytest.raises(SweepError, match=r"the file has Example CPU\. Call `sweep time` here"):
        fix_tokens(planned, folder, Services(timing=str(tmp_path / "timing.json")))


def test_run_and_report_decide_alike_although_the_timed_tokens_are_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "run_job", lambda *_: "Example CPU")
    services = Services(timing=str(tmp_path / "timing.json"))
    settings = {"seeds": "auto", "lr": "0.05", "answer": {"max_seeds": 5}}
    planned, folder = plan_in(tmp_path / "s", services, **settings)
    write_timing(SweepFolder(tmp_path), timing_for(planned.plan, execution=planned.plan.execution))
    planned = fix_tokens(planned, folder, services)
    assert planned.plan.tokens_are_common and planned.plan.has_unequal_amounts
    run_plan(planned, folder)

    loaded = sweep.load_sweep(folder.path)
    slopes = loaded.trials["valid_slope"]
    records = {record.row.id: record for record in read_records(loaded)}
    for row in loaded.plan.known_trials:
        record = read_trial_record(folder, row, loaded.plan.settings.objective)
        assert records[row.id].time == record.time
    assert slopes.notna().all()
    added = trials_after_look(loaded.plan, planned.experiment, folder)
    assert added == next_trials(loaded.plan, planned.experiment, [*records.values()], loaded.timing)


def test_a_finished_sweep_is_answered_again_for_what_a_command_asks(tmp_path, timed_briefly):
    planned, folder = plan_in(tmp_path / "s")
    run_plan(fix_tokens(planned, folder, LOCAL), folder)
    again, _ = plan_in(tmp_path / "s")
    assert finished_summary(again, folder) is not None
    priced, _ = plan_in(tmp_path / "s", price=3.6)
    assert finished_summary(priced, folder) is None  # writes the plan and the report again
    run_plan(priced, folder)
    assert load_plan(folder).settings.answer.price == 3.6
    assert finished_summary(plan_in(tmp_path / "s", price=3.6)[0], folder) is not None


def test_a_plan_takes_its_tokens_from_a_file_in_python_too(tmp_path):
    plan = plan_in(tmp_path / "s", experiment="quick", batches="4,8")[0].plan
    device = measuring.run_job(measuring.name_device, "cpu")
    path = tmp_path / "timing.json"
    write_timing(SweepFolder(tmp_path), timing_for(plan, device=device))
    options = {"batches": "4,8", "budget": "1s", "device": "cpu", "timing": str(path)}
    rows = sweep.plan_sweep("quick", out=tmp_path / "s", **options).trials
    assert {row.batch_size: row.steps for row in rows} == {4: 1000, 8: 500}
    rows = sweep.plan_sweep("quick", out=tmp_path / "s", **{**options, "timing": None}).trials
    assert {row.steps for row in rows} == {0} and {row.id for row in rows} == {None}
