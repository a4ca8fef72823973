"""The rules that need only a table of trials; they judge our trials.csv and published tables alike.

Conditions and remedies are in checks.toml.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sweep.analysis.cells import LOSSES, SETTINGS
from sweep.analysis.frames import policy_labels
from sweep.analysis.rates import TunedRate, tuned_rates
from sweep.errors import cut
from sweep.plan.policies import LEAST_SEEDS

TOKENS_TOLERANCE = 0.01  # share of the steps that the budget gives
STEPS_TOLERANCE = 0.05  # share of steps that people round, and of the tokens that follow from them
MOST_CHANCE = 0.01  # largest share of random columns that a formula of log rows may fit
MOST_CLIP_RATES = 10.0  # largest over smallest share of clipped steps
LEAST_CLIP_RATE = 0.001  # smaller shares count as this one
MOST_TIME_SCALES = 2.01  # most over least of an optimizer's time scale: ×2, rounded

# The batch sizes at fault and the evidence; None if a rule does not apply. A rule gets one cell per
# batch size, the best with a value in every column that the rule needs.
Verdict = tuple[Iterable[Any], str] | None


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


def rows_of_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the table of trials.csv with the columns that the rules read."""
    names = {"beta2": "adam_beta2", "tokens": "token_budget"}
    rows = trials.rename(columns={**names, "tokens_per_sequence": "context_length"})
    rows = rows.drop(columns="best_valid_loss")  # `best_of_evaluations` is for published tables
    rows["label"] = policy_labels(rows)
    rows["state"] = rows["state"].astype(object).fillna("unknown")
    rows["cause"] = rows["cause"].astype(object).fillna("")
    rows["status"] = (rows["state"] + " " + rows["cause"]).str.strip()
    has_ended = rows["state"].isin(["COMPLETE", "FAILED"])
    is_infinite = np.isinf(rows["final_valid_loss"].astype(float))
    rows["has_diverged"] = (rows["cause"] == "diverged") | (is_infinite & has_ended)
    rows["is_out_of_memory"] = rows["cause"] == "out_of_memory"
    rows["is_failed"] = rows["state"] != "COMPLETE"
    # A loss on the way is not that of the end of the schedule.
    rows["final_valid_loss"] = rows["final_valid_loss"].mask(rows["is_failed"])
    rows["hours"] = rows["seconds_training"] / 3600
    rows["has_target"] = has_target = bool(rows["target"].notna().any())
    is_pruned = rows["state"] == "PRUNED"
    if has_target:
        rows["is_failed"] &= ~is_pruned  # a bound, which is data too
        logs = rows["tokens_to_target"].astype(float).map(math.log).fillna(math.inf)
        rows["final_valid_loss"] = logs.mask(rows["is_failed"])
        counts = rows[["steps", "token_budget"]].astype(float)
        rows[["steps", "token_budget"]] = counts.mask(is_pruned | (rows["stage"] == "tune"))
    return rows


