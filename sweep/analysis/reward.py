"""Rewards of the same held-out prompts before and after training (GRPO)."""

from dataclasses import dataclass

from sweep.analysis.comparison import CELL_KEYS, report_trials
from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.statistics import Estimate, compare_pairs


@dataclass(frozen=True)
class Gain:
    """Mean rewards of the milestone prompts, of one batch size under one policy and rate."""

    label: str
    batch_size: int
    learning_rate: float
    start: dict[int, float]  # by seed
    end: dict[int, float]
    difference: Estimate | None  # paired by seed; None below two seeds


def find_gains(sweep: Sweep) -> tuple[Gain, ...]:
    """Compare the start of each complete trial with its end, cell by cell, in the plan's order.

    Both use the same prompts and random numbers, so the interval (t) is that of paired differences.
    """
    last = {trial: float(values[-1]) for trial, _, values in curves_by_trial(sweep, "valid/loss")}
    trials = report_trials(sweep.trials)
    trials["end"] = trials["id"].map(last).astype(float)
    is_known = trials["initial_valid_loss"].notna() & trials["end"].notna()
    done = trials[(trials["state"] == "COMPLETE") & is_known]
    gains = []
    for _, rows in done.groupby(CELL_KEYS, sort=False):
        label, batch_size, rate = rows.iloc[0][CELL_KEYS]
        seeds = rows["seed"].astype(int)
        start, end = (
            dict(zip(seeds, -rows[name].astype(float), strict=True))
            for name in ("initial_valid_loss", "end")
        )
        pairs = compare_pairs({0: start, 1: end}).pairs  # before and after
        difference = pairs[0].difference if pairs else None
        gains.append(Gain(str(label), int(batch_size), float(rate), start, end, difference))
    return tuple(gains)
