"""The question of a sweep: which batch size to use, or the order of all of them."""

from typing import Literal

import numpy as np

from sweep.decision.decision import Decision, Flags

Question = Literal["which", "order"]


def undecided_of(
    decision: Decision,
    question: Question,
    pursues: str,
    tolerance: float,
    may_be_within: Flags | bool = True,
) -> Flags:
    """Return the batch sizes whose verdicts the question still needs, (..., k).

    `order` needs those of all batch sizes that are compared. `which` needs that one is within the
    tolerance: the best by the estimates is asked about, of those that may be. If steps count, it
    needs the largest one that is, and therefore the verdicts of all larger ones.

    Args:
        decision: about the side that is pursued, as far as its losses or times are known.
        question: which or order.
        pursues: tokens, time or steps.
        tolerance: the difference of compared values that matters.
        may_be_within: those that further trainings could show to be within the tolerance, (..., k).
    """
    is_compared = np.isfinite(decision.mean)
    is_within = decision.is_within(tolerance)
    is_open = is_compared & ~is_within & ~decision.is_outside(tolerance)
    if question == "order":
        return np.asarray(is_open)
    if pursues == "steps":
        index = np.arange(is_open.shape[-1])
        largest_within = np.where(is_within, index, -1).max(-1, keepdims=True)
        return np.asarray(is_open & (index > largest_within))
    may_answer = is_open & may_be_within & ~is_within.any(-1, keepdims=True)
    estimate = np.where(may_answer, decision.best_estimate, np.inf)
    return np.asarray(may_answer & (estimate == estimate.min(-1, keepdims=True)))


def is_answered(decision: Decision, question: Question, pursues: str, tolerance: float) -> Flags:
    """Return whether a question is answered, (...); a batch size without a result keeps it open."""
    has_answer = np.isfinite(decision.mean).all(-1)
    if question == "which":
        has_answer &= decision.is_within(tolerance).any(-1)
    return np.asarray(has_answer & ~undecided_of(decision, question, pursues, tolerance).any(-1))