def prepare(table: pd.DataFrame, is_own: bool = True) -> TrialTable:
    """Derive true steps, failures, cells and the grids of rates."""
    rows = table.copy()
    has_target = is_own and bool(rows["has_target"].any())
    rows["loss"] = next((rows[n] for n in LOSSES if n in rows and rows[n].notna().any()), math.nan)
    tokens_per_step = rows["batch_size"] * rows["context_length"]
    rows["true_steps"] = (rows["token_budget"] / tokens_per_step).fillna(rows["steps"])
    rows["trained_tokens"] = rows["token_budget"].fillna(rows["steps"] * _tokens_per_step(rows))
    has_loss = bool(rows["loss"].notna().any())
    has_outcome = has_loss or (rows["status"] != "").any() or rows["is_failed"].any()
    rows["outcome"] = 1.0 if has_outcome else math.nan
    rows["is_failed"] |= has_loss & rows["loss"].isna()
    ended_early = ("token_budget", "steps", "epochs") if is_own else ()
    settings = [name for name in SETTINGS if name in rows and name not in ended_early]
    if is_own and not has_target:
        settings.append("token_budget")
    if is_own or (rows["seeds"].isna().all() and (rows["seed"] != "").any()):
        rows["seeds"] = (~rows.duplicated([*settings, "stage", "seed"])).astype(float)
    groups = rows[~rows["is_failed"] & (rows["stage"] != "tune")].groupby(settings, dropna=False)
    cells = groups.mean(numeric_only=True).reset_index()
    cells["seeds"] = groups["seeds"].sum(min_count=1).to_numpy()
    best = cells.sort_values("loss", kind="stable").drop_duplicates("batch_size")
    tolerance = 0.0 if is_own else (TOKENS_TOLERANCE * cells["true_steps"]).clip(lower=1)
    wrong = cells[(cells["steps"] - cells["true_steps"]).abs() > tolerance]
    counted = cells.dropna(subset=["steps", "true_steps"])
    formula = explain_log_rows(counted["steps"], counted["true_steps"]) if len(wrong) else ""
    best = best.sort_values("batch_size")
    rates = tuned_rates(rows, is_own)
    return TrialTable(rows, cells, best, wrong, formula, rates, is_own, has_target)


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
    triples, form = np.array(list(product(numbers, repeat=3))), "T/{} + T/max({}, T/{}) + 1"
    a, b, c = triples.T[:, :, None]
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


def _range(cells: pd.DataFrame, values: pd.Series, form: str = ".3g") -> str:
    low, high = f"{values.min():{form}}", f"{values.max():{form}}"
    if low == high:
        return f"{low} at every batch size"
    by_size = pd.Series(values.to_numpy(), cells["batch_size"])
    first, last = by_size.idxmin(), by_size.idxmax()
    if first == last:
        return f"{low} to {high} at batch size {first:g}"
    return f"{low} at batch size {first:g} to {high} at batch size {last:g}"


def _compare(
    cells: pd.DataFrame, values: pd.Series, most: float, subject: str, form: str = ".3g"
) -> Verdict:
    """Blame every batch size if the largest value is more than `most` times the least."""
    if cells.empty:
        return None
    is_off = float(values.max()) > most * float(values.min())  # both may be infinite
    return cells["batch_size"] if is_off else (), f"{subject}: {_range(cells, values, form)}."


