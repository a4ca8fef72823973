"""Batch sizes side by side, and what the measured points recommend, each by a stated rule.

A cell is one batch size under one policy and rate; its reporting seeds are its sample. Tuning
trials take no part. Nothing here is a test: differences are described, not declared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

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
    *("planned", "complete", "diverged", "failed", "pruned", "unfinished", "seeds"),
    *MEANS,
    *("loss_sd", "loss_min", "loss_max", "seconds_min", "seconds_max", "train_valid_gap"),
    *("peak_memory_bytes", "is_comparable"),
)


@dataclass(frozen=True)
class Recommendation:
    """What one rule picks from the cells."""

    title: str
    rule: str  # one sentence
    cells: tuple[int, ...]  # index of the cells; several where they tie, none without data


def short(number: float) -> str:
    """Write a number shortly, but so that reading it back gives the same: 3e-4, 0.01, 32."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(float(number))
    scientific = f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e+")
    is_shorter = 0 < abs(number) < 0.01 and float(scientific) == number
    return scientific if is_shorter else text


def policy_label(policy: str, learning_rate: float) -> str:
    """Name a policy so that two fixed rates in one sweep stay apart: `fixed 3e-4`."""
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
        Counts (planned, complete, diverged, failed for another cause, pruned, unfinished), the
        complete seeds, and over the complete trials: the mean of each measure, `loss_sd` (n-1;
        NaN below two), `loss_min` and `loss_max` of the final validation loss, `seconds_min` and
        `seconds_max` of the total time, the largest
        `peak_memory_bytes`, and `train_valid_gap`, final validation minus final training loss.
        `is_comparable`: every planned seed is complete; `is_on_front`: Pareto, among those.
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


def cell_records(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the cells as dicts, in order."""
    return [{str(name): row[name] for name in row} for row in cells.to_dict("records")]


def cell_at(cells: pd.DataFrame, position: int) -> dict[str, Any]:
    """Return one cell as a dict, by its index."""
    return cell_records(cells.loc[[position]])[0]


def _cell(key: dict[Any, Any], group: pd.DataFrame) -> dict[str, Any]:
    state, cause = group["state"], group["cause"]
    complete = group[state == "COMPLETE"]
    diverged = (state == "FAILED") & (cause == "diverged")
    loss = complete["final_valid_loss"].to_numpy(float)
    is_measured = len(loss) > 0 and bool(np.isfinite(loss).all())
    first = group.iloc[0]
    means = {name: _mean(complete[name]) for name in MEANS}
    return {
        **key,
        "policy": first["policy"],
        # A diverged trial records how far it came; the others, the whole.
        **{name: int(group[name].max()) for name in ("tokens", "steps", "warmup_steps")},
        "planned": len(group),
        "complete": len(complete),
        "diverged": int(diverged.sum()),
        "failed": int(((state == "FAILED") & ~diverged).sum()),
        "pruned": int((state == "PRUNED").sum()),
        "unfinished": int((~state.isin(["COMPLETE", "FAILED", "PRUNED"])).sum()),
        "seeds": tuple(sorted(int(seed) for seed in complete["seed"])),
        **means,
        "loss_sd": float(np.std(loss, ddof=1)) if is_measured and len(loss) > 1 else np.nan,
        "loss_min": float(loss.min()) if is_measured else np.nan,
        "loss_max": float(loss.max()) if is_measured else np.nan,
        "seconds_min": float(complete["seconds_total"].astype(float).min()),
        "seconds_max": float(complete["seconds_total"].astype(float).max()),
        "train_valid_gap": means["final_valid_loss"] - means["final_train_loss"],
        "peak_memory_bytes": float(complete["peak_memory_bytes"].astype(float).max()),
        # Only towards a target is a report pruned: it is a bound, which is data too.
        "is_comparable": is_measured and bool(state.isin(["COMPLETE", "PRUNED"]).all()),
    }


def _mean(values: pd.Series) -> float:
    """Return the mean, NaN where one value is missing: a mean of fewer would look like all."""
    return float(values.astype(float).mean(skipna=False)) if len(values) else float("nan")


def recommend(
    cells: pd.DataFrame, tolerance: float = BALANCED_TOLERANCE
) -> tuple[Recommendation, ...]:
    """Apply the three rules to the comparable cells; see docs/report.md.

    Args:
        cells: from `compare_batch_sizes`.
        tolerance: of `balanced`, as a fraction of the lowest mean loss.
    """
    usable = cells[cells["is_comparable"]]
    loss, seconds = usable["final_valid_loss"], usable["seconds_total"]
    least = float(loss.min()) if len(usable) else float("nan")
    close = usable[loss <= least + tolerance * abs(least)]
    return (
        Recommendation(
            "best quality",
            "The lowest mean final validation loss among the cells whose planned seeds all "
            "completed.",
            _least(loss),
        ),
        Recommendation(
            "fastest",
            "The least mean total seconds, whatever the loss, among the same cells.",
            _least(seconds),
        ),
        Recommendation(
            "balanced",
            f"The least mean total seconds among the cells whose mean final validation loss is "
            f"within {100 * tolerance:g} % of the lowest.",
            _least(close["seconds_total"]),
        ),
    )


def _least(values: pd.Series) -> tuple[int, ...]:
    """Return the index of the least value: all of them where several are equal."""
    found = values[values == values.min()].index
    return tuple(int(position) for position in found)


def overlapping(cells: pd.DataFrame, position: int, measure: str = "loss") -> list[int]:
    """Return the comparable cells whose range over seeds meets that of the given cell.

    Cells of one seed have no range and are left out. The measure is `loss` or `seconds`.
    """
    least, most = f"{measure}_min", f"{measure}_max"
    own = cell_at(cells, position)
    others = cells[cells["is_comparable"] & (cells["complete"] > 1)]
    meets = (others[least] <= own[most]) & (others[most] >= own[least])
    return [int(other) for other in others[meets].index if other != position]


def not_comparable(cells: pd.DataFrame) -> Iterable[tuple[str, int, str]]:
    """Yield label, batch size and reason of every cell that takes no part in comparisons."""
    for row in cell_records(cells[~cells["is_comparable"]]):
        kinds = ("diverged", "failed", "pruned", "unfinished")
        counts = [f"{row[kind]} {kind}" for kind in kinds if row[kind]]
        reason = ", ".join(counts) or "no final validation loss"
        yield row["label"], row["batch_size"], f"{reason} of {row['planned']} planned"


def is_on_front(losses: Sequence[float], seconds: Sequence[float]) -> list[bool]:
    """Mark the points to which no other is at least equal in both and better in one.

    Only final points may be compared: under a schedule that knows its end, a point of a longer
    trial is not what a shorter one would have reached. Points with NaN are never on the front.
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
