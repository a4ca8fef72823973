"""Tuned sweeps from end to end, on a small quadratic, in this process."""

import math
import shutil
import signal
from collections import Counter
from pathlib import Path

import optuna
import pytest

from sweep.config.execution import Execution, Services
from sweep.config.experiment import load_experiment
from sweep.orchestration.executors import InlineExecutor
from sweep.orchestration.planning import make_plan
from sweep.orchestration.runner import finished_summary, run_plan
from sweep.orchestration.schedule import Schedule
from sweep.orchestration.status import sweep_status
from sweep.orchestration.studies import named_trials
from sweep.plan.plan import load_plan
from sweep.plan.tuning import EXTENSIONS
from sweep.report.report import write_report
from sweep.trial.files import read_metrics
from sweep.trial.folder import Cause, State, SweepFolder, TrialStatus

SMALL = {
    "batches": "16,32",
    "budget": "3200",
    "lr": "tuned",
    "seeds": 2,
    "model": {"preset": "quadratic", "name": "small", "dimensions": 30},
    "optimizer": {"name": "adamw", "weight_decay": 0.1},
    "schedule": {"name": "cosine"},
    "tuning": {"centre": 0.003},  # the best rates are some 0.03 to 0.06
}


class Interrupted(InlineExecutor):
    """Presses Ctrl-C at a given attempt."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def submit(self, folder, environment):
        self.left -= 1
        if not self.left:
            signal.raise_signal(signal.SIGINT)
        return super().submit(folder, environment)


def tune_in(path, stop_at=0, **settings):
    """Run a tuned sweep in a folder; interrupted at an attempt if that is named."""
    folder = SweepFolder(path)
    tuning = {**SMALL["tuning"], **settings.pop("tuning", {})}
    experiment = load_experiment("quadratic", {**SMALL, "tuning": tuning, **settings})
    planned = make_plan(experiment, Execution(device="cpu"), folder)
    found = finished_summary(planned, folder)
    return found or run_plan(planned, folder, executor=Interrupted(stop_at))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tuned sweep that nothing disturbed; not to be changed."""
    return tune_in(tmp_path_factory.mktemp("whole") / "sweep")


@pytest.fixture
def tune(tmp_path):
    """Run a tuned sweep of its own."""
    return lambda stop_at=0, **settings: tune_in(tmp_path / "sweep", stop_at, **settings)


def rows_of(summary, stage):
    return [row for row in load_plan(summary.folder).trials if row.stage == stage]


def losses_of(summary, batch):
    found = {}
    for row in rows_of(summary, "tune"):
        if row.batch_size == batch:
            result = summary.folder.trial(row.id).read_result()
            found[row.learning_rate] = result["final_valid_loss"] if result else math.inf
    return found


def test_each_batch_size_is_tuned_by_as_many_trials_and_reported_on_other_seeds(whole):
    summary = whole
    assert summary.exit_code == 0
    counts = Counter(row.batch_size for row in rows_of(summary, "tune"))
    assert counts[16] == counts[32] >= 6
    reports = rows_of(summary, "report")
    assert Counter(row.batch_size for row in reports) == {16: 2, 32: 2}
    assert {row.seed for row in reports} == {0, 1}
    assert {row.seed for row in rows_of(summary, "tune")} == {1000}
    for batch in (16, 32):
        losses = losses_of(summary, batch)
        best = min(losses, key=losses.get)
        assert min(losses) < best < max(losses), "strictly inside"
        assert {row.learning_rate for row in reports if row.batch_size == batch} == {best}


def test_the_worse_half_is_pruned_at_equal_tokens_and_keeps_its_curve(whole):
    trials = [whole.folder.trial(row.id) for row in rows_of(whole, "tune") if row.batch_size == 16]
    pruned = [trial for trial in trials if trial.read_status().state is State.PRUNED]
    assert pruned
    for trial in pruned:
        status, lines = trial.read_status(), read_metrics(trial.metrics_path)
        assert lines[-1]["step"] in (50, 100) and str(lines[-1]["step"]) in status.message
        assert not trial.checkpoints() and trial.read_result() is None
    assert {trial.read_result()["steps"] for trial in trials if trial.read_result()} == {200}


@pytest.mark.slow
def test_a_sweep_without_pruning_finds_the_same_rates(whole, tune):
    unpruned = tune(tuning={"prune": False})
    assert not [t for t in unpruned.folder.trials() if t.read_status().state is State.PRUNED]
    reported = [
        {(row.batch_size, round(math.log2(row.learning_rate))) for row in rows_of(one, "report")}
        for one in (whole, unpruned)
    ]
    assert reported[0] == reported[1]


