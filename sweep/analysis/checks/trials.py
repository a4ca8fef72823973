"""The checks of a table of trials, in the order of reports.

They judge our trials.csv and published tables alike. T stands for tokens / (batch size × context).
"""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.checks.registry import NotApplicable, Verdict, check
from sweep.analysis.checks.table import TrialTable, tokens_of_a_step
from sweep.analysis.tables import read_execution
from sweep.analysis.tuned_rates import TunedRate
from sweep.errors import cut
from sweep.plan.course import MOST_EPOCHS, MOST_TOKEN_RATIO
from sweep.plan.policies import LEAST_SEEDS
from sweep.trial.status import State

STEPS_TOLERANCE = 0.05  # share of steps that people round, and of the tokens that follow from them
LEAST_LOG_LENGTHS = 3  # two wrong numbers of steps do not look like a log of the training
MOST_CLIP_RATES = 10.0  # largest over smallest share of clipped steps
LEAST_CLIP_RATE = 0.001  # smaller shares count as this one
MOST_TIME_SCALES = 2.01  # most over least of an optimizer's time scale: ×2, rounded
LEAST_THROUGHPUT = 0.6  # as a share of the sequences per second at a smaller batch size
MOST_INITIAL_MISFIT = 0.25  # nats; random logits add up to about 0.15
SPREAD_OF_TOKENS = 2.0  # nats; over two standard deviations of a token's loss before training
MOST_STATUS_CHARACTERS = 40


