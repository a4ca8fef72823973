"""Several trials on one device: how many, with which bits, and what their times count for."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from sweep.analysis.audit import audit
from sweep.analysis.checks import NOT_APPLICABLE
from sweep.analysis.results import load_sweep
from sweep.analysis.tables import TIME_COLUMNS, without_shared_times, write_trials_csv
from sweep.cli.show import total_seconds
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.errors import SweepError
from sweep.memory.limit import PROCESS_BYTES
from sweep.orchestration import planning
from sweep.orchestration.estimates import estimate_seconds
from sweep.orchestration.execution import Machine
from sweep.orchestration.executors.build import build_executor, services_table
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import Request
from sweep.orchestration.timing import time_folder
from sweep.plan.plan import load_plan
from sweep.plan.retry import begin_attempt
from sweep.training import attempt_trial
from sweep.training.device import available_cores
from sweep.training.process import FreshProcess
from sweep.trial.folder import SweepFolder
from sweep.trial.status import State
from tests.exactness.attempts import plan_trial
from tests.exactness.test_resume import assert_same
from tests.orchestration.clusters import Command, run_in, states, wait_until

SHORT = {"batches": "4,8", "budget": 8 * 64 * 4, "seeds": 2}
TWO = Execution(device="cpu", at_once=2)


def plan_here(path=Path("nowhere"), execution=None, executor="local", **settings):
    experiment = load_experiment("quick", {**SHORT, **settings})
    services = services_table()(executor=executor)
    chosen = Execution(**{"device": "cpu", **(execution or {})})
    return make_plan(Request(experiment, chosen, SweepFolder(path), services)).plan


@pytest.fixture
def four_cores(monkeypatch):
    machine = Machine("cpu", cores=4, can_compile=False)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)


@pytest.mark.parametrize(
    ("asked", "settings", "count", "threads"),
    [
        (1, {}, 1, 4),
        (2, {}, 2, 2),
        (3, {}, 3, 1),
        ("auto", {}, 4, 1),
        ("auto", {"seeds": 1}, 2, 2),  # the plan has two trials
        ("auto", {"batches": "4,8", "lr": "tuned", "seeds": 1}, 4, 1),  # five rates, then fewer
        ("auto", {"target": 3.0}, 1, 4),
        ("auto", {"model": "tinystories"}, 1, 4),  # large steps
        ("auto", {"budget": "1min"}, 1, 4),
    ],
)
@pytest.mark.usefixtures("four_cores")
def test_auto_is_decided_by_the_steps_the_cores_and_the_trials(asked, settings, count, threads):
    execution = plan_here(execution={"at_once": asked}, **settings).execution
    assert (execution.at_once, execution.threads) == (count, threads)
    assert bool(execution.at_once_reason) == (asked != 1)
    alone = execution.alone()
    assert (alone.at_once, alone.threads) == (1, 4)


@pytest.mark.parametrize(
    ("cores", "seeds", "count", "threads"),
    [(16, 5, 8, 2), (16, 9, 16, 1), (6, 2, 4, 1), (7, 3, 6, 1), (13, 5, 10, 1)],
)
def test_auto_weighs_more_trials_against_more_threads(monkeypatch, cores, seeds, count, threads):
    machine = Machine("cpu", cores=cores, can_compile=False)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)
    chosen = {"device_memory_bytes": 64 << 30, "at_once": "auto"}
    execution = plan_here(execution=chosen, seeds=seeds).execution
    assert (execution.at_once, execution.threads) == (count, threads)
    assert execution.alone().threads == cores


def test_trials_on_several_gpus_share_the_cores(monkeypatch):
    machine = Machine("cuda", cores=16, can_compile=True, gpus=4)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)
    chosen = {"device": "cuda", "device_memory_bytes": 64 << 30}
    for at_once, seeds, threads in ((1, 2, 4), (2, 2, 2), ("auto", 2, 4), ("auto", 6, 1)):
        # auto: 4 trials on 4 GPUs, and 12, of which 3 share a GPU and 4 cores
        execution = plan_here(execution={**chosen, "at_once": at_once}, seeds=seeds).execution
        assert (execution.threads, execution.alone().threads) == (threads, 4)


def test_a_sweep_that_grows_has_the_memory_of_one_of_its_trials_at_once(tmp_path, monkeypatch):
    machine = Machine("cpu", cores=4, can_compile=False)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)
    tensors = 40 << 20  # enough for steps of 8 sequences, and too little for 64
    process = PROCESS_BYTES
    settings = {"batches": "8", "budget": 196_608, "seeds": 1}
    limit = {"device_memory_bytes": 2 * (tensors + process + process // 50)}
    first = plan_here(tmp_path, {**limit, "at_once": 2}, **settings)
    assert [row.microbatch_size for row in first.trials] == [8]
    save_plan(first, SweepFolder(tmp_path))
    grown = plan_here(tmp_path, **{**settings, "batches": "8,64"})
    sizes = {row.batch_size: row.microbatch_size for row in grown.trials}
    assert sizes[8] == 8 and 8 <= sizes[64] < 64 and not grown.execution.reason


@pytest.mark.parametrize(("at_once", "kind"), [(1, "complete"), (2, "out_of_memory")])
def test_a_trial_has_its_part_of_the_memory_limit(tmp_path, at_once, kind):
    settings = {"batches": "8", "budget": 8 * 64 * 2, "seeds": 1}
    chosen = Execution(device="cpu", device_memory_bytes=24 << 20)
    trial = plan_trial(tmp_path, "quick", settings, chosen, at_once=at_once)
    trial.write_status(begin_attempt(trial.read_status()))
    assert FreshProcess(attempt_trial, trial.path, None).result().kind == kind


@pytest.mark.parametrize(
    ("at_once", "seeds", "compiles"), [(1, 7, True), (2, 7, False), (2, 14, True), (4, 3, False)]
)
def test_each_process_compiles_the_steps_of_a_batch_size(monkeypatch, at_once, seeds, compiles):
    machine = Machine("cpu", cores=4, can_compile=True)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)
    settings = {"budget": 196_608, "batches": "4,8", "seeds": seeds}
    assert plan_here(execution={"at_once": at_once}, **settings).execution.compile is compiles


@pytest.mark.parametrize("executor", ["ray", "slurm"])
def test_another_executor_cannot_resume_trials_that_share_a_device(tmp_path, executor):
    services = services_table()(executor=executor)
    with pytest.raises(SweepError, match=r"at_once must be 1 with the executor .* has 4\. Leave"):
        build_executor(services, Execution(device="cpu", at_once=4), SweepFolder(tmp_path))


@pytest.mark.parametrize(
    ("device", "at_once", "seconds", "total"),
    [
        ("cpu", 1, [1, 2, 3], 6),
        ("cpu", 2, [1, 2, 3], 3),
        ("cpu", 3, [1, 2, 9], 9),  # the longest
        ("cuda", 3, [1, 2, 3], 6),  # how well they share it is not known
        ("cpu", 2, [1, None], None),
    ],
)
def test_an_estimate_is_at_least_the_time_of_the_longest_trial(device, at_once, seconds, total):
    (row, *_) = plan_here().trials
    rows = [row.model_copy(update={"forecast_seconds": time}) for time in seconds]
    assert total_seconds(rows, Execution(device=device, at_once=at_once)) == total


def test_an_estimate_counts_that_searches_wait_for_others():
    rows = plan_here(batches="4,8", lr="tuned", seeds=1).trials
    rows = [row.model_copy(update={"forecast_seconds": 1.0}) for row in rows]
    counts = [(row.batch_size, row.stage) for row in rows]
    assert (counts.count((4, "tune")), counts.count((8, "tune")), len(rows)) == (5, 3, 10)
    for at_once, total in ((1, 10), (4, 1.25 + 1 + 1), (10, 3)):
        assert total_seconds(rows, Execution(device="cpu", at_once=at_once)) == total


@pytest.mark.usefixtures("four_cores")
def test_the_forecast_of_memory_limits_the_trials_at_once():
    peak = 1 << 30
    limit = {"device_memory_bytes": peak, "microbatch": 8}
    assert plan_here(execution={**limit, "at_once": "auto"}).execution.at_once == 1
    with pytest.raises(SweepError, match="at_once must be at most 1, as a trial may take"):
        plan_here(execution={**limit, "at_once": 2})


@pytest.mark.parametrize(
    ("asked", "executor", "settings", "why"),
    [
        (5, "local", {}, "each device has 4 cores"),
        (2, "local", {"budget": "1min"}, "a budget of time"),
        (2, "local", {"target": 3.0}, "with a target"),
        (2, "ray", {}, "on other machines"),
    ],
)
@pytest.mark.usefixtures("four_cores")
def test_more_trials_than_can_share_a_device_are_refused(asked, executor, settings, why):
    with pytest.raises(SweepError, match=f"at_once must be at most .*{why}.* got {asked}"):
        plan_here(execution={"at_once": asked}, executor=executor, **settings)


def test_a_folder_keeps_how_many_share_its_device(tmp_path):
    plan_trial(tmp_path, "quick", SHORT, TWO)
    assert plan_here(tmp_path).execution.at_once == 2
    assert plan_here(tmp_path, {"at_once": "auto"}, seeds=3).execution.at_once == 2
    with pytest.raises(SweepError, match="at_once was decided as 2"):
        plan_here(tmp_path, {"at_once": 1})


def test_times_of_trials_that_may_have_shared_a_device_are_left_out():
    executions = ['{"at_once": 1}', "{}", None, '{"at_once": 2}', "{", "[]"]
    columns = dict.fromkeys(TIME_COLUMNS, 1.0)
    trials = pd.DataFrame({"execution": pd.Series(executions, dtype=object), **columns})
    times = without_shared_times(trials)["seconds_training"]
    assert times.notna().tolist() == [True, True, True, False, False, False]


needs_cores = pytest.mark.skipif(available_cores() < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same trials, two at a time and one at a time, each with one thread."""
    sweeps = []
    for name, execution in (("two", TWO), ("one", Execution(device="cpu"))):
        path = tmp_path_factory.mktemp(name)
        plan_trial(path, "quick", SHORT, execution, threads=1)
        summary = run_in(path, experiment="quick", execution=Execution(), **SHORT)
        assert summary.exit_code == 0
        sweeps.append(SweepFolder(path))
    return sweeps


