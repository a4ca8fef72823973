"""What the tuning trials of a sweep say of the best rate at each batch size."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sweep.analysis.frames import Sweep
from sweep.analysis.optimum import LearningRateOptimum, learning_rate_optimum


@dataclass(frozen=True, eq=False)
class TunedRate:
    """The tuning trials of one batch size at the tokens of its reports, or at fewer."""

    batch_size: int
    # ascending in rate: learning_rate, state, and loss (inf: diverged or pruned), or, with a
    # target, the logarithm of the tokens that it took (inf: not reached)
    trials: pd.DataFrame
    optimum: LearningRateOptimum
    tokens: int
    is_full: bool  # at the tokens of the reports
    tried: int  # tuning trials of this batch size in all
    has_other_dimensions: bool  # β2 or weight decay were tuned too


def tuned_rates(sweep: Sweep, sigma: float | None, degrees: int) -> list[TunedRate]:
    """Return what was tuned, by batch size; nothing where no rate was.

    A trial that was pruned counts as worse than those that went on: it was, at equal tokens.

    Args:
        sweep: as `load_sweep` gives it.
        sigma: standard deviation over seeds of a loss, or of log tokens; None: not known.
        degrees: with which it was estimated.
    """
    trials, has_target = sweep.trials, sweep.plan.settings.target is not None
    tuned = trials[(trials["stage"] == "tune") & (trials["policy"] == "tuned")]
    reports = trials[(trials["stage"] == "report") & (trials["policy"] == "tuned")]
    planned = reports.groupby("batch_size")["tokens"].max()
    found = []
    for batch, group in tuned.groupby("batch_size"):
        most = int(group["tokens"].max())
        ended = group[group["state"].isin(["COMPLETE", "PRUNED", "FAILED"])]
        loss = ended["tokens_to_target"].astype(float).map(np.log)
        if not has_target:
            ended = ended[(ended["tokens"] == most) | (ended["cause"] == "diverged")]
            loss = ended["final_valid_loss"].astype(float)
        table = pd.DataFrame(
            {
                "learning_rate": ended["learning_rate"].astype(float),
                "loss": loss.where(np.isfinite(loss), np.inf),
                "state": ended["state"],
            }
        )
        table = table.sort_values("learning_rate").drop_duplicates("learning_rate")
        optimum = learning_rate_optimum(
            table["learning_rate"].to_list(), table["loss"].to_list(), sigma, degrees or np.inf
        )
        is_full = has_target or most >= int(planned.get(batch, most))
        others = group[["beta2", "weight_decay"]].nunique().max() > 1
        found.append(
            TunedRate(int(str(batch)), table, optimum, most, is_full, len(group), bool(others))
        )
    return found
