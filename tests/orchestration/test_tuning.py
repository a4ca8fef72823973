"""Tuned sweeps, and sweeps to a target loss, from end to end on small quadratics."""

import math
import runpy
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import optuna
import pytest

from sweep.analysis.checks import supports_fit
from sweep.analysis.critical_batch_size import fit_steps, steps_to_target
from sweep.analysis.results import load_sweep
from sweep.analysis.tables import compare_batch_sizes
from sweep.cli.show import print_status
from sweep.config.execution import Services
from sweep.config.load import load_experiment
from sweep.orchestration.planning import make_plan
from sweep.orchestration.progress import Progress
from sweep.orchestration.request import Request
from sweep.orchestration.runner import finished_summary
from sweep.orchestration.schedule import Scheduler
from sweep.orchestration.status import sweep_status
from sweep.orchestration.tuning import named_trials
from sweep.plan.plan import load_plan
from sweep.plan.rate_search import EXTENSIONS
from sweep.report.report import write_report
from sweep.tracking.store import default_tracking_uri
from sweep.trial.files import read_json, read_metrics, write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.status import Cause, State, TrialStatus
from tests.fakes.executors import InlineExecutor
from tests.orchestration.clusters import LOCAL, ON_CPU, run_in
from tests.servers import load_stored_sweep

SMALL = {
    "batches": "16,32",
    "budget": "3200",
    "lr": "tuned",
    "seeds": 2,
    "model_option": {"dimensions": 30},
    "optimizer": {"name": "adamw", "weight_decay": 0.1},
    "schedule": {"name": "cosine"},
    "tuning": {"centre": 0.003},  # the best rates are about 0.03 to 0.06
}
TRUTH = runpy.run_path(str(Path(__file__).parents[1] / "analysis" / "noisy_quadratic.py"))
TARGET = 0.01
TO_TARGET = {
    "batches": "32,128,512",
    "budget": 512 * 400,
    "target": 0.05,
    "lr": "0.2",
    "seeds": 2,
    "model_option": SMALL["model_option"],
    "evaluation": {"points": 200},
}


class Interrupted(InlineExecutor):
    """Sends SIGTERM, which background jobs do not ignore, at one attempt; 0: never."""

    def __init__(self, at):
        super().__init__()
        self.countdown = at

    def submit(self, folder, environment):
        self.countdown -= 1
        if not self.countdown:
            signal.raise_signal(signal.SIGTERM)
        return super().submit(folder, environment)


