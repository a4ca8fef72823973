"""Divergence and accounts of time."""

import math

import pytest

from sweep.training.checkpoint import DIVERGED_POINTS, Progress


@pytest.mark.parametrize(
    ("losses", "has_diverged"),
    [
        ([math.nan], True),
        ([math.inf], True),
        ([10.3] * DIVERGED_POINTS, True),
        ([10.3] * (DIVERGED_POINTS - 1), False),
        ([12.0, 12.0, 9.0] * 10, False),
    ],
)
def test_a_trial_diverges_with_its_last_loss_or_not_at_all(losses, has_diverged):
    progress = Progress(start_loss=9.2)
    *earlier, last = [progress.is_diverging(loss) for loss in losses]
    assert not any(earlier) and last is has_diverged


def test_a_loss_that_does_not_measure_what_the_start_did_is_not_compared_with_it():
    progress = Progress(start_loss=-200.0)
    assert not any(progress.is_diverging(0.0, is_like_start=False) for _ in range(100))
    assert progress.is_diverging(math.nan, is_like_start=False)


def test_every_second_is_charged_once():
    progress = Progress(charged_at=0.0)
    for account in ("other", "training", "evaluation", "checkpoint", "compile", "noise"):
        progress.charge(account)
    names = [name for name in vars(progress) if name.startswith("seconds_")]
    parts = sum(getattr(progress, name) for name in names if name != "seconds_total")
    assert len(names) == 6 and 0 < parts < progress.seconds_total  # the rest is other
