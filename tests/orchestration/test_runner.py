"""Retries, crashes and resumption, with real worker processes."""

import threading
from collections import Counter
from dataclasses import replace

import pytest

from sweep.analysis.results import load_sweep
from sweep.api import run_sweep
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.errors import FolderInUse, SweepError
from sweep.orchestration import runner
from sweep.orchestration.executors.local import attempt_slots
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import Request
from sweep.orchestration.runner import run_plan
from sweep.trial.files import read_metrics
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import Lease
from sweep.trial.status import Cause, State
from tests.fakes.executors import InlineExecutor
from tests.orchestration.clusters import ON_CPU, assert_resumed, plan_trials, planned, run_in
from tests.servers import load_stored_sweep


def by_batch(summary):
    """Return each trial and its status by batch size."""
    trials = summary.folder.trials()
    return {t.read_config().science.batch_size: (t, t.read_status()) for t in trials}


def end_of(trial_and_status):
    _, status = trial_and_status
    return status.state, status.cause, status.attempts


def test_the_same_command_runs_nothing_again_and_a_grown_one_only_new_trials(run):
    summary = run()
    assert summary.exit_code == 0 and summary.untracked == ""
    before = {batch: status for batch, (_, status) in by_batch(summary).items()}
    assert {status.state for status in before.values()} == {State.COMPLETE}
    assert {batch: status for batch, (_, status) in by_batch(run()).items()} == before
    grown = run(batches="16")
    after = {batch: status for batch, (_, status) in by_batch(grown).items()}
    assert after.keys() == {4, 8, 16} and after.items() > before.items()
    assert set(grown.states) == {by_batch(grown)[16][0].id}
    with pytest.raises(SweepError, match="microbatch was decided as"):
        run(execution=Execution(device="cpu", microbatch=2))
    with Lease(summary.folder.lock_path), pytest.raises(FolderInUse, match="sweep stop"):
        run()


def test_out_of_memory_shrinks_the_microbatch_and_keeps_the_batch_size(run, faulty):
    settings = {"lr": "0.1", "budget": "792"}
    whole = run(name="whole", batches="8", **settings)  # MLflow keeps a moved database open
    whole_curve = read_metrics(by_batch(whole)[8][0].metrics_path)
    settings["workload"] = "faulty:OutOfMemoryAboveTwo"
    summary = run(batches="8,12", **settings)
    assert summary.exit_code == 0
    for batch, (trial, status) in by_batch(summary).items():
        result = trial.read_result()
        assert (result.batch_size, result.microbatch_size) == (batch, 2)
        assert 2 * result.gradient_accumulation_steps == batch
        assert status.attempts == {8: 3, 12: 1}[batch]  # 8 4 2; then 2 at once
    curve = read_metrics(by_batch(summary)[8][0].metrics_path)
    losses_of_both = [[line["train/loss"] for line in lines] for lines in (whole_curve, curve)]
    assert losses_of_both[0] == pytest.approx(losses_of_both[1], rel=1e-5)
    trial, status = by_batch(run(batches="4", **settings))[4]  # the next command tries 4 again
    assert (status.attempts, trial.read_result().microbatch_size) == (2, 2)


def test_out_of_memory_at_one_sequence_fails_in_the_folder_and_in_mlflow(run, faulty):
    summary = run(workload="faulty:OutOfMemoryAlways", batches="4")
    trial, status = by_batch(summary)[4]
    assert (status.state, status.cause) == (State.FAILED, Cause.OUT_OF_MEMORY)
    assert "can't allocate memory" in status.message
    assert summary.exit_code == 1 and trial.read_result() is None
    folder = load_sweep(summary.folder.path)
    stored = load_stored_sweep(f"sqlite:///{summary.folder.path}/mlflow.db", "quadratic")
    assert folder.trials.equals(stored.trials)
    assert folder.trials.microbatch_size.tolist() == [1]


def test_remedies_are_named_if_not_even_one_sequence_fits(run):
    limit = Execution(device="cpu", device_memory_bytes=2 << 20)
    summary = run(experiment="quick", execution=limit, batches="4", budget="8192")
    (status,) = summary.states.values()
    assert (status.state, status.cause) == (State.FAILED, Cause.OUT_OF_MEMORY)
    for remedy in ("sweep forecast", "--activation-checkpointing", "--precision bf16", "--zero 3"):
        assert remedy in status.message


