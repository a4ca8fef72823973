"""Cells of a sweep (one batch size under one policy and rate), recommendations, gains of reward."""

from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.statistics import compare_pairs

BALANCED_TOLERANCE = 0.01  # share of the lowest mean loss; the summary's template names it
SEEDS_FOR_SPREAD = 3  # from which a standard deviation is worth printing
MEANS = [
    *("final_valid_loss", "final_train_loss", "best_valid_loss", "bits_per_byte"),
    *("clipped_step_fraction", "seconds_total", "seconds_compile", "seconds_training"),
    *("seconds_evaluation", "seconds_checkpoint", "seconds_noise", "tokens_per_second", "mfu"),
]
CELL_KEYS = ["label", "batch_size", "learning_rate"]
COUNTS = ["planned", "complete", "diverged", "failed", "pruned", "unfinished"]


def short(number: float) -> str:
    """Format a number so that reading it back gives the same: 3e-4, 0.01, 32."""
    text = f"{number:g}" if float(f"{number:g}") == number else repr(float(number))
    scientific = f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e+")
    is_shorter = 0 < abs(number) < 0.01 and float(scientific) == number
    return scientific if is_shorter else text


def policy_labels(trials: pd.DataFrame) -> list[str]:
    """Return the name of each trial's policy, with the rate if it is fixed: `fixed 3e-4`."""
    pairs = zip(trials["policy"], trials["learning_rate"], strict=True)
    return [f"fixed {short(rate)}" if policy == "fixed" else str(policy) for policy, rate in pairs]


def report_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the reporting trials with their policy's label, in the plan's order."""
    reports = trials[trials["stage"] == "report"]
    return reports.assign(label=policy_labels(reports))


def compare_batch_sizes(trials: pd.DataFrame) -> pd.DataFrame:
    """Summarise each cell: one row per policy, batch size and rate.

    It holds counts of trials by state, means over the complete trials and their spread.
    `is_comparable`: every planned seed is complete; `is_on_front`: on the Pareto front of these in
    loss and time.
    """
    reports = report_trials(trials)
    state, is_diverged = reports["state"], reports["cause"] == "diverged"
    reports["planned"], reports["complete"] = 1, state == "COMPLETE"
    reports["diverged"], reports["pruned"] = is_diverged, state == "PRUNED"
    reports["failed"] = (state == "FAILED") & ~is_diverged
    reports["unfinished"] = ~state.isin(["COMPLETE", "FAILED", "PRUNED"])
    groups = reports.groupby(CELL_KEYS, sort=False)
    done = reports[reports["complete"]].astype(dict.fromkeys(MEANS, float)).groupby(CELL_KEYS)
    # A mean of some of the trials would look like one of all: it is NaN if one value is missing.
    means = done[MEANS].agg(pd.Series.mean, skipna=False)
    means["peak_memory_bytes"] = done["peak_memory_bytes"].max()
    losses = done["final_valid_loss"].agg(loss_sd="std", loss_min="min", loss_max="max")
    # A diverged trial records the steps that it took; the others, those of the plan.
    planned = groups[["policy", "steps"]].max()
    cells = pd.concat([planned, groups[COUNTS].sum(), means, losses], axis=1).reset_index()
    cells["order"] = pd.factorize(cells["label"])[0]
    cells = cells.sort_values(["order", "batch_size"], ignore_index=True)
    cells["train_valid_gap"] = cells["final_valid_loss"] - cells["final_train_loss"]
    # A report is pruned only on the way to a target: it is a bound, which is data too.
    is_whole = cells["complete"] + cells["pruned"] == cells["planned"]
    cells["is_comparable"] = is_whole & np.isfinite(cells["final_valid_loss"])
    ends = cells[["final_valid_loss", "seconds_total"]].where(cells["is_comparable"]).to_numpy()
    excess = ends[:, None] - ends  # of each cell over each other: (cells, cells, 2)
    is_dominated = ((excess <= 0).all(axis=2) & (excess < 0).any(axis=2)).any(axis=0)
    cells["is_on_front"] = ~(np.isnan(ends).any(axis=1) | is_dominated)
    return cells


def recommend(cells: pd.DataFrame) -> dict[str, list[dict[Any, Any]]]:
    """Return the best of the comparable cells by each question of the summary; several if tied."""
    usable = cells[cells["is_comparable"]]
    loss, seconds = usable["final_valid_loss"], usable["seconds_total"]
    close = seconds[loss <= loss.min() + BALANCED_TOLERANCE * abs(loss.min())]
    measures = {"best quality": loss, "fastest": seconds, "balanced": close}
    best = {name: values.index[values == values.min()] for name, values in measures.items()}
    return {name: cells.loc[rows].to_dict("records") for name, rows in best.items() if len(rows)}


def find_gains(sweep: Sweep) -> list[dict[str, Any]]:
    """Compare the mean rewards of the milestone prompts before and after training, cell by cell.

    `start` and `end` are by seed. Both use the same prompts and random numbers, so `difference` is
    the Estimate of a paired difference, or None below two seeds.
    """
    last = {trial: -float(values[-1]) for trial, _, values in curves_by_trial(sweep, "valid/loss")}
    trials = report_trials(sweep.trials)
    trials["start"] = -trials["initial_valid_loss"].astype(float)
    trials["end"] = trials["id"].map(last).astype(float)
    trials = trials[trials["state"] == "COMPLETE"].dropna(subset=["start", "end"])
    gains = []
    for _, rows in trials.groupby(CELL_KEYS, sort=False):
        ends = rows.astype({"seed": int}).set_index("seed")[["start", "end"]].to_dict()
        pairs = compare_pairs({0: ends["start"], 1: ends["end"]}).pairs
        difference = pairs[0].difference if pairs else None
        gains.append({**rows.iloc[0][CELL_KEYS], **ends, "difference": difference})
    return gains
