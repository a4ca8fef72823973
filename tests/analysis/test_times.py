"""What is known about times, from rounds and from trials, and which batch size is the soonest."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sweep.analysis.sides import (
    decision_about_times,
    find_dominated,
    find_fewest_steps,
    find_soonest,
)
from sweep.analysis.times import known_times
from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.objective import LOSS, TOKENS_TO_TARGET
from sweep.decision.decision import decide
from sweep.decision.question import is_answered
from sweep.decision.rates import RateBounds
from tests.fakes.times import timing_of

HERE = "cpu: one"
ON_CPU = Execution(device="cpu", threads=2).model_dump(mode="json")
SIZES = (2, 4, 8)


def finals(seconds, seeds=5, device=HERE, sizes=SIZES):
    """Final trials of 1,600 tokens; sequences have 8 tokens."""
    rows = []
    for size, of_size in zip(sizes, seconds, strict=True):
        for seed in range(seeds):
            took = of_size * (1 + 0.01 * seed)
            row = {"batch_size": size, "seed": seed, "value": 1.0, "device": device}
            row |= {"microbatch_size": size, "seconds_training": took}
            row |= {"execution": json.dumps(ON_CPU), "steps": 1600 / 8 / size, "target": np.nan}
            row |= {"seconds_per_token": took / 1600, "steps_taken": 1600 / 8 / size}
            rows.append(row)
    return pd.DataFrame(rows)


def timing(seconds_per_sequence, rounds=8, sizes=SIZES, **changes):
    """Rounds of which each is slower than the one before by 10 %, at every batch size."""
    times = {}
    for size, seconds in zip(sizes, seconds_per_sequence, strict=True):
        times[Arm(None, size)] = [size * seconds * 1.1**number for number in range(rounds)]
    return timing_of(times, **{"device": HERE, "rounds_needed": 8, **changes})


def decision_of(means, seeds=12, noise=0.001):
    noise = noise * np.random.default_rng(0).normal(size=(len(means), seeds))
    return decide(np.array(means)[:, None] + noise, None, np.zeros(len(means)))


def with_regrets(decision, regrets):
    """Return the decision if the rates used are known to give up so much, (3,)."""
    flags = np.ones(3, bool)
    numbers = dict.fromkeys(RateBounds.__dataclass_fields__, np.zeros(3))
    numbers |= dict.fromkeys(("regret", "regret_low", "regret_high"), regrets)
    numbers |= {"misfits": ~flags, "is_clear": flags, "has_corner": ~flags}
    return replace(decision, rates=RateBounds(**numbers))


def test_ratios_come_from_rounds_in_which_load_cancels():
    times = known_times(finals((10.0, 10.0, 10.0)), SIZES, None, timing((4.0, 2.0, 1.0)))
    assert times.ratios[2, 8].median == pytest.approx(4.0) and times.has_intervals
    assert times.ratios[2, 8].low == pytest.approx(times.ratios[2, 8].high)
    assert times.seconds[2].median == pytest.approx(10.2)  # of trials on the same device
    assert not times.reasons and not times.is_elsewhere


@pytest.mark.parametrize(
    "change",
    [
        {"device": "gpu"},
        {"execution": Execution(device="cpu", threads=1)},
        {"microbatch_sizes": {Arm(None, size): 1 for size in SIZES}},
    ],
)
def test_steps_that_were_timed_otherwise_than_the_trials_ran_give_the_seconds(change):
    times = known_times(finals((10.0,) * 3), SIZES, None, timing((4.0, 2.0, 1.0), **change))
    assert times.is_elsewhere
    median = 4.0 * (1.1**3 + 1.1**4) / 2
    assert times.seconds[2].median == pytest.approx(1600 / 8 * median)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"rounds": 3}, "3 rounds"), ({"cpu_share": 0.5}, "batch size 2, 4 and 8")],
)
def test_few_rounds_and_load_weaken_what_is_said_of_times(changes, word):
    times = known_times(finals((10.0,) * 3), SIZES, None, timing((4.0, 2.0, 1.0), **changes))
    (reason,) = times.reasons
    assert word in reason
    assert find_dominated(decision_of([1.2, 1.1, 1.0]), times, LOSS) == [None] * 3
    assert times.has_intervals is ("rounds" not in changes)


def test_rounds_that_lack_a_batch_size_do_not_count():
    of_two = timing((4.0, 2.0), sizes=SIZES[:2])
    times = known_times(finals((10.0, 20.0, 30.0)), SIZES, None, of_two)
    assert times.ratios[8, 2].median == pytest.approx(3.0)


def test_without_rounds_a_ratio_has_the_bounds_of_two_medians():
    few = known_times(finals((10.0, 20.0, 30.0)), SIZES, None, None)
    assert few.ratios[4, 2].low == pytest.approx(20.0 / 10.4) and few.reasons
    assert not few.has_intervals
    many = known_times(finals((10.0, 20.0, 30.0), seeds=12), SIZES, None, None)
    assert many.has_intervals and not many.reasons


@pytest.mark.parametrize(
    ("column", "value", "unknown"),
    [
        ("device", "cpu: another", [2, 4, 8]),
        ("execution", json.dumps({**ON_CPU, "threads": 1}), [2, 4, 8]),
        ("microbatch_size", 1, [2]),
        ("seconds_per_token", np.nan, [2]),
    ],
)
def test_trials_that_ran_differently_have_no_time(column, value, unknown):
    trials = finals((10.0, 20.0, 30.0))
    trials.loc[trials.index[0], column] = value
    times = known_times(trials, SIZES, None, None)
    assert times.unknown == unknown
    assert np.isnan(times.log_ratios[0][0, 1])


def test_times_of_trials_whose_device_is_not_known_are_provisional():
    trials = finals((10.0, 20.0, 30.0), seeds=12, device=None)
    times = known_times(trials, SIZES, None, None)
    (reason,) = times.reasons
    assert "same device" in reason and times.has_intervals
    assert find_dominated(decision_of([1.2, 1.1, 1.0]), times, LOSS) == [None] * 3


def test_the_soonest_has_the_least_product_of_tokens_and_time_per_token():
    decision = decision_of([12.0, 12.5, 13.5])  # logarithms of tokens
    times = known_times(finals((40.0, 10.0, 8.0)), SIZES, None, timing((4.0, 1.0, 0.8)))
    side = find_soonest(decision, times, TOKENS_TO_TARGET, 3.3, 2, "order")
    assert (side.batch_size, side.candidates) == (4, [4])
    assert f"2 takes {4 * math.exp(-0.5):.2g} times as long" in side.basis
    assert find_dominated(decision, times, TOKENS_TO_TARGET) == [False, False, True]


def test_batch_sizes_that_may_be_as_soon_are_named():
    decision = decision_of([12.0, 12.5, 13.5], noise=0.05)
    close = timing((1.0, math.exp(-0.5), 1.0))
    times = known_times(finals((10.0, 6.0, 10.0)), SIZES, None, close)
    side = find_soonest(decision, times, TOKENS_TO_TARGET, 3.3, 2, "order")
    assert side.candidates == [2, 4] and "may be as soon" in side.basis


def test_which_prefers_a_batch_size_that_is_known_to_be_nearly_as_soon():
    """2 is the soonest by 1 %, but how it compares with 8 is not known well."""
    logs = np.array([12.0, 12.01, 12.03])
    widths = np.array([[0.0, 0.02, 0.2], [0.02, 0.0, 0.03], [0.2, 0.03, 0.0]])
    decision = replace(decision_of(logs), half_width=widths)
    times = known_times(finals(10 * np.exp(logs - 12)), SIZES, None, timing((1.0, 1.0, 1.0)))
    sides = {
        question: find_soonest(decision, times, TOKENS_TO_TARGET, 3.3, 2, question)
        for question in ("order", "which")
    }
    assert {side.candidates == [2, 4, 8] for side in sides.values()} == {True}
    assert sides["order"].batch_size == 2 and sides["order"].basis.startswith("soonest to a loss")
    assert sides["which"].batch_size == 4
    assert sides["which"].basis.startswith("known to be within 5 % of the soonest to a loss")


def test_which_is_answered_with_the_batch_size_that_is_recommended():
    """The search ends by `is_answered`; its batch size then counts, whatever else may be sooner."""
    rng = np.random.default_rng(0)
    answered = 0
    for _ in range(300):
        logs = 12 + 0.03 * rng.normal(size=3)
        noise = np.triu(rng.choice([0.001, 0.01, 0.03, 0.3], size=(3, 3)), 1)
        decision = replace(decision_of(logs), half_width=noise + noise.T)
        decision = with_regrets(decision, 0.03 * rng.random(3))
        times = known_times(finals(10 * np.exp(logs - 12)), SIZES, None, timing((1.0, 1.0, 1.0)))
        about_times = decision_about_times(decision, times)
        if is_answered(about_times, "which", "time", TOKENS_TO_TARGET.margin):
            side = find_soonest(decision, times, TOKENS_TO_TARGET, 3.3, 2, "which")
            is_within = about_times.is_within(TOKENS_TO_TARGET.margin)
            assert is_within[SIZES.index(side.batch_size)]
            assert side.batch_size in side.candidates
            answered += 1
    assert answered > 100


def test_without_a_target_or_without_times_the_soonest_is_not_known():
    decision = decision_of([12.0, 12.5, 13.5])
    times = known_times(finals((40.0, 10.0, 8.0)), SIZES, None, timing((4.0, 1.0, 0.8)))
    assert find_soonest(decision, times, LOSS, None, 2, "order").batch_size is None
    unknown = known_times(finals((np.nan, 10.0, 8.0)), SIZES, None, None)
    side = find_soonest(decision, unknown, TOKENS_TO_TARGET, 3.3, 2, "order")
    assert side.batch_size is None and "batch size 2" in side.reason


def test_at_equal_tokens_a_worse_and_slower_batch_size_is_dominated():
    decision = decision_of([1.0, 1.1, 1.2])
    times = known_times(finals((10.0, 20.0, 5.0)), SIZES, None, timing((1.0, 2.0, 0.5)))
    assert find_dominated(decision, times, LOSS) == [False, True, False]
    ranges = known_times(finals((10.0, 20.0, 5.0)), SIZES, None, None)
    assert find_dominated(decision, ranges, LOSS) == [None] * 3
    close = decision_of([1.0, 1.001, 1.2], noise=0.05)
    assert find_dominated(close, times, LOSS) == [False, None, False]


def test_no_batch_size_has_the_fewest_steps_if_none_is_known_to_be_within():
    side = find_fewest_steps([], finals((10.0,) * 3), LOSS)
    assert side.batch_size is None and "within 0.01" in side.reason


def test_unequal_tokens_count_in_what_is_dominated():
    decision = decision_of([1.0, 1.1, 1.2])
    trials = finals((10.0, 9.0, 5.0))
    trials.loc[trials["batch_size"] == 4, "seconds_per_token"] *= 2  # 800 tokens
    times = known_times(trials, SIZES, None, timing((1.0, 1.8, 0.5)))
    assert find_dominated(decision, times, LOSS) == [False, False, False]


def test_steps_that_were_timed_elsewhere_get_an_interval_with_the_error_of_the_seeds():
    trials = finals((10.0, 20.0, 5.0), seeds=3, device="cpu: other")
    trials["target"] = 3.3
    trials["steps_taken"] *= 1 + 0.1 * (trials["seed"] - 1)
    seconds = known_times(trials, SIZES, None, timing((1.0, 2.0, 0.5))).seconds[2]
    exact = known_times(trials.assign(target=np.nan), SIZES, None, timing((1.0, 2.0, 0.5)))
    assert seconds.is_interval and seconds.median == pytest.approx(
        exact.seconds[2].median, rel=0.01
    )
    assert seconds.low < 0.8 * seconds.median and seconds.high > 1.2 * seconds.median

    two = known_times(trials[trials["seed"] < 2], SIZES, None, timing((1.0, 2.0, 0.5)))
    assert not two.seconds[2].is_interval


def test_steps_are_used_although_one_batch_size_has_neither_values_nor_times():
    trials = finals((10.0, 20.0, 5.0))
    trials.loc[trials["batch_size"] == 8, "value"] = np.nan
    times = known_times(trials, SIZES, None, timing((1.0, 2.0), sizes=(2, 4)))
    assert times.sizes == SIZES and times.unknown == [8]
    assert times.ratios[4, 2].median == pytest.approx(2.0)
    decision = decision_of([1.0, 1.1, np.nan])
    assert find_dominated(decision, times, LOSS) == [False, True, None]
