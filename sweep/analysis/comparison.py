"""Cells of a sweep (one batch size under one policy and rate), recommendations, gains of reward."""

from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.statistics import compare_pairs

BALANCED_TOLERANCE = 0.01  # share of the lowest mean loss
SEEDS_FOR_SPREAD = 3  # from which a standard deviation is worth printing
MEANS = (
    *("final_valid_loss", "final_train_loss", "best_valid_loss", "bits_per_byte"),
    *("clipped_step_fraction", "seconds_total", "seconds_compile", "seconds_training"),
    *("seconds_evaluation", "seconds_checkpoint", "seconds_noise", "tokens_per_second", "mfu"),
)
CELL_KEYS = ["label", "batch_size", "learning_rate"]
COUNTS = ["planned", "complete", "diverged", "failed", "pruned", "unfinished"]


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
    reports = trials[trials["stage"] == "report"].copy()
    pairs = zip(reports["policy"], reports["learning_rate"], strict=True)
    reports["label"] = [policy_label(policy, rate) for policy, rate in pairs]
    return reports


def compare_batch_sizes(trials: pd.DataFrame) -> pd.DataFrame:
    """Summarise each cell: one row per policy, batch size and rate.

    Returns:
        Counts of trials by state, means over the complete trials, the spread of the final
        validation loss and of the total time, and the largest peak memory. `is_comparable`: every
        planned seed is complete; `is_on_front`: on the Pareto front of these in loss and time.
    """
    reports = report_trials(trials)
    state, is_diverged = reports["state"], reports["cause"] == "diverged"
    reports = reports.assign(
        planned=1,
        complete=state == "COMPLETE",
        diverged=is_diverged,
        failed=(state == "FAILED") & ~is_diverged,
        pruned=state == "PRUNED",
        unfinished=~state.isin(["COMPLETE", "FAILED", "PRUNED"]),
    )
    groups = reports.groupby(CELL_KEYS, sort=False)
    done = reports[reports["complete"]].astype(dict.fromkeys(MEANS, float)).groupby(CELL_KEYS)
    # A mean of some of the trials would look like one of all: it is NaN if one value is missing.
    means = done[list(MEANS)].agg(pd.Series.mean, skipna=False)
    loss, seconds = done["final_valid_loss"], done["seconds_total"]
    spread = {
        "loss_sd": loss.agg(pd.Series.std, skipna=False),
        "loss_min": loss.agg(pd.Series.min, skipna=False),
        "loss_max": loss.agg(pd.Series.max, skipna=False),
        "seconds_min": seconds.min(),
        "seconds_max": seconds.max(),
        "peak_memory_bytes": done["peak_memory_bytes"].max(),
    }
    # A diverged trial records the steps that it took; the others, those of the plan.
    planned = groups[["policy", "tokens", "steps", "warmup_steps"]].max()
    parts = [planned, groups[COUNTS].sum(), means, pd.DataFrame(spread)]
    cells = pd.concat(parts, axis=1).reset_index()
    cells["order"] = pd.factorize(cells["label"])[0]
    cells = cells.sort_values(["order", "batch_size"], ignore_index=True)
    cells["train_valid_gap"] = cells["final_valid_loss"] - cells["final_train_loss"]
    # A report is pruned only on the way to a target: it is a bound, which is data too.
    is_whole = cells["complete"] + cells["pruned"] == cells["planned"]
    cells["is_comparable"] = is_whole & np.isfinite(cells["final_valid_loss"])
    losses = cells["final_valid_loss"].where(cells["is_comparable"]).to_numpy()
    times = cells["seconds_total"].to_numpy()
    is_dominated = (losses[:, None] <= losses) & (times[:, None] <= times)
    is_dominated &= (losses[:, None] < losses) | (times[:, None] < times)
    cells["is_on_front"] = ~(np.isnan(losses) | np.isnan(times) | is_dominated.any(axis=0))
    return cells


def cell_records(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the cells as dicts, in order."""
    return [{str(name): row[name] for name in row} for row in cells.to_dict("records")]


def recommend(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Apply three rules to the comparable cells.

    Returns:
        The `title` and the `rule` of each, and the indices of its `cells`: several if they tie,
        none without data.
    """
    usable = cells[cells["is_comparable"]]
    loss, seconds = usable["final_valid_loss"], usable["seconds_total"]
    close = seconds[loss <= loss.min() + BALANCED_TOLERANCE * abs(loss.min())]
    within = f"within {100 * BALANCED_TOLERANCE:g} % of the lowest mean loss"
    rules = [
        ("best quality", "lowest mean final validation loss", loss),
        ("fastest", "least mean total seconds, whatever the loss,", seconds),
        ("balanced", f"least mean total seconds {within}", close),
    ]
    recommendations = []
    for title, rule, values in rules:
        best = list(values.index[values == values.min()])
        sentence = f"The {rule} among the cells whose planned seeds all completed."
        recommendations.append({"title": title, "rule": sentence, "cells": best})
    return recommendations


def overlapping(cells: pd.DataFrame, position: int, measure: str = "loss") -> list[int]:
    """Return the comparable cells whose range over seeds overlaps with that of a cell.

    Cells of one seed have no range and are left out. The measure is `loss` or `seconds`.
    """
    least, most = f"{measure}_min", f"{measure}_max"
    others = cells[cells["is_comparable"] & (cells["complete"] > 1)].drop(position, errors="ignore")
    low, high = cells.loc[position, [least, most]]
    return list(others.index[(others[least] <= high) & (others[most] >= low)])


def find_gains(sweep: Sweep) -> list[dict[str, Any]]:
    """Compare the mean rewards of the milestone prompts before and after training, cell by cell.

    Both use the same prompts and random numbers, so the interval (t) is that of paired differences.

    Returns:
        In the plan's order: label, batch_size, learning_rate, `start` and `end` by seed, and their
        `difference`, an Estimate or None below two seeds.
    """
    last = {trial: float(values[-1]) for trial, _, values in curves_by_trial(sweep, "valid/loss")}
    trials = report_trials(sweep.trials)
    trials["final"] = trials["id"].map(last).astype(float)
    trials = trials[trials["state"] == "COMPLETE"].dropna(subset=["initial_valid_loss", "final"])
    gains = []
    for _, rows in trials.groupby(CELL_KEYS, sort=False):
        start, end = (
            dict(zip(rows["seed"].astype(int), -rows[name].astype(float), strict=True))
            for name in ("initial_valid_loss", "final")
        )
        pairs = compare_pairs({0: start, 1: end}).pairs  # before and after
        difference = pairs[0].difference if pairs else None
        ends = {"start": start, "end": end, "difference": difference}
        gains.append({**rows.iloc[0][CELL_KEYS], **ends})
    return gains
