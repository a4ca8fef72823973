"""Retries, crashes and resumption, with real worker processes."""

import threading
from collections import Counter
from dataclasses import replace

import pytest

from sweep.config.execution import Execution, Services
from sweep.config.experiment import load_experiment
from sweep.errors import FolderInUse, SweepError
from sweep.orchestration.executors import InlineExecutor, attempt_slots
from sweep.orchestration.planning import make_plan
from sweep.orchestration.runner import run_plan
from sweep.trial.files import read_metrics
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder
from sweep.trial.lease import FileLock


def by_batch(summary):
    folder = summary.folder
    found = {}
    for trial in folder.trials():
        config = trial.read_config()
        found[config.science.batch_size] = (trial, trial.read_status())
    return found


def test_every_trial_completes_and_the_same_command_runs_nothing_again(run):
    summary = run()
    assert summary.exit_code == 0 and summary.untracked == ""
    before = {batch: status for batch, (_, status) in by_batch(summary).items()}
    assert {status.state for status in before.values()} == {State.COMPLETE}
    assert all(status.mlflow_run_id for status in before.values())
    again = run()
    assert {batch: status for batch, (_, status) in by_batch(again).items()} == before


def test_the_inline_executor_gives_the_same_losses_as_processes(run, tmp_path):
    first = run(seeds=1)
    losses = {b: t.read_result()["final_valid_loss"] for b, (t, _) in by_batch(first).items()}
    for trial, _ in by_batch(first).values():
        trial.clear()
        trial.state_path.unlink()
    second = run(InlineExecutor(), seeds=1)
    assert losses == {
        b: t.read_result()["final_valid_loss"] for b, (t, _) in by_batch(second).items()
    }


def test_out_of_memory_shrinks_the_microbatch_and_keeps_the_batch_size(run, faulty):
    summary = run(workload="faulty:OutOfMemoryAboveTwo", batches="8,12")
    assert summary.exit_code == 0
    for batch, (trial, status) in by_batch(summary).items():
        result = trial.read_result()
        assert result["batch_size"] == batch and result["microbatch_size"] <= 2
        assert result["microbatch_size"] * result["gradient_accumulation_steps"] == batch
        assert status.attempts == {8: 3, 12: 1}[batch]  # 8 4 2; then 2 at once


def test_out_of_memory_at_one_sequence_fails_and_substitutes_nothing(run, faulty):
    summary = run(workload="faulty:OutOfMemoryAlways", batches="4")
    ((trial, status),) = by_batch(summary).values()
    assert (status.state, status.cause) == (State.FAILED, Cause.OUT_OF_MEMORY)
    assert "can't allocate memory" in status.message
    assert summary.exit_code == 1 and trial.read_result() is None


def test_one_trials_mistake_does_not_stop_the_others(run, faulty):
    summary = run(workload="faulty:BatchEightRaises", batches="4,8,16")
    states = {b: (s.state, s.cause) for b, (_, s) in by_batch(summary).items()}
    assert states[4] == states[16] == (State.COMPLETE, None)
    assert states[8] == (State.FAILED, Cause.ERROR)
    trial, status = by_batch(summary)[8]
    assert "a mistake in the user's code" in status.message
    assert "Traceback" in trial.log_path.read_text()
    assert summary.exit_code == 1


@pytest.mark.parametrize("workload", ["Dies", "DiesOfSegfault"])
def test_a_worker_that_dies_without_a_word_is_retried_once(run, faulty, workload):
    summary = run(workload=f"faulty:{workload}", batches="4")
    ((trial, status),) = by_batch(summary).values()
    assert status.state is State.COMPLETE and status.attempts == 2
    assert trial.read_result()["steps"] == 200


def test_a_worker_that_dies_twice_is_lost_and_named(run, faulty):
    summary = run(workload="faulty:DiesAlways", batches="4,8")
    for trial, status in by_batch(summary).values():
        assert (status.state, status.cause, status.attempts) == (State.FAILED, Cause.LOST, 2)
        assert "SIGKILL" in status.message and str(trial.log_path) in status.message
    assert summary.exit_code == 1


def test_a_preempted_attempt_resumes_from_its_checkpoint(run, faulty):
    summary = run(workload="faulty:IsPreempted", batches="4")
    ((trial, status),) = by_batch(summary).values()
    assert status.state is State.COMPLETE and status.attempts == 2
    steps = [line["step"] for line in read_metrics(trial.metrics_path)]
    assert steps == sorted(set(steps)) and steps[-1] == 200
    assert "goes on from step 21 of 200" in trial.log_path.read_text()


def test_divergence_is_data_and_is_only_retried_when_asked(run):
    summary = run(lr="5", batches="4,8")
    for trial, status in by_batch(summary).values():
        assert (status.state, status.cause) == (State.FAILED, Cause.DIVERGED)
        assert trial.read_result()["final_valid_loss"] is None
    assert summary.exit_code == 0
    again = run(lr="5", batches="4,8")
    assert {s.attempts for _, s in by_batch(again).values()} == {1}
    asked = run(lr="5", batches="4,8", also=frozenset({Cause.DIVERGED}))
    assert {s.attempts for _, s in by_batch(asked).values()} == {2}