@check(
    needs=("steps", "context_length", "token_budget"),
    condition="Steps are optimizer steps.",
    remedy=(
        "Use tokens / (batch size × context) as the number of steps, also in conclusions about "
        "updates."
    ),
    blocks_claims=True,
)
def steps_are_log_rows(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    """Fail if the column `steps` does not hold steps: it is below T in every row, for three or more
    T, rises with T, and is not one share of T within 5 %.
    """
    if not _counts_log_rows(table):
        return Verdict("The column steps does not look like a count of log rows.")
    row = table.wrong_steps.iloc[0]
    evidence = (
        f"The column steps does not hold optimizer steps; it looks like a count of log rows "
        f"({row['steps']:,.0f} rows for {row['true_steps']:,.0f} steps = tokens / (batch size × "
        f"context) at batch size {row['batch_size']:g})."
    )
    return Verdict(evidence, batch_sizes=table.wrong_steps["batch_size"])


def _counts_log_rows(table: TrialTable) -> bool:
    """Return True if `steps` is wrong in every cell, as a count of the rows of a log would be.

    A log has fewer rows than steps, more rows for more steps, and further rows for evaluations, so
    that it does not have the same share of the steps everywhere, as micro-steps or the steps of one
    of several devices would.
    """
    counted = table.cells.dropna(subset=["steps", "true_steps"])
    pairs = counted[["true_steps", "steps"]].drop_duplicates().sort_values("true_steps")
    true_steps = pairs["true_steps"]
    steps = pairs["steps"]
    if len(table.wrong_steps) < len(counted) or len(pairs) < LEAST_LOG_LENGTHS:
        return False
    if not (true_steps.is_unique and steps.is_unique and steps.is_monotonic_increasing):
        return False
    steps_per_row = true_steps / steps
    is_one_share = steps_per_row.max() <= (1 + STEPS_TOLERANCE) * steps_per_row.min()
    return bool((steps < true_steps).all()) and not is_one_share


@check(
    needs=("steps", "context_length", "token_budget"),
    condition="steps × batch size × tokens per sequence = tokens.",
    remedy=(
        "Find out what was counted (micro-steps, one device's share, rows of a log) or how much "
        "was trained."
    ),
    blocks_claims=True,
)
def tokens_mismatch(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if `steps` differs from T by more than one step and more than 1 % (in trials.csv: at
    all), and `steps_are_log_rows` does not fail.
    """
    if _counts_log_rows(table):
        return NotApplicable()
    wrong = table.wrong_steps[["steps", "true_steps", "batch_size"]].to_numpy()
    listed = [f"{steps:,.0f} for {true:,.0f} at batch size {size:g}" for steps, true, size in wrong]
    evidence = f"Steps that are not tokens / (batch size × context): {_join(listed)}."
    return Verdict(evidence, batch_sizes=table.wrong_steps["batch_size"])


@check(
    needs=("steps",),
    condition="Batch sizes are compared at equal tokens, not at equal steps.",
    remedy="Give every batch size the same tokens: steps = tokens / (batch size × context).",
    blocks_claims=True,
    needs_equal_tokens=True,
)
def equal_steps_not_tokens(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if two batch sizes have equal steps, within 5 %, and at no number of steps the same
    tokens (steps × batch size × context), within 5 % and a step.
    """
    if cells.empty:
        return NotApplicable()
    evidence = f"Steps: {_range(cells, cells['steps'], ',.0f')}."
    blamed = _sizes_at_equal_steps(table)
    if blamed:
        listed = _join_sizes(blamed)
        evidence += f" Of the batch sizes {listed}, some have equal steps, and not the same tokens."
    return Verdict(evidence, batch_sizes=blamed)


def _sizes_at_equal_steps(table: TrialTable) -> list[float]:
    """Return the batch sizes that have the steps of another one, but in no case its tokens.

    Steps are equal within 5 %, and tokens within 5 % and one step. Rows of a log are no steps.
    """
    if _counts_log_rows(table):
        return []
    cells = table.cells.dropna(subset="steps")
    sizes = cells["batch_size"].to_numpy()
    steps = cells["steps"].to_numpy(float)
    tokens_per_step = tokens_of_a_step(cells).to_numpy(float)
    low = (steps - 1) * tokens_per_step
    high = (steps + 1) * tokens_per_step * (1 + STEPS_TOLERANCE)

    blamed = []
    for size in np.unique(sizes):
        with_equal_steps = set[float]()
        with_equal_tokens = {float(size)}
        for cell in np.flatnonzero(sizes == size):
            ratio = steps / steps[cell]
            has_equal_steps = (ratio <= 1 + STEPS_TOLERANCE) & (ratio >= 1 / (1 + STEPS_TOLERANCE))
            with_equal_steps.update(sizes[has_equal_steps].tolist())
            has_equal_tokens = (low <= high[cell]) & (low[cell] <= high)
            with_equal_tokens.update(sizes[has_equal_tokens].tolist())
        if with_equal_steps - with_equal_tokens:
            blamed.append(float(size))
    return blamed


@check(
    needs=("trained_tokens",),
    condition="Every batch size trained on the same number of tokens.",
    remedy=(
        "Choose batch sizes with a small least common multiple, or a budget that all of them use "
        "up in whole steps."
    ),
    blocks_claims=True,
    needs_equal_tokens=True,
)
def tokens_differ(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if token budgets differ by more than 1 % (in trials.csv: at all without slopes of the
    curves), or tokens that follow from the steps by more than 5 % and a step; batch sizes of
    `equal_steps_not_tokens` are not named again.
    """
    others = {*cells["batch_size"]} - {*_sizes_at_equal_steps(table)}
    if not others:
        return NotApplicable()

    tokens = cells["trained_tokens"]
    is_given = cells["token_budget"].notna()
    most = MOST_TOKEN_RATIO
    if not is_given.all():
        most = 1 + STEPS_TOLERANCE
    elif table.is_own and cells["valid_slope"].isna().any():
        most = 1.0
    step = tokens_of_a_step(cells).mask(is_given, 0.0)
    is_off = float((tokens - step).max()) > most * float((tokens + step).min())

    unit = "sequences"
    if is_given.any() or cells["context_length"].notna().any():
        unit = "tokens"
    source = "" if is_given.all() else ", by the steps"
    evidence = f"Training {unit}{source}: {_range(cells, tokens, ',.0f')}."
    if table.is_own and not is_off and tokens.nunique() > 1:
        evidence += " The intervals allow for the difference, by the slopes of the curves."
    return Verdict(evidence, batch_sizes=sorted(others) if is_off else ())


@check(
    needs=("learning_rate",),
    condition="The learning rate is chosen at each batch size, not fixed or set by a scaling rule.",
    remedy="Tune the rate at each batch size until the best one is inside the grid.",
    blocks_claims=True,
)
def fixed_learning_rate(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if a batch size has one rate, which was also tried at another one (in trials.csv: no
    tuning trials with several rates belong to it, whatever the policy is called).
    """
    rows = table.rows.dropna(subset="learning_rate")
    if rows["batch_size"].nunique() < 2:
        return NotApplicable()
    evidence = f"The learning rate is {_range(rows, rows['learning_rate'])}."
    outside = _sizes_outside_of_grid(table, rows) if table.is_own else set()
    untuned = _untuned_sizes(rows) | outside if table.is_own else _sizes_of_shared_rate(rows)
    if not untuned:
        return Verdict(evidence)
    if outside:
        evidence += " Some final trials have a rate outside of those tried at their batch size."
    evidence += " A worse result may only show that the rate suits a batch size less."
    return Verdict(evidence, batch_sizes=sorted(untuned), command=table.tuning_command)


def _untuned_sizes(rows: pd.DataFrame) -> set[float]:
    """Return the batch sizes without tuning trials at several rates, whatever the policy's name."""
    tuning = rows[rows["stage"] == "tune"]
    counts = tuning.groupby("batch_size")["learning_rate"].nunique()
    return {*rows["batch_size"]} - {*counts.index[counts > 1]}


def _sizes_outside_of_grid(table: TrialTable, rows: pd.DataFrame) -> set[float]:
    """Return the batch sizes whose final trials have a rate outside of those tried."""
    used = rows[rows["stage"] != "tune"].groupby("batch_size")["learning_rate"].first()
    return {
        rate.batch_size
        for rate in table.rates
        if rate.batch_size in used and not rate.covers(float(used[rate.batch_size]))
    }


def _sizes_of_shared_rate(rows: pd.DataFrame) -> set[float]:
    """Return the batch sizes with one rate that was also tried at another batch size.

    A table without tuning trials does not say how its rates were chosen.
    """
    tried = rows[~rows["is_failed"] | rows["has_diverged"]]
    rates = tried.groupby("batch_size")["learning_rate"].agg(["nunique", "first"])
    sizes_of_rate = tried.groupby("learning_rate")["batch_size"].nunique()
    is_shared = rates["first"].map(sizes_of_rate) > 1
    return {*rates.index[(rates["nunique"] == 1) & is_shared]}


@check(
    needs=("learning_rate", "value"),
    condition="The best learning rate of every batch size is strictly inside its grid.",
    remedy=(
        "Tune these batch sizes until the best rate is strictly inside: around a higher rate if "
        "the highest is the best, around a lower one if the lowest is. "
        "If no rate reached a target, raise the target or the budget."
    ),
    blocks_claims=True,
)
def learning_rate_at_edge(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if several rates were tried at a batch size, and the best is its lowest or highest. A
    diverged rate bounds a grid; one that was pruned, did not end or failed does not.
    """
    if not table.rates:
        return NotApplicable()
    untuned = set[Any]()
    if table.is_own:
        finals = table.rows[table.rows["stage"] != "tune"]
        untuned = set(finals["batch_size"]) - {rate.batch_size for rate in table.rates}
    at_edge = [rate for rate in table.rates if not rate.is_inside and (rate.best or table.is_own)]
    described: Iterable[TunedRate] = at_edge
    if not at_edge and not untuned:
        described = table.rates
    texts = [f"Batch size {rate.batch_size}: {_describe_rates(rate)}." for rate in described]
    texts += [f"Batch size {size:g}: no rate was tuned." for size in sorted(untuned)]
    blamed = [*untuned, *(rate.batch_size for rate in at_edge)]
    return Verdict(" ".join(texts), batch_sizes=blamed)


def _describe_rates(rate: TunedRate) -> str:
    if rate.best is None:
        return f"none of {rate.tried} trials completed"
    grid = rate.trials.dropna(subset="value")["learning_rate"]  # a pruned rate bounds nothing
    if len(rate.trials) == 1:
        return f"{rate.best:.3g} is the only rate that was tried"
    text = f"{rate.best:.3g} is the best rate of {rate.tried} trials"
    return f"{text}, with results at {grid.min():.3g} to {grid.max():.3g}"


@check(
    needs=("policy",),
    condition=("No tuning trial failed, and the best rates ran on the tokens of the final trials."),
    remedy=(
        "Repeat the trials that failed. If the best rates ran on fewer tokens than the final "
        "trials, tune on all tokens."
    ),
    blocks_claims=True,
)
def tuning_incomplete(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if tuning trials failed, or had fewer tokens than the final ones."""
    if not table.rates:
        return NotApplicable()
    early = [rate.batch_size for rate in table.rates if not rate.is_full]
    tuning = table.rows[table.rows["stage"] == "tune"]
    failed = tuning[(tuning["state"] == State.FAILED) & ~tuning["has_diverged"]]
    evidence = (
        f"{len(failed)} tuning trials failed. Batch sizes whose rates ran on fewer tokens: "
        f"{_join(map(str, early))}."
    )
    return Verdict(evidence, batch_sizes=[*early, *failed["batch_size"]])


@check(
    needs=("seeds",),
    condition="Every batch size has at least three seeds, with different results.",
    remedy="Train at least 3 seeds at each batch size, better 5, each to its end.",
    blocks_claims=True,
)
def single_seed(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if no rate of a batch size has three seeds (in trials.csv also: three that all other
    batch sizes have, with different losses).
    """
    seeds = table.cells.groupby("batch_size")["seeds"].max().dropna().reset_index()
    if seeds.empty:
        return NotApplicable()
    blamed = seeds["batch_size"][seeds["seeds"] < LEAST_SEEDS].to_list()
    evidence = f"The number of seeds is {_range(seeds, seeds['seeds'], 'g')}."

    finals = table.rows[table.rows["stage"] != "tune"]
    ended = finals[~finals["is_failed"] & finals["value"].notna()]
    equal = _sizes_of_equal_values(ended)
    if equal:
        evidence += f" All seeds gave the same result at {_join_sizes(equal)}."
    if not table.is_own or ended["seed"].isna().all():
        return Verdict(evidence, batch_sizes=blamed)

    apart = _sizes_without_common_seeds(ended)
    if apart and not blamed:
        sizes = _join_sizes(apart)
        evidence += f" Fewer than {LEAST_SEEDS} seeds are common to all of the batch sizes {sizes}."
        blamed = apart
    return Verdict(evidence, batch_sizes=[*blamed, *equal])


def _sizes_of_equal_values(ended: pd.DataFrame) -> list[float]:
    """Return the batch sizes at which all of several trials with one rate have one value."""
    finite = ended[np.isfinite(ended["value"])]
    values = finite.groupby(["batch_size", "learning_rate"])["value"].agg(["count", "nunique"])
    is_equal = (values["count"] > 1) & (values["nunique"] == 1)
    sizes: list[float] = values.index[is_equal].get_level_values("batch_size").to_list()
    return sizes


def _sizes_without_common_seeds(ended: pd.DataFrame) -> list[float]:
    """Return the batch sizes that share too few seeds with another one."""
    has_seed = (pd.crosstab(ended["batch_size"], ended["seed"]) > 0).astype(int)
    in_common = has_seed @ has_seed.T
    return in_common.index[(in_common < LEAST_SEEDS).any(axis=1)].to_list()


@check(
    needs=("warmup_steps", "true_steps"),
    condition="Warmup is the same fraction of every training, within 2 % or one step.",
    remedy="Make warmup one fraction of the tokens at every batch size.",
    needs_equal_budgets=True,
)
def warmup_fraction(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if no single fraction of T is within one step (or 2 %) of the warmup at every batch
    size.
    """
    if cells.empty:
        return NotApplicable()
    warmup = cells["warmup_steps"]
    steps = cells["true_steps"]
    fraction = warmup / steps
    median = fraction.median()
    evidence = f"The median warmup is {median:.3%} of the steps; {_range(cells, fraction, '.3%')}."
    # Numbers are written with two digits: 1.3k for 1,280.
    tolerance = (0.02 * warmup).clip(lower=1)
    least = ((warmup - tolerance) / steps).max()
    most = ((warmup + tolerance) / steps).min()
    if not least > most:  # some fraction suits every batch size
        return Verdict(evidence)
    is_off = (warmup - median * steps).abs() > tolerance
    return Verdict(evidence, batch_sizes=cells["batch_size"][is_off])


@check(
    needs=("hours", "true_steps"),
    condition="No batch size is much slower per sequence than a smaller one.",
    remedy="Measure these times again with smaller microbatches and gradient accumulation.",
)
def seconds_per_step_outlier(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if sequences per second are below 0.6 of a smaller batch size's, beyond the rounding of
    the hours: the device spills into host memory, or the allocator thrashes.
    """
    if cells.empty:
        return NotApplicable()
    sizes = cells["batch_size"]
    hours = cells["hours"]
    sequences = cells["true_steps"] * sizes
    rounding = _rounding_of(hours)
    least = (hours - rounding) / sequences
    most = (hours + rounding) / sequences
    is_slow = least > most.cummin().shift() / LEAST_THROUGHPUT
    if not is_slow.any():
        return Verdict("No batch size is much slower per sequence than a smaller one.")

    last = is_slow[is_slow].index[-1]
    first = (hours / sequences)[sizes < sizes[last]].idxmin()
    seconds = 3600 * hours / cells["true_steps"]
    memory = cells["device_memory_gib"][last] if "device_memory_gib" in cells else math.nan
    device = "a device" if math.isnan(memory) else f"a device of {memory:g} GiB"
    evidence = (
        f"A step of batch size {sizes[last]:g} took {seconds[last]:.3f} s, one of {sizes[first]:g} "
        f"{seconds[first]:.3f} s: {seconds[last] / seconds[first]:.1f} times as long for "
        f"{sizes[last] / sizes[first]:.3g} times the work. Compilation cannot explain this; "
        f"{device} that spills into host memory or an allocator that thrashes can."
    )
    return Verdict(evidence, batch_sizes=sizes[is_slow])


def _rounding_of(hours: pd.Series) -> float:
    """Return the largest error of hours that are rounded to as many digits as these have."""
    for digits in range(9):
        if (hours - hours.round(digits)).abs().max() < 1e-12:
            return 0.5 * 10.0**-digits
    return 0.5 * 10.0**-9


@check(
    needs=("learning_rate", "weight_decay", "true_steps"),
    condition="AdamW's time scale differs by at most a factor of 2.",
    remedy="Keep rate × weight decay × steps constant, or tune both and say so.",
    needs_equal_budgets=True,
)
def adamw_time_scale(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if 1/(rate × weight decay × T) differs by more than a factor of 2 (Wang & Aitchison
    2024); rows of SGD and of your own optimizers are left out.
    """
    cells = _without_optimizers(table, cells[cells["weight_decay"] > 0], "sgd|:")
    scale = 1 / (cells["learning_rate"] * cells["weight_decay"] * cells["true_steps"])
    return _compare(cells, scale, MOST_TIME_SCALES, "1/(rate × weight decay × steps)")


@check(
    needs=("adam_beta2", "context_length"),
    condition="The half-life of Adam's second moment differs by at most a factor of 2 in tokens.",
    remedy="Raise β2 to the power of the ratio of the batch sizes: β2' = β2^(B'/B).",
)
def beta2_half_life(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if batch size × context × ln ½ / ln β2 differs by more than a factor of 2 (Marek et al.
    2025); rows of SGD, Adafactor and your own optimizers are left out.
    """
    cells = cells[cells["adam_beta2"].between(0, 1, "neither")]
    cells = _without_optimizers(table, cells, "sgd|adafactor|:")
    tokens_per_step = cells["batch_size"] * cells["context_length"]
    tokens = tokens_per_step * math.log(0.5) / np.log(cells["adam_beta2"])
    return _compare(cells, tokens, MOST_TIME_SCALES, "Half-life in tokens", ",.0f")


def _without_optimizers(table: TrialTable, cells: pd.DataFrame, names: str) -> pd.DataFrame:
    """Leave out cells of optimizers to which a check does not apply, or may not (a user's own)."""
    if "optimizer" not in table.rows:
        return cells
    is_other = table.rows["optimizer"].astype(str).str.contains(names, case=False)
    keys = ["batch_size", "learning_rate"]
    excluded = pd.MultiIndex.from_frame(table.rows.loc[is_other, keys])
    return cells[~pd.MultiIndex.from_frame(cells[keys]).isin(excluded)]


@check(
    needs=("clipped_step_fraction",),
    condition="The share of clipped steps differs by at most an order of magnitude.",
    remedy="Tune the clip too, or switch it off: it acts like another learning rate.",
)
def clip_rate_differs(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if the share of clipped steps (at least 0.001) differs by more than a factor of 10."""
    rates = cells["clipped_step_fraction"].clip(lower=LEAST_CLIP_RATE)
    return _compare(cells, rates, MOST_CLIP_RATES, "Share of clipped steps, at least 0.001")


@check(
    needs=("best_valid_loss",),
    condition="Final losses are compared, not the best of several evaluations.",
    remedy="Compare the final loss, at the end of the schedule.",
)
def best_of_evaluations(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    """Fail if the best evaluation is more than 0.001 below the final loss or ranks the batch sizes
    differently, or there is no final loss.
    """
    both = cells[cells["final_valid_loss"].notna()]
    if both.empty:
        return Verdict("No final loss is given.", batch_sizes=cells["batch_size"])
    sizes = both["batch_size"]
    bias = both["final_valid_loss"] - both["best_valid_loss"]
    final_ranking = _ranking(sizes, both["final_valid_loss"])
    best_ranking = _ranking(sizes, both["best_valid_loss"])
    is_same = final_ranking == best_ranking
    ranking = "the same ranking"
    if not is_same:
        ranking = f"another ranking ({best_ranking}, not {final_ranking})"
    evidence = (
        f"best_valid_loss is up to {bias.max():.4f} below final_valid_loss and gives {ranking}."
    )
    return Verdict(evidence, batch_sizes=sizes[bias > 1e-3] if is_same else sizes)


def _ranking(sizes: pd.Series, losses: pd.Series) -> str:
    order = losses.argsort(kind="stable")
    return _join_sizes(sizes.iloc[order])


@check(
    needs=("outcome",),
    condition="Every final trial has a result.",
    remedy=(
        "Train the missing trials. If memory ran out, use smaller "
        "microbatches and gradient accumulation; if training diverged, use a lower rate."
    ),
    blocks_claims=True,
)
def missing_batch_size(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    """Fail if a row failed (in trials.csv: for another reason than `diverged`), is unfinished or
    has no loss; a rate that diverged next to one that did not is no fault.
    """
    rows = table.rows[table.rows["stage"] != "tune"]
    keys = rows["batch_size"].astype(str) + " " + rows["learning_rate"].astype(str)
    done = rows[~rows["is_failed"]]
    # A rate that diverged next to one that did not belongs to tuning: nothing is missing.
    is_needed = keys.isin(keys[done.index]) | ~rows["batch_size"].isin(done["batch_size"])
    lost = rows[rows["is_failed"] & (rows["is_out_of_memory"] | is_needed)]
    if table.is_own:  # running the same command again would not train them: see `diverged`
        lost = lost[~lost["has_diverged"]]

    reasons = {}
    for size, status in zip(lost["batch_size"], lost["status"], strict=True):
        reasons[size] = cut(status, MOST_STATUS_CHARACTERS)
    undecided = {*table.rows["batch_size"], *table.waiting} - {*rows["batch_size"]}
    reasons |= dict.fromkeys(undecided, "no rate decided yet")
    listed = [f"{size:g} ({reason or 'no loss'})" for size, reason in reasons.items()]
    evidence = f"Batch sizes that lack the loss of a seed: {_join(listed)}."
    return Verdict(evidence, batch_sizes=list(reasons))


@check(
    needs=("cause",),
    condition="No final trial diverged.",
    remedy="Use a lower rate, a longer warmup or a lower clip.",
    blocks_claims=True,
)
def diverged(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    """Fail if a final trial diverged."""
    is_tuning = table.rows["stage"] == "tune"
    finals = table.rows[~is_tuning]
    tuning = table.rows[is_tuning]
    counts = [
        f"{trials['has_diverged'].sum()} of {len(trials)} {stage} trials"
        for stage, trials in (("final", finals), ("tuning", tuning))
        if len(trials)
    ]
    blamed = finals["batch_size"][finals["has_diverged"]]
    return Verdict(f"{' and '.join(counts)} diverged.", batch_sizes=blamed)


@check(
    needs=("value",),
    condition="The best batch size lies between others.",
    remedy="Add batch sizes beyond the best one.",
    needs_equal_budgets=True,
)
def batch_size_at_edge(table: TrialTable, cells: pd.DataFrame) -> Verdict | NotApplicable:
    """Fail if the least loss is at the smallest (above 1) or largest of three or more batch
    sizes.
    """
    sizes = cells["batch_size"]
    if len(sizes) < 3:
        return NotApplicable()
    smallest, largest = sizes.min(), sizes.max()
    best = sizes[cells["value"] == cells["value"].min()]
    evidence = f"The best result is at batch size {best.iloc[0]:g} of {smallest:g} to {largest:g}."
    is_at_edge = best.isin([smallest, largest]).all() and best.min() > 1
    return Verdict(evidence, batch_sizes=best if is_at_edge else ())


@check(
    needs=("epochs",),
    condition="The data were used for at most four epochs.",
    remedy="Use more data or a smaller budget, or read the answer as one about so many epochs.",
)
def many_epochs(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    """Fail if the data were used for more than 4 epochs."""
    epochs = table.rows["epochs"].astype(float)
    evidence = f"The data were used for {epochs.max():.3g} epochs."
    return Verdict(evidence, batch_sizes=table.rows["batch_size"][epochs > MOST_EPOCHS])


@check(
    needs=("initial_train_loss", "expected_initial_loss"),
    condition="The loss before training is close to ln V.",
    remedy="Find out why the model did not start from chance: pretrained weights, or a fault.",
    blocks_claims=True,
)
def initial_loss(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    """Fail if the loss before training is more than 0.25 nats from ln V, and 2/√n for n tokens."""
    rows = table.rows.dropna(subset=["initial_train_loss"])
    losses = rows["initial_train_loss"]
    expected = rows["expected_initial_loss"].max()
    evidence = f"Loss before training: {_range(rows, losses, '.3f')}; ln V is {expected:.3f}."
    tokens = (rows["batch_size"] * rows["context_length"]).astype(float)  # of the first step
    sampling = SPREAD_OF_TOKENS * tokens.pow(-0.5).fillna(0.0)
    is_off = (losses - expected).abs() > MOST_INITIAL_MISFIT + sampling
    return Verdict(evidence, batch_sizes=rows["batch_size"][is_off])


@check(
    needs=("execution",),
    condition="All trials ran on the same device, software and settings.",
    remedy="Run all trials on one kind of device with one version of the software.",
)
def mixed_execution(table: TrialTable, cells: pd.DataFrame) -> Verdict:
    """Fail if device, software or settings of the execution differ between trials."""
    done = table.rows[table.rows["execution"].notna() & (table.rows["state"] == State.COMPLETE)]
    values: dict[str, set[str]] = {}
    for name in ("device", "hardware", "torch_version", "git_commit", "devices"):
        if name in done:
            values[name] = set(done[name].dropna().map(str)) - {""}
    values |= _values_of_executions(set(done["execution"]))
    for size, sizes in done.groupby("batch_size")["microbatch_size"]:
        values[f"microbatch_size at batch size {size}"] = {f"{number:g}" for number in sizes}
    mixed = [f"{name}: {', '.join(sorted(v))}" for name, v in values.items() if len(v) > 1]
    evidence = f"Settings that differ between trials: {_join(mixed, '; ')}."
    return Verdict(evidence, batch_sizes=table.rows["batch_size"] if mixed else ())


def _values_of_executions(texts: Iterable[str]) -> dict[str, set[str]]:
    """Return the values of each setting, except those that follow from the microbatch."""
    follow_from_microbatch = ("microbatch", "generation_batch_size", "evaluation_batch_size")
    executions = [read_execution(text) or {} for text in texts]
    names = {name for execution in executions for name in execution}
    values: dict[str, set[str]] = {}
    for name in sorted(names):
        if name.startswith(follow_from_microbatch):
            continue
        seen = values.setdefault(f"execution.{name}", set())
        for execution in executions:
            value = execution.get(name)  # None also if an older version did not record it
            if isinstance(value, list) and value:  # a value for each attempt of a trial
                seen.update(map(json.dumps, value))
            else:
                seen.add(json.dumps(value))
    return values


def _compare(
    cells: pd.DataFrame, values: pd.Series, most: float, subject: str, form: str = ".3g"
) -> Verdict | NotApplicable:
    """Blame every batch size if the largest value is more than `most` times the least."""
    if cells.empty:
        return NotApplicable()
    evidence = f"{subject}: {_range(cells, values, form)}."
    is_off = float(values.max()) > most * float(values.min())  # both may be infinite
    return Verdict(evidence, batch_sizes=cells["batch_size"] if is_off else ())


def _range(cells: pd.DataFrame, values: pd.Series, form: str = ".3g") -> str:
    """Describe the least and the largest value, and the batch sizes that have them."""
    low = f"{values.min():{form}}"
    high = f"{values.max():{form}}"
    if low == high:
        return f"{low} at every batch size"
    by_size = pd.Series(values.to_numpy(), cells["batch_size"])
    size_of_low = by_size.idxmin()
    size_of_high = by_size.idxmax()
    if size_of_low == size_of_high:
        return f"{low} to {high} at batch size {size_of_low:g}"
    return f"{low} at batch size {size_of_low:g} to {high} at batch size {size_of_high:g}"


def _join_sizes(sizes: Iterable[float]) -> str:
    return ", ".join(f"{size:g}" for size in sizes)


def _join(texts: Iterable[str], separator: str = ", ") -> str:
    return separator.join(texts) or "none"
