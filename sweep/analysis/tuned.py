"""What the tuning trials of a sweep say of the best rate at each batch size."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sweep.analysis.frames import Sweep
from sweep.analysis.optimum import LearningRateOptimum, learning_rate_optimum


@dataclass(frozen=True, eq=False)
class TunedRate:
    """The tuning trials of one batch size that say what its best rate is.

    Those at the tokens of its reports, or at fewer; of several dimensions those with the β2 and
    weight decay that won.
    """

    batch_size: int
    # ascending in rate: learning_rate, state, and loss (inf: diverged; NaN: pruned), or, with a
    # target, the logarithm of the tokens that it took (inf: not reached)
    trials: pd.DataFrame
    optimum: LearningRateOptimum
    is_full: bool  # at the tokens of the reports
    tried: int  # tuning trials of this batch size in all
    failed: int  # of them, for reasons that say nothing of their rate
    has_other_dimensions: bool  # β2 or weight decay were tuned too


def tuned_rates(sweep: Sweep, sigma: float | None, degrees: int) -> list[TunedRate]:
    """Return what was tuned, by batch size; nothing where no rate was.

    A trial that was pruned on the way bounds nothing: its loss at the end is not known.

    Args:
        sweep: as `load_sweep` gives it.
        sigma: standard deviation over seeds of a loss, or of log tokens; None: not known.
        degrees: with which it was estimated.
    """
    trials, has_target = sweep.trials, sweep.plan.settings.target is not None
    tuned = trials[(trials["stage"] == "tune") & (trials["policy"] == "tuned")]
    reports = trials[(trials["stage"] == "report") & (trials["policy"] == "tuned")]
    found = []
    for batch, group in tuned.groupby("batch_size"):
        own = reports[reports["batch_size"] == batch]
        most = int(group["tokens"].max())
        table = _table(_comparable(group, own, has_target), has_target)
        known = table.dropna(subset=["loss"])
        found.append(
            TunedRate(
                int(str(batch)),
                table,
                learning_rate_optimum(
                    known["learning_rate"].to_list(),
                    known["loss"].to_list(),
                    sigma,
                    degrees or np.inf,
                ),
                has_target or own.empty or most >= int(own["tokens"].max()),
                len(group),
                int(((group["state"] == "FAILED") & (group["cause"] != "diverged")).sum()),
                bool(group[["beta2", "weight_decay"]].nunique().max() > 1),
            )
        )
    return found


def _comparable(group: pd.DataFrame, reports: pd.DataFrame, has_target: bool) -> pd.DataFrame:
    """Return the trials that differ in their rate alone, and ended in a way that tells of it."""
    is_lost = (group["state"] == "FAILED") & (group["cause"] != "diverged")
    ended = group[group["state"].isin(["COMPLETE", "PRUNED", "FAILED"]) & ~is_lost]
    if not has_target:  # a rate that diverges early would have later
        is_longest = ended["tokens"] == group["tokens"].max()
        ended = ended[is_longest | (ended["cause"] == "diverged")]
    winners = reports if len(reports) else ended[ended["state"] == "COMPLETE"]
    for name in ("beta2", "weight_decay"):
        if len(winners) and ended[name].nunique() > 1:
            best = winners["final_valid_loss"].astype(float).fillna(np.inf).to_numpy().argmin()
            ended = ended[ended[name] == winners[name].iloc[int(best)]]
    return ended


def _table(ended: pd.DataFrame, has_target: bool) -> pd.DataFrame:
    loss = ended["final_valid_loss"].astype(float)
    loss = loss.where(ended["state"] != "FAILED", np.inf)
    if has_target:
        loss = ended["tokens_to_target"].astype(float).map(np.log).fillna(np.inf)
    table = pd.DataFrame(
        {
            "learning_rate": ended["learning_rate"].astype(float),
            "loss": loss,
            "state": ended["state"],
        }
    )
    table = table.sort_values(["learning_rate", "loss"], kind="stable")
    return table.drop_duplicates("learning_rate")
