"""The rules that need only a table of trials; they judge our trials.csv and published tables alike.

Each rule returns the batch sizes at fault (none: the condition holds) and a message with the
numbers, or None if it does not apply. Sources and thresholds: docs/audit.md.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.comparison import SEEDS_FOR_SPREAD, policy_label, short
from sweep.analysis.optimum import TunedRate, tuned_rates
from sweep.config.numbers import format_count
from sweep.plan.plan import Plan

ROUND = (1, 2, 5, *(digit * 10**power for power in range(4) for digit in (10, 20, 25, 50)))
SETTINGS = ["batch_size", "learning_rate", "context_length", "token_budget"]
SETTINGS += ["weight_decay", "adam_beta2"]
LOSSES = ("final_valid_loss", "best_valid_loss", "final_train_loss")  # the first that is given
OURS = {"beta2": "adam_beta2", "tokens": "token_budget"}  # other names in trials.csv
TOKENS_TOLERANCE = 0.01  # of the steps that the budget gives
EQUAL_STEPS = 1.05  # most over least
COLLAPSE = 0.6  # of the throughput of a smaller batch size: spilling, thrashing
HELD = 2.01  # most over least of an optimizer's time scale: ×2, rounded
BIAS = 1e-3  # nats between final and best loss
WARMUP_ROUNDING = 0.02  # of the warmup steps: 1.3k for 1,280
MANY_EPOCHS = 4
INITIAL_LOSS_TOLERANCE = 0.25  # nats around ln V; random logits add up to about 0.15
UNEVEN_TIMES = 1.25  # longest over shortest total time of trials that differ in their seed
MIXABLE = ("device", "torch_version", "git_commit", "devices")
FOLLOW_FROM_MICROBATCH = ("microbatch", "generation_batch_size", "evaluation_batch_size")

Verdict = tuple[Iterable[Any], str] | None  # batch sizes at fault, message


@dataclass(frozen=True, eq=False)
class Evidence:
    """One table of trials, prepared for the rules."""

    rows: pd.DataFrame  # every trial, with loss, true_steps and flags of failure
    cells: pd.DataFrame  # means over the completed trials of equal settings, tuning excluded
    best: pd.DataFrame  # the cell of least loss of each batch size, ascending
    wrong_steps: pd.DataFrame  # the cells whose column steps is not true_steps
    log_formula: tuple[int, int, int] | None  # a, b, c that explain the column steps
    rates: tuple[TunedRate, ...]  # the grid of learning rates of each batch size
    is_own: bool  # whether the table is a trials.csv, whose counts are exact
    has_target: bool  # whether the loss is the log of the tokens to a target


def rows_of_trials(trials: pd.DataFrame, plan: Plan | None = None) -> pd.DataFrame:
    """Return the rows of our own trials.csv with the columns that the rules read.

    The plan adds the vocabulary; without it, the rule that needs it is left out.
    """
    rows = trials.rename(columns=OURS).drop(columns="best_valid_loss", errors="ignore")
    pairs = zip(rows["policy"], rows["learning_rate"], strict=True)
    rows["label"] = [policy_label(str(policy), float(rate)) for policy, rate in pairs]
    is_tuning = rows["stage"] == "tune"
    for name, default in (("state", "unknown"), ("cause", "")):
        rows[name] = rows[name].astype(object).where(rows[name].notna(), default)
    rows["status"] = (rows["state"] + " " + rows["cause"]).str.strip()
    rows["has_diverged"] = rows["cause"] == "diverged"
    rows["is_out_of_memory"] = rows["cause"] == "out_of_memory"
    rows["is_failed"] = rows["state"] != "COMPLETE"
    rows["hours"] = rows["seconds_training"] / 3600
    tokens = rows["token_budget"] / (rows["steps"] * rows["batch_size"])
    rows["context_length"] = tokens.round().median()
    # Reports are pruned on the way to a target only.
    is_pruned = rows["state"] == "PRUNED"
    has_target = bool((rows["tokens_to_target"].notna() | (is_pruned & ~is_tuning)).any())
    if plan is not None:
        has_target = plan.settings.target is not None
        rows["context_length"] = float(plan.tokens_per_sequence)
        if plan.settings.traits.starts_at_log_vocabulary:
            rows["vocabulary"] = float(plan.settings.model.vocabulary or math.nan)
    rows["has_target"] = has_target
    if has_target:
        rows["is_failed"] &= ~is_pruned  # a bound, which is data too
        logs = rows["tokens_to_target"].astype(float).map(math.log).fillna(math.inf)
        rows["final_valid_loss"] = logs.mask(rows["is_failed"])
        for name in ("steps", "token_budget"):
            rows[name] = rows[name].astype(float).mask(is_tuning | is_pruned)
    return rows


def prepare(table: pd.DataFrame) -> Evidence:
    """Derive the true steps, the failures, the cells and the grids of rates."""
    rows, is_own = table.copy(), "policy" in table
    has_target = is_own and bool(rows["has_target"].any())
    rows["loss"] = next((rows[n] for n in LOSSES if n in rows and rows[n].notna().any()), math.nan)
    tokens_per_step = rows["batch_size"] * rows["context_length"]
    rows["true_steps"] = (rows["token_budget"] / tokens_per_step).fillna(rows["steps"])
    has_loss = bool(rows["loss"].notna().any())
    rows["outcome"] = 1.0 if has_loss or (rows["status"] != "").any() else math.nan
    rows["is_failed"] |= has_loss & rows["loss"].isna()
    rows["state"] = rows["state"] if is_own else ""
    settings = [name for name in SETTINGS if not (has_target and name == "token_budget")]
    if is_own or (rows["seeds"].isna().all() and (rows["seed"] != "").any()):
        rows["seeds"] = (~rows.duplicated([*settings, "stage", "seed"])).astype(float)
    groups = rows[~rows["is_failed"] & (rows["stage"] != "tune")].groupby(settings, dropna=False)
    cells = groups.mean(numeric_only=True).reset_index()
    cells["seeds"] = groups["seeds"].sum(min_count=1).to_numpy()
    best = cells.sort_values("loss", kind="stable").drop_duplicates("batch_size")
    tolerance = 0.0 if is_own else (TOKENS_TOLERANCE * cells["true_steps"]).clip(lower=1)
    wrong = cells[(cells["steps"] - cells["true_steps"]).abs() > tolerance]
    known = cells.dropna(subset=["steps", "true_steps"])
    formula = explain_log_rows(known["steps"], known["true_steps"]) if len(wrong) else None
    best, rates = best.sort_values("batch_size"), tuned_rates(rows)
    return Evidence(rows, cells, best, wrong, formula, rates, is_own, has_target)


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


def execution_differences(trials: pd.DataFrame) -> dict[str, list[str]]:
    """Return the execution settings that differ between completed trials, with their values.

    The microbatch size counts as mixed only between trials of one batch size.
    """
    done = trials[trials["execution"].notna() & (trials["state"] == "COMPLETE")]
    seen: dict[str, set[str]] = {name: set(done[name].dropna().map(str)) for name in MIXABLE}
    for text in set(done["execution"]):
        for name, value in json.loads(text).items():
            if not name.startswith(FOLLOW_FROM_MICROBATCH):
                seen.setdefault(f"execution.{name}", set()).add(json.dumps(value))
    for batch, sizes in done.groupby("batch_size")["microbatch_size"]:
        seen[f"microbatch_size at batch size {batch}"] = {f"{size:g}" for size in sizes}
    return {name: sorted(values) for name, values in seen.items() if len(values) > 1}


def _ratio(values: pd.Series) -> float:
    return float(values.max() / values.min()) if len(values) else 1.0


def _range(known: pd.DataFrame, values: pd.Series, form: str) -> str:
    pairs = sorted(zip(values, known["batch_size"], strict=True))
    ends = [f"{value:{form}} at batch size {batch:g}" for value, batch in (pairs[0], pairs[-1])]
    return " to ".join(ends)


def steps_are_log_rows(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    if evidence.log_formula is None:
        return (), "No formula of log rows explains the column steps."
    a, b, c = evidence.log_formula
    row = evidence.wrong_steps.iloc[0]
    return (
        evidence.cells["batch_size"],
        f"The column steps counts rows of a log: T/{a} + T/max({b}, T/{c}) + 1 gives it at every "
        "batch size, where T = tokens / (batch size × context) is the number of optimizer steps "
        f"({row['steps']:,.0f} rows for {row['true_steps']:,.0f} steps at batch size "
        f"{row['batch_size']:g}).",
    )


def tokens_mismatch(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    off = evidence.wrong_steps
    if evidence.log_formula is not None:
        return None
    if off.empty:
        return (), "steps × batch size × context is the token count at every batch size."
    row = off.iloc[0]
    tokens = row["steps"] * row["batch_size"] * row["context_length"]
    return (
        off["batch_size"],
        "steps × batch size × context is not the token budget: at batch size "
        f"{row['batch_size']:g}, {row['steps']:,.0f} steps are {format_count(tokens)} tokens, "
        f"while {format_count(row['token_budget'])} are {row['true_steps']:,.0f} steps.",
    )


def _tokens_at_equal_steps(known: pd.DataFrame) -> float:
    """Return the ratio of the trained tokens if steps are equal and tokens are not; else 0."""
    tokens = known["steps"] * known["batch_size"] * known["context_length"].fillna(1)
    return _ratio(tokens) if _ratio(known["steps"]) <= EQUAL_STEPS < _ratio(tokens) else 0.0


def equal_steps_not_tokens(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    factor = _tokens_at_equal_steps(known)
    if not factor or evidence.log_formula is not None:
        return (), f"Steps differ by up to a factor of {_ratio(known['steps']):.3g}."
    return (
        known["batch_size"],
        f"Every batch size took about {known['steps'].median():,.0f} steps, so the training tokens "
        f"differ by a factor of {factor:.3g}. Losses at equal steps do not show which batch size "
        "makes the best use of a token budget.",
    )


def tokens_differ(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    counts, tolerance = known["token_budget"], 1.0 if evidence.is_own else 1 + TOKENS_TOLERANCE
    if counts.empty or _tokens_at_equal_steps(known):
        return None
    text = f"Training tokens are {counts.min():,.0f} to {counts.max():,.0f}."
    return known["batch_size"] if _ratio(counts) > tolerance else (), text


def fixed_learning_rate(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    rates, sizes = evidence.rows["learning_rate"].dropna(), set(evidence.rows["batch_size"])
    is_fixed = rates.nunique() == 1 and len(sizes & set(known["batch_size"])) > 1
    if evidence.is_own:
        is_fixed = set(evidence.rows["policy"]) == {"fixed"}
    if not is_fixed:
        return (), f"Learning rates from {rates.min():.3g} to {rates.max():.3g} were used."
    return (
        set(known["batch_size"]) or sizes,
        f"One learning rate, {short(rates.iloc[0])}, at every batch size. The best rate changes "
        "with the batch size, so this compares how well the rate suits each batch size as much as "
        "the batch sizes; a higher loss is no sign of worse generalisation.",
    )


def scaled_learning_rate(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    rules = [p for p in evidence.rows["policy"].unique() if p.startswith(("sqrt", "linear"))]
    text = "it was not tuned at each batch size, so this tests the rule as much as the batch sizes."
    sizes = evidence.rows["batch_size"]
    return (sizes, f"A scaling rule sets the rate ({rules[0]}); {text}") if rules else None


def learning_rate_at_edge(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    rows, rates, is_own = evidence.rows, evidence.rates, evidence.is_own
    reported = set(rows.loc[rows["stage"] != "tune", "batch_size"])
    is_tuned = is_own and bool((rows["policy"] == "tuned").any())
    if not (rates or is_tuned):
        return None
    untuned = reported - {rate.batch_size for rate in rates} if is_own else set()
    empty = [rate.batch_size for rate in rates if rate.optimum.best is None and is_own]
    edges = [rate for rate in rates if rate.optimum.best and not rate.optimum.is_inside]
    listed = ", ".join(
        f"{rate.optimum.best:.3g} of {len(rate.trials['loss'].dropna())} tried "
        f"{f'({rate.has_no_result} more did not end) ' if rate.has_no_result else ''}"
        f"at batch size {rate.batch_size}"
        for rate in edges
    )
    parts = {
        "The best learning rate is the lowest or highest that was tried, so a better one may lie "
        "beyond: ": listed,
        "No rate completed at batch size ": ", ".join(map(str, empty)),
        "No rate was tuned at batch size ": ", ".join(f"{size:g}" for size in sorted(untuned)),
    }
    wrong = " ".join(f"{start}{text}." for start, text in parts.items() if text)
    return [*untuned, *empty, *(r.batch_size for r in edges)], wrong or _rate_texts(evidence)


def _rate_texts(evidence: Evidence) -> str:
    texts = []
    for rate in evidence.rates:
        optimum, rates = rate.optimum, rate.trials["learning_rate"]
        text = (
            f"Batch size {rate.batch_size}: {optimum.best or math.nan:.3g}, inside "
            f"{rates.min():.3g} to {rates.max():.3g}, {rate.tried} trials"
        )
        if optimum.rate is not None:
            ends = optimum.interval
            interval = f" [{ends[0]:.3g}, {ends[1]:.3g}]" if ends else ""
            text += f", vertex {optimum.rate:.3g}{interval}"
        if optimum.plateau:
            text += f", within one σ {optimum.plateau[0]:.3g} to {optimum.plateau[1]:.3g}"
        if rate.has_other_dimensions:
            text += ", at the β2 and weight decay of the best trial, which are not bracketed"
        texts.append(f"{text}.")
    return " ".join(texts)


def tuning_incomplete(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    early = [rate.batch_size for rate in evidence.rates if not rate.is_full]
    failed = {rate.batch_size: rate.failed for rate in evidence.rates if rate.failed}
    counts = ", ".join(f"{count} at batch size {size}" for size, count in failed.items())
    sizes = ", ".join(map(str, early))
    text = f"Tuning trials failed: {counts or 'none'}. Tuned at fewer tokens: {sizes or 'none'}."
    return ([*early, *failed], text) if evidence.rates else None


def single_seed(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    counts = evidence.cells.groupby("batch_size")["seeds"].max().dropna()
    few = counts[counts < SEEDS_FOR_SPREAD]
    if few.empty:
        return ((), f"At least {counts.min():g} seeds per batch size.") if len(counts) else None
    number = {"1": "One seed"}.get(f"{few.max():g}", f"At most {few.max():g} seeds")
    return (
        few.index,
        f"{number} at batch size {', '.join(f'{size:g}' for size in few.index)}. Another seed "
        "changes every loss by an unknown amount, so no difference between batch sizes can be "
        "distinguished from chance.",
    )


def warmup_fraction(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    warmup, steps = known["warmup_steps"], known["true_steps"]
    fraction, tolerance = warmup / steps, (WARMUP_ROUNDING * warmup).clip(lower=1)
    if not ((warmup - tolerance) / steps).max() > ((warmup + tolerance) / steps).min():
        return (), f"Warmup is {fraction.median():.3%} of the steps by the median."
    off = known[(warmup - fraction.median() * steps).abs() > tolerance]
    pairs = zip(fraction[off.index], off["batch_size"], strict=True)
    listed = [f"{part:.3%} at batch size {batch:g}" for part, batch in pairs]
    return (
        off["batch_size"],
        f"Warmup is not the same fraction of every training: {fraction.median():.3%} by the "
        f"median, but {', '.join(listed)}.",
    )


def seconds_per_step_outlier(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    hours, sequences = known["hours"], known["true_steps"] * known["batch_size"]
    digits = next((d for d in range(9) if (hours - hours.round(d)).abs().max() < 1e-12), 9)
    half = 0.5 * 10.0**-digits  # the rounding of hours as written
    fastest = ((hours + half) / sequences).cummin().shift()
    slow = known[(hours - half) / sequences > fastest / COLLAPSE]
    if slow.empty:
        return (), "No batch size is much slower per sequence than a smaller one."
    row = slow.iloc[-1]
    smaller = known[known["batch_size"] < row["batch_size"]]
    base = smaller.loc[(hours / sequences)[smaller.index].idxmin()]
    late, early = (3600 * cell["hours"] / cell["true_steps"] for cell in (row, base))
    memory = row.get("device_memory_gib", math.nan)
    size = "" if math.isnan(memory) else f" of {memory:g} GiB"
    return (
        slow["batch_size"],
        f"A step of batch size {row['batch_size']:g} took {late:.3f} s, one of "
        f"{base['batch_size']:g} {early:.3f} s: {late / early:.1f} times as long for "
        f"{row['batch_size'] / base['batch_size']:.3g} times the work. Compilation happens once "
        f"and cannot explain this; a device{size} that spills into host memory can, or an "
        "allocator that thrashes.",
    )


def adamw_time_scale(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    known = known[known["weight_decay"] > 0]
    scale = 1 / (known["learning_rate"] * known["weight_decay"] * known["true_steps"])
    if known.empty:
        return None
    return (
        known["batch_size"] if _ratio(scale) > HELD else (),
        "AdamW's time scale 1/(rate × weight decay × steps), as a fraction of the training, ranges "
        f"from {_range(known, scale, '.3g')}.",
    )


def beta2_half_life(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    known = known[known["adam_beta2"] < 1]
    tokens_per_step = known["batch_size"] * known["context_length"]
    half_life = tokens_per_step * math.log(0.5) / np.log(known["adam_beta2"])
    if known.empty:
        return None
    return (
        known["batch_size"] if _ratio(half_life) > HELD else (),
        "The half-life of Adam's second moment, in tokens, ranges from "
        f"{_range(known, half_life, ',.0f')}.",
    )


def best_of_evaluations(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    text = "The least loss of many evaluations is biased downwards"
    both = known[known["final_valid_loss"].notna()]
    if both.empty:
        return known["batch_size"], f"{text}, and no final loss is given."
    bias = both["final_valid_loss"] - both["best_valid_loss"]
    final, least = (
        [f"{batch:g}" for batch in both.sort_values(name, kind="stable")["batch_size"]]
        for name in ("final_valid_loss", "best_valid_loss")
    )
    changed = f"another ranking ({', '.join(least)} instead of {', '.join(final)})"
    return (
        both["batch_size"] if final != least else both[bias > BIAS]["batch_size"],
        f"{text}: best_valid_loss is up to {bias.max():.4f} below final_valid_loss, and gives "
        f"{'the same ranking' if final == least else changed} of the batch sizes.",
    )


def missing_batch_size(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    rows = evidence.rows[evidence.rows["stage"] != "tune"]
    keys = list(zip(rows["batch_size"], rows["learning_rate"].fillna(0), strict=True))
    done = {key for key, is_failed in zip(keys, rows["is_failed"], strict=True) if not is_failed}
    batches = {batch for batch, _ in done}
    # A rate that diverged next to one that did not belongs to tuning: nothing is missing.
    is_lost = [key in done or key[0] not in batches for key in keys]
    lost = rows[rows["is_failed"] & (rows["is_out_of_memory"] | np.array(is_lost, bool))]
    pairs = [
        *zip(lost["batch_size"], lost["status"].str[:40], strict=True),
        *(
            (b, "no rate decided yet")
            for b in {*evidence.rows["batch_size"]} - {*rows["batch_size"]}
        ),
    ]
    words = list(dict.fromkeys(f"{batch:g} ({status or 'no loss'})" for batch, status in pairs))
    text = f"The loss of some or all seeds is missing at batch size {', '.join(words)}."
    return [batch for batch, _ in pairs], text if pairs else "No loss is missing."


def diverged(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    is_tuning, has_diverged = evidence.rows["stage"] == "tune", evidence.rows["has_diverged"]
    reports = evidence.rows["batch_size"][~is_tuning & has_diverged]
    text = f"{len(reports)} of {(~is_tuning).sum()} reporting trials"
    tuning = f" and {(is_tuning & has_diverged).sum()} of {is_tuning.sum()} tuning trials"
    return reports, f"{text}{tuning if is_tuning.any() else ''} diverged."


def batch_size_at_edge(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    sizes = known["batch_size"].to_list()
    if len(sizes) < 3:
        return None
    best = known.loc[known["loss"] == known["loss"].min(), "batch_size"].to_list()
    text = f"The least loss is at batch size {best[0]:g} of {sizes[0]:g} to {sizes[-1]:g}."
    side = "smaller" if best[0] == sizes[0] else "larger"
    is_inside = any(sizes[0] < size < sizes[-1] for size in best)
    return ((), text) if is_inside else (best, f"{text} No {side} one was tried.")


def many_epochs(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    epochs = evidence.rows["epochs"].astype(float)
    text = f"The data were used for {epochs.max():.3g} epochs."
    return evidence.rows["batch_size"][epochs > MANY_EPOCHS], text


def initial_loss(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    rows = evidence.rows.dropna(subset=["initial_train_loss"])
    start, expected = rows["initial_train_loss"], math.log(rows["vocabulary"].iloc[0])
    far = (start - expected).abs() > INITIAL_LOSS_TOLERANCE
    return (
        rows["batch_size"][far],
        f"The loss before training was {start.min():.3f} to {start.max():.3f}; ln V is "
        f"{expected:.3f}.",
    )


def mixed_execution(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    mixed = execution_differences(evidence.rows)
    if not mixed:
        return (), "All trials ran on the same device, software and settings."
    listed = "; ".join(f"{name}: {', '.join(values)}" for name, values in mixed.items())
    return (
        evidence.rows["batch_size"],
        f"Execution differs between trials ({listed}). Losses then differ by rounding too, and "
        "times cannot be compared.",
    )


def uneven_times(evidence: Evidence, known: pd.DataFrame) -> Verdict:
    rows = evidence.rows
    done = rows[(rows["stage"] != "tune") & ~rows["is_failed"]].groupby("batch_size")
    ratios = done["seconds_total"].max() / done["seconds_total"].min()
    if ratios.empty:
        return None
    return (
        ratios.index[ratios > UNEVEN_TIMES],
        f"Trials that differ only in their seed took up to {ratios.max():.2f} times as long as "
        f"each other (batch size {ratios.idxmax():g}).",
    )


RULES: dict[str, Callable[[Evidence, pd.DataFrame], Verdict]] = {
    rule.__name__: rule
    for rule in (
        *(steps_are_log_rows, tokens_mismatch, equal_steps_not_tokens, tokens_differ),
        *(fixed_learning_rate, scaled_learning_rate, learning_rate_at_edge, tuning_incomplete),
        *(single_seed, warmup_fraction, seconds_per_step_outlier, adamw_time_scale),
        *(beta2_half_life, best_of_evaluations, missing_batch_size, diverged),
        *(batch_size_at_edge, many_epochs, initial_loss, mixed_execution, uneven_times),
    )
}
