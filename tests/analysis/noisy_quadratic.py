"""Losses and steps to a target on the noisy quadratic model, in closed form (Zhang et al. 2019).

E w0² = 1, and h_i = c_i = 1/i unless other powers are given. Per coordinate the expected loss after
k steps is (1−ηh)^2k·h/2 + (1−(1−ηh)^2k)·ηc/(2B(2−ηh)).
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize_scalar

TARGET, DIMENSIONS = 0.01, 1000
COARSE_RATES = np.geomspace(1e-3, 1.999, 24)


def quadratic_loss(
    steps: np.ndarray,
    batch_size: int,
    rates: np.ndarray,
    dimensions: int = DIMENSIONS,
    curvature_power: float = 1.0,
    noise_power: float = 1.0,
    noise: float = 1.0,
) -> np.ndarray:
    """Return the expected loss of each rate after its own number of steps, whole or not."""
    index = np.arange(1.0, dimensions + 1)
    curvature = 1 / index**curvature_power
    rate = np.asarray(rates, float)[:, None]
    variance = noise / index**noise_power
    floor = rate * variance / (2 * batch_size * (2 - rate * curvature))
    with np.errstate(divide="ignore"):
        shrink = 2 * np.log(np.abs(1 - rate * curvature))
    decay = np.exp(np.asarray(steps, float)[:, None] * shrink)
    return (floor + decay * (curvature / 2 - floor)).sum(-1)


def quadratic_crossing(
    batch_size: int, rates: Sequence[float], target: float = TARGET, dimensions: int = DIMENSIONS
) -> np.ndarray:
    """Return where each constant rate below 2 crosses the target, infinite if never."""
    rate = np.asarray(rates, float)
    low, high = np.ones_like(rate), np.full_like(rate, 1e7)
    reaches = quadratic_loss(high, batch_size, rate, dimensions) <= target
    for _ in range(60):
        middle = np.sqrt(low * high)
        is_below = quadratic_loss(middle, batch_size, rate, dimensions) <= target
        low, high = np.where(is_below, low, middle), np.where(is_below, middle, high)
    return np.where(reaches, high, math.inf)


def quadratic_steps(
    batch_size: int, rates: Sequence[float], target: float = TARGET, dimensions: int = DIMENSIONS
) -> np.ndarray:
    """Return the whole steps that each constant rate takes, infinite if it never gets there."""
    return np.ceil(quadratic_crossing(batch_size, rates, target, dimensions))


def best_quadratic_steps(batch_size: int, target: float = TARGET) -> tuple[int, float]:
    """Return the least steps over constant rates, and the rate: a grid, then Brent's method."""
    coarse = quadratic_crossing(batch_size, COARSE_RATES, target)
    best = int(coarse.argmin())
    ends = COARSE_RATES[max(best - 1, 0)], COARSE_RATES[min(best + 1, len(COARSE_RATES) - 1)]
    optimum = minimize_scalar(
        lambda log_rate: -1 / quadratic_crossing(batch_size, [math.exp(log_rate)], target)[0],
        bounds=np.log(ends),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return math.ceil(-1 / optimum.fun), math.exp(optimum.x)


def best_quadratic_loss(sequences: float, batch_size: int) -> float:
    """Return the least loss over constant rates after so many sequences."""
    steps = np.array([sequences / batch_size])

    def loss(log_rate: float) -> float:
        return float(quadratic_loss(steps, batch_size, np.exp([log_rate]))[0])

    grid = np.log(COARSE_RATES)
    best = int(np.argmin([loss(log_rate) for log_rate in grid]))
    ends = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return float(minimize_scalar(loss, bounds=ends, method="bounded").fun)
