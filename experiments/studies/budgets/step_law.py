"""How fast does the best batch size grow in Step Law's released trainings, and what do rules cost?

    python experiments/studies/budgets/step_law.py dense_lr_bs_loss.csv

The table (https://github.com/step-law/steplaw, data/dense_lr_bs_loss.csv) has no licence, so it is
read from a file. The loss of a batch size is the lowest point over its rates. Its fit over batch
sizes is a parabola near the least loss, or this project's class of curves. The second table has the
loss that three choices give up at the largest budget of a model, interpolated between batch sizes:
the line through the two smallest budgets, the best batch size of the second one, and Step Law. The
results are in docs/log/2026-11-larger-runs.md.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from sweep.analysis.law import LEAST_BUDGETS, Law, Optimum, fit_law
from sweep.analysis.published_laws import STEP_LAW, Scale
from sweep.analysis.tables import Estimate
from sweep.decision.curves import Floats, Points, possible_curves
from sweep.decision.rates import rate_points

LOSS = "smooth loss"
NOISE = 0.002  # standard deviation of a loss, for the fits over rates and batch sizes
LEAST_POINTS = 3
NEAR = 0.03  # nats above the least loss, within which a parabola is fitted
SEQUENCE = 2048  # tokens
Budgets = Mapping[tuple[float, float], tuple[Floats, Floats]]  # by model size and tokens
Lowest = Callable[[Floats, Floats], float]  # log batch sizes and losses to a log batch size


def losses_by_batch_size(trainings: pd.DataFrame) -> tuple[Floats, Floats]:
    """Return the log batch sizes of one budget and model, and their losses at the best rates.

    Batch sizes to whose rates no curve fits are left out.
    """
    log_sizes = []
    losses = []
    for size, of_size in trainings.groupby("bs"):
        tried = {rate: {0: loss} for rate, loss in zip(of_size["lr"], of_size[LOSS], strict=True)}
        loss = _lowest(rate_points(tried).curve)[1]
        if np.isfinite(loss):
            log_sizes.append(math.log(int(str(size))))
            losses.append(loss)
    return np.array(log_sizes), np.array(losses)


def _lowest(points: Points) -> tuple[float, float]:
    """Return the lowest point of the curve that fits best, and its loss; NaN without a fit."""
    curves = possible_curves(
        Points(
            positions=points.positions[None],
            losses=points.losses[None],
            ends=points.ends[None],
            seeds=points.seeds[None],
        ),
        np.array([NOISE**2]),
    )
    return float(curves.optimum[0]), float(curves.at_best(curves.fit.level)[0])


def parabola(within: float) -> Lowest:
    """Return the vertex of a parabola through the batch sizes so close to the least loss."""

    def lowest(log_sizes: Floats, losses: Floats) -> float:
        best = int(losses.argmin())
        is_near = losses <= losses[best] + within
        if is_near.sum() < LEAST_POINTS:
            is_near = np.abs(np.arange(len(losses)) - best) <= LEAST_POINTS - 1
        square, linear, _ = np.polyfit(log_sizes[is_near], losses[is_near], 2)
        return float(-linear / (2 * square))

    return lowest


def own_class(log_sizes: Floats, losses: Floats) -> float:
    """Return the lowest point of this project's curves, near the best batch size."""
    tried = {float(np.exp(x)): {0: loss} for x, loss in zip(log_sizes, losses, strict=True)}
    return _lowest(rate_points(tried).curve)[0]


def fit_with_models(budgets: Budgets, lowest: Lowest) -> tuple[Law, Law]:
    """Return the laws of the best batch size with and without a term in model sizes.

    All points count the same, because the table has one seed and no errors.
    """
    optima = []
    for (model, tokens), of_budget in budgets.items():
        size = math.exp(lowest(*of_budget))
        optima.append(Optimum(tokens, size, low=size, high=size, parameters=model))
    return fit_law(optima), fit_law([replace(optimum, parameters=None) for optimum in optima])


def describe(estimate: Estimate | None) -> str:
    """Write an estimate with its 95 % interval."""
    assert estimate is not None
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def print_regrets(budgets: Budgets) -> None:
    """Print what three choices give up at the largest budget of each model with three budgets.

    Args:
        budgets: log batch sizes and losses by model size and tokens.
    """
    lowest = parabola(NEAR)
    print("| N | tokens | line | kept | Step Law |")
    print("| --: | :-- | --: | --: | --: |")
    for model in dict.fromkeys(model for model, _ in budgets):
        tokens = sorted(count for of_model, count in budgets if of_model == model)
        if len(tokens) < LEAST_BUDGETS:
            continue
        first, second, last = tokens[0], tokens[1], tokens[-1]
        at_first, at_second = (lowest(*budgets[model, count]) for count in (first, second))
        exponent = (at_second - at_first) / math.log(second / first)
        in_tokens = STEP_LAW.batch_size(Scale(model, last))
        choices = (
            at_second + exponent * math.log(last / second),
            at_second,
            math.log(in_tokens / SEQUENCE),
        )
        log_sizes, losses = budgets[model, last]
        assert log_sizes.min() < min(choices) and max(choices) < log_sizes.max()
        regrets = [np.interp(choice, log_sizes, losses) - losses.min() for choice in choices]
        cells = " | ".join(f"{regret:.4f}" for regret in regrets)
        small = " and ".join(f"{count / 1e9:.3g}" for count in (first, second))
        print(f"| {model / 1e6:.0f}M | {small} → {last / 1e9:.3g} billion | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    table = pd.read_csv(parser.parse_args().file)
    budgets = {}
    for model, of_model in table.groupby("N"):
        for tokens, trainings in of_model.groupby("D"):
            budgets[float(str(model)), float(str(tokens))] = losses_by_batch_size(trainings)

    print("| fit over batch sizes | D, with N | N | D, without N |")
    print("| :-- | --: | --: | --: |")
    fits = {"parabola, within 0.03 of the least": parabola(NEAR), "own class": own_class}
    for name, lowest in fits.items():
        with_models, without = fit_with_models(budgets, lowest)
        cells = with_models.exponent, with_models.exponent_of_parameters, without.exponent
        print(f"| {name} | {' | '.join(map(describe, cells))} |")
    print()
    print_regrets(budgets)


if __name__ == "__main__":
    main()