def test_a_second_runner_is_refused(run, tmp_path):
    run()
    with (
        FileLock(tmp_path / "sweep" / "sweep.lock"),
        pytest.raises(FolderInUse, match="sweep stop"),
    ):
        run()


class TwoAtATime(InlineExecutor):
    """Has a second slot, and knows what was started in which order."""

    def __init__(self):
        super().__init__()
        self.slots, self.started = [{"SLOT": "a"}, {"SLOT": "b"}], []

    def submit(self, folder, environment):
        self.started.append(folder.id)
        return super().submit(folder, environment)


def test_where_several_trials_run_at_a_time_the_longest_start_first(tmp_path):
    folder, executor = SweepFolder(tmp_path / "sweep"), TwoAtATime()
    experiment = load_experiment("quadratic", {"batches": "2,4,8,16", "budget": "800"})
    planned = make_plan(experiment, Execution(device="cpu"), folder)
    seconds = dict(zip((2, 4, 8, 16), (3.0, 1.0, 4.0, 2.0), strict=True))
    rows = [
        row.model_copy(update={"forecast_seconds": seconds[row.batch_size]})
        for row in planned.plan.trials
    ]
    planned = replace(planned, plan=planned.plan.model_copy(update={"trials": tuple(rows)}))
    run_plan(planned, folder, executor=executor)
    batch = {row.id: row.batch_size for row in rows}
    assert [batch[one] for one in executor.started] == [8, 2, 16, 4]


READS = ("read_status", "read_config", "read_result", "write_status", "write_config")


def test_what_is_read_and_written_grows_with_the_trials_and_no_faster(tmp_path, monkeypatch):
    runner = Counter()

    def counted(name, real):
        def call(self, *arguments):
            runner[name] += threading.current_thread().name != "mirror"
            return real(self, *arguments)

        return call

    for name in READS:
        monkeypatch.setattr(TrialFolder, name, counted(name, getattr(TrialFolder, name)))

    def counts_of(trials):
        runner.clear()
        folder = SweepFolder(tmp_path / str(trials))
        settings = {"batches": "4", "budget": "4", "seeds": trials}
        planned = make_plan(load_experiment("quadratic", settings), Execution(device="cpu"), folder)
        run_plan(planned, folder, executor=InlineExecutor())
        return dict(runner)

    few, many = counts_of(8), counts_of(32)
    assert few.keys() == many.keys() == set(READS)
    for name in READS:
        assert many[name] <= 4 * few[name] + 32, (name, few, many)


class Noted(InlineExecutor):
    """Knows how it was ended."""

    def __init__(self):
        super().__init__()
        self.ended = []

    def stop(self):
        self.ended.append("stop")
        super().stop()

    def close(self):
        self.ended.append("close")


def test_a_command_that_ends_stops_no_attempts_of_an_earlier_one(run):
    executor = Noted()
    run(executor)
    assert executor.ended == ["close"]


def test_what_fails_before_the_first_trial_leaves_no_executor_open(tmp_path):
    folder, executor = SweepFolder(tmp_path / "sweep"), Noted()
    experiment = load_experiment("quadratic", {"batches": "4", "budget": "800"})
    planned = make_plan(experiment, Execution(device="cpu"), folder)
    with pytest.raises(SweepError, match="tracking URI"):
        run_plan(
            planned, folder, executor=executor, services=Services(tracking_uri="ftp://nowhere")
        )
    assert executor.ended == ["stop", "close"]


class LosesItsPlaces(InlineExecutor):
    """Has nowhere to run behind its first trial, as on a cluster that is gone."""

    def submit(self, folder, environment):
        self.slots = []
        return super().submit(folder, environment)


def test_a_command_without_a_place_stops_and_the_same_one_goes_on(run):
    summary = run(LosesItsPlaces())
    assert summary.exit_code == 130
    states = {batch: status.state for batch, (_, status) in by_batch(summary).items()}
    assert states == {4: State.COMPLETE, 8: State.WAITING}
    assert run().exit_code == 0


class LosesAResult(InlineExecutor):
    """Says complete the first time, and nothing of it is there: as of a machine since wiped."""

    def __init__(self):
        super().__init__()
        self.is_first = True

    def submit(self, folder, environment):
        future = super().submit(folder, environment)
        if self.is_first:
            self.is_first = False
            folder.clear()
        return future


def test_what_left_no_result_is_not_complete(run):
    summary = run(LosesAResult(), batches="4")
    (trial,) = summary.folder.trials()
    assert trial.read_result() and trial.read_status().attempts == 2


def test_a_grown_sweep_runs_only_what_is_new(run):
    run()
    summary = run(batches="16")
    states = by_batch(summary)
    assert set(states) == {4, 8, 16} and set(summary.states) == {states[16][0].id}
    assert {status.attempts for _, status in states.values()} == {1}


