"""The tuning trials of each batch size: which rates were tried, and how they did."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from sweep.analysis.tables import to_numbers
from sweep.decision.curves import RateBounds, RatePoints, best_log_rates, bound_rates, rate_points
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
        return bound_rates(self.points, np.zeros(()), np.zeros(()))

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
    is_tuning = rows["stage"] == "tune"
    has_stage = bool(is_tuning.any())
    trials = rows[is_tuning] if has_stage else rows[~rows["is_out_of_memory"]]
    counts = trials.groupby("batch_size")["learning_rate"].nunique()
    if not counts.max() > 1:
        return ()
    if not is_own:
        is_tried = ~trials["is_failed"] | trials["has_diverged"]
        counts = trials[is_tried].groupby("batch_size")["learning_rate"].nunique()
        trials = trials[trials["batch_size"].isin(counts.index[counts > 1])]

    rates = []
    for batch_size, group in trials.groupby("batch_size"):
        finals = rows[~is_tuning & (rows["batch_size"] == batch_size)]
        is_without_value = group["is_failed"] & ~group["has_diverged"]
        is_without_value &= group["state"] != State.PRUNED
        ended = group[~is_without_value]
        most = group["token_budget"].max()
        if has_stage:
            is_told = tells_of_budget(ended["token_budget"], most, ended["has_diverged"])
            ended = ended[is_told | ended["token_budget"].isna()]

        winners = finals if len(finals) else ended[~ended["is_failed"]]
        if has_stage and is_own and len(winners):
            losses = winners["value"].fillna(math.inf).to_numpy()
            best = winners.iloc[losses.argmin()]
            for name in ("adam_beta2", "weight_decay"):
                if group[name].nunique() > 1:  # tuned too
                    ended = ended[ended[name] == best[name]]

        value = ended["value"].mask(ended["has_diverged"], math.inf)
        table = ended[["learning_rate", "state"]].assign(value=value, seed=0)
        if has_stage:
            table["seed"] = to_numbers(ended["seed"]).fillna(0).astype(int)

        groups = table.groupby(["learning_rate", "seed"])["value"]
        means = groups.agg(pd.Series.mean, skipna=False).reset_index()
        tried: dict[float, dict[int, float]] = {}
        for rate, seed, mean in means.itertuples(index=False):
            tried.setdefault(float(rate), {})[int(seed)] = float(mean)
        rates.append(
            TunedRate(
                batch_size=int(group["batch_size"].iloc[0]),
                trials=table.sort_values(["learning_rate", "seed"], ignore_index=True),
                points=rate_points(tried),
                is_full=not (has_stage and finals["token_budget"].max() > most),
                tried=len(group),
            )
        )
    return tuple(rates)
