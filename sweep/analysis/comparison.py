"""Cells of a sweep (one batch size under one policy and rate), recommendations, gains of reward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.statistics import Estimate, compare_pairs

BALANCED_TOLERANCE = 0.01  # of the lowest mean loss
SEEDS_FOR_SPREAD = 3  # from which a standard deviation is worth printing
MEANS = (
    *("final_valid_loss", "final_train_loss", "best_valid_loss", "bits_per_byte"),
    *("clipped_step_fraction", "seconds_total", "seconds_compile", "seconds_training"),
    *("seconds_evaluation", "seconds_checkpoint", "seconds_noise", "tokens_per_second", "mfu"),
)
CELL_KEYS = ["label", "batch_size", "learning_rate"]
CELL_COLUMNS = (
    *CELL_KEYS,
    *("policy", "tokens", "steps", "warmup_steps"),
    *("planned", "complete", "diverged", "failed", "pruned", "unfinished"),
    *MEANS,
    *("loss_sd", "loss_min", "loss_max", "seconds_min", "seconds_max", "train_valid_gap"),
    *("peak_memory_bytes", "is_comparable"),
)


@dataclass(frozen=True)
class Recommendation:
    """The cells that one rule picks."""

    title: str
    rule: str  # one sentence
    cells: tuple[int, ...]  # index of the cells; several if they tie, none without data


def short(number: float) -> str:
    """Format a number so that reading it back gives the same: 3e-4, 0.01, 32."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(float(number))
    scientific = f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e+")
    is_shorter = 0 < abs(number) < 0.01 and float(scientific) == number
    return scientific if is_shorter else text


def policy_label(policy: str, learning_rate: float) -> str:
    """Return a policy's name, with the rate if it is fixed: `fixed 3e-4`."""
    return f"fixed {short(learning_rate)}" if policy == "fixed" else policy


def report_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the reporting trials with their policy's label, in the plan's order."""
    chosen = trials[trials["stage"] == "report"].copy()
    pairs = zip(chosen["policy"], chosen["learning_rate"], strict=True)
    chosen["label"] = [policy_label(policy, rate) for policy, rate in pairs]
    return chosen


def compare_batch_sizes(trials: pd.DataFrame) -> pd.DataFrame:
    """Summarise each cell: one row per policy, batch size and rate.

    Returns:
        Counts of trials by state, means over the complete trials, the spread of the final
        validation loss and of the total time, and the largest peak memory. `is_comparable`: every
        planned seed is complete; `is_on_front`: on the Pareto front of these.
    """
    chosen = report_trials(trials)
    groups = chosen.groupby(CELL_KEYS, sort=False)
    rows = [_cell(dict(zip(CELL_KEYS, key, strict=True)), group) for key, group in groups]
    labels = list(dict.fromkeys(chosen["label"]))
    rows.sort(key=lambda row: (labels.index(row["label"]), row["batch_size"]))
    cells = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    if not rows:
        cells = cells.astype(dict.fromkeys(MEANS, float) | {"is_comparable": bool})
    loss = cells["final_valid_loss"].where(cells["is_comparable"])
    front = is_on_front(loss.to_list(), cells["seconds_total"].to_list())
    cells["is_on_front"] = np.array(front, dtype=bool)
    return cells


def _cell(key: dict[Any, Any], group: pd.DataFrame) -> dict[str, Any]:
    state, is_diverged = group["state"], group["cause"] == "diverged"
    complete = group[state == "COMPLETE"]
    # A mean of some of the trials would look like one of all: it is NaN if one value is missing.
    means = {name: float(complete[name].astype(float).mean(skipna=False)) for name in MEANS}
    loss, seconds = complete["final_valid_loss"].astype(float), complete["seconds_total"]
    loss = loss if np.isfinite(loss).all() else loss.iloc[:0]
    return {
        **key,
        "policy": group["policy"].iloc[0],
        # A diverged trial records the steps that it took; the others, those of the plan.
        **{name: int(group[name].max()) for name in ("tokens", "steps", "warmup_steps")},
        "planned": len(group),
        "complete": len(complete),
        "diverged": int(is_diverged.sum()),
        "failed": int(((state == "FAILED") & ~is_diverged).sum()),
        "pruned": int((state == "PRUNED").sum()),
        "unfinished": int((~state.isin(["COMPLETE", "FAILED", "PRUNED"])).sum()),
        **means,
        "loss_sd": loss.std(),
        "loss_min": loss.min(),
        "loss_max": loss.max(),
        "seconds_min": float(seconds.astype(float).min()),
        "seconds_max": float(seconds.astype(float).max()),
        "train_valid_gap": means["final_valid_loss"] - means["final_train_loss"],
        "peak_memory_bytes": float(complete["peak_memory_bytes"].astype(float).max()),
        # A report is pruned only on the way to a target: it is a bound, which is data too.
        "is_comparable": len(loss) > 0 and bool(state.isin(["COMPLETE", "PRUNED"]).all()),
    }


def cell_records(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the cells as dicts, in order."""
    return [{str(name): row[name] for name in row} for row in cells.to_dict("records")]


def recommend(
    cells: pd.DataFrame, tolerance: float = BALANCED_TOLERANCE
) -> tuple[Recommendation, ...]:
    """Apply the three rules to the comparable cells; `tolerance` is relative."""
    usable = cells[cells["is_comparable"]]
    loss, seconds = usable["final_valid_loss"], usable["seconds_total"]
    least = float(loss.min()) if len(usable) else float("nan")
    close = seconds[loss <= least + tolerance * abs(least)]
    rules = {
        "best quality": ("lowest mean final validation loss", loss),
        "fastest": ("least mean total seconds, whatever the loss,", seconds),
        "balanced": (
            f"least mean total seconds within {100 * tolerance:g} % of the lowest mean loss",
            close,
        ),
    }
    among = "among the cells whose planned seeds all completed."
    return tuple(
        Recommendation(
            title, f"The {rule} {among}", tuple(values.index[values == values.min()].tolist())
        )
        for title, (rule, values) in rules.items()
    )


def overlapping(cells: pd.DataFrame, position: int, measure: str = "loss") -> list[int]:
    """Return the comparable cells whose range over seeds overlaps with that of the given cell.

    Cells of one seed have no range and are left out. The measure is `loss` or `seconds`.
    """
    least, most = f"{measure}_min", f"{measure}_max"
    others = cells[cells["is_comparable"] & (cells["complete"] > 1)].drop(position, errors="ignore")
    low, high = cells.loc[position, [least, most]]
    return [int(other) for other in others.index[(others[least] <= high) & (others[most] >= low)]]


def is_on_front(losses: Sequence[float], seconds: Sequence[float]) -> list[bool]:
    """Mark the points to which no other is at least equal in both and better in one.

    Only final points may be compared: under a schedule with a horizon, a point within a longer
    trial is not the result of a shorter one. Points with NaN are never on the front.
    """
    points = list(zip(losses, seconds, strict=True))
    return [
        loss == loss
        and time == time
        and not any(
            other <= loss and faster <= time and (other < loss or faster < time)
            for other, faster in points
        )
        for loss, time in points
    ]


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
