"""Sweeps to a target loss from end to end on the noisy quadratic, whose truth is known."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from sweep.analysis.checks import judge
from sweep.analysis.critical_batch_size import fit_steps, steps_to_target
from sweep.analysis.frames import compare_batch_sizes, load_sweep
from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.orchestration.planning import make_plan
from sweep.orchestration.runner import run_plan
from sweep.plan.plan import load_plan
from sweep.report.report import write_report
from sweep.trial.files import read_metrics
from sweep.trial.folder import State, SweepFolder
from tests.fakes.executors import InlineExecutor

TRUTH = runpy.run_path(str(Path(__file__).parents[1] / "analysis" / "noisy_quadratic.py"))
TARGET = 0.01
SMALL = {
    "batches": "32,128,512",
    "budget": 512 * 400,
    "target": 0.05,
    "lr": "0.2",
    "seeds": 2,
    "model": {"preset": "quadratic", "name": "small", "dimensions": 30},
    "evaluation": {"points": 200},
}


@pytest.fixture
def reach(tmp_path):
    """Run a sweep to a target in tmp_path/sweep, in this process."""

    def reach_here(**settings):
        folder = SweepFolder(tmp_path / "sweep")
        experiment = load_experiment("quadratic", {**SMALL, **settings})
        planned = make_plan(experiment, Execution(device="cpu"), folder)
        return run_plan(planned, folder, executor=InlineExecutor())

    return reach_here


def test_trials_end_complete_at_their_crossing_confirmed_by_the_next_evaluation(reach):
    summary = reach()
    assert summary.exit_code == 0
    for trial in summary.folder.trials():
        result, config = trial.read_result(), trial.read_config()
        lines = read_metrics(trial.metrics_path)
        losses = [line["valid/loss"] for line in lines if "valid/loss" in line]
        assert result["state"] == "COMPLETE" and result["steps"] < config.steps
        assert losses[-2] <= 0.05 and losses[-1] <= 0.05 < losses[-3]
        assert result["tokens"] == result["steps"] * result["batch_size"]
        step_tokens = config.steps * result["batch_size"] / 200
        assert 0 < result["tokens"] - result["tokens_to_target"] <= 2 * step_tokens + 1
        expected = TRUTH["quadratic_steps"](result["batch_size"], [0.2], 0.05, 30)[0]
        assert result["tokens_to_target"] / result["batch_size"] == pytest.approx(expected, rel=0.2)


def test_a_trial_that_is_twice_as_slow_is_pruned_and_its_last_evaluation_is_a_bound(reach):
    reach(batches="32", seeds=1)
    summary = reach(batches="32", seeds=1, lr="0.02")
    rows = {row.learning_rate: row.id for row in load_plan(summary.folder).trials}
    slow = summary.folder.trial(rows[0.02])
    assert slow.read_status().state is State.PRUNED
    assert "did not reach 0.05" in slow.read_status().message
    assert not slow.checkpoints()
    least = summary.folder.trial(rows[0.2]).read_result()["tokens_to_target"]
    table = steps_to_target(load_sweep(summary.folder.path)).set_index("learning_rate")
    assert table["is_censored"].to_dict() == {0.2: False, 0.02: True}
    bound = table.loc[0.02, "tokens"]
    assert 2 * least <= bound <= 2 * least + 2 * 512 * 400 / 200 + 32
    assert summary.exit_code == 0


def test_at_the_cap_a_trial_is_complete_and_censored(reach):
    summary = reach(batches="32", seeds=1, budget=32 * 20)
    (trial,) = summary.folder.trials()
    result = trial.read_result()
    assert result["state"] == "COMPLETE" and result["steps"] == 20
    assert result["tokens_to_target"] is None
    (row,) = steps_to_target(load_sweep(summary.folder.path)).to_dict("records")
    assert row["is_censored"] and row["steps"] == 20


def test_a_target_out_of_reach_leaves_a_report_that_says_so(reach):
    summary = reach(lr="tuned", target=1e-6, budget=512 * 10, tuning={"centre": 0.5})
    assert not [row for row in load_plan(summary.folder).trials if row.stage == "report"]
    text = write_report(summary.folder.path).read_text()
    assert "Nothing can be compared yet" in text


def test_a_target_makes_a_schedule_without_a_horizon_and_leaves_other_ids_alone():
    plain, aimed = (load_experiment("quick", {"target": t}) for t in (None, 3.0))
    assert plain.schedule.name == "cosine" and not plain.schedule.average
    assert aimed.schedule.name == "constant" and aimed.schedule.average == 0.1
    folder = SweepFolder(Path("nowhere"))
    plan = make_plan(plain, Execution(device="cpu"), folder).plan
    science = plan.science(plan.trials[0], 1e-3)
    document = science.model_dump(mode="json")
    assert document["target"] is None and document["schedule"]["average"] == 0
    assert science.model_copy(update={"target": 1.0}).model_dump()["target"] == 1.0


def reach_the_known_target(reach, sizes, seeds):
    """Tune and report steps to the target; assert each within 5 % of the closed recursion."""
    summary = reach(
        batches=",".join(map(str, sizes)),
        budget=8192 * 1024,
        target=TARGET,
        lr="tuned",
        seeds=seeds,
        model="quadratic",
        evaluation={"points": 1024, "noise_points": 0, "window": 16},
        tuning={"centre": 1.0},  # one seed chooses the rate: the best is clearly best on this grid
    )
    assert summary.exit_code == 0
    sweep = load_sweep(summary.folder.path)
    (judged,) = judge(sweep)
    tuning = sweep.trials[sweep.trials["stage"] == "tune"]
    steps = judged.curve.trials.groupby("batch_size")["steps"].mean()
    expected = []
    for size in sizes:
        rates = tuning.loc[tuning["batch_size"] == size, "learning_rate"]
        stable = rates[rates < 2].to_list()  # the largest curvature is 1
        expected.append(TRUTH["quadratic_steps"](size, stable, TARGET).min())
        assert steps[size] == pytest.approx(expected[-1], rel=0.05)
    return summary, judged, fit_steps(sizes, expected)


def test_steps_at_batch_sizes_above_the_critical_one_support_no_claim(reach):
    """SCIENCE.md §6 C at three batch sizes."""
    _, judged, truth = reach_the_known_target(reach, [1024, 2048, 4096], 3)
    assert judged.curve.fit.s_min.value == pytest.approx(truth.s_min.value, rel=0.05)
    blocking = {check.code for check in judged.failed if check.blocks_claims}
    assert blocking == {"critical_batch_size"}, judged.failed
    assert judged.headline == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_known_critical_batch_size_is_measured(reach):
    """SCIENCE.md §6 C: the whole pipeline, at all six batch sizes."""
    sizes = [256, 512, 1024, 2048, 4096, 8192]
    summary, judged, truth = reach_the_known_target(reach, sizes, 5)
    assert judged.passes, judged.failed
    assert judged.curve.fit.s_min.value == pytest.approx(truth.s_min.value, rel=0.05)
    assert judged.curve.fit.e_min.value == pytest.approx(truth.e_min.value, rel=0.05)
    assert judged.curve.fit.b_crit.low < truth.b_crit.value < judged.curve.fit.b_crit.high
    text = write_report(summary.folder.path).read_text()
    assert "Losses at equal steps" in text and judged.headline in text


def test_if_no_rate_of_the_grid_reaches_the_target_the_search_extends_upwards(reach):
    """The distance to the target shows on which side to continue."""
    settings = {"batches": "32", "budget": 32 * 100, "evaluation": {"points": 50}}
    summary = reach(lr="tuned", tuning={"centre": 0.02}, **settings)
    rows = [row for row in load_plan(summary.folder).trials if row.stage == "report"]
    assert len(rows) == 2 and all(row.learning_rate > 0.25 for row in rows)
    assert summary.exit_code == 0


def test_a_fixed_rate_chooses_which_batch_size_wins_and_tuned_rates_do_not(reach):
    """SCIENCE.md §6 C: the artefact of one rate for all, where the truth is known."""
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
    headlines = {policy.label: policy.headline for policy in judge(sweep)}
    assert headlines["fixed 0.1"] == headlines["fixed 1"] == ""