@needs_cores
def test_trials_at_once_have_the_bits_of_single_ones(folders):
    two, one = (folder.trials() for folder in folders)
    assert len(two) == len(one) == 4
    for trial, other in zip(two, one, strict=True):
        assert_same(trial, other)
        assert not trial.read_result().was_alone and other.read_result().was_alone


@needs_cores
def test_times_of_trials_at_once_count_for_nothing(folders, monkeypatch):
    shared, alone = (load_sweep(folder.path) for folder in folders)
    assert without_shared_times(shared.trials)[TIME_COLUMNS].isna().all(axis=None)
    pd.testing.assert_frame_equal(without_shared_times(alone.trials), alone.trials)
    assert all(row.seconds is None for row in shared.answer().batch_sizes)
    assert all(row.seconds is not None for row in alone.answer().batch_sizes)

    for sweep, judged in ((shared, False), (alone, True)):
        table = sweep.path / "trials.csv"
        write_trials_csv(sweep, table)
        checked = {check.code: check for check in sweep.leading.checks}
        assert (checked["seconds_per_step_outlier"].status is not NOT_APPLICABLE) is judged
        missing = {check["code"] for check in audit(table)["not_checked"]}
        assert ("seconds_per_step_outlier" in missing) is not judged

    estimated = []
    monkeypatch.setattr(
        "sweep.orchestration.estimates.run_job",
        lambda *_, **__: estimated.append(1) or ({8: 1.0, 4: 0.5}, 0.0),
    )
    for folder in folders:
        plan = folder.located(load_plan(folder))
        estimate_seconds(plan, plan.trials, folder)
        assert len(estimated) == 1  # for the first folder; the trials of the other one tell theirs


