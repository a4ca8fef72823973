"""Divergence and accounts of time."""

import math

from sweep.training.progress import DIVERGED_POINTS, Clock, Progress


def test_a_loss_that_is_not_finite_has_diverged():
    assert Progress(start_loss=9.2).is_diverging(math.nan)
    assert Progress(start_loss=9.2).is_diverging(math.inf)


def test_a_loss_above_its_start_for_long_enough_has_diverged():
    progress = Progress(start_loss=9.2)
    judged = [progress.is_diverging(10.3) for _ in range(DIVERGED_POINTS)]
    assert judged == [False] * (DIVERGED_POINTS - 1) + [True]


def test_a_spike_that_passes_is_no_divergence():
    progress = Progress(start_loss=9.2)
    for loss in [12.0, 12.0, 9.0] * 10:
        assert not progress.is_diverging(loss)


def test_a_loss_that_is_no_measure_of_the_start_is_not_held_against_it():
    progress = Progress(start_loss=-200.0)
    assert not any(progress.is_diverging(0.0, is_like_start=False) for _ in range(100))
    assert progress.is_diverging(math.nan, is_like_start=False)


def test_every_second_is_charged_once():
    progress = Progress()
    clock = Clock(progress, start=0.0)
    for account in ("other", "training", "evaluation", "checkpoint", "compile"):
        clock.charge(account)
    parts = (
        progress.seconds_training
        + progress.seconds_evaluation
        + progress.seconds_checkpoint
        + progress.seconds_noise
        + progress.seconds_compile
    )
    assert 0 < parts < progress.seconds_total  # the rest is other
