"""Times of steps, measured in one process: rounds, order, microbatches, and the share of a CPU."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.data.sources import identify_data
from sweep.orchestration.timing import time_arms
from sweep.plan.rounds import LEAST_STEPS, WARM_UP_STEPS, TimingRequest
from sweep.training.process import FreshProcess
from sweep.training.timing import CpuUsage, read_threads
from sweep.trial.timing import TOO_SHORT
from tests.plans import build_plan

ON_CPU = Execution(device="cpu", threads=1)
ORCHESTRATION = Path(__file__).parents[1] / "orchestration"


def configs_of(experiment="quadratic", execution=ON_CPU, data=None, **fields):
    settings = {"batches": "2,4,8", "budget": 8192, "precision": "fp32", **fields}
    plan = build_plan(load_experiment(experiment, settings), execution, data=data)
    return {row.arm: plan.trial_config(row) for row in plan.trials}


def time_here(configs, rounds=3, seconds=0.05, deadline=math.inf, evaluates=False):
    """Time the steps in a fresh process, as the commands do."""
    request = TimingRequest(
        configs=configs,
        sweep_uid="uid",
        rounds=rounds,
        rounds_needed=rounds,
        seconds_per_arm=seconds,
        deadline=deadline,
        evaluates=evaluates,
    )
    return FreshProcess(time_arms, request).result()


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Make `faulty:NotesItsSteps` importable, and return what it noted as numbers."""
    monkeypatch.syspath_prepend(str(ORCHESTRATION))
    monkeypatch.setenv("FAULTY_FOLDER", str(tmp_path))

    def read(name):
        path = tmp_path / name
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    return read


def test_each_arm_has_a_time_of_each_round(tmp_path):
    configs = configs_of()
    timing = time_here(configs, rounds=4, evaluates=True)
    assert (timing.rounds, timing.rounds_needed, timing.reason) == (4, 4, "")
    assert [times.arm for times in timing.arms] == list(configs)
    assert timing.execution == ON_CPU.model_dump(mode="json")
    assert (timing.precision, timing.torch_version) == ("fp32", torch.__version__)
    assert timing.has_real_batches and timing.seconds_evaluation > 0
    for times in timing.arms:
        assert len(times.seconds_per_step) == 4 and times.steps_per_round >= LEAST_STEPS
        assert times.microbatch_size == times.batch_size and times.seconds_compile is None


def test_rounds_take_the_steps_of_all_arms_in_turn_and_every_other_one_in_reverse(notes):
    timing = time_here(configs_of(workload="faulty:NotesItsSteps"), rounds=3)
    steps = {times.batch_size: times.steps_per_round for times in timing.arms}
    expected = [size for size in (2, 4, 8) for _ in range(WARM_UP_STEPS)]
    for order in ((2, 4, 8), (8, 4, 2), (2, 4, 8)):
        expected += [size for size in order for _ in range(steps[size])]
    assert notes("batches") == expected


def test_a_step_takes_the_microbatches_of_its_arm(notes):
    execution = ON_CPU.model_copy(update={"microbatch": 4})
    timing = time_here(configs_of(workload="faulty:NotesItsSteps", execution=execution))
    assert [times.microbatch_size for times in timing.arms] == [2, 4, 4]
    counts = {times.batch_size: 3 * times.steps_per_round + WARM_UP_STEPS for times in timing.arms}
    sizes = notes("microbatches")
    assert {size: sizes.count(size) for size in {*sizes}} == {
        2: counts[2],
        4: counts[4] + 2 * counts[8],
    }


def test_optimizers_are_timed_on_one_model_with_their_own_labels():
    timing = time_here(configs_of(batches="2,4", lr="tuned", optimizers="adamw,sgd"))
    arms = [Arm(name, size) for name in ("adamw", "sgd") for size in (2, 4)]
    assert [times.arm for times in timing.arms] == arms


def test_a_deadline_that_has_passed_leaves_no_round_and_says_why():
    timing = time_here(configs_of(), deadline=time.monotonic())
    assert (timing.rounds, timing.rounds_needed, timing.reason) == (0, 3, TOO_SHORT)
    for times in timing.arms:
        assert (times.seconds_per_step, times.cpu_share, times.is_loaded) == ((), None, None)


def test_rounds_that_would_pass_the_deadline_are_left_out(notes):
    configs = configs_of(workload="faulty:Slow")  # 0.02 s per step, so 0.18 s per round
    timing = time_here(configs, rounds=1000, deadline=time.monotonic() + 5.0)
    assert 0 < timing.rounds < 1000 and timing.rounds_needed == 1000


def test_text_that_is_not_prepared_here_is_replaced_by_random_tokens():
    data = identify_data("synthetic") | {"seed": 12345}  # nothing has prepared this
    timing = time_here(configs_of("quick", data=data, batches="2,4"), rounds=2, evaluates=True)
    assert not timing.has_real_batches and timing.seconds_evaluation is None
    assert timing.rounds == 2


def test_a_share_of_the_processors_is_that_of_the_time_in_which_threads_wanted_to_run():
    usage = CpuUsage()
    assert usage.share is None
    usage.add({1: (0, 0), 2: (5 * 10**9, 0)}, {1: (10**9, 10**9), 2: (7 * 10**9, 0)})
    assert (usage.ran, usage.waited) == (3.0, 1.0)
    usage.add({1: (10**9, 10**9)}, {1: (2 * 10**9, 10**9), 3: (10**9, 0)})  # 3 is a new thread
    assert (usage.ran, usage.waited, usage.share) == (5.0, 1.0, 5 / 6)
    usage.add({}, {})  # a system that counts nothing
    assert usage.share is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's counters")
def test_threads_that_share_a_core_with_busy_programs_are_denied_a_part_of_it():
    (core, *_) = cores = os.sched_getaffinity(0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    usage = CpuUsage()
    try:
        for program in (0, *(process.pid for process in busy)):
            os.sched_setaffinity(program, {core})
        before = read_threads()
        while usage.ran + usage.waited < 0.5:
            sum(range(100_000))
            usage = CpuUsage()
            usage.add(before, read_threads())
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()
    assert usage.share < 0.9


@pytest.mark.slow
def test_compiled_steps_stay_compiled_at_more_microbatches_than_torch_recompiles_for(notes):
    sizes = list(range(1, 11))
    execution = ON_CPU.model_copy(update={"compile": True})
    fields = {"batches": sizes, "workload": "faulty:NotesItsSteps", "budget": 2520 * 10}
    timing = time_here(configs_of(execution=execution, **fields), rounds=2)
    assert all(times.seconds_compile > 0 for times in timing.arms)
    assert notes("microbatches") == []
