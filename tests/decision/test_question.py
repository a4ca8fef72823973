"""Which batch sizes a question needs decided, and when it is answered."""

from dataclasses import replace

import numpy as np
import pytest

from sweep.decision.decision import LOOKS, decide
from sweep.decision.next import next_trainings
from sweep.decision.question import is_answered, undecided_of

TOLERANCE = 0.01


def decision_of(*gaps, noise=0.002, seeds=5):
    """Return the decision about batch sizes with these losses above 1."""
    rng = np.random.default_rng(4)
    losses = 1.0 + np.array(gaps)[:, None] + noise * rng.normal(size=(len(gaps), seeds))
    return decide(losses, None, np.zeros(len(gaps)), LOOKS)


CLEAR = decision_of(0.0, 0.05, 0.011, noise=0.001, seeds=8)  # within, outside, undecided
OPEN = decision_of(0.0, 0.005, 0.008, 0.1, noise=0.006)


def asked(decision, question, pursues="tokens"):
    return undecided_of(decision, question, pursues, TOLERANCE).tolist()


def test_the_order_needs_each_verdict_and_one_to_use_only_that_of_the_best():
    assert CLEAR.is_within(TOLERANCE).tolist() == [True, False, False]
    assert CLEAR.is_outside(TOLERANCE).tolist() == [False, True, False]
    assert asked(CLEAR, "order") == [False, False, True]
    assert asked(CLEAR, "which") == [False, False, False]
    assert asked(OPEN, "order") == [True, True, True, False]
    assert asked(OPEN, "which") == [True, False, False, False]


def test_the_fewest_steps_need_the_verdicts_of_all_larger_batch_sizes():
    assert asked(CLEAR, "which", "steps") == [False, False, True]
    larger_are_outside = decision_of(0.0, 0.05, 0.06, noise=0.001, seeds=8)
    assert asked(larger_are_outside, "which", "steps") == [False, False, False]
    assert asked(OPEN, "which", "steps") == [True, True, True, False]


@pytest.mark.parametrize(
    ("decision", "question", "pursues", "expected"),
    [
        (CLEAR, "which", "tokens", True),
        (CLEAR, "which", "steps", False),
        (CLEAR, "order", "tokens", False),
        (OPEN, "which", "tokens", False),
        (decision_of(0.0, 0.05, 0.1, noise=1e-4), "order", "tokens", True),
    ],
)
def test_a_question_is_answered_once_nothing_that_it_needs_is_open(
    decision, question, pursues, expected
):
    assert bool(is_answered(decision, question, pursues, TOLERANCE)) == expected


def test_a_batch_size_without_a_result_keeps_both_questions_open():
    losses = 1.0 + np.array([[0.0], [0.05], [np.inf]]) + np.zeros((3, 5))
    losses[:2] += 1e-4 * np.random.default_rng(0).normal(size=(2, 5))
    decision = decide(losses, None, np.zeros(3), LOOKS)
    assert decision.is_within(TOLERANCE)[0]
    for question in ("which", "order"):
        assert not is_answered(decision, question, "tokens", TOLERANCE)
        assert not undecided_of(decision, question, "tokens", TOLERANCE).any()


def test_one_to_use_needs_seeds_of_the_best_and_of_those_that_keep_it_open():
    k = 4
    none = np.zeros(k, bool)
    seeds = np.full(k, 5)
    common = {"tolerance": TOLERANCE, "most_seeds": 20, "pursues": "tokens"}
    counts = {"seeds": seeds, "tuning_seeds": np.ones(k, int), "is_refinable": none}
    close = decision_of(0.0, 0.002, 0.018, 0.1, noise=0.006)
    more, _, _ = next_trainings(close, question="which", **counts, **common)
    assert more.tolist() == [8, 8, 5, 5]
    assert not close.is_outside(TOLERANCE)[2]
    more, _, _ = next_trainings(close, question="order", **counts, **common)
    assert more.tolist() == [8, 8, 8, 5]


def test_if_the_best_cannot_be_within_another_one_is_asked_about():
    best, second, _, last = range(4)
    others = np.array([False, True, True, True])
    assert undecided_of(OPEN, "which", "tokens", TOLERANCE, others).tolist() == [
        index == second for index in range(4)
    ]
    none = np.zeros(4, bool)
    assert not undecided_of(OPEN, "which", "tokens", TOLERANCE, none).any()
    assert asked(OPEN, "which")[best] and not asked(OPEN, "which")[last]


def test_times_decide_with_the_errors_of_their_ratios():
    tokens = decision_of(0.0, 0.3, noise=1e-4)
    ratio = np.array([[0.0, 0.5], [-0.5, 0.0]])  # log times per token: the first one is slower
    exact = tokens.in_time((ratio, ratio, ratio))
    assert exact.is_within(0.05).tolist() == [False, True]
    assert exact.gap_high[1] == pytest.approx(-0.2, abs=0.01)
    assert exact.best_estimate[1] - exact.best_estimate[0] == pytest.approx(-0.2, abs=0.01)
    vague = tokens.in_time((ratio, ratio - 0.3, ratio + 0.3))
    assert not vague.is_within(0.05).any() and not vague.is_outside(0.05).any()
    same = tokens.in_time((np.zeros((2, 2)),) * 3)
    np.testing.assert_allclose(same.gap_high, replace(tokens, other_errors=None).gap_high)