@needs_cores
def test_their_steps_are_timed_with_all_cores(folders):
    folder = folders[0]
    timing = time_folder(folder, load_plan(folder), seconds_per_arm=0.01)
    assert (timing.execution["at_once"], timing.execution["threads"]) == (1, available_cores())
    answer = load_sweep(folder.path).answer()
    assert answer.times_are_elsewhere
    assert f"with {available_cores()} threads" in answer.times_device
    assert all(row.seconds is not None for row in answer.batch_sizes)
    chosen = time_folder(folder, load_plan(folder), threads=1, seconds_per_arm=0.01)
    assert (chosen.execution["at_once"], chosen.execution["threads"]) == (1, 1)


@pytest.mark.slow
def test_a_sweep_that_was_killed_twice_ends_with_the_same_bits(tmp_path):
    settings = {"batches": "4,8", "budget": 8 * 64 * 64, "seeds": 2}
    often = {"checkpoint_seconds": 0.01, "threads": 1}
    for name, execution in (("killed", TWO), ("whole", Execution(device="cpu"))):
        plan_trial(tmp_path / name, "quick", settings, execution, **often)
    run_in(tmp_path / "whole", experiment="quick", execution=Execution(), **settings)

    folder = SweepFolder(tmp_path / "killed")
    command = Command(folder)
    flags = [f"--{name}={value}" for name, value in settings.items()]
    command.words = [sys.executable, "-m", "sweep", "run", "quick", *flags, "--quiet", "--yes"]
    command.words += ["--out", str(folder.path)]
    for count in (1, 3):

        def has_trained(count=count):
            trials = folder.trials()
            ended = sum(trial.result_path.exists() for trial in trials)
            running = sum(bool(t.checkpoints()) and not t.result_path.exists() for t in trials)
            return ended + running > count and running

        command.start()
        wait_until(has_trained, command)
        command.kill()
    assert command.run() == 0
    assert states(folder) == {State.COMPLETE}
    for trial, other in zip(folder.trials(), SweepFolder(tmp_path / "whole").trials(), strict=True):
        assert_same(trial, other)