def test_a_finished_tuned_sweep_is_recognised_and_nothing_starts_again(whole):
    experiment = load_experiment("quadratic", SMALL)
    planned = make_plan(experiment, Execution(device="cpu"), whole.folder)
    found = finished_summary(planned, whole.folder)
    assert found is not None and found.exit_code == 0 and planned.is_known
    assert len(found.states) == len(rows_of(whole, "report"))


@pytest.mark.parametrize(
    "stop_at",
    [7, pytest.param(2, marks=pytest.mark.slow), pytest.param(13, marks=pytest.mark.slow)],
)
def test_an_interrupted_sweep_goes_on_as_if_it_had_not_been(whole, tune, stop_at):
    cut = tune(stop_at)
    assert cut.exit_code == 130
    if stop_at == 7:
        (cut.folder.path / "optuna.db").unlink(missing_ok=True)
    resumed = tune()
    assert resumed.exit_code == 0

    def final(summary):
        found = {}
        for row in load_plan(summary.folder).trials:
            result = summary.folder.trial(row.id).read_result()
            found[row.id] = result and result["final_valid_loss"]
        return found

    assert final(resumed) == final(whole)


def test_an_error_decides_nothing_and_the_next_command_tries_the_rate_again(
    whole, tune, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("FAULTY_FOLDER", str(tmp_path))
    (best,) = {row.learning_rate for row in rows_of(whole, "report") if row.batch_size == 16}
    monkeypatch.setenv("FAULTY_RATE", repr(best))
    failed = tune(workload="faulty:RaisesOnceAtTheBestRate")
    assert failed.exit_code == 1
    assert {row.batch_size for row in rows_of(failed, "report")} == {32}, "of the other one"
    assert sweep_status(failed.folder)["state"] == State.WAITING, "more trials are to follow"
    text = write_report(failed.folder.path).read_text()
    assert "Batch size 16 has no tuned rate yet" in text
    again = tune(workload="faulty:RaisesOnceAtTheBestRate")
    assert again.exit_code == 0
    reported = {row.batch_size: row.learning_rate for row in rows_of(again, "report")}
    assert reported == {row.batch_size: row.learning_rate for row in rows_of(whole, "report")}


def test_a_pruned_trial_that_turns_out_to_bound_the_best_goes_on_from_its_checkpoint(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    schedule = Schedule(None, folder, InlineExecutor())
    trial = folder.trial("aaaa")
    trial.path.mkdir(parents=True)
    trial.write_status(TrialStatus(state=State.WAITING))
    trial.metrics_path.write_text('{"step": 1, "tokens": 4}\n')
    (trial.path / "checkpoint-00000004-1").write_bytes(b"")
    schedule.prune(trial, "behind", keep_checkpoint=True)
    schedule.revive(trial)
    assert trial.read_status().state is State.WAITING
    assert trial.checkpoints() and trial.metrics_path.exists()
    schedule.prune(trial, "too late")
    assert not trial.checkpoints() and trial.metrics_path.exists()
    schedule.revive(trial)
    assert not trial.metrics_path.exists()


def test_no_checkpoint_of_a_pruned_trial_is_left(whole):
    assert not [one for trial in whole.folder.trials() for one in trial.checkpoints()]


def test_the_best_rate_lies_between_trials_that_were_trained_to_the_end(whole):
    for batch in (16, 32):
        rows = [row for row in rows_of(whole, "tune") if row.batch_size == batch]
        (reported,) = {r.learning_rate for r in rows_of(whole, "report") if r.batch_size == batch}
        ordered = sorted(rows, key=lambda row: row.learning_rate)
        place = [row.learning_rate for row in ordered].index(reported)
        for row in ordered[place - 1 : place + 2]:
            assert whole.folder.trial(row.id).read_result()["state"] == "COMPLETE"


def test_sweeps_that_share_a_storage_and_a_name_keep_apart(whole, tmp_path):
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    found = []
    for name, settings in (("one", {"optimizer": {"name": "sgd"}, "batches": "16"}), ("two", {})):
        folder = SweepFolder(tmp_path / name / "sweep")
        experiment = load_experiment("quadratic", {**SMALL, **settings})
        planned = make_plan(experiment, Execution(device="cpu"), folder)
        found.append(
            run_plan(planned, folder, executor=InlineExecutor(), services=Services(storage=storage))
        )
    assert [row.id for row in rows_of(found[1], "tune")] == [
        row.id for row in rows_of(whole, "tune")
    ]


def test_a_sweep_in_the_place_of_one_that_was_removed_gets_studies_of_its_own(tmp_path):
    storage, tuned = f"sqlite:///{tmp_path / 'shared.db'}", []
    settings = {**SMALL, "batches": "16", "budget": "800", "seeds": 1}
    experiment = load_experiment("quadratic", settings)
    for _ in range(2):  # as on two machines whose folders have the same path
        folder = SweepFolder(tmp_path / "sweep")
        planned = make_plan(experiment, Execution(device="cpu"), folder)
        found = run_plan(
            planned, folder, executor=InlineExecutor(), services=Services(storage=storage)
        )
        tuned.append(sorted(row.id for row in rows_of(found, "tune")))
        shutil.rmtree(folder.path)
    assert tuned[0] == tuned[1]
    names = optuna.get_all_study_names(storage)
    studies = [optuna.load_study(study_name=name, storage=storage) for name in names]
    assert [sorted(named_trials(study)) for study in studies] == tuned


def test_optuna_holds_a_study_per_batch_size_with_what_became_of_each_trial(whole):
    summary = whole
    storage = f"sqlite:///{summary.folder.path / 'optuna.db'}"
    names = optuna.get_all_study_names(storage)
    assert len(names) == 2 and any("batch size 32" in name for name in names)
    for name in names:
        study = optuna.load_study(study_name=name, storage=storage)
        rows = {row.id: row for row in rows_of(summary, "tune")}
        for trial in named_trials(study).values():
            row = rows[trial.user_attrs["sweep.trial_id"]]
            assert trial.params["learning_rate"] == pytest.approx(row.learning_rate)
            assert trial.state.name == summary.folder.trial(row.id).read_status().state.name
            if trial.state.name == "PRUNED":
                assert trial.intermediate_values


def test_a_winner_found_at_fewer_tokens_is_bracketed_at_the_full_budget(tune):
    summary = tune(tuning={"budget": "800"})
    assert summary.exit_code == 0
    for batch in (16, 32):
        tuned = [row for row in rows_of(summary, "tune") if row.batch_size == batch]
        assert {row.tokens for row in tuned} == {800, 3200}
        full = sorted(row.learning_rate for row in tuned if row.tokens == 3200)
        (reported,) = {
            row.learning_rate for row in rows_of(summary, "report") if row.batch_size == batch
        }
        assert full[0] < reported < full[-1]
        assert full[1] / full[0] == pytest.approx(2)


def test_more_seeds_and_batch_sizes_leave_what_was_decided_alone(whole, tune, tmp_path):
    shutil.copytree(whole.folder.path, tmp_path / "sweep")
    first = whole
    rates = {row.batch_size: row.learning_rate for row in rows_of(first, "report")}
    tuned = {row.id for row in rows_of(first, "tune")}
    grown = tune(seeds=3, batches="8,16,32")
    assert grown.exit_code == 0
    reports = rows_of(grown, "report")
    assert Counter(row.batch_size for row in reports) == {8: 3, 16: 3, 32: 3}
    assert {(row.batch_size, row.learning_rate) for row in reports if row.batch_size != 8} == set(
        rates.items()
    )
    added = {row.batch_size for row in rows_of(grown, "tune") if row.id not in tuned}
    assert added == {8}


def test_more_dimensions_are_searched_together(tune):
    summary = tune(
        batches="16", tuning={"dimensions": ["lr", "weight_decay", "beta2"], "trials": 8}
    )
    assert summary.exit_code == 0
    rows = rows_of(summary, "tune")
    assert len(rows) >= 10, "eight together, then ×½ and ×2 of the winner's rate"
    assert len({row.weight_decay for row in rows}) == len({row.beta2 for row in rows}) == 4
    losses = {row.id: summary.folder.trial(row.id).read_result() for row in rows}
    best = min(
        (row for row in rows if losses[row.id]), key=lambda row: losses[row.id]["final_valid_loss"]
    )
    (reported,) = {
        (row.learning_rate, row.beta2, row.weight_decay) for row in rows_of(summary, "report")
    }
    assert reported == (best.learning_rate, best.beta2, best.weight_decay)


def test_where_every_rate_diverges_nothing_is_reported_and_the_search_ends(tune, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    summary = tune(batches="16", workload="faulty:NeverFinite")
    assert summary.exit_code == 0 and not rows_of(summary, "report")
    assert {status.cause for status in summary.states.values()} == {Cause.DIVERGED}
    assert len(rows_of(summary, "tune")) == 5 + EXTENSIONS
    text = write_report(summary.folder.path).read_text()
    assert "Batch size 16 has no tuned rate yet: of 9 tuning trials 0 are complete and 9" in text
