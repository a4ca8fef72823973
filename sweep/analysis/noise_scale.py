"""The gradient noise scale, from the measurements of `--noise`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from sweep.analysis.tables import Estimate, SweepTables, final_trials

LEAST_RECORDS = 4  # in half of a training
RESAMPLES = 1000
TAILS = (0.025, 0.975)
CELL = ["label", "batch_size"]


@dataclass(frozen=True)
class NoiseScale:
    """B_simple over some steps; each number with its 95 % interval."""

    value: Estimate | None  # sequences; None is unresolved: the interval of square contains 0
    trace: Estimate  # tr Σ of the gradient of one sequence
    square: Estimate  # |G|²; may be negative, because it is not clamped
    records: int


def noise_scale(traces: Sequence[float], squares: Sequence[float]) -> NoiseScale:
    """Average tr Σ̂ and Ĝ² of four or more records, in order, separately; then divide.

    Intervals are those of a bootstrap of moving blocks of ⌊√n⌋ records that wrap round at the end
    (Politis & Romano 1992), widened by t/1.96·√(m/(m−1)), t with m − 1 degrees of freedom, for the
    m blocks.
    """
    values = np.array([traces, squares], float).T  # (records, 2)
    length = math.isqrt(len(values))
    blocks = len(values) // length
    wrapped = np.concatenate([values, values[: length - 1]])
    windows = np.lib.stride_tricks.sliding_window_view(wrapped, length, axis=0).mean(-1)
    rng = np.random.default_rng(0)
    starts = rng.integers(len(values), size=(RESAMPLES, blocks))
    means = windows[starts].mean(1)  # (resamples, 2)

    quantile = stdtrit(blocks - 1, TAILS[1])
    normal_quantile = stdtrit(math.inf, TAILS[1])
    widening = float(quantile / normal_quantile)
    widening *= math.sqrt(blocks / (blocks - 1))

    mean = values.mean(0)
    low, high = mean + widening * (np.quantile(means, TAILS, axis=0) - mean)
    trace = Estimate(float(mean[0]), float(low[0]), float(high[0]))
    square = Estimate(float(mean[1]), float(low[1]), float(high[1]))
    if square.low <= 0:
        return NoiseScale(None, trace, square, len(values))

    value = trace.value / square.value
    ratios = np.full(len(means), np.inf)
    np.divide(means[:, 0], means[:, 1], out=ratios, where=means[:, 1] > 0)
    low, high = np.quantile(ratios, TAILS, method="nearest").tolist()
    interval = Estimate(
        value=value,
        low=value * (low / value) ** widening,
        high=value * (high / value) ** widening,
    )
    return NoiseScale(interval, trace, square, len(values))


def noise_scales(sweep: SweepTables) -> Iterator[dict[str, Any]]:
    """Yield each cell's noise scale over each half of training, all seeds together."""
    names = {"noise/trace": "trace", "noise/square": "square"}
    if not set(names) <= set(sweep.curves):
        return
    trials = final_trials(sweep.trials)[["id", "seed", *CELL]]
    curves = sweep.curves.rename(columns=names)
    measured = curves[["id", "tokens", "trace", "square"]].dropna()
    measured = measured.astype({"id": object}).merge(trials, on="id")
    measured = measured.sort_values(["seed", "tokens"])

    for cell, rows in measured.groupby(CELL):
        cell_columns = dict(zip(CELL, cell, strict=True))
        halves = pd.cut(rows["tokens"], 2, labels=False)
        for half, part in rows.groupby(halves):
            if len(part) < LEAST_RECORDS:
                continue
            scale = noise_scale(part["trace"].to_list(), part["square"].to_list())
            yield {**cell_columns, "is_late": half == 1, "scale": scale}
