"""The table that checks of trials receive, from our trials.csv or from a published table."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sweep.analysis.cells import LOSSES, SETTINGS
from sweep.analysis.frames import policy_labels
from sweep.analysis.rates import TunedRate, tuned_rates
from sweep.trial.status import State

TOKENS_TOLERANCE = 0.01  # share of the steps that the budget gives
MOST_CHANCE = 0.01  # largest share of random columns that a formula of log rows may fit
# Columns of a table by the columns that follow from them.
DERIVED_FROM = {
    "true_steps": "steps",
    "trained_tokens": "token_budget",
    "outcome": "final_valid_loss",
    "loss": "final_valid_loss",
}


@dataclass(frozen=True, eq=False)
class TrialTable:
    rows: pd.DataFrame  # every trial, with loss, true_steps and flags of failure
    cells: pd.DataFrame  # means over the completed trials of equal settings, tuning excluded
    best: pd.DataFrame  # the cell of least loss of each batch size, ascending
    wrong_steps: pd.DataFrame  # the cells whose column steps is not true_steps
    log_formula: str  # in the steps T, which explains the column steps; empty if none does
    rates: tuple[TunedRate, ...]  # the grid of learning rates of each batch size
    is_own: bool  # whether it is a trials.csv, whose counts are exact
    has_target: bool  # whether the loss is the log of the tokens to a target
    tuning_command: str = ""  # the command that would tune the learning rates, if it is known


def rows_of_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the table of trials.csv with the columns that checks read."""
    names = {
        "beta2": "adam_beta2",
        "tokens": "token_budget",
        "tokens_per_sequence": "context_length",
    }
    rows = trials.rename(columns=names)
    rows = rows.drop(columns="best_valid_loss")  # `best_of_evaluations` is for published tables
    rows["label"] = policy_labels(rows)

    rows["state"] = rows["state"].astype(object).fillna("unknown")
    rows["cause"] = rows["cause"].astype(object).fillna("")
    rows["status"] = (rows["state"] + " " + rows["cause"]).str.strip()
    has_ended = rows["state"].isin([State.COMPLETE, State.FAILED])
    is_infinite = np.isinf(rows["final_valid_loss"].astype(float))
    rows["has_diverged"] = (rows["cause"] == "diverged") | (is_infinite & has_ended)
    rows["is_out_of_memory"] = rows["cause"] == "out_of_memory"
    rows["is_failed"] = rows["state"] != State.COMPLETE

    # A loss on the way is not that of the end of the schedule.
    rows["final_valid_loss"] = rows["final_valid_loss"].mask(rows["is_failed"])
    rows["hours"] = rows["seconds_training"] / 3600

    has_target = bool(rows["target"].notna().any())
    rows["has_target"] = has_target
    if has_target:
        is_pruned = rows["state"] == State.PRUNED
        rows["is_failed"] &= ~is_pruned  # a bound, which is data too
        log_tokens = rows["tokens_to_target"].astype(float).map(math.log).fillna(math.inf)
        rows["final_valid_loss"] = log_tokens.mask(rows["is_failed"])
        counts = rows[["steps", "token_budget"]].astype(float)
        rows[["steps", "token_budget"]] = counts.mask(is_pruned | (rows["stage"] == "tune"))
    return rows


