"""Ratios of times that were measured alternately."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def ratio(others: Sequence[float], own: Sequence[float]) -> dict[str, float]:
    """Return the median over rounds of other/own, and its 95 % interval."""
    ratios = np.array(others) / np.array(own)
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {"ratio": float(np.median(ratios)), "low": float(low), "high": float(high)}