def test_an_error_in_one_trial_does_not_stop_the_others(run, faulty):
    summary = run(workload="faulty:BatchEightRaises", batches="4,8,16")
    trials = by_batch(summary)
    assert end_of(trials[4]) == end_of(trials[16]) == (State.COMPLETE, None, 1)
    assert end_of(trials[8]) == (State.FAILED, Cause.ERROR, 1)
    trial, status = trials[8]
    assert "a mistake in the user's code" in status.message
    assert "Traceback" in trial.log_path.read_text()
    assert summary.exit_code == 1


@pytest.mark.parametrize(
    ("workload", "line", "fencing"),
    [
        ("LeavesHalfACheckpoint", "attempt 2", 2),
        ("EvaluatesTwoAtATime", "in microbatches of 2", 2),
        ("IsPreempted", "step 21 of 200", 2),
        ("IsSuperseded", "attempt 2", 3),
    ],
)
def test_a_second_attempt_ends_the_trial(run, faulty, workload, line, fencing):
    trial, status = by_batch(run(workload=f"faulty:{workload}", batches="4"))[4]
    assert_resumed(trial, b"", attempts=2)
    assert status.fencing == fencing and line in trial.log_path.read_text()
    assert trial.read_result().attempts == 2
    assert not list(trial.path.glob(".*.part"))


def test_a_worker_that_dies_twice_is_lost_and_named(run, faulty):
    summary = run(workload="faulty:DiesAlways", batches="4")
    trial, status = by_batch(summary)[4]
    assert end_of((trial, status)) == (State.FAILED, Cause.LOST, 2)
    assert "SIGKILL" in status.message and str(trial.log_path) in status.message
    assert summary.exit_code == 1


@pytest.mark.parametrize("settings", [{"lr": "5"}, {"workload": "faulty:EndsInNan"}])
def test_divergence_is_data_and_is_only_retried_on_request(run, faulty, settings):
    summary = run(batches="4", **settings)
    trial, status = by_batch(summary)[4]
    assert (status.state, status.cause) == (State.FAILED, Cause.DIVERGED)
    assert trial.read_result().final_valid_loss is None and summary.exit_code == 0
    assert not trial.weights_path.exists() and not trial.checkpoints()
    assert by_batch(run(batches="4", **settings))[4][1].attempts == 1
    retried = run(batches="4", retried_causes=frozenset({Cause.DIVERGED}), **settings)
    assert by_batch(retried)[4][1].attempts == 2


def test_a_result_that_the_runner_did_not_record_is_not_computed_again(run):
    trial, status = by_batch(run())[4]
    trial.write_status(status.changed(state=State.RUNNING))
    assert end_of(by_batch(run())[4]) == (State.COMPLETE, None, 1)


class Scripted(InlineExecutor):
    """Records its calls; can lose its slots or a result after the first attempt."""

    def __init__(self, slots=1, loses=""):
        super().__init__()
        self.slots = [{"SLOT": str(number)} for number in range(slots)]
        self.loses, self.started, self.ended = loses, [], []

    def submit(self, folder, environment):
        self.started.append(folder.id)
        future = super().submit(folder, environment)
        if self.loses == "slots":
            self.slots = []
        elif self.loses == "result" and len(self.started) == 1:
            folder.clear()
        return future

    def stop(self, force=False):
        self.ended.append("stop")
        super().stop()

    def close(self):
        self.ended.append("close")


def test_if_several_trials_run_at_a_time_the_longest_start_first(tmp_path):
    folder, executor = SweepFolder(tmp_path / "sweep"), Scripted(slots=2)
    experiment = load_experiment("quadratic", {"batches": "2,4,8,16", "budget": "800"})
    planned = make_plan(Request(experiment, ON_CPU, folder))
    seconds = {2: 3.0, 4: 1.0, 8: 4.0, 16: 2.0}
    rows = tuple(
        row.model_copy(update={"forecast_seconds": seconds[row.batch_size]})
        for row in planned.plan.trials
    )
    planned = replace(planned, plan=planned.plan.model_copy(update={"trials": rows}))
    run_plan(planned, folder, executor=executor)
    batches = {row.id: row.batch_size for row in rows}
    assert [batches[trial_id] for trial_id in executor.started] == [8, 2, 16, 4]
    assert executor.ended == ["close"], "attempts of an earlier command are not stopped"