def prepare(table: pd.DataFrame, is_own: bool = True) -> TrialTable:
    """Derive true steps, failures, cells and the grids of rates."""
    rows = table.copy()
    has_target = is_own and bool(rows["has_target"].any())

    rows["loss"] = _loss_of(rows)
    has_loss = bool(rows["loss"].notna().any())
    tokens_per_step = rows["batch_size"] * rows["context_length"]
    rows["true_steps"] = (rows["token_budget"] / tokens_per_step).fillna(rows["steps"])
    rows["trained_tokens"] = rows["token_budget"].fillna(rows["steps"] * tokens_of_a_step(rows))
    has_outcome = has_loss or (rows["status"] != "").any() or rows["is_failed"].any()
    rows["outcome"] = 1.0 if has_outcome else math.nan
    rows["is_failed"] |= has_loss & rows["loss"].isna()

    ended_early = ("token_budget", "steps", "epochs") if is_own else ()
    settings = [name for name in SETTINGS if name in rows and name not in ended_early]
    if is_own and not has_target:
        settings.append("token_budget")
    if is_own or _has_row_per_seed(rows):
        is_repeated = rows.duplicated([*settings, "stage", "seed"])
        rows["seeds"] = (~is_repeated).astype(float)

    completed = rows[~rows["is_failed"] & (rows["stage"] != "tune")]
    groups = completed.groupby(settings, dropna=False)
    cells = groups.mean(numeric_only=True).reset_index()
    cells["seeds"] = groups["seeds"].sum(min_count=1).to_numpy()
    best = cells.sort_values("loss", kind="stable").drop_duplicates("batch_size")

    tolerance: float | pd.Series = 0.0
    if not is_own:
        tolerance = (TOKENS_TOLERANCE * cells["true_steps"]).clip(lower=1)
    wrong_steps = cells[(cells["steps"] - cells["true_steps"]).abs() > tolerance]
    log_formula = ""
    if len(wrong_steps):
        counted = cells.dropna(subset=["steps", "true_steps"])
        log_formula = explain_log_rows(counted["steps"], counted["true_steps"])

    return TrialTable(
        rows=rows,
        cells=cells,
        best=best.sort_values("batch_size"),
        wrong_steps=wrong_steps,
        log_formula=log_formula,
        rates=tuned_rates(rows, is_own),
        is_own=is_own,
        has_target=has_target,
    )


def _loss_of(rows: pd.DataFrame) -> pd.Series | float:
    """Return the first column of losses that has values; NaN if there is none."""
    for name in LOSSES:
        if name in rows and rows[name].notna().any():
            return rows[name]
    return math.nan


def tokens_of_a_step(rows: pd.DataFrame) -> pd.Series:
    """Return the tokens of a step; in sequences if no row has a context length."""
    contexts = rows["context_length"].astype(float)
    if contexts.isna().all():
        contexts = contexts.fillna(1.0)
    tokens: pd.Series = rows["batch_size"] * contexts
    return tokens


def _has_row_per_seed(rows: pd.DataFrame) -> bool:
    """Return True if a table has seeds instead of a number of seeds."""
    return bool(rows["seeds"].isna().all()) and bool((rows["seed"] != "").any())


def explain_log_rows(rows: pd.Series, steps: pd.Series) -> str:
    """Find a formula of the rows of a log in the steps T; empty if chance could explain it too.

    The formulas are T/a, T/a + 1 and T/a + T/max(b, T/c) + 1 with round a, b, c, rounded down. The
    chance is that of a column of random numbers from 1 to T to fit one of the formulas.
    """
    true = np.floor(steps.to_numpy(float) + 1e-6).astype(np.int64)
    if len(set(true)) < 3:
        return ""  # a line through two points explains anything
    larger = (digit * 10**power for power in range(4) for digit in (10, 20, 25, 50))
    numbers = np.array([1, 2, 5, *larger])
    triples = np.array(list(product(numbers, repeat=3)))
    a, b, c = triples.T[:, :, None]
    form = "T/{} + T/max({}, T/{}) + 1"
    families: list[tuple[NDArray[np.int64], Callable[[int], str]]] = [
        (true // numbers[3:, None], lambda i: f"T/{numbers[3 + i]}"),  # T/2 may be two devices
        (true // numbers[:, None] + 1, lambda i: f"T/{numbers[i]} + 1"),
        (true // a + true // np.maximum(b, true // c) + 1, lambda i: form.format(*triples[i])),
    ]
    columns = math.prod(map(float, np.maximum(np.unique(true), 1)))
    tried = 0
    for fitted, write in families:
        tried += len(np.unique(fitted, axis=0))
        is_fit = (fitted == rows.to_numpy()).all(axis=1)
        if is_fit.any():
            return write(int(is_fit.argmax())) if tried / columns < MOST_CHANCE else ""
    return ""


def read_execution(text: str | None) -> dict[str, Any] | None:
    """Read the column execution; None if it is not a JSON object."""
    try:
        settings = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None
