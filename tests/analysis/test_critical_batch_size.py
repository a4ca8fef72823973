"""Steps to a target: the fitted curve, its intervals and its claims, with a known truth."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from sweep.analysis.audit import audit
from sweep.analysis.checks import CURVE_CHECKS, PASS
from sweep.analysis.critical_batch_size import fit_curve, fit_steps, steps_to_target
from sweep.analysis.results import load_sweep
from sweep.analysis.tables import write_trials_csv
from sweep.errors import SweepError
from sweep.plan.policies import Tuned
from sweep.plan.target import crossing_tokens
from sweep.resources import sha256_of_file
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.status import State, TrialStatus
from tests.analysis.fake_sweeps import fake_result, write_fake_sweep
from tests.analysis.noisy_quadratic import best_quadratic_steps

SIZES = 64 * 2.0 ** np.arange(9)
PUBLISHED = {  # Zhang et al. 2025: steps to target at SIZES; S_min, E_min, B* with B_opt 256
    "85M": ([46000, 23000, 13282, 7000, 3840, 2528, 1917, 1600, 1600], 1293.83, 2834258, 745.32),
    "151M": ([96000, 49000, 24000, 12000, 7128, 4350, 2940, 2400, 2300], 1752.42, 5677479, 955.16),
}
QUADRATIC_STEPS = (  # the noisy quadratic model of Zhang et al. 2019, at its best rates
    *(461033, 230629, 115427, 57827, 29029, 14633, 7441, 3860, 2105, 1304, 982, 845, 776, 737),
    *(713, 698, 688),
)


def hyperbola(s_min, e_min, sizes=SIZES):
    return s_min + e_min / sizes


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_published_fits_are_reproduced_from_all_nine_rows(model):
    steps, s_min, e_min, b_star = PUBLISHED[model]
    fit = fit_steps(SIZES, steps)
    assert fit.s_min.value == pytest.approx(s_min, rel=1e-5)
    assert fit.e_min.value == pytest.approx(e_min, rel=1e-5)
    assert fit.b_opt == 256
    assert fit.b_star.value == pytest.approx(b_star, rel=1e-5)
    assert fit.b_crit.value == pytest.approx(e_min / s_min, rel=1e-5)
    assert fit.b_overhead.value == pytest.approx(0.2 * e_min / s_min, rel=1e-5)


@given(
    log_s_min=st.floats(0, 12),
    log_b_crit=st.floats(math.log(SIZES[0] / 4), math.log(SIZES[-1] * 4)),
    crossed=st.integers(3, 9),
    slack=st.floats(0.01, 1),
)
def test_an_exact_hyperbola_is_recovered_with_bounds_below_it(
    log_s_min, log_b_crit, crossed, slack
):
    s_min, b_crit = math.exp(log_s_min), math.exp(log_b_crit)
    steps = hyperbola(s_min, s_min * b_crit)
    censored = np.arange(9) >= crossed
    fit = fit_steps(SIZES, np.where(censored, slack * steps, steps), censored)
    numbers = [fit.s_min.value, fit.e_min.value, fit.b_crit.value]
    assert numbers == pytest.approx([s_min, s_min * b_crit, b_crit], rel=1e-6)
    assert np.abs(fit.residuals).max() < 1e-6


def test_a_bound_above_the_curve_pulls_it_up_and_shows_as_a_residual():
    steps = hyperbola(1300, 2.8e6)
    censored = np.arange(9) == 8
    fit = fit_steps(SIZES, np.where(censored, 1.2 * steps, steps), censored)
    assert fit.s_min.value > 1350
    assert 0 < fit.residuals[0, -1] < math.log(1.2)
    assert (fit.residuals[0, :-1].min(), fit.spread) < (0, 0.1)


def test_slow_seeds_that_are_censored_do_not_bias_the_fit():
    """A cap at the true curve censors the slower half of the trials at five batch sizes."""
    rng = np.random.default_rng(0)
    curve = hyperbola(1300, 2.8e6)
    steps = curve * np.exp(0.2 * rng.standard_normal((20, 9)))
    bounds = np.where(np.arange(9) >= 4, curve, np.inf)
    censored = steps > bounds
    fit = fit_steps(SIZES, np.minimum(steps, bounds), censored)
    assert fit.s_min.value == pytest.approx(1300, rel=0.08)
    assert fit.e_min.value == pytest.approx(2.8e6, rel=0.04)
    assert fit.spread == pytest.approx(0.2, rel=0.15)


def test_local_slopes_and_residuals_are_those_of_the_data():
    steps = np.array([[800, 400, 250, 200], [800, 400, 160, 200]])
    fit = fit_steps([1, 2, 4, 8], steps)
    assert fit.slopes.tolist() == pytest.approx([-1, -1, 0])
    log_curve = np.log(hyperbola(fit.s_min.value, fit.e_min.value, np.array([1, 2, 4, 8])))
    assert fit.residuals == pytest.approx(np.log(steps) - log_curve)
    assert np.isnan(fit_steps([1, 2, 4, 8], [8, 4, 2, 1], [False, False, False, True]).slopes[-1])


def test_what_the_batch_sizes_do_not_show_is_none_or_unbounded():
    no_linear = fit_steps(SIZES, hyperbola(1300, 1300 * 100))
    assert no_linear.b_opt is None and no_linear.b_star is None
    rng = np.random.default_rng(0)
    noise = np.exp(0.05 * rng.standard_normal((3, 9)))
    linear = fit_steps(SIZES, 1e9 / SIZES * noise)
    assert (linear.s_min.low, linear.b_crit.high) == (0, math.inf)
    assert linear.e_min.low < 1e9 < linear.e_min.high
    flat = fit_steps(SIZES, np.full((3, 9), 1000.0))
    assert (flat.e_min.value, flat.b_crit.value) == (0, 0)
    assert flat.s_min.value == pytest.approx(1000)


def test_one_seed_has_no_intervals_and_several_give_the_same_again():
    steps = hyperbola(1300, 2.8e6) * np.exp(np.random.default_rng(0).normal(0, 0.1, (4, 9)))
    assert math.isnan(fit_steps(SIZES, steps[0]).s_min.low)
    first, again = fit_steps(SIZES, steps), fit_steps(SIZES, steps)
    assert first.b_crit == again.b_crit
    assert first.b_crit.low < first.b_crit.value < first.b_crit.high


def test_the_interval_of_an_uncensored_fit_is_the_t_interval_of_its_seeds():
    # To first order the fit is the mean of the fits of single seeds.
    steps = hyperbola(1300, 2.8e6) * np.exp(np.random.default_rng(0).normal(0, 0.01, (5, 9)))
    logs = np.log([fit_steps(SIZES, row).b_crit.value for row in steps])
    half = 2.776 * logs.std(ddof=1) / math.sqrt(5)
    b_crit = fit_steps(SIZES, steps).b_crit
    assert math.log(b_crit.high / b_crit.value) == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize("sizes", [[1, 2, 4], [1, 2]])
def test_a_fit_needs_three_batch_sizes_that_reached_the_target(sizes):
    with pytest.raises(SweepError, match="3 batch sizes"):
        fit_steps(sizes, [4 / size for size in sizes], [size == 4 for size in sizes])


def covered(simulations, seeds, sigma, shared, cap, pruned=False):
    """Count the sweeps whose intervals hold S_min, E_min and B_crit; return the censored share.

    Trials end at the cap, in sequences, and if pruned at twice the best of their batch size so far.
    """
    rng = np.random.default_rng(0)
    truth = [1300, 2.8e6, 2.8e6 / 1300]
    hits, censored_share = np.zeros(3), 0.0
    for _ in range(simulations):
        noise = sigma * rng.standard_normal((seeds, 9)) + shared * rng.standard_normal((seeds, 1))
        steps = hyperbola(1300, 2.8e6) * np.exp(noise)
        bounds = np.broadcast_to(cap / SIZES, steps.shape)
        if pruned:
            bounds = np.minimum(bounds, 2 * np.minimum.accumulate(steps, axis=0))
        censored = steps > bounds
        fit = fit_steps(SIZES, np.minimum(steps, bounds), censored)
        numbers = (fit.s_min, fit.e_min, fit.b_crit)
        hits += [x.low <= true <= x.high for x, true in zip(numbers, truth, strict=True)]
        censored_share += censored.mean() / simulations
    return hits, censored_share


@pytest.mark.parametrize(
    ("shared", "cap", "expected_share"),
    [(0.0, math.inf, 0.0), (0.1, math.inf, 0.0), (0.0, 8e6, 0.28)],
    ids=["independent", "shared by a seed", "censored"],
)
def test_intervals_of_three_seeds_cover_as_often_as_they_say(shared, cap, expected_share):
    simulations = 100
    hits, censored = covered(simulations, 3, 0.1, shared, cap)
    assert censored == pytest.approx(expected_share, abs=0.01)
    assert binom.ppf(1e-3, simulations, 0.93) <= hits.min()
    assert hits.max() <= binom.ppf(1 - 1e-3, simulations, 0.97)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulations", "seeds", "sigma", "shared", "cap", "pruned"),
    [
        (2000, 3, 0.1, 0.0, math.inf, False),
        (2000, 3, 0.05, 0.05, math.inf, False),
        (2000, 3, 0.1, 0.0, 8e6, False),
        (2000, 3, 0.3, 0.0, 2e7, True),
        (500, 5, 0.1, 0.0, 8e6, False),
    ],
)
@pytest.mark.timeout(1200)
def test_intervals_cover_in_93_to_97_percent_of_simulations(
    simulations, seeds, sigma, shared, cap, pruned
):
    hits, _ = covered(simulations, seeds, sigma, shared, cap, pruned)
    assert (hits >= 0.93 * simulations).all(), hits
    assert (hits <= 0.97 * simulations).all(), hits


def test_the_quadratic_model_takes_the_published_steps_at_its_best_rates():
    best = [best_quadratic_steps(2**k)[0] for k in range(17)]
    assert tuple(best) == QUADRATIC_STEPS


def test_the_quadratic_model_has_the_known_critical_batch_size():
    sizes = 2.0 ** np.arange(17)
    whole, part = [654.6, 437165, 667.9], [681.3, 342_920, 503.3]
    for some, truth in ((slice(None), whole), (slice(8, 14), part)):
        fit = fit_steps(sizes[some], QUADRATIC_STEPS[some])
        numbers = [fit.s_min.value, fit.e_min.value, fit.b_crit.value]
        assert numbers == pytest.approx(truth, rel=1e-4)


TARGET = 3.0
TARGET_SIZES = (16, 32, 64, 128, 256)
CONTEXT = 64  # of the experiment quick


@pytest.fixture
def to_target(tmp_path):
    """Write a tuned sweep whose trials reach the target at given steps, or are pruned; judge it."""

    def write(taken_at=None, pruned=lambda row: False, points=2000):
        path = tmp_path / "s"
        options = {"lrs": ("tuned",), "seeds": 3, "batches": ",".join(map(str, TARGET_SIZES))}
        options |= {"evaluation": {"points": points}, "target": TARGET}
        plan = write_fake_sweep(path, budget=256 * CONTEXT * 6000, **options)
        rng = np.random.default_rng(0)
        for row in plan.trials:
            taken = (taken_at or {}).get(row.batch_size, hyperbola(600, 60_000, row.batch_size))
            if row.stage == "tune":
                off = math.log2(row.learning_rate / plan.tuning_centre(Tuned(), row.arm))
                taken *= 1 + 0.5 * off**2
            else:
                taken *= math.exp(0.01 * rng.normal())
            write_trial(SweepFolder(path).trial(row.id), plan, row, taken, pruned(row), points)
        sweep = load_sweep(path)
        (reached,) = sweep.policies
        return reached, sweep

    return write


def write_trial(trial, plan, row, taken, is_pruned, points):
    lines, below = [], 0
    for step in plan.course(row).milestones(points):
        loss = TARGET * (taken / step) ** 0.3
        loss = max(loss, 1.01 * TARGET) if is_pruned else loss
        tokens = step * row.batch_size * CONTEXT
        lines.append({"time": 1.7e9 + step, "step": step, "tokens": tokens, "valid/loss": loss})
        below = below + 1 if loss <= TARGET else 0
        if below == 2 or (is_pruned and step >= 2 * taken):
            break
    trial.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if is_pruned:
        trial.result_path.unlink()
        trial.write_status(TrialStatus(state=State.PRUNED, attempts=1, fencing=1))
        return
    columns = [[line[name] for line in lines] for name in ("tokens", "valid/loss")]
    result = fake_result(plan, row) | {"steps": step, "tokens": tokens, "final_valid_loss": loss}
    result |= {"tokens_to_target": crossing_tokens(*columns, TARGET)}
    result |= {"seconds_training": tokens / 20_000, "initial_train_loss": math.log(512)}
    result |= {"metrics_sha256": sha256_of_file(trial.metrics_path)}
    write_json(trial.result_path, result)


def blocking(reached):
    return {check.code for check in reached.blocking}


def states_the_critical_batch_size(sweep):
    return any("the critical batch size is" in sentence for sentence in sweep.sentences())


def test_steps_on_the_curve_make_the_claim_and_the_audit_finds_nothing(to_target, tmp_path):
    reached, sweep = to_target()
    assert blocking(reached) == set(), reached.failed
    passed = {check.code for check in reached.checks if check.status == PASS}
    assert {"critical_batch_size", "off_the_curve"} <= passed
    assert states_the_critical_batch_size(sweep)
    assert reached.curve.fit.b_crit.low < 100 < reached.curve.fit.b_crit.high
    assert "lr tuned by 5 trials" in reached.answer.scope and "3 seeds" in reached.answer.scope
    write_trials_csv(sweep, tmp_path / "trials.csv")
    document = audit(tmp_path / "trials.csv")
    assert document["findings"] == []
    assert {item["code"] for item in document["not_checked"]} >= {*CURVE_CHECKS}


def test_a_crossing_before_the_first_evaluation_is_no_point_of_the_curve(to_target):
    reached, sweep = to_target(points=10)
    assert "crossing_too_early" in blocking(reached)
    assert reached.curve.trials["is_early"].any() and not states_the_critical_batch_size(sweep)


def test_steps_off_the_curve_make_no_claim(to_target):
    taken = {16: 4000, 32: 2100, 64: 1300, 128: 1000, 256: 1500}
    reached, sweep = to_target(taken)
    (check,) = (check for check in reached.failed if check.code == "off_the_curve")
    assert 256 in check.batch_sizes and not states_the_critical_batch_size(sweep)


def curve_of(sizes, s_min=100, e_min=10_000):
    """The tokens of an exact hyperbola, of which B_crit is e_min/s_min."""
    rows = [
        {"batch_size": size, "seed": seed, "steps": steps, "tokens": steps * size}
        for size, steps in zip(sizes, hyperbola(s_min, e_min, np.array(sizes)), strict=True)
        for seed in range(3)
    ]
    return fit_curve(pd.DataFrame(rows).assign(is_censored=False), 3.0)


def test_measured_batch_sizes_are_those_of_the_closed_form_if_the_tokens_level_off():
    curve = curve_of([1, 2, 4, 8, 16, 32, 64, 128, 256])
    # The tokens exceed those of batch size 1, which are 1 % more than E_min.
    assert curve.excess[0.2].value == pytest.approx(1.2 * 101 - 100, rel=0.06)
    assert curve.excess[1.0].value == pytest.approx(2 * 101 - 100, rel=0.06)
    assert not curve.is_excess_bound


def test_measured_batch_sizes_are_bounds_if_smaller_ones_would_take_fewer_tokens():
    curve = curve_of([64, 128, 256, 512])
    assert curve.is_excess_bound and curve.excess[0.2].value > 20


def test_higher_targets_are_read_from_the_same_trials(to_target):
    reached, sweep = to_target()
    curve = fit_curve(steps_to_target(sweep, 2 * TARGET), 2 * TARGET)
    ratio = curve.fit.e_min.value / reached.curve.fit.e_min.value
    assert ratio == pytest.approx(2 ** (-1 / 0.3), rel=0.1)  # of the loss that the trials follow


def test_pruned_seeds_are_data_and_not_missing(to_target, tmp_path):
    reached, sweep = to_target(pruned=lambda row: row.stage == "final" and row.seed == 2)
    assert reached.curve.trials["is_censored"].sum() == len(TARGET_SIZES)
    assert not reached.blocking, reached.failed
    write_trials_csv(sweep, tmp_path / "trials.csv")
    assert audit(tmp_path / "trials.csv")["findings"] == []


def test_without_any_crossing_there_is_no_curve_and_no_claim(to_target):
    reached, sweep = to_target(pruned=lambda row: row.stage == "final")
    assert reached.curve.fit is None and not states_the_critical_batch_size(sweep)
    assert "critical_batch_size" in {check.code for check in reached.failed}
    assert "target_not_reached" in blocking(reached)
