"""The tuning trials of each batch size: which rates were tried, and how they did."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from sweep.analysis.tables import to_numbers
from sweep.decision.rates import RateBounds, RatePoints, best_log_rates, bound_rates, rate_points
from sweep.decision.trials import tells_of_budget
from sweep.trial.status import State


@dataclass(frozen=True, eq=False)
class TunedRate:
    """The rates of one batch size."""

    batch_size: int
    # learning_rate, seed, state and value (inf: diverged, target not reached; NaN: pruned), by rate
    trials: pd.DataFrame
    points: RatePoints  # those next to the best rate
    is_full: bool  # whether the trials had as many tokens as the final ones
    tried: int  # trials of this batch size in all

    @property
    def is_inside(self) -> bool:
        """Whether the best rate has worse ones on both sides; a diverged trial is worse."""
        return bool(np.isfinite(self.points.ends).all())

    def covers(self, rate: float) -> bool:
        """Return True if a rate lies among those tried, so that the curve says what it costs."""
        tried = self.trials["learning_rate"]
        return bool(tried.min() * (1 - 1e-9) <= rate <= tried.max() * (1 + 1e-9))

    @property
    def best(self) -> float | None:
        """The measured rate with the least loss, the lowest of equal ones; None without a loss."""
        losses = np.nan_to_num(self.points.losses, nan=math.inf)
        if not np.isfinite(losses).any():
            return None
        return float(np.exp(self.points.log_rates[losses.argmin()]))

    @cached_property
    def fit(self) -> RateBounds:
        """The curve that fits best, with NaN if there is none; its bounds do not count."""
        return bound_rates(self.points, np.zeros(()), np.zeros(()), compared=1)

    @property
    def optimum(self) -> float | None:
        """The lowest point of the curve that fits best, below rates that diverged; or None."""
        if not np.isfinite(self.fit.optimum):
            return None
        return float(np.exp(best_log_rates(self.points)))


def tuned_rates(rows: pd.DataFrame, is_own: bool = True) -> tuple[TunedRate, ...]:
    """Return the rates of each batch size; nothing if at most one rate was tried at each.

    Of a table that is not ours, batch sizes with one rate are left out: theirs may not be tuned.
    """
    finals = rows[rows["stage"] != "tune"]
    rates = []
    for batch_size, trials in _trials_of_rates(rows, is_own).groupby("batch_size"):
        finals_of_size = finals[finals["batch_size"] == batch_size]
        rates.append(_rate_of_size(trials, finals_of_size, is_own))
    return tuple(rates)


def _trials_of_rates(rows: pd.DataFrame, is_own: bool) -> pd.DataFrame:
    """Return the trials that tried several rates: those of tuning, if the table tells them."""
    is_tuning = rows["stage"] == "tune"
    trials = rows[is_tuning] if is_tuning.any() else rows[~rows["is_out_of_memory"]]
    counts = trials.groupby("batch_size")["learning_rate"].nunique()
    if not counts.max() > 1:
        return trials.iloc[:0]
    if is_own:
        return trials

    is_tried = ~trials["is_failed"] | trials["has_diverged"]
    counts = trials[is_tried].groupby("batch_size")["learning_rate"].nunique()
    return trials[trials["batch_size"].isin(counts.index[counts > 1])]


def _rate_of_size(trials: pd.DataFrame, finals: pd.DataFrame, is_own: bool) -> TunedRate:
    """Return the rates of one batch size, from the trials that tried them and the final ones."""
    is_without_value = trials["is_failed"] & ~trials["has_diverged"]
    is_without_value &= trials["state"] != State.PRUNED
    ended = trials[~is_without_value]
    budget = trials["planned_tokens"].max()

    is_early = False
    seeds: pd.Series | int = 0
    if (trials["stage"] == "tune").all():
        ended = _trials_of_budget(ended, budget)
        if is_own:
            tuned = [name for name in ("adam_beta2", "weight_decay") if trials[name].nunique() > 1]
            ended = _trials_like_best(ended, finals, tuned)
        is_early = bool(finals["planned_tokens"].max() > budget)
        seeds = to_numbers(ended["seed"]).fillna(0).astype(int)

    value = ended["value"].mask(ended["has_diverged"], math.inf)
    table = ended[["learning_rate", "state"]].assign(value=value, seed=seeds)
    return TunedRate(
        batch_size=int(trials["batch_size"].iloc[0]),
        trials=table.sort_values(["learning_rate", "seed"], ignore_index=True),
        points=rate_points(_values_by_rate(table)),
        is_full=not is_early,
        tried=len(trials),
    )


def _trials_of_budget(ended: pd.DataFrame, budget: float) -> pd.DataFrame:
    """Keep the trials that tell how their rates do at a budget; an unknown one may be it."""
    planned = ended["planned_tokens"]
    is_of_budget: pd.Series = tells_of_budget(planned, budget, ended["has_diverged"])
    return ended[is_of_budget | planned.isna()]


def _trials_like_best(ended: pd.DataFrame, finals: pd.DataFrame, tuned: list[str]) -> pd.DataFrame:
    """Keep the trials with the values that the best trial has in other tuned columns."""
    winners = finals if len(finals) else ended[~ended["is_failed"]]
    if winners.empty:
        return ended
    values = winners["value"].fillna(math.inf).to_numpy()
    best = winners.iloc[values.argmin()]
    for name in tuned:
        ended = ended[ended[name] == best[name]]
    return ended


def _values_by_rate(table: pd.DataFrame) -> dict[float, dict[int, float]]:
    """Return the mean value of each rate and seed."""
    groups = table.groupby(["learning_rate", "seed"])["value"]
    means = groups.agg(pd.Series.mean, skipna=False).reset_index()
    values: dict[float, dict[int, float]] = {}
    for rate, seed, mean in means.itertuples(index=False):
        values.setdefault(float(rate), {})[int(seed)] = float(mean)
    return values
