"""The table that checks of trials receive, from our trials.csv or from a published table."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sweep.analysis.cells import FOREIGN_NAMES, LOSSES, SETTINGS
from sweep.analysis.tables import policy_labels, without_shared_times
from sweep.analysis.tuned_rates import TunedRate, tuned_rates
from sweep.config.objective import LOSS, Objective
from sweep.decision.trials import compared_value, parse_end
from sweep.trial.status import Cause, State

TOKENS_TOLERANCE = 0.01  # share of the steps that the budget gives
# Columns of a table by the columns that follow from them.
DERIVED_FROM = {"true_steps": "steps", "trained_tokens": "token_budget"}


@dataclass(frozen=True, eq=False)
class TrialTable:
    rows: pd.DataFrame  # every trial, with value, true_steps and flags of failure
    cells: pd.DataFrame  # means over the completed trials of equal settings, tuning excluded
    best: pd.DataFrame  # the cell of least value of each batch size, ascending
    wrong_steps: pd.DataFrame  # the cells whose column steps is not true_steps
    rates: tuple[TunedRate, ...]  # the grid of learning rates of each batch size
    is_own: bool  # whether it is a trials.csv, whose counts are exact
    objective: Objective  # the objective of the values
    tuning_command: str | None  # the command that would tune the rates, if it is known
    waiting: frozenset[int]  # batch sizes whose first rates are not chosen yet

    @property
    def has_target(self) -> bool:
        """Whether the value is the log of the tokens to a target."""
        return self.objective.is_ratio

    @property
    def has_time_budget(self) -> bool:
        """Whether each batch size trained for the same time, on tokens of its own."""
        return time_budget_of(self.rows) is not None


def time_budget_of(rows: pd.DataFrame) -> float | None:
    """Return the seconds for which all trials were to train; None if they have no common ones."""
    name = "time_budget_seconds"
    budgets = rows[name].astype(float) if name in rows else pd.Series(dtype=float)
    if budgets.empty or budgets.isna().any() or budgets.nunique() > 1:
        return None
    return float(budgets.iloc[0])


def source_of(column: str, objective: Objective = LOSS) -> str:
    """Return the column of a table from which a derived one follows, or the column itself."""
    if column in ("value", "outcome"):
        return objective.name
    return DERIVED_FROM.get(column, column)


def rows_of_trials(trials: pd.DataFrame, objective: Objective = LOSS) -> pd.DataFrame:
    """Return the table of trials.csv with the columns that checks read.

    `value` is what batch sizes are compared by: less is better. It is infinite if the trial
    diverged or missed a target, and NaN if the trial has no result.
    """
    # The state is one of ours, not the words of a column `status`.
    names = {own: column for own, column in FOREIGN_NAMES.items() if own != "state"}
    rows = trials.rename(columns=names)
    rows = rows.drop(columns="best_valid_loss")  # `best_of_evaluations` is for published tables
    rows["label"] = policy_labels(rows)
    rows["state"] = rows["state"].astype(object).fillna("unknown")
    rows["cause"] = rows["cause"].astype(object).fillna("")
    rows["status"] = (rows["state"] + " " + rows["cause"]).str.strip()
    has_ended = rows["state"].isin([State.COMPLETE, State.FAILED])
    evaluated = LOSS.name if objective.is_ratio else objective.name
    is_infinite = np.isinf(rows[evaluated].astype(float))
    rows["has_diverged"] = (rows["cause"] == "diverged") | (is_infinite & has_ended)
    rows["is_out_of_memory"] = rows["cause"] == "out_of_memory"
    rows["is_failed"] = rows["state"] != State.COMPLETE
    rows["value"] = _compared_values(rows, objective)
    rows["hours"] = without_shared_times(trials)["seconds_training"] / 3600

    if objective.is_ratio:
        is_pruned = rows["state"] == State.PRUNED
        rows["is_failed"] &= ~is_pruned  # a bound, which is data too
        counts = rows[["steps", "token_budget"]].astype(float)
        rows[["steps", "token_budget"]] = counts.mask(is_pruned | (rows["stage"] == "tune"))

    # Earlier versions wrote the planned tokens of a trial that did not end into its tokens.
    rows["planned_tokens"] = rows["planned_tokens"].fillna(rows["token_budget"])
    return rows


def _compared_values(rows: pd.DataFrame, objective: Objective) -> pd.Series:
    metrics = rows[objective.name].astype(float)
    values = []
    for metric, trial in zip(metrics, rows.itertuples(), strict=True):
        state, cause = parse_end(trial.state, trial.cause)
        if trial.has_diverged:
            cause = Cause.DIVERGED
        measured = None if math.isnan(metric) else metric
        values.append(compared_value(state, cause, measured, objective))
    return pd.Series(values, rows.index, dtype=float)


def prepare(
    table: pd.DataFrame,
    is_own: bool = True,
    objective: Objective = LOSS,
    tuning_command: str | None = None,
    waiting: frozenset[int] = frozenset(),
) -> TrialTable:
    """Derive true steps, failures, cells and the grids of rates.

    Args:
        table: The trials of one policy, or comparable rows of a published table.
        is_own: Whether it is a trials.csv.
        objective: What its values are of.
        tuning_command: The command that would tune the learning rates, if it is known.
        waiting: Batch sizes without a trial, because their first rates are not chosen yet.
    """
    rows = table.copy()
    if not is_own:
        rows["value"] = _loss_of(rows)
        rows["planned_tokens"] = rows["token_budget"]
    has_value = bool(rows["value"].notna().any())
    tokens_per_step = rows["batch_size"] * rows["context_length"]
    rows["true_steps"] = (rows["token_budget"] / tokens_per_step).fillna(rows["steps"])
    rows["trained_tokens"] = rows["token_budget"].fillna(rows["steps"] * tokens_of_a_step(rows))
    has_outcome = has_value or (rows["status"] != "").any() or rows["is_failed"].any()
    rows["outcome"] = 1.0 if has_outcome else math.nan
    rows["is_failed"] |= has_value & rows["value"].isna()

    ended_early = ("token_budget", "steps", "epochs") if is_own else ()
    settings = [name for name in SETTINGS if name in rows and name not in ended_early]
    if is_own and not objective.is_ratio:
        settings.append("token_budget")
    if is_own or _has_row_per_seed(rows):
        is_repeated = rows.duplicated([*settings, "stage", "seed"])
        rows["seeds"] = (~is_repeated).astype(float)

    completed = rows[~rows["is_failed"] & (rows["stage"] != "tune")]
    groups = completed.groupby(settings, dropna=False)
    cells = groups.mean(numeric_only=True).reset_index()
    cells["seeds"] = groups["seeds"].sum(min_count=1).to_numpy()
    best = cells.sort_values("value", kind="stable").drop_duplicates("batch_size")

    tolerance: float | pd.Series = 0.0
    if not is_own:
        tolerance = (TOKENS_TOLERANCE * cells["true_steps"]).clip(lower=1)
    wrong_steps = cells[(cells["steps"] - cells["true_steps"]).abs() > tolerance]

    return TrialTable(
        rows=rows,
        cells=cells,
        best=best.sort_values("batch_size"),
        wrong_steps=wrong_steps,
        rates=tuned_rates(rows, is_own),
        is_own=is_own,
        objective=objective,
        tuning_command=tuning_command,
        waiting=waiting,
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
