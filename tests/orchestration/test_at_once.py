"""Several trials on one device: how many, with which bits, and what their times count for."""

import sys
from pathlib import Path

import pandas as pd
import pytest

from sweep.analysis.results import load_sweep
from sweep.analysis.tables import OWN_TIMES, with_own_times
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.errors import SweepError
from sweep.orchestration import planning
from sweep.orchestration.estimates import estimate_seconds
from sweep.orchestration.execution import Machine
from sweep.orchestration.executors.build import services_table
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import Request
from sweep.orchestration.timing import time_folder
from sweep.plan.plan import load_plan
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
    assert (alone.at_once, alone.threads) == (1, count * threads)


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
        (5, "local", {}, "the machine has 4 cores"),
        (2, "local", {"budget": "1min"}, "a budget of time"),
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same trials, two at a time and one at a time, each with one thread."""
    made = []
    for name, execution in (("two", TWO), ("one", Execution(device="cpu"))):
        path = tmp_path_factory.mktemp(name)
        plan_trial(path, "quick", SHORT, execution, threads=1)
        summary = run_in(path, experiment="quick", execution=Execution(), **SHORT)
        assert summary.exit_code == 0
        made.append(SweepFolder(path))
    return made


def test_trials_at_once_have_the_bits_of_single_ones(folders):
    two, one = (folder.trials() for folder in folders)
    assert len(two) == len(one) == 4
    for trial, other in zip(two, one, strict=True):
        assert_same(trial, other)
        assert not trial.read_result().was_alone and other.read_result().was_alone


def test_times_of_trials_at_once_count_for_nothing(folders, monkeypatch):
    shared, alone = (load_sweep(folder.path) for folder in folders)
    assert with_own_times(shared.trials)[OWN_TIMES].isna().all(axis=None)
    pd.testing.assert_frame_equal(with_own_times(alone.trials), alone.trials)
    assert all(row.seconds is None for row in shared.answer().batch_sizes)
    assert all(row.seconds is not None for row in alone.answer().batch_sizes)

    estimated = []
    monkeypatch.setattr(
        "sweep.orchestration.estimates.run_job",
        lambda *_, **__: estimated.append(1) or ({8: 1.0, 4: 0.5}, 0.0),
    )
    for folder in folders:
        plan = folder.located(load_plan(folder))
        estimate_seconds(plan, plan.trials, folder)
        assert len(estimated) == 1  # for the first folder; the trials of the other one tell theirs


def test_their_steps_are_timed_with_all_cores(folders):
    folder = folders[0]
    timing = time_folder(folder, load_plan(folder), seconds_per_arm=0.01)
    assert (timing.execution["at_once"], timing.execution["threads"]) == (1, 2)
    answer = load_sweep(folder.path).answer()
    assert answer.times_are_elsewhere and "with 2 threads" in answer.times_device
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