def steps_are_log_rows(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    if not table.log_formula:
        return (), "The column steps does not look like a count of log rows."
    row = table.wrong_steps.iloc[0]
    return table.cells["batch_size"], (
        f"The column steps counts rows of a log: it is {table.log_formula}, where T = "
        f"tokens / (batch size × context) are the optimizer steps ({row['steps']:,.0f} rows for "
        f"{row['true_steps']:,.0f} steps at batch size {row['batch_size']:g})."
    )


def tokens_mismatch(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    if table.log_formula:
        return None
    wrong = table.wrong_steps[["steps", "true_steps", "batch_size"]].to_numpy()
    listed = [f"{steps:,.0f} for {true:,.0f} at batch size {size:g}" for steps, true, size in wrong]
    text = f"Steps that are not tokens / (batch size × context): {', '.join(listed) or 'none'}."
    return table.wrong_steps["batch_size"], text


def _tokens_per_step(rows: pd.DataFrame) -> pd.Series:
    """Return the tokens of a step; in sequences if no row has a context length."""
    contexts = rows["context_length"].astype(float)
    tokens: pd.Series = rows["batch_size"] * (1.0 if contexts.isna().all() else contexts)
    return tokens


def _sizes_at_equal_steps(table: TrialTable) -> list[float]:
    """Return the batch sizes that have the steps of another one, but in no case its tokens.

    Steps are equal within 5 %, and tokens within 5 % and one step.
    """
    if table.log_formula:
        return []
    cells = table.cells.dropna(subset="steps")
    tokens_per_step = _tokens_per_step(cells).to_numpy(float)
    sizes, steps = cells["batch_size"].to_numpy(), cells["steps"].to_numpy(float)
    low = (steps - 1) * tokens_per_step
    high = (steps + 1) * tokens_per_step * (1 + STEPS_TOLERANCE)
    blamed = []
    for size in np.unique(sizes):
        with_equal_steps, with_equal_tokens = set[float](), {float(size)}
        for cell in np.flatnonzero(sizes == size):
            ratio = steps / steps[cell]
            is_equal = (ratio <= 1 + STEPS_TOLERANCE) & (ratio >= 1 / (1 + STEPS_TOLERANCE))
            with_equal_steps.update(sizes[is_equal].tolist())
            is_equal = (low <= high[cell]) & (low[cell] <= high)
            with_equal_tokens.update(sizes[is_equal].tolist())
        if with_equal_steps - with_equal_tokens:
            blamed.append(float(size))
    return blamed


def equal_steps_not_tokens(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    if cells.empty:
        return None
    blamed = _sizes_at_equal_steps(table)
    text = f"Steps: {_range(cells, cells['steps'], ',.0f')}."
    if blamed:
        listed = ", ".join(f"{size:g}" for size in blamed)
        text += f" Of the batch sizes {listed}, some have equal steps, and not the same tokens."
    return blamed, text


def tokens_differ(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    """Compare the tokens of the best cells; those that follow from steps may be one step off."""
    blamed = sorted({*cells["batch_size"]} - {*_sizes_at_equal_steps(table)})
    if not blamed:
        return None
    tokens, is_given = cells["trained_tokens"], cells["token_budget"].notna()
    step = _tokens_per_step(cells).mask(is_given, 0.0)
    most = 1 + TOKENS_TOLERANCE
    if not is_given.all():
        most = 1 + STEPS_TOLERANCE
    elif table.is_own:
        most = 1.0
    is_off = float((tokens - step).max()) > most * float((tokens + step).min())
    unit = "tokens" if is_given.any() or cells["context_length"].notna().any() else "sequences"
    source = "" if is_given.all() else ", by the steps"
    return blamed if is_off else (), (f"Training {unit}{source}: {_range(cells, tokens, ',.0f')}.")


def fixed_learning_rate(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    rows = table.rows.dropna(subset="learning_rate")
    sizes = rows["batch_size"].unique()
    if len(sizes) < 2:
        return None
    text = f"The learning rate is {_range(rows, rows['learning_rate'])}."
    untuned = _untuned_sizes(table, rows) if table.is_own else _sizes_of_shared_rate(rows)
    if not untuned:
        return (), text
    if any(rate.batch_size in untuned for rate in table.rates):
        text += " Some reporting trials have a rate outside of those tried at their batch size."
    return untuned, f"{text} A worse result may only show that the rate suits a batch size less."


def _untuned_sizes(table: TrialTable, rows: pd.DataFrame) -> list[float]:
    """Return the batch sizes whose rate does not come from tuning trials at several rates.

    The policy's name does not matter. A rate outside of those tried was not tuned either.
    """
    is_tuning = rows["stage"] == "tune"
    counts = rows[is_tuning].groupby("batch_size")["learning_rate"].nunique()
    untuned = {*rows["batch_size"]} - {*counts.index[counts > 1]}
    used = rows[~is_tuning].groupby("batch_size")["learning_rate"].first()
    for rate in table.rates:
        if rate.batch_size in used and not rate.covers(float(used[rate.batch_size])):
            untuned.add(rate.batch_size)
    return sorted(untuned)


def _sizes_of_shared_rate(rows: pd.DataFrame) -> list[float]:
    """Return the batch sizes with one rate that was also tried at another batch size.

    A table without tuning trials does not say how its rates were chosen.
    """
    tried = rows[~rows["is_failed"] | rows["has_diverged"]]
    rates = tried.groupby("batch_size")["learning_rate"].agg(["nunique", "first"])
    sizes_of_rate = tried.groupby("learning_rate")["batch_size"].nunique()
    is_shared = rates["first"].map(sizes_of_rate) > 1
    return sorted(rates.index[(rates["nunique"] == 1) & is_shared])


def learning_rate_at_edge(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    rows, rates, untuned = table.rows, table.rates, set[Any]()
    if not rates:
        return None
    if table.is_own:
        untuned = set(rows.loc[rows["stage"] != "tune", "batch_size"])
        untuned -= {rate.batch_size for rate in rates}
    edges = [rate for rate in rates if not rate.is_inside and (rate.best or table.is_own)]
    described = edges if edges or untuned else rates
    texts = [f"Batch size {rate.batch_size}: {_describe_rates(rate)}." for rate in described]
    texts += [f"Batch size {size:g}: no rate was tuned." for size in sorted(untuned)]
    return [*untuned, *(rate.batch_size for rate in edges)], " ".join(texts)


def _describe_rates(rate: TunedRate) -> str:
    if rate.best is None:
        return f"none of {rate.tried} trials completed"
    grid = rate.trials.dropna(subset="loss")["learning_rate"]  # a pruned rate bounds nothing
    text = f"{rate.best:.3g} is the best rate of {rate.tried} trials"
    return f"{text}, with results at {grid.min():.3g} to {grid.max():.3g}"


def tuning_incomplete(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    early, rows = [rate.batch_size for rate in table.rates if not rate.is_full], table.rows
    failed = rows[(rows["stage"] == "tune") & (rows["state"] == "FAILED") & ~rows["has_diverged"]]
    text = f"{len(failed)} tuning trials failed. Batch sizes whose rates ran on fewer tokens: "
    text += f"{', '.join(map(str, early)) or 'none'}."
    return ([*early, *failed["batch_size"]], text) if table.rates else None


def single_seed(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    seeds = table.cells.groupby("batch_size")["seeds"].max().dropna().reset_index()
    if seeds.empty:
        return None
    blamed = seeds["batch_size"][seeds["seeds"] < LEAST_SEEDS].to_list()
    text = f"The number of seeds is {_range(seeds, seeds['seeds'], 'g')}."
    ended = table.rows[(table.rows["stage"] != "tune") & table.rows["loss"].notna()]
    finite = ended[np.isfinite(ended["loss"])]
    losses = finite.groupby(["batch_size", "learning_rate"])["loss"].agg(["count", "nunique"])
    equal = losses[(losses["count"] > 1) & (losses["nunique"] == 1)].index.get_level_values(0)
    if len(equal):
        text += f" All seeds gave the same result at {', '.join(f'{n:g}' for n in equal)}."
    if not table.is_own or ended["seed"].isna().all():
        return blamed, text
    has_seed = pd.crosstab(ended["batch_size"], ended["seed"]) > 0
    in_common = has_seed.astype(int) @ has_seed.T.astype(int)
    if len(apart := in_common.index[(in_common < LEAST_SEEDS).any(axis=1)]) and not blamed:
        sizes = ", ".join(map("{:g}".format, apart))
        text += f" Fewer than {LEAST_SEEDS} seeds are common to all of the batch sizes {sizes}."
        blamed = [*apart]
    return [*blamed, *equal], text


def warmup_fraction(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    warmup, steps = cells["warmup_steps"], cells["true_steps"]
    if cells.empty:
        return None
    # Numbers are written with two digits: 1.3k for 1,280.
    fraction, tolerance = warmup / steps, (0.02 * warmup).clip(lower=1)
    off = cells[(warmup - fraction.median() * steps).abs() > tolerance]
    if not ((warmup - tolerance) / steps).max() > ((warmup + tolerance) / steps).min():
        off = cells.iloc[:0]
    text = f"The median warmup is {fraction.median():.3%} of the steps"
    return off["batch_size"], f"{text}; {_range(cells, fraction, '.3%')}."


def seconds_per_step_outlier(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    hours, sequences = cells["hours"], cells["true_steps"] * cells["batch_size"]
    if cells.empty:
        return None
    digits = next((d for d in range(9) if (hours - hours.round(d)).abs().max() < 1e-12), 9)
    half = 0.5 * 10.0**-digits  # the rounding of hours as written
    # A throughput below 0.6 of that of a smaller batch size: spilling, thrashing.
    slow = (hours - half) / sequences > ((hours + half) / sequences).cummin().shift() / 0.6
    if not slow.any():
        return (), "No batch size is much slower per sequence than a smaller one."
    last = slow[slow].index[-1]
    seconds, sizes = 3600 * hours / cells["true_steps"], cells["batch_size"]
    first = (hours / sequences)[sizes < sizes[last]].idxmin()
    memory = cells["device_memory_gib"][last] if "device_memory_gib" in cells else math.nan
    device = "a device" if math.isnan(memory) else f"a device of {memory:g} GiB"
    return sizes[slow], (
        f"A step of batch size {sizes[last]:g} took {seconds[last]:.3f} s, one of {sizes[first]:g} "
        f"{seconds[first]:.3f} s: {seconds[last] / seconds[first]:.1f} times as long for "
        f"{sizes[last] / sizes[first]:.3g} times the work. Compilation cannot explain this; "
        f"{device} that spills into host memory or an allocator that thrashes can."
    )


def adamw_time_scale(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    cells = _without(table, cells[cells["weight_decay"] > 0], "sgd|:")
    scale = 1 / (cells["learning_rate"] * cells["weight_decay"] * cells["true_steps"])
    return _compare(cells, scale, MOST_TIME_SCALES, "1/(rate × weight decay × steps)")


def _without(table: TrialTable, cells: pd.DataFrame, names: str) -> pd.DataFrame:
    """Leave out cells of optimizers to which a rule does not apply, or may not (a user's own)."""
    if "optimizer" not in table.rows:
        return cells
    is_other = table.rows["optimizer"].astype(str).str.contains(names, case=False)
    keys = ["batch_size", "learning_rate"]
    excluded = pd.MultiIndex.from_frame(table.rows.loc[is_other, keys])
    return cells[~pd.MultiIndex.from_frame(cells[keys]).isin(excluded)]


def beta2_half_life(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    cells = cells[cells["adam_beta2"].between(0, 1, "neither")]
    cells = _without(table, cells, "sgd|adafactor|:")
    tokens_per_step = cells["batch_size"] * cells["context_length"]
    tokens = tokens_per_step * math.log(0.5) / np.log(cells["adam_beta2"])
    return _compare(cells, tokens, MOST_TIME_SCALES, "Half-life in tokens", ",.0f")


def clip_rate_differs(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    rates = cells["clipped_step_fraction"].clip(lower=LEAST_CLIP_RATE)
    return _compare(cells, rates, MOST_CLIP_RATES, "Share of clipped steps, at least 0.001")


def best_of_evaluations(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    both = cells[cells["final_valid_loss"].notna()]
    if both.empty:
        return cells["batch_size"], "No final loss is given."
    sizes, bias = both["batch_size"], both["final_valid_loss"] - both["best_valid_loss"]
    orders = [both[name].argsort(kind="stable") for name in ("final_valid_loss", "best_valid_loss")]
    final, best = (", ".join(f"{size:g}" for size in sizes.iloc[order]) for order in orders)
    ranking = "the same ranking" if final == best else f"another ranking ({best}, not {final})"
    text = f"best_valid_loss is up to {bias.max():.4f} below final_valid_loss and gives {ranking}."
    return sizes if final != best else sizes[bias > 1e-3], text


def missing_batch_size(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    rows = table.rows[table.rows["stage"] != "tune"]
    keys = rows["batch_size"].astype(str) + " " + rows["learning_rate"].astype(str)
    done = rows[~rows["is_failed"]]
    # A rate that diverged next to one that did not belongs to tuning: nothing is missing.
    is_needed = keys.isin(keys[done.index]) | ~rows["batch_size"].isin(done["batch_size"])
    lost = rows[rows["is_failed"] & (rows["is_out_of_memory"] | is_needed)]
    if table.is_own:  # running the same command again would not train them: see `diverged`
        lost = lost[~lost["has_diverged"]]
    statuses = zip(lost["batch_size"], lost["status"], strict=True)
    reasons = {size: cut(status, 40) for size, status in statuses}
    undecided = set(table.rows["batch_size"]) - set(rows["batch_size"])
    reasons |= dict.fromkeys(undecided, "no rate decided yet")
    listed = [f"{size:g} ({reason or 'no loss'})" for size, reason in reasons.items()]
    return reasons, f"Batch sizes that lack the loss of a seed: {', '.join(listed) or 'none'}."


def diverged(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    is_tuning = table.rows["stage"] == "tune"
    tuned, reported = (table.rows[is_it] for is_it in (is_tuning, ~is_tuning))
    counts = [
        f"{trials['has_diverged'].sum()} of {len(trials)} {stage} trials"
        for stage, trials in (("reporting", reported), ("tuning", tuned))
        if len(trials)
    ]
    return reported["batch_size"][reported["has_diverged"]], f"{' and '.join(counts)} diverged."


def batch_size_at_edge(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    sizes, best = cells["batch_size"], cells["batch_size"][cells["loss"] == cells["loss"].min()]
    if len(sizes) < 3:
        return None
    is_at_edge = best.isin([sizes.min(), sizes.max()]).all() and best.min() > 1
    text = f"The best result is at batch size {best.iloc[0]:g} of {sizes.min():g} to "
    return best if is_at_edge else (), f"{text}{sizes.max():g}."


def many_epochs(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    epochs = table.rows["epochs"].astype(float)
    text = f"The data were used for {epochs.max():.3g} epochs."
    return table.rows["batch_size"][epochs > 4], text


def initial_loss(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    rows = table.rows.dropna(subset=["initial_train_loss"])
    start, expected = rows["initial_train_loss"], rows["expected_initial_loss"].max()
    text = f"Loss before training: {_range(rows, start, '.3f')}; ln V is {expected:.3f}."
    # Random logits add up to about 0.15 nats.
    return rows["batch_size"][(start - expected).abs() > 0.25], text


def read_execution(text: str | None) -> dict[str, Any] | None:
    """Read the column execution; None if it is not a JSON object."""
    try:
        settings = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def mixed_execution(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    done = table.rows[table.rows["execution"].notna() & (table.rows["state"] == "COMPLETE")]
    names = ("device", "hardware", "torch_version", "git_commit", "devices")
    values: dict[str, set[str]] = {
        name: set(done[name].dropna().map(str)) - {""} for name in names if name in done
    }
    follow_from_microbatch = ("microbatch", "generation_batch_size", "evaluation_batch_size")
    executions = [read_execution(text) or {} for text in set(done["execution"])]
    for name in sorted({name for execution in executions for name in execution}):
        if name.startswith(follow_from_microbatch):
            continue
        seen = values.setdefault(f"execution.{name}", set())
        for execution in executions:
            value = execution.get(name)  # None also if an older version did not record it
            if isinstance(value, list) and value:  # of the attempts of a trial
                seen.update(map(json.dumps, value))
            else:
                seen.add(json.dumps(value))
    for size, sizes in done.groupby("batch_size")["microbatch_size"]:
        values[f"microbatch_size at batch size {size}"] = {f"{number:g}" for number in sizes}
    mixed = [f"{name}: {', '.join(sorted(v))}" for name, v in values.items() if len(v) > 1]
    text = f"Settings that differ between trials: {'; '.join(mixed) or 'none'}."
    return table.rows["batch_size"] if mixed else (), text


IN_ORDER: tuple[Callable[[TrialTable, pd.DataFrame], Verdict], ...] = (
    *(steps_are_log_rows, tokens_mismatch, equal_steps_not_tokens, tokens_differ),
    *(fixed_learning_rate, learning_rate_at_edge, tuning_incomplete),
    *(single_seed, warmup_fraction, seconds_per_step_outlier, adamw_time_scale),
    *(beta2_half_life, clip_rate_differs, best_of_evaluations, missing_batch_size, diverged),
    *(batch_size_at_edge, many_epochs, initial_loss, mixed_execution),
)
RULES = {rule.__name__: rule for rule in IN_ORDER}
