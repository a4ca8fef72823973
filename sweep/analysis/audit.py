"""What is impossible or confounded in a published sweep table: `sweep audit FILE`.

Each rule sees one table, and of its best cells those that have what the rule needs. It returns the
batch sizes concerned and a message, or nothing. In words, with the sources: docs/audit.md.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.audit_status import has_diverged, has_failed, is_out_of_memory
from sweep.analysis.audit_table import HEADERS, LOSSES, read_tables
from sweep.analysis.comparison import SEEDS_FOR_SPREAD, short
from sweep.config.numbers import format_count

ROUND = (1, 2, 5, *(digit * 10**power for power in range(4) for digit in (10, 20, 25, 50)))
SETTINGS = ["batch_size", "learning_rate", "context_length", "token_budget"]
SETTINGS += ["weight_decay", "adam_beta2"]
DERIVED_FROM = {"true_steps": "steps", "outcome": "final_valid_loss", "loss": "final_valid_loss"}
MEANS = ["loss", "true_steps", "outcome", *(name for name in HEADERS if name not in SETTINGS)]
TOKENS_TOLERANCE = 0.01  # of the steps that the budget gives
EQUAL_STEPS = 1.05  # most over least
COLLAPSE = 0.6  # of the throughput of a smaller batch size: spilling, thrashing
HELD = 2.01  # most over least of an optimizer's time scale: ×2, rounded
BIAS = 1e-3  # nats between final and best loss
WARMUP_ROUNDING = 0.02  # of the warmup steps: 1.3k for 1,280

Found = tuple[Iterable[Any], str] | None  # batch sizes concerned, message


@dataclass(frozen=True, eq=False)
class Evidence:
    """One table, prepared for the rules."""

    rows: pd.DataFrame  # every row, with loss, true_steps, is_failed, is_full (of memory)
    cells: pd.DataFrame  # what ended well, tuning apart: means over the rows of equal settings
    best: pd.DataFrame  # the cell of least loss of each batch size, ascending
    log_formula: tuple[int, int, int] | None  # explains the column steps, where that is wrong


def audit(path: Path) -> dict[str, Any]:
    """Return what is wrong with every table of a file or folder, as `sweep audit --json` has it.

    Raises:
        SweepError: if there is no table with batch sizes.
    """
    findings, notes, missing = [], [], list[dict[str, list[str]]]()
    for table in (tables := read_tables(path)):
        where = f"{table.name}: " if len(tables) > 1 else ""
        found, absent = audit_rows(table.rows)
        findings += [{**finding, "message": where + finding["message"]} for finding in found]
        notes += [where + note for note in table.notes]
        missing.append(absent)
    unchecked = [code for code in RULES if all(code in absent for absent in missing)]
    least = {code: min((absent[code] for absent in missing), key=len) for code in unchecked}
    listed = [{"code": code, "missing_columns": names} for code, names in least.items()]
    return {"findings": findings, "not_checked": listed, "notes": notes}


def audit_rows(rows: pd.DataFrame) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    """Return the findings in an `AuditTable.rows`, and by code the columns that a rule lacks."""
    evidence = prepare(rows)
    findings, missing = [], {}
    for code, (rule, needs, remedy) in RULES.items():
        columns = needs.split()
        if absent := [name for name in columns if evidence.rows[name].isna().all()]:
            missing[code] = [DERIVED_FROM.get(name, name) for name in absent]
        elif found := rule(evidence, evidence.best.dropna(subset=columns)):
            batches = sorted({int(batch) for batch in found[0]})
            findings.append({"code": code, "rows": batches, "message": found[1], "remedy": remedy})
    return findings, missing


def prepare(table: pd.DataFrame) -> Evidence:
    """Derive the true steps, what failed, and the cells."""
    rows = table.copy()
    rows["loss"] = rows[next((name for name in LOSSES if rows[name].notna().any()), LOSSES[0])]
    tokens_per_step = rows["batch_size"] * rows["context_length"]
    rows["true_steps"] = (rows["token_budget"] / tokens_per_step).fillna(rows["steps"])
    has_loss = bool(rows["loss"].notna().any())
    rows["outcome"] = 1.0 if has_loss or (rows["status"] != "").any() else math.nan
    rows["is_full"] = rows["status"].map(is_out_of_memory).astype(bool)
    failed = rows["status"].map(has_failed).astype(bool)
    rows["is_failed"] = failed | (has_loss & rows["loss"].isna())
    if rows["seeds"].isna().all() and (rows["seed"] != "").any():
        rows["seeds"] = (~rows.duplicated([*SETTINGS, "seed"])).astype(float)
    done = rows[~rows["is_failed"] & (rows["stage"] != "tune")]
    groups = done.groupby(SETTINGS, dropna=False)
    cells = groups[MEANS].mean().reset_index()
    cells["seeds"] = groups["seeds"].sum(min_count=1).to_numpy()
    best = cells.sort_values("loss", kind="stable").drop_duplicates("batch_size")
    known = cells[cells["steps"].notna() & cells["true_steps"].notna()]
    formula = explain_log_rows(known["steps"], known["true_steps"]) if len(_off(cells)) else None
    return Evidence(rows, cells, best.sort_values("batch_size"), formula)


def explain_log_rows(rows: pd.Series, steps: pd.Series) -> tuple[int, int, int] | None:
    """Find round a, b, c with rows = T/a + T/max(b, T/c) + 1, rounded down, T each of `steps`."""
    true, listed = np.floor(steps.to_numpy(float) + 1e-6).astype(np.int64), rows.to_numpy()
    if len(set(true)) < 3:
        return None  # fewer points fit some formula by chance

    def fits(formula: tuple[int, int, int], some: slice) -> bool:
        (a, b, c), few = formula, true[some]
        return bool((few // a + few // np.maximum(b, few // c) + 1 == listed[some]).all())

    likely = [formula for formula in product(ROUND, ROUND, ROUND) if fits(formula, slice(3))]
    return next((formula for formula in likely if fits(formula, slice(None))), None)


def _off(cells: pd.DataFrame) -> pd.DataFrame:
    tolerance = (TOKENS_TOLERANCE * cells["true_steps"]).clip(lower=1)
    return cells[(cells["steps"] - cells["true_steps"]).abs() > tolerance]


def _ratio(values: pd.Series) -> float:
    return float(values.max() / values.min()) if len(values) else 1.0


def _range(known: pd.DataFrame, values: pd.Series, form: str) -> str:
    pairs = sorted(zip(values, known["batch_size"], strict=True))
    ends = [f"{value:{form}} at batch size {batch:g}" for value, batch in (pairs[0], pairs[-1])]
    return " to ".join(ends)


def _log_rows(evidence: Evidence, known: pd.DataFrame) -> Found:
    if evidence.log_formula is None:
        return None
    a, b, c = evidence.log_formula
    row = _off(evidence.cells).iloc[0]
    return (
        evidence.cells["batch_size"],
        f"The column steps counts rows of a log: T/{a} + T/max({b}, T/{c}) + 1 gives it at every "
        "batch size, where T = tokens / (batch size × context) is the optimizer's steps "
        f"({row['steps']:,.0f} rows for {row['true_steps']:,.0f} steps at batch size "
        f"{row['batch_size']:g}).",
    )


def _tokens(evidence: Evidence, known: pd.DataFrame) -> Found:
    off = _off(evidence.cells)
    if off.empty or evidence.log_formula is not None:
        return None
    row = off.iloc[0]
    tokens = row["steps"] * row["batch_size"] * row["context_length"]
    return (
        off["batch_size"],
        "steps × batch size × context is not the token budget: at batch size "
        f"{row['batch_size']:g} {row['steps']:,.0f} steps are {format_count(tokens)} tokens, while "
        f"{format_count(row['token_budget'])} are {row['true_steps']:,.0f} steps.",
    )


def _equal_steps(evidence: Evidence, known: pd.DataFrame) -> Found:
    tokens = known["steps"] * known["batch_size"] * known["context_length"].fillna(1)
    is_equal = _ratio(known["steps"]) <= EQUAL_STEPS < _ratio(tokens)
    if not is_equal or evidence.log_formula is not None:
        return None
    return (
        known["batch_size"],
        f"Every batch size took about {known['steps'].median():,.0f} steps, so one trained on "
        f"{_ratio(tokens):.3g} times the tokens of another. Losses at equal steps do not say which "
        "batch size makes the most of a token budget.",
    )


def _fixed_rate(evidence: Evidence, known: pd.DataFrame) -> Found:
    if evidence.rows["learning_rate"].nunique() != 1 or len(known) < 2:
        return None
    return (
        known["batch_size"],
        f"One learning rate, {short(known['learning_rate'].iloc[0])}, at every batch size. The "
        "best rate changes with the batch size, so this compares how well the rate suits each as "
        "much as the batch sizes; a higher loss is no sign of worse generalisation.",
    )


def _edge(evidence: Evidence, known: pd.DataFrame) -> Found:
    rows = evidence.rows[~evidence.rows["is_full"]]
    rows = rows[rows["stage"] == "tune"] if (rows["stage"] == "tune").any() else rows
    tried = rows.groupby("batch_size")["learning_rate"].nunique()
    # A rate that diverged was tried, and is no candidate: NaN. What failed otherwise says nothing.
    rows = rows[~rows["is_failed"] | rows["status"].map(has_diverged).astype(bool)]
    rows = rows.assign(loss=rows["loss"].mask(rows["is_failed"]))
    grids = rows.groupby(["batch_size", "learning_rate"])["loss"].mean().reset_index()
    grids = grids[grids.groupby("batch_size")["loss"].transform("count") > 0]
    at_edge = {}
    for batch, grid in grids.groupby("batch_size"):
        rates, more = grid["learning_rate"], int(tried[batch]) - len(grid)
        least = rates[grid["loss"] == grid["loss"].min()]
        if not ((least > rates.min()) & (least < rates.max())).any():
            place = f"{f'({more} more did not end) ' if more else ''}at batch size {batch:g}"
            at_edge[batch] = f"{least.iloc[0]:.3g} of {len(rates)} tried {place}"
    if not at_edge or tried.max() < 2:
        return None
    return (
        at_edge,
        "The best learning rate is the lowest or highest that was tried, so a better one may lie "
        f"beyond: {', '.join(at_edge.values())}.",
    )


def _seeds(evidence: Evidence, known: pd.DataFrame) -> Found:
    counts = evidence.cells.groupby("batch_size")["seeds"].max().dropna()
    few = counts[counts < SEEDS_FOR_SPREAD]
    if few.empty:
        return None
    shown = {"1": "One seed"}.get(f"{few.max():g}", f"At most {few.max():g} seeds")
    return (
        few.index,
        f"{shown} per batch size. Another seed changes every loss, and how much is not known, so "
        "no difference between batch sizes can be told from chance.",
    )


def _warmup(evidence: Evidence, known: pd.DataFrame) -> Found:
    warmup, steps = known["warmup_steps"], known["true_steps"]
    tolerance = (WARMUP_ROUNDING * warmup).clip(lower=1)
    if not ((warmup - tolerance) / steps).max() > ((warmup + tolerance) / steps).min():
        return None  # one fraction fits all
    fraction = warmup / steps
    off = known[(warmup - fraction.median() * steps).abs() > tolerance]
    pairs = zip(fraction[off.index], off["batch_size"], strict=True)
    shown = [f"{part:.3%} at batch size {batch:g}" for part, batch in pairs]
    return (
        off["batch_size"],
        f"Warmup is not the same part of every training: {fraction.median():.3%} by the median, "
        f"but {', '.join(shown)}.",
    )


def _seconds(evidence: Evidence, known: pd.DataFrame) -> Found:
    hours, sequences = known["hours"], known["true_steps"] * known["batch_size"]
    digits = next((d for d in range(9) if (hours - hours.round(d)).abs().max() < 1e-12), 9)
    half = 0.5 * 10.0**-digits  # as exactly as hours are written
    fastest = ((hours + half) / sequences).cummin().shift()
    slow = known[(hours - half) / sequences > fastest / COLLAPSE]
    if slow.empty:
        return None
    row = slow.iloc[-1]
    smaller = known[known["batch_size"] < row["batch_size"]]
    base = smaller.loc[(hours / sequences)[smaller.index].idxmin()]
    late, early = (3600 * one["hours"] / one["true_steps"] for one in (row, base))
    size = "" if math.isnan(row["device_memory_gib"]) else f" of {row['device_memory_gib']:g} GiB"
    return (
        slow["batch_size"],
        f"A step of batch size {row['batch_size']:g} took {late:.3f} s, one of "
        f"{base['batch_size']:g} {early:.3f} s: {late / early:.1f} times as long for "
        f"{row['batch_size'] / base['batch_size']:.3g} times the work. Compilation happens once "
        f"and cannot do this; a device{size} that spills into the host's memory does, or an "
        "allocator that thrashes.",
    )


def _time_scale(evidence: Evidence, known: pd.DataFrame) -> Found:
    known = known[known["weight_decay"] > 0]
    scale = 1 / (known["learning_rate"] * known["weight_decay"] * known["true_steps"])
    if _ratio(scale) <= HELD:
        return None
    return (
        known["batch_size"],
        "AdamW's time scale 1/(rate × weight decay × steps), as a part of the training, is not "
        f"held: from {_range(known, scale, '.3g')}.",
    )


def _half_life(evidence: Evidence, known: pd.DataFrame) -> Found:
    known = known[known["adam_beta2"] < 1]
    tokens_per_step = known["batch_size"] * known["context_length"]
    half_life = tokens_per_step * math.log(0.5) / np.log(known["adam_beta2"])
    if _ratio(half_life) <= HELD:
        return None
    text = "The half-life of Adam's second moment is not held in tokens"
    return known["batch_size"], f"{text}: from {_range(known, half_life, ',.0f')}."


def _best_of(evidence: Evidence, known: pd.DataFrame) -> Found:
    text = "The least loss of many evaluations is biased downwards"
    both = known[known["final_valid_loss"].notna()]
    if both.empty:
        return known["batch_size"], f"{text}, and no final loss is given."
    bias = both["final_valid_loss"] - both["best_valid_loss"]
    final, least = (
        [f"{batch:g}" for batch in both.sort_values(name, kind="stable")["batch_size"]]
        for name in ("final_valid_loss", "best_valid_loss")
    )
    if final == least and not bias.max() > BIAS:
        return None
    changed = f"another ranking ({', '.join(least)} instead of {', '.join(final)})"
    ranking = "the same ranking" if final == least else changed
    return (
        both["batch_size"] if final != least else both[bias > BIAS]["batch_size"],
        f"{text}: best_valid_loss is up to {bias.max():.4f} below final_valid_loss, and gives "
        f"{ranking} of the batch sizes.",
    )


def _missing(evidence: Evidence, known: pd.DataFrame) -> Found:
    rows = evidence.rows[evidence.rows["stage"] != "tune"]
    keys = list(zip(rows["batch_size"], rows["learning_rate"].fillna(0), strict=True))
    done = {key for key, is_failed in zip(keys, rows["is_failed"], strict=True) if not is_failed}
    batches = {batch for batch, _ in done}
    # A rate that diverged beside one that did not belongs to tuning: nothing is missing.
    is_lost = [key in done or key[0] not in batches for key in keys]
    lost = rows[rows["is_failed"] & (rows["is_full"] | np.array(is_lost, bool))]
    if lost.empty:
        return None
    pairs = zip(lost["batch_size"], lost["status"], strict=True)
    shown = dict.fromkeys(f"{batch:g} ({status[:40] or 'no loss'})" for batch, status in pairs)
    return (
        lost["batch_size"],
        f"No loss, or not of every seed, at batch size {', '.join(shown)}: what it would reach is "
        "not known.",
    )


Rule = Callable[[Evidence, pd.DataFrame], Found]
ACCUMULATE = "Train with smaller microbatches and gradient accumulation"
RULES: dict[str, tuple[Rule, str, str]] = {  # code: rule, columns that it needs, remedy
    "steps_are_log_rows": (_log_rows, "steps context_length token_budget",
        "Use T as the steps, in every conclusion about updates too."),
    "tokens_mismatch": (_tokens, "steps context_length token_budget",
        "Find out what was counted (micro-steps, one device's share) or how much was trained."),
    "equal_steps_not_tokens": (_equal_steps, "steps",
        "Give every batch size the same tokens: steps = tokens / (batch size × context)."),
    "fixed_learning_rate": (_fixed_rate, "learning_rate",
        "Tune the rate at each batch size until the best one is inside the grid."),
    "learning_rate_at_edge": (_edge, "learning_rate loss",
        "Extend the grid at these batch sizes until the best rate is strictly inside."),
    "single_seed": (_seeds, "seeds",
        f"Train at least {SEEDS_FOR_SPREAD} seeds at each batch size and compare seed by seed."),
    "warmup_fraction": (_warmup, "warmup_steps true_steps",
        "Make warmup one fraction of the tokens at every batch size."),
    "seconds_per_step_outlier": (_seconds, "hours true_steps",
        f"Leave these times out of every comparison. {ACCUMULATE}."),
    "adamw_time_scale": (_time_scale, "learning_rate weight_decay true_steps",
        "Hold rate × weight decay × steps, or tune both and say so."),
    "beta2_half_life": (_half_life, "adam_beta2 context_length",
        "Raise β2 to the ratio of the batch sizes: β2' = β2^(B'/B)."),
    "best_of_evaluations": (_best_of, "best_valid_loss",
        "Compare the final loss, at the end of the schedule."),
    "missing_batch_size": (_missing, "outcome",
        f"Leave it out of every comparison. Where memory ran out: {ACCUMULATE.lower()}."),
}  # fmt: skip
