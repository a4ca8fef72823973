"""Times at the end of `sweep run` and by `sweep time`: when they are measured, and when not."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from sweep.config.arms import Arm
from sweep.config.execution import Execution, Services
from sweep.config.load import load_experiment
from sweep.decision.times import rounds_needed
from sweep.errors import SweepError
from sweep.orchestration import timing as measuring
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import Request, read_request
from sweep.orchestration.runner import finished_summary, run_plan
from sweep.orchestration.timing import time_folder
from sweep.plan.plan import load_plan
from sweep.tracking.mirror import Mirror
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.status import State
from sweep.trial.timing import TOO_SHORT, read_timing, write_timing
from tests.commands import COMMAND, SCRIPT
from tests.fakes.times import timing_of
from tests.orchestration.clusters import ON_CPU, plan_trials, planned, run_in, states, wait_until

FOUR, EIGHT, SIXTEEN = (Arm(None, size) for size in (4, 8, 16))
OTHER_ENDS = ("SIGKILL", "sweep stop")
LONG = 1000.0  # seconds of training, of which a tenth is more than any timing here takes


def timing_in(folder):
    return read_timing(folder, load_plan(folder).sweep_uid)


def arms_of(timing):
    return [times.arm for times in timing.arms]


def lengthen(folder, **changes):
    """Make the results say that trials took long; a sweep is timed for a tenth of that."""
    for trial in folder.trials():
        document = read_json(trial.result_path)
        write_json(trial.result_path, {**document, "seconds_training": LONG, **changes})


def mirror(folder):
    """Give MLflow what a test has changed in a folder, so that only times may be missing."""
    assert Mirror(folder, load_plan(folder), None).deliver() == ""


@pytest.fixture
def timed_briefly(monkeypatch):
    """Take a fraction of a second for each batch size."""
    monkeypatch.setattr(measuring, "SECONDS_PER_ARM", 0.1)


@pytest.fixture
def long_sweep(run, timed_briefly):
    """A sweep of batch sizes 4 and 8 whose trials seem to have taken long, and were not timed."""
    folder = run().folder
    lengthen(folder)
    folder.timing_path.unlink()
    return folder


def test_a_sweep_that_trained_for_an_instant_is_not_timed_and_says_so(run):
    folder = run().folder
    timing = timing_in(folder)
    assert (timing.rounds, timing.reason, arms_of(timing)) == (0, TOO_SHORT, [FOUR, EIGHT])
    result = folder.trials()[0].read_result()
    assert (timing.device, timing.execution) == (result.device, result.execution)


def test_a_sweep_is_timed_once_when_all_its_trials_have_ended(run, long_sweep):
    assert run().exit_code == 0
    timing = timing_in(long_sweep)
    assert (timing.rounds, timing.reason, arms_of(timing)) == (7, "", [FOUR, EIGHT])
    assert timing.execution["threads"] == load_plan(long_sweep).execution.threads
    assert timing.device == long_sweep.trials()[0].read_result().device
    before = long_sweep.timing_path.read_bytes()
    run()
    assert long_sweep.timing_path.read_bytes() == before


def test_added_batch_sizes_are_timed_with_all_others_and_added_seeds_are_not(run, long_sweep):
    run()
    first = timing_in(long_sweep)
    run(seeds=2)
    assert timing_in(long_sweep) == first
    run(batches="16")
    grown = timing_in(long_sweep)
    assert arms_of(grown) == [FOUR, EIGHT, SIXTEEN] and grown.rounds == rounds_needed(3)


def test_a_sweep_that_was_too_short_to_be_timed_is_timed_after_more_seeds(run, timed_briefly):
    folder = run().folder
    lengthen(folder)
    assert timing_in(folder).rounds == 0
    run(seeds=2)
    assert timing_in(folder).rounds == rounds_needed(2)


def test_nothing_is_timed_while_a_trial_waits_or_with_one_batch_size(tmp_path, timed_briefly):
    folder = plan_trials(tmp_path, "quadratic", batches=[4, 8])
    first, second = folder.trials()
    question = planned(folder)
    run_plan(replace(question, requested=(first.id,)), folder)
    assert second.read_status().state is State.WAITING and not folder.timing_path.exists()
    run_plan(question, folder)
    assert arms_of(timing_in(folder)) == [FOUR, EIGHT]
    alone = run_in(tmp_path / "alone", batches="4", budget="400").folder
    assert not alone.timing_path.exists()


def test_a_sweep_without_its_times_is_not_finished_unless_it_ran_elsewhere(run, long_sweep):
    experiment = load_experiment("quadratic", {"batches": "4,8", "budget": "800"})
    question = make_plan(Request(experiment, ON_CPU, long_sweep))
    mirror(long_sweep)
    assert finished_summary(question, long_sweep) is None
    assert finished_summary(question, long_sweep, Services(executor="ray")).exit_code == 0
    run()
    assert finished_summary(question, long_sweep).exit_code == 0
    assert timing_in(long_sweep).rounds

    long_sweep.timing_path.unlink()
    lengthen(long_sweep, device="Another machine's CPU")
    mirror(long_sweep)
    assert finished_summary(question, long_sweep).exit_code == 0
    run()
    assert not long_sweep.timing_path.exists()


def test_times_of_another_device_stay_although_they_lack_a_batch_size(run, long_sweep):
    on_cuda = Execution(device="cuda", threads=8)
    uid = load_plan(long_sweep).sweep_uid
    theirs = timing_of({FOUR: [0.1], EIGHT: [0.2]}, sweep_uid=uid, execution=on_cuda)
    write_timing(long_sweep, theirs)
    run(batches="16")
    assert timing_in(long_sweep) == theirs


@pytest.mark.parametrize("damage", ["changed", "another sweep's"])
def test_a_file_that_cannot_be_used_is_measured_again(run, long_sweep, damage):
    run()
    path = long_sweep.timing_path
    if damage == "changed":
        path.write_bytes(path.read_bytes().replace(b'"rounds": 7', b'"rounds": 8'))
    else:
        write_timing(long_sweep, timing_of({FOUR: [0.1], EIGHT: [0.1]}, sweep_uid="other"))
    run()
    assert timing_in(long_sweep).rounds == 7


def test_steps_are_timed_with_the_microbatch_that_memory_left(run, faulty, timed_briefly):
    settings = {"workload": "faulty:OutOfMemoryAboveTwo", "budget": "792"}
    folder = run(batches="4,8", **settings).folder
    lengthen(folder)
    run(batches="4,8", seeds=2, **settings)
    timing = timing_in(folder)
    assert timing.rounds == rounds_needed(2)
    assert [times.microbatch_size for times in timing.arms] == [2, 2]
    planned_sizes = dict.fromkeys([FOUR, EIGHT], 4)
    assert not timing.covers(planned_sizes)


def test_a_failure_to_time_is_a_warning_and_sweep_time_tries_again(
    run, faulty, timed_briefly, tmp_path, caplog
):
    folder = run(workload="faulty:RaisesIfTold").folder
    lengthen(folder)
    folder.timing_path.unlink()
    (tmp_path / "raise").touch()
    assert run(workload="faulty:RaisesIfTold").exit_code == 0
    assert "a mistake in the user's code" in caplog.text and "sweep time" in caplog.text
    failed = timing_in(folder)
    assert failed.rounds == 0 and "a mistake in the user's code" in failed.reason
    with pytest.raises(SweepError, match="a mistake in the user's code"):
        time_folder(folder, load_plan(folder))
    assert timing_in(folder) == failed
    (tmp_path / "raise").unlink()
    timing = time_folder(folder, load_plan(folder), seconds_per_arm=0.1)
    assert timing.rounds == rounds_needed(2) and timing == timing_in(folder)


def test_sweep_time_needs_only_the_plan_and_asks_the_question_on_its_own_device(tmp_path):
    settings = {"batches": "4,8,64", "budget": "65536"}
    experiment = load_experiment("quick", settings)
    ran = SweepFolder(tmp_path / "ran")
    chosen = Execution(device="cpu", microbatch=8)
    plan = save_plan(make_plan(Request(experiment, chosen, ran)).plan, ran)
    copy = SweepFolder(tmp_path / "copy")
    copy.path.mkdir()
    copy.plan_path.write_bytes(ran.plan_path.read_bytes())

    timing = time_folder(copy, plan, threads=1, seconds_per_arm=0.1)
    assert timing == read_timing(copy, plan.sweep_uid)
    assert timing.execution["threads"] == 1 and timing.rounds == rounds_needed(3)
    assert [times.microbatch_size for times in timing.arms] == [4, 8, 8]
    assert {path.name for path in copy.path.iterdir()} == {"plan.json", "timing.json"}


def test_another_device_splits_batches_as_a_plan_for_it_would(tmp_path):
    folder = SweepFolder(tmp_path / "s")
    experiment = load_experiment("quadratic", {"batches": "4,16384", "budget": "65536"})
    on_cuda = Execution(device="cuda", devices=1)
    plan = make_plan(Request(experiment, on_cuda, folder), is_elsewhere=True).plan
    assert [row.microbatch_size for row in plan.trials] == [4, 16384]
    plan = save_plan(plan, folder)

    timing = time_folder(folder, plan, device="cpu", threads=1, seconds_per_arm=0.1)
    assert (timing.execution["device"], timing.execution["threads"]) == ("cpu", 1)
    assert [times.microbatch_size for times in timing.arms] == [4, 8192]
    assert timing.precision == plan.settings.precision
    with pytest.raises(SweepError, match="device must be auto or one of this machine's"):
        time_folder(folder, plan)


def test_steps_of_a_command_or_on_several_devices_cannot_be_timed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = SweepFolder(tmp_path / "s")
    fields = {"command": COMMAND, "budget": 80, "batches": "4,8", "lr": "0.1", "device": "cpu"}
    plan = make_plan(read_request(None, fields, folder.path)).plan
    with pytest.raises(SweepError, match=r"got a command\. The times of its trials count"):
        time_folder(folder, plan)
    execution = Execution(device="cpu", devices=2, threads=1)
    experiment = load_experiment("quick", {"batches": "4,8", "budget": "8192"})
    plan = make_plan(Request(experiment, execution, folder)).plan
    with pytest.raises(SweepError, match="got 2 devices per trial"):
        time_folder(folder, plan)


@pytest.fixture
def measuring_command(tmp_path, command, faulty, go):
    """A command that waits for the file `go` while it times an ended sweep."""
    folder = plan_trials(tmp_path, "faulty:WaitsForGo", batches=[4, 8], budget=800)
    started = command(folder, "--device", "cpu")
    go.touch()
    assert run_plan(planned(folder), folder).exit_code == 0
    lengthen(folder)
    folder.timing_path.unlink()
    go.unlink()
    started.start()
    wait_until((tmp_path / "waits").exists, started)
    return started


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "how", ["Ctrl-C", *(pytest.param(how, marks=pytest.mark.slow) for how in OTHER_ENDS)]
)
def test_a_command_that_ends_while_it_times_leaves_that_to_the_next_one(measuring_command, go, how):
    running = measuring_command
    if how == "SIGKILL":
        running.kill()
    elif how == "Ctrl-C":
        os.killpg(running.process.pid, signal.SIGINT)
        assert running.wait() == 130
    else:
        program = [sys.executable, "-m", "sweep", "stop", str(running.folder.path)]
        subprocess.run(program, check=True)
        assert running.wait() == 130
    assert states(running.folder) == {State.COMPLETE}
    assert not running.folder.timing_path.exists()
    go.touch()
    assert running.run() == 0
    assert timing_in(running.folder).rounds == rounds_needed(2)