def test_an_error_before_the_first_trial_closes_the_executor(run):
    executor = Scripted()
    with pytest.raises(SweepError, match="tracking URI"):
        run(executor, tracking_uri="ftp://nowhere")
    assert executor.ended == ["close"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"tracking_uri": "./mlruns"}, "tracking URI"), ({"executor": "ray", "slurm": ""}, "slurm")],
)
def test_bad_stores_and_executors_are_refused_before_anything_is_written(
    tmp_path, settings, message
):
    with pytest.raises(SweepError, match=message):
        run_sweep("quadratic", out=tmp_path / "sweep", budget=800, device="cpu", **settings)
    assert not (tmp_path / "sweep").exists()


def test_a_command_without_slots_stops_and_the_same_one_resumes(run):
    summary = run(Scripted(loses="slots"))
    assert summary.exit_code == 130
    states = [by_batch(summary)[batch][1].state for batch in (4, 8)]
    assert states == [State.COMPLETE, State.WAITING]
    assert run().exit_code == 0


def test_a_trial_without_a_result_is_not_complete(run):
    summary = run(Scripted(loses="result"), batches="4")
    trial, status = by_batch(summary)[4]
    assert trial.read_result() and status.attempts == 2


def test_reads_and_writes_grow_no_faster_than_the_number_of_trials(tmp_path, monkeypatch):
    calls = Counter()
    names = ("read_status", "read_config", "read_result", "write_status", "write_config")

    def counted(name, real):
        def call(self, *arguments):
            calls[name] += threading.current_thread().name != "mirror"
            return real(self, *arguments)

        return call

    for name in names:
        monkeypatch.setattr(TrialFolder, name, counted(name, getattr(TrialFolder, name)))

    def counts_of(trials):
        calls.clear()
        fields = {"batches": "4", "budget": "4", "seeds": trials}
        run_in(tmp_path / str(trials), InlineExecutor(), **fields)
        return dict(calls)

    few, many = counts_of(8), counts_of(32)
    assert few.keys() == many.keys() == set(names)
    for name in names:
        assert many[name] <= 4 * few[name] + 32, (name, few, many)


def test_each_visible_gpu_is_a_slot_for_each_of_the_trials_that_share_it(monkeypatch):
    def slots_of(**execution):
        slots = attempt_slots(Execution(device="cuda", **execution))
        return [slot["CUDA_VISIBLE_DEVICES"] for slot in slots]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert slots_of() == ["2", "5"]
    assert slots_of(at_once=2) == ["2", "5", "2", "5"]
    assert attempt_slots(Execution(device="cuda:1")) == attempt_slots(ON_CPU) == [{}]
    assert attempt_slots(Execution(device="cpu", at_once=3)) == [{}, {}, {}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,7")
    assert slots_of(devices=2) == ["0,1", "2,3"]


class Released(InlineExecutor):
    """Counts how often its processes were released."""

    def __init__(self):
        super().__init__()
        self.releases = 0

    def release(self):
        self.releases += 1


@pytest.mark.parametrize("measures", [False, True])
def test_processes_are_released_only_for_a_measurement(tmp_path, monkeypatch, measures):
    looks = []

    def look(plan, folder, is_stopping, silence):
        looks.append(plan)
        if measures:
            with silence():
                pass

    monkeypatch.setattr(runner, "time_ended_sweep", look)
    executor = Released()
    run_in(tmp_path / "sweep", executor, batches="4,8", budget="64", seeds=2)
    assert len(looks) == 1
    assert executor.releases == measures


def test_a_config_that_is_not_as_planned_is_written_again(tmp_path):
    folder = plan_trials(tmp_path, "quadratic")
    (trial,) = folder.trials()
    config = trial.read_config()
    trial.write_config(config.model_copy(update={"steps": 10, "warmup_steps": 7}))
    assert run_plan(planned(folder), folder).exit_code == 0
    assert trial.read_config() == config and trial.read_result().steps == config.steps
