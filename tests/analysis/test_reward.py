"""Rewards before and after training, paired by seed."""

import pytest
from scipy.stats import ttest_rel

from sweep.analysis.frames import find_gains, load_sweep
from tests.analysis.fake_sweeps import write_fake_sweep

START = {0: -0.05, 1: -0.06, 2: -0.04}


def written(folder, seeds, **change):
    write_fake_sweep(
        folder,
        experiment="grpo-words",
        batches=[16, 32],
        seeds=seeds,
        data="synthetic",
        change=lambda row: {"initial_valid_loss": START[row.seed], **change},
    )
    return load_sweep(folder)


def test_gains_are_paired_by_seed(tmp_path):
    sweep = written(tmp_path / "s", 3)
    gains = find_gains(sweep)
    assert [gain["batch_size"] for gain in gains] == [16, 32]
    for gain in gains:
        assert gain["start"] == {seed: -loss for seed, loss in START.items()}
        test = ttest_rel([gain["end"][s] for s in range(3)], [gain["start"][s] for s in range(3)])
        low, high = test.confidence_interval(0.95)
        assert gain["difference"].low == pytest.approx(low, rel=1e-9)
        assert gain["difference"].high == pytest.approx(high, rel=1e-9)


def test_one_seed_has_no_interval_and_an_older_result_no_gain(tmp_path):
    (first, _) = find_gains(written(tmp_path / "one", 1))
    assert first["difference"] is None and set(first["end"]) == {0}
    older = written(tmp_path / "older", 3, initial_valid_loss=None)
    assert find_gains(older) == []