def test_a_result_that_the_runner_did_not_note_is_not_run_again(run):
    summary = run()
    trial, status = by_batch(summary)[4]
    trial.write_status(status.changed(state=State.RUNNING))
    again = by_batch(run())[4][1]
    assert (again.state, again.attempts) == (State.COMPLETE, 1)


def test_flags_that_contradict_the_plan_are_refused(run):
    from sweep.errors import SweepError

    run()
    with pytest.raises(SweepError, match="microbatch was decided as"):
        run(logistics=Execution(device="cpu", microbatch=2))


def test_a_failed_trial_reads_the_same_from_mlflow_as_from_its_folder(run, faulty, tmp_path):
    from sweep.analysis.frames import load_stored_sweep, load_sweep, write_trials_csv

    run(workload="faulty:OutOfMemoryAlways", batches="4")
    uri = f"sqlite:///{tmp_path}/sweep/mlflow.db"
    for name, found in (
        ("folder", load_sweep(tmp_path / "sweep")),
        ("store", load_stored_sweep(uri, "quadratic")),
    ):
        write_trials_csv(found, tmp_path / name)
    assert (tmp_path / "store").read_bytes() == (tmp_path / "folder").read_bytes()
    assert load_sweep(tmp_path / "sweep").trials.microbatch_size.tolist() == [1]


def test_a_loss_that_is_not_finite_in_the_final_evaluation_has_diverged(run, faulty):
    summary = run(workload="faulty:EndsInNan", batches="4")
    ((trial, status),) = by_batch(summary).values()
    assert (status.state, status.cause) == (State.FAILED, Cause.DIVERGED)
    assert trial.read_result()["final_valid_loss"] is None and summary.exit_code == 0
    assert not trial.weights_path.exists() and not trial.checkpoints()


def test_half_written_files_of_dead_attempts_are_removed_by_the_next(run, faulty):
    summary = run(workload="faulty:LeavesHalfACheckpoint", batches="4")
    ((trial, status),) = by_batch(summary).values()
    assert (status.state, status.attempts) == (State.COMPLETE, 2)
    assert not list(trial.path.glob(".*.part"))


def test_each_visible_gpu_is_a_slot(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    visible = [slot["CUDA_VISIBLE_DEVICES"] for slot in attempt_slots("cuda")]
    assert visible == ["2", "5"]
    assert attempt_slots("cuda:1") == attempt_slots("cpu") == [{}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,7")
    assert attempt_slots("cuda", 2) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]


def test_a_living_worker_that_was_superseded_writes_nothing_more(run, faulty):
    summary = run(workload="faulty:IsSuperseded", batches="4")
    ((trial, status),) = by_batch(summary).values()
    # The superseded attempt ended without a result; the next one has number 3 and finished.
    assert (status.state, status.attempts, status.fencing) == (State.COMPLETE, 2, 3)
    assert trial.read_result()["attempts"] == 2


def test_the_microbatch_that_fits_is_remembered_for_later_trials(run, faulty):
    summary = run(workload="faulty:OutOfMemoryAboveTwo", batches="8", seeds=2)
    attempts = sorted(trial.read_status().attempts for trial in summary.folder.trials())
    assert attempts == [1, 3]  # 8 4 2 for the first, 2 at once for the second
    grown = run(workload="faulty:OutOfMemoryAboveTwo", batches="4", seeds=1)
    (trial,) = (grown.folder.trial(trial_id) for trial_id in grown.states)
    assert (trial.read_status().attempts, trial.read_result()["microbatch_size"]) == (1, 2)


def test_memory_that_runs_out_in_an_evaluation_halves_the_microbatch_too(run, faulty):
    summary = run(workload="faulty:EvaluatesTwoAtATime", batches="4")
    ((trial, status),) = by_batch(summary).values()
    assert (status.state, status.microbatch_size) == (State.COMPLETE, 2)
    assert trial.read_result()["execution"]["evaluation_batch_size"] == 2


def test_out_of_memory_changes_the_loss_curve_by_rounding_only(run, faulty, tmp_path):
    curves = []
    for workload in ("quadratic", "faulty:OutOfMemoryAboveTwo"):
        summary = run(workload=workload, batches="8", seeds=1, lr="0.1")
        ((trial, _),) = by_batch(summary).values()
        curves.append([line["train/loss"] for line in read_metrics(trial.metrics_path)])
        (tmp_path / "sweep").rename(tmp_path / f"done-{len(curves)}")
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_what_would_help_is_said_where_not_even_one_sequence_fits(tmp_path):
    limit = Execution(device="cpu", device_memory_bytes=2 << 20)
    experiment = load_experiment("quick", {"batches": "4", "budget": "8192"})
    folder = SweepFolder(tmp_path / "sweep")
    summary = run_plan(make_plan(experiment, limit, folder), folder)
    ((_, status),) = by_batch(summary).values()
    assert (status.state, status.cause) == (State.FAILED, Cause.OUT_OF_MEMORY)
    for remedy in ("by forecast", "--activation-checkpointing", "--precision bf16", "2 devices"):
        assert remedy in status.message