def tune_in(path, stop_at=0, services=LOCAL, **settings):
    """Run a tuned sweep in a folder; interrupt it at an attempt."""
    tuning = {**SMALL["tuning"], **settings.pop("tuning", {})}
    return run_in(path, Interrupted(stop_at), services, **{**SMALL, **settings, "tuning": tuning})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tuned sweep that nothing disturbed; not to be changed."""
    return tune_in(tmp_path_factory.mktemp("whole") / "sweep")


@pytest.fixture
def tune(tmp_path):
    return lambda stop_at=0, **settings: tune_in(tmp_path / "sweep", stop_at, **settings)


def rows_of(summary, stage, batch=None):
    rows = load_plan(summary.folder).trials
    return [row for row in rows if row.stage == stage and batch in (None, row.batch_size)]


def losses_of(summary, rows):
    """Return final losses by id; None for a trial without a result."""
    results = {row.id: summary.folder.trial(row.id).read_result() for row in rows}
    return {trial_id: result and result.final_valid_loss for trial_id, result in results.items()}


def reported_rates(summary):
    return {row.batch_size: row.learning_rate for row in rows_of(summary, "final")}


def test_each_batch_size_is_tuned_and_reported_on_other_seeds(whole):
    assert whole.exit_code == 0
    counts = Counter(row.batch_size for row in rows_of(whole, "tune"))
    assert counts[16] >= 6 and 3 <= counts[32] <= counts[16]
    assert {row.seed for row in rows_of(whole, "tune")} == {1000}
    for batch in (16, 32):
        ordered = sorted(rows_of(whole, "tune", batch), key=lambda row: row.learning_rate)
        losses = losses_of(whole, ordered)
        best = min(ordered, key=lambda row: math.inf if losses[row.id] is None else losses[row.id])
        index = ordered.index(best)
        assert 0 < index < len(ordered) - 1, "strictly inside"
        assert None not in losses_of(whole, ordered[index - 1 : index + 2]).values()
        finals = rows_of(whole, "final", batch)
        assert [row.seed for row in finals] == [0, 1]
        (rate,) = {row.learning_rate for row in finals}
        # The losses of 32 are off any curve, so at 16 the best rate may be at either neighbour.
        assert ordered[index - 1].learning_rate <= rate <= ordered[index + 1].learning_rate


def test_the_worse_half_is_pruned_at_equal_tokens_and_keeps_its_curve(whole):
    trials = [whole.folder.trial(row.id) for row in rows_of(whole, "tune", 16)]
    pruned = [trial for trial in trials if trial.read_status().state is State.PRUNED]
    assert pruned
    for trial in pruned:
        status, lines = trial.read_status(), read_metrics(trial.metrics_path)
        assert lines[-1]["step"] in (50, 100) and str(lines[-1]["step"]) in status.message
        assert not trial.checkpoints() and trial.read_result() is None
    assert {trial.read_result().steps for trial in trials if trial.read_result()} == {200}


def test_rates_near_a_prediction_run_to_the_end(whole):
    rows = rows_of(whole, "tune", 32)
    states = [whole.folder.trial(row.id).read_status() for row in rows]
    assert len(rows) >= 5 and State.PRUNED not in {status.state for status in states}


def test_a_pruned_trial_has_the_tokens_and_the_seconds_that_it_took(whole):
    sweep = load_sweep(whole.folder.path)
    trials = sweep.trials.set_index("id")
    pruned = trials[trials["state"] == State.PRUNED]
    assert len(pruned) and set(pruned["planned_tokens"]) == {3200}
    for trial_id, row in pruned.iterrows():
        last = read_metrics(whole.folder.trial(trial_id).metrics_path)[-1]
        assert (row["steps"], row["tokens"]) == (last["step"], last["tokens"])
        assert row["tokens"] == row["steps"] * row["batch_size"] < 3200
        assert row["seconds_total"] == last["perf/seconds"] > 0

    stored = load_stored_sweep(default_tracking_uri(whole.folder), sweep.plan.experiment)
    assert stored.trials.equals(sweep.trials)

    complete = trials[trials["state"] == State.COMPLETE]
    assert (complete["tokens"] == complete["planned_tokens"]).all()
    for trial_id, row in complete.iterrows():
        seconds = [
            line["perf/seconds"] for line in read_metrics(whole.folder.trial(trial_id).metrics_path)
        ]
        assert seconds[0] > 0 and seconds == sorted(seconds)
        assert seconds[-1] <= row["seconds_total"]


def test_the_report_knows_the_rates_of_pruned_trials_although_their_tokens_are_fewer(whole):
    rates = load_sweep(whole.folder.path).leading.rates
    for rate in rates:
        tried = {row.learning_rate for row in rows_of(whole, "tune", rate.batch_size)}
        assert {*rate.trials["learning_rate"]} == tried
    assert State.PRUNED in {*rates[0].trials["state"]}


@pytest.mark.slow
def test_a_sweep_without_pruning_has_the_same_rates(whole, tune):
    unpruned = tune(tuning={"prune": False})
    assert not [t for t in unpruned.folder.trials() if t.read_status().state is State.PRUNED]
    rates = [reported_rates(summary) for summary in (whole, unpruned)]
    assert rates[0] == pytest.approx(rates[1])


def test_a_finished_tuned_sweep_is_recognised(whole):
    planned = make_plan(Request(load_experiment("quadratic", SMALL), ON_CPU, whole.folder))
    summary = finished_summary(planned, whole.folder)
    assert summary is not None and summary.exit_code == 0
    assert len(summary.states) == len(rows_of(whole, "final"))


def test_an_interrupted_sweep_continues_as_if_it_had_not_been(whole, tune):
    cut = tune(stop_at=7)
    assert cut.exit_code == 130
    (cut.folder.path / "optuna.db").unlink(missing_ok=True)
    resumed = tune()
    assert resumed.exit_code == 0
    rows = [load_plan(summary.folder).trials for summary in (resumed, whole)]
    assert losses_of(resumed, rows[0]) == losses_of(whole, rows[1])


def test_batch_sizes_that_wait_for_a_prediction_fix_the_tokens_and_are_listed(tune, capsys):
    common = {"batches": "32,48", "budget": 8000, "seeds": 1}  # 32 alone would have 8,000 tokens
    first = tune(stop_at=3, **common)
    assert first.is_interrupted and {row.batch_size for row in rows_of(first, "tune")} == {32, 48}
    plan = load_plan(first.folder)
    assert {row.tokens for row in plan.trials} == {7968}
    assert {row.id for row in rows_of(first, "tune", 48)} == {None}
    waiting = [row for row in sweep_status(first.folder)["trials"] if row["batch_size"] == 48]
    assert {(row["id"], row["state"]) for row in waiting} == {(None, State.WAITING)}
    with Progress(first.folder, None, is_quiet=False, finals=2):  # no trial has ended, none is best
        pass
    print_status(sweep_status(first.folder))
    printed = capsys.readouterr()
    assert "of at least" in printed.err and "predicted WAITING" in printed.out

    # Without 48 the command decides about 32; 48 is still asked about.
    narrower = tune(**{**common, "batches": "32", "seeds": 3})
    assert narrower.exit_code == 0
    assert {row.id for row in rows_of(narrower, "tune", 48)} == {None}

    again = tune(**common)
    assert again.exit_code == 0
    plan = load_plan(again.folder)
    assert {row.tokens for row in plan.trials} == {7968} and None not in {r.id for r in plan.trials}
    assert {*reported_rates(again)} == {32, 48}


def test_a_report_misses_a_batch_size_whose_search_has_not_begun(tune):
    whole = tune()
    known = {row.id for row in load_plan(whole.folder).trials}
    settings = {"batches": "16,32,64", "seeds": 3}  # the new seeds come before the search at 64
    assert tune(stop_at=2, **settings).is_interrupted
    rows = [row for row in load_plan(whole.folder).trials if row.id not in known]
    assert {row.batch_size for row in rows if row.id is None} == {64}
    sweep = load_sweep(whole.folder.path)
    (judged,) = sweep.policies
    (check,) = [check for check in judged.failed if check.code == "missing_batch_size"]
    assert "64 (no rate decided yet)" in check.evidence and judged.blocking
    assert sweep.batch_sizes == [16, 32, 64]


def test_an_error_decides_nothing_and_the_next_command_tries_the_rate_again(
    whole, tune, faulty, monkeypatch
):
    rows = rows_of(whole, "tune", 16)
    losses = losses_of(whole, rows)
    best = min((row for row in rows if losses[row.id]), key=lambda row: losses[row.id])
    monkeypatch.setenv("FAULTY_RATE", repr(best.learning_rate))
    failed = tune(workload="faulty:RaisesOnceAtTheBestRate")
    assert failed.exit_code == 1
    assert set(reported_rates(failed)) == {32}
    assert sweep_status(failed.folder)["state"] == State.WAITING, "more trials will follow"
    text = write_report(failed.folder.path).read_text()
    assert "16 (no rate decided yet)" in text
    again = tune(workload="faulty:RaisesOnceAtTheBestRate")
    assert again.exit_code == 0
    tried, expected = (
        {row.learning_rate for row in rows_of(summary, "tune", 16)} for summary in (again, whole)
    )
    assert tried == expected
    # The rate to use allows for the noise in all searches of a command, here only in this one.
    assert min(tried) < reported_rates(again)[16] < max(tried)
    assert reported_rates(again)[32] == reported_rates(failed)[32]  # without a prediction


def test_a_pruned_trial_continues_from_its_checkpoint_if_it_has_one(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    schedule = Scheduler(None, folder, InlineExecutor())
    trial = folder.trial("0123456789ab")
    trial.path.mkdir(parents=True)
    trial.write_status(TrialStatus(state=State.WAITING))
    trial.metrics_path.write_text('{"time": 1.0, "step": 1, "tokens": 4}\n')
    (trial.path / "checkpoint-00000004-1").write_bytes(b"")
    schedule.prune(trial, "in the worse half", keep_checkpoint=True)
    schedule.revive(trial)
    assert trial.read_status().state is State.WAITING
    assert trial.checkpoints() and trial.metrics_path.exists()
    schedule.prune(trial, "too late")
    assert not trial.checkpoints() and trial.metrics_path.exists()
    schedule.revive(trial)
    assert not trial.metrics_path.exists()


def test_two_sweeps_that_share_a_storage_and_a_path_have_studies_of_their_own(tmp_path):
    storage, tuned = f"sqlite:///{tmp_path / 'shared.db'}", []
    services = Services(storage=storage, tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    settings = {"batches": "16", "budget": "800", "seeds": 1}
    for _ in range(2):  # as on two machines whose folders have the same path
        summary = tune_in(tmp_path / "sweep", services=services, **settings)
        tuned.append(sorted(row.id for row in rows_of(summary, "tune")))
        shutil.rmtree(summary.folder.path)
    assert tuned[0] == tuned[1]
    names = optuna.get_all_study_names(storage)
    studies = [optuna.load_study(study_name=name, storage=storage) for name in names]
    assert [sorted(named_trials(study)) for study in studies] == tuned


def test_optuna_holds_a_study_per_batch_size_with_the_end_of_each_trial(whole):
    storage = f"sqlite:///{whole.folder.path / 'optuna.db'}"
    names = optuna.get_all_study_names(storage)
    assert len(names) == 2 and any("batch size 32" in name for name in names)
    rows = {row.id: row for row in rows_of(whole, "tune")}
    trials = {}
    for name in names:
        trials |= named_trials(optuna.load_study(study_name=name, storage=storage))
    assert trials.keys() == rows.keys()
    for trial_id, trial in trials.items():
        assert trial.params["learning_rate"] == pytest.approx(rows[trial_id].learning_rate)
        assert trial.state.name == whole.folder.trial(trial_id).read_status().state.name
        assert trial.intermediate_values or trial.state.name != "PRUNED"


def test_a_winner_at_fewer_tokens_is_bracketed_at_the_full_budget(tune):
    summary = tune(tuning={"budget": "800"})
    assert summary.exit_code == 0
    for batch in (16, 32):
        tuned = rows_of(summary, "tune", batch)
        assert {row.tokens for row in tuned} == {800, 3200}
        full = sorted(row.learning_rate for row in tuned if row.tokens == 3200)
        assert full[0] < reported_rates(summary)[batch] < full[-1]
        assert full[1] / full[0] == pytest.approx(2)


def test_more_seeds_and_batch_sizes_leave_decided_rates_alone(whole, tune, tmp_path):
    shutil.copytree(whole.folder.path, tmp_path / "sweep")
    grown = tune(seeds=3, batches="8,16,32")
    assert grown.exit_code == 0
    assert Counter(row.batch_size for row in rows_of(grown, "final")) == {8: 3, 16: 3, 32: 3}
    assert reported_rates(grown).items() > reported_rates(whole).items()
    tuned = {row.id for row in rows_of(whole, "tune")}
    assert {row.batch_size for row in rows_of(grown, "tune") if row.id not in tuned} == {8}


def test_more_dimensions_are_searched_together(tune):
    tuning = {"dimensions": ["lr", "weight_decay", "beta2"], "trials": 8}
    summary = tune(batches="16", tuning=tuning)
    assert summary.exit_code == 0
    rows = rows_of(summary, "tune")
    assert len(rows) >= 10, "eight together, then ×½ and ×2 of the winner's rate"
    assert len({row.weight_decay for row in rows}) == len({row.beta2 for row in rows}) == 4
    losses = losses_of(summary, rows)
    best = min((row for row in rows if losses[row.id]), key=lambda row: losses[row.id])
    (reported,) = {
        (row.learning_rate, row.beta2, row.weight_decay) for row in rows_of(summary, "final")
    }
    assert reported[1:] == (best.beta2, best.weight_decay)
    assert best.learning_rate / 2 < reported[0] < best.learning_rate * 2


def test_if_every_rate_diverges_nothing_is_reported_and_the_search_ends(tune, faulty):
    summary = tune(batches="16", workload="faulty:NeverFinite")
    assert summary.exit_code == 0 and not rows_of(summary, "final")
    assert {status.cause for status in summary.states.values()} == {Cause.DIVERGED}
    assert len(rows_of(summary, "tune")) == 5 + EXTENSIONS
    text = write_report(summary.folder.path).read_text()
    assert "16 (no rate decided yet)" in text and "9 of 9 tuning trials diverged" in text


class Unmeasured(InlineExecutor):
    """Leaves the objective out of every result, as no evaluation of this package does."""

    def submit(self, folder, environment):
        future = super().submit(folder, environment)
        result = read_json(folder.result_path)
        lacking = {"final_valid_loss": None, "final_valid_other": 1.0}
        write_json(folder.result_path, result | lacking)
        return future


def test_if_no_trial_has_the_objective_nothing_is_reported_and_the_search_ends(tmp_path):
    settings = {**SMALL, "batches": "16", "tuning": {"prune": False}}
    summary = run_in(tmp_path / "sweep", Unmeasured(), **settings)
    assert not rows_of(summary, "final")
    assert {status.state for status in summary.states.values()} == {State.COMPLETE}


@pytest.fixture
def reach(run):
    return lambda **settings: run(InlineExecutor(), **{**TO_TARGET, **settings})


def test_trials_end_complete_at_their_crossing_confirmed_by_the_next_evaluation(reach):
    summary = reach()
    assert summary.exit_code == 0
    for trial in summary.folder.trials():
        result, config = trial.read_result(), trial.read_config()
        lines = read_metrics(trial.metrics_path)
        losses = [line["valid/loss"] for line in lines if "valid/loss" in line]
        assert result.state == "COMPLETE" and result.steps < config.steps
        assert losses[-2] <= 0.05 and losses[-1] <= 0.05 < losses[-3]
        assert result.tokens == result.steps * result.batch_size
        step_tokens = config.steps * result.batch_size / 200
        assert 0 < result.tokens - result.tokens_to_target <= 2 * step_tokens + 1
        expected = TRUTH["quadratic_steps"](result.batch_size, [0.2], 0.05, 30)[0]
        assert result.tokens_to_target / result.batch_size == pytest.approx(expected, rel=0.2)


def test_a_trial_that_is_twice_as_slow_is_pruned_and_its_last_evaluation_is_a_bound(reach):
    reach(batches="32", seeds=1)
    summary = reach(batches="32", seeds=1, lr="0.02")
    rows = {row.learning_rate: row.id for row in load_plan(summary.folder).trials}
    slow = summary.folder.trial(rows[0.02])
    assert slow.read_status().state is State.PRUNED
    assert "above 0.05 after 2 times the tokens" in slow.read_status().message
    assert not slow.checkpoints()
    least = summary.folder.trial(rows[0.2]).read_result().tokens_to_target
    table = steps_to_target(load_sweep(summary.folder.path)).set_index("learning_rate")
    assert table["is_censored"].to_dict() == {0.2: False, 0.02: True}
    bound = table.loc[0.02, "tokens"]
    assert 2 * least <= bound <= 2 * least + 2 * 512 * 400 / 200 + 32
    assert summary.exit_code == 0


def test_at_the_cap_a_trial_is_complete_and_censored(reach):
    summary = reach(batches="32", seeds=1, budget=32 * 20)
    (trial,) = summary.folder.trials()
    result = trial.read_result()
    assert result.state == "COMPLETE" and result.steps == 20
    assert result.tokens_to_target is None
    (row,) = steps_to_target(load_sweep(summary.folder.path)).to_dict("records")
    assert row["is_censored"] and row["steps"] == 20


def test_a_target_out_of_reach_leaves_a_report_that_says_so(reach):
    summary = reach(lr="tuned", target=1e-6, budget=512 * 10, tuning={"centre": 0.5})
    assert not [row for row in load_plan(summary.folder).trials if row.stage == "final"]
    text = write_report(summary.folder.path).read_text()
    assert "Nothing can be compared" in text


def test_a_target_makes_a_schedule_without_a_horizon_and_leaves_other_ids_alone():
    plain, aimed = (load_experiment("quick", {"target": t}) for t in (None, 3.0))
    assert plain.schedule.name == "cosine" and not plain.schedule.average
    assert aimed.schedule.name == "constant" and aimed.schedule.average == 0.1
    plan = make_plan(Request(plain, ON_CPU, SweepFolder(Path("nowhere")))).plan
    science = plan.science(plan.trials[0], 1e-3)
    document = science.model_dump(mode="json")
    assert document["target"] is None and document["schedule"]["average"] == 0
    assert science.model_copy(update={"target": 1.0}).model_dump()["target"] == 1.0


def reach_the_known_target(reach, sizes, seeds):
    """Tune and report steps to the target; assert each within 5 % of the closed recursion.

    The best rate is just below divergence. All batch sizes have the same grid, so that each is
    equally far below it and the steps lie on a smooth curve.
    """
    summary = reach(
        batches=",".join(map(str, sizes)),
        budget=8192 * 1024,
        target=TARGET,
        lr="tuned",
        seeds=seeds,
        model_option={"dimensions": TRUTH["DIMENSIONS"]},
        evaluation={"points": 1024, "window": 20},
        # one seed chooses the rate: the best is clearly best on this grid
        tuning={"centre": 1.0, "centred_by": "rule"},
    )
    assert summary.exit_code == 0
    sweep = load_sweep(summary.folder.path)
    (judged,) = sweep.policies
    tuning = sweep.trials[sweep.trials["stage"] == "tune"]
    steps = judged.curve.trials.groupby("batch_size")["steps"].mean()
    expected = []
    for size in sizes:
        rates = tuning.loc[tuning["batch_size"] == size, "learning_rate"]
        stable = rates[rates < 2].to_list()  # the largest curvature is 1
        expected.append(TRUTH["quadratic_steps"](size, stable, TARGET).min())
        assert steps[size] == pytest.approx(expected[-1], rel=0.05)
    return summary, judged, fit_steps(sizes, expected)


@pytest.mark.slow
def test_steps_at_batch_sizes_above_the_critical_one_do_not_measure_it(reach):
    _, judged, truth = reach_the_known_target(reach, [1024, 2048, 4096], 3)
    assert judged.curve.fit.s_min.value == pytest.approx(truth.s_min.value, rel=0.05)
    assert "critical_batch_size" in {check.code for check in judged.failed}
    assert not supports_fit(judged.curve)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_known_critical_batch_size_is_measured(reach):
    """The whole pipeline, at all six batch sizes."""
    sizes = [256, 512, 1024, 2048, 4096, 8192]
    summary, judged, truth = reach_the_known_target(reach, sizes, 5)
    assert not judged.blocking, judged.failed
    assert judged.curve.fit.s_min.value == pytest.approx(truth.s_min.value, rel=0.05)
    assert judged.curve.fit.e_min.value == pytest.approx(truth.e_min.value, rel=0.05)
    assert judged.curve.fit.b_crit.low < truth.b_crit.value < judged.curve.fit.b_crit.high
    text = write_report(summary.folder.path).read_text()
    assert "Losses at equal steps" in text and "the critical batch size is" in text


def test_if_no_rate_of_the_grid_reaches_the_target_the_search_extends_upwards(reach):
    settings = {"batches": "32", "budget": 32 * 100, "evaluation": {"points": 50}}
    summary = reach(lr="tuned", tuning={"centre": 0.02}, **settings)
    rows = [row for row in load_plan(summary.folder).trials if row.stage == "final"]
    assert len(rows) == 2 and all(row.learning_rate > 0.25 for row in rows)
    assert summary.exit_code == 0


@pytest.mark.slow
def test_a_fixed_rate_chooses_which_batch_size_wins_and_tuned_rates_do_not(reach):
    """The artefact of one rate for all, where the truth is known."""
    tokens, sizes = 16_384, [16, 256]
    fields = {"batches": "16,256", "budget": tokens, "target": None, "seeds": 4}

    def expected(size, rates):
        steps = np.full(len(rates), tokens / size)
        return TRUTH["quadratic_loss"](steps, size, np.array(rates), 30).min()

    for rate in ("0.1", "1.0"):
        summary = reach(lr=rate, **fields)
    summary = reach(lr="tuned", tuning={"centre": 0.3}, **fields)
    sweep = load_sweep(summary.folder.path)
    cells = compare_batch_sizes(sweep.trials)
    measured = {
        label: dict(zip(group["batch_size"], group["final_valid_loss"], strict=True))
        for label, group in cells.groupby("label")
    }
    for label, rate in (("fixed 0.1", 0.1), ("fixed 1", 1.0)):
        for size in sizes:
            assert measured[label][size] == pytest.approx(expected(size, [rate]), rel=0.5)
    assert measured["fixed 0.1"][256] > 10 * measured["fixed 0.1"][16]  # small batches "win"
    assert measured["fixed 1"][16] > 4 * measured["fixed 1"][256]  # large batches "win"
    truth = expected(256, np.geomspace(0.01, 1.9, 50)) / expected(16, np.geomspace(0.01, 1.9, 50))
    assert measured["tuned"][256] / measured["tuned"][16] == pytest.approx(truth, rel=0.5)
    answers = {policy.label: policy.answer for policy in sweep.policies}
    assert answers["fixed 0.1"].provisional and answers["fixed 1"].provisional
