"""The table of checks: every fact that a claim about batch sizes rests on, judged once.

The report, the terminal and `sweep audit` read this table. Conditions and remedies are in
checks.toml. The rules that need only a table of trials are in `sweep.analysis.rules`; they judge
our own trials.csv and published tables alike.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from sweep.analysis.comparison import SEEDS_FOR_SPREAD, report_trials, short
from sweep.analysis.frames import Sweep
from sweep.analysis.optimum import TunedRate, tuned_rates
from sweep.analysis.rules import RULES, Evidence, prepare, rows_of_trials
from sweep.analysis.statistics import (
    MOST_SEEDS,
    Comparison,
    Estimate,
    compare_pairs,
    minimal_detectable_difference,
    seeds_sd,
    seeds_to_detect,
)
from sweep.config.numbers import format_count
from sweep.plan.plan import TUNING_SEED, Plan, answering_command

TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("checks.toml").read_text(encoding="utf-8")
)
PASS, FAIL, NOT_APPLICABLE = "PASS", "FAIL", "NOT APPLICABLE"
WANTED_DIFFERENCE = 0.01  # nats: the margin of equivalence too
DERIVED_FROM = {"true_steps": "steps", "outcome": "final_valid_loss", "loss": "final_valid_loss"}


@dataclass(frozen=True)
class Check:
    """One condition, evaluated for the trials of one policy."""

    code: str  # SCIENCE.md §8's if the subject is the same, such as single_seed
    status: Literal["PASS", "FAIL", "NOT APPLICABLE"]
    condition: str  # what must hold, a sentence
    evidence: str  # the numbers, one or more sentences
    remedy: str = ""  # what would settle it, a sentence or a command; empty unless it fails
    blocks_claims: bool = False  # no claim about the best batch size is made while it fails
    batch_sizes: tuple[int, ...] = ()  # those at fault
    missing_columns: tuple[str, ...] = ()  # columns whose absence makes it NOT APPLICABLE


def build_check(
    code: str,
    evidence: str,
    is_failed: bool | None = None,
    batch_sizes: Iterable[Any] = (),
    remedy: str = "",
) -> Check:
    """Return a row of checks.toml with its evidence.

    Args:
        is_failed: None if the check is not applicable.
        remedy: replaces the general one if it is not empty.
    """
    row = TABLE[code]
    return Check(
        code=code,
        status="NOT APPLICABLE" if is_failed is None else "FAIL" if is_failed else "PASS",
        condition=row["condition"],
        evidence=evidence,
        remedy=(remedy or row.get("remedy", "")) if is_failed else "",
        blocks_claims=row.get("blocks_claims", False),
        batch_sizes=tuple(sorted({int(size) for size in batch_sizes})) if is_failed else (),
    )


@dataclass(frozen=True, eq=False)
class PolicyChecks:
    """The checks of one learning-rate policy and the optimum of each batch size."""

    label: str  # "tuned", "fixed 3e-4", "sqrt:0.001@32"
    checks: tuple[Check, ...]
    rates: tuple[TunedRate, ...]  # empty unless the rates were tuned
    scope: str  # "This holds for …", a sentence

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that fail, those that block claims first."""
        failed = [check for check in self.checks if check.status == FAIL]
        return tuple(sorted(failed, key=lambda check: not check.blocks_claims))

    @property
    def passes(self) -> bool:
        """Whether no check fails that blocks claims."""
        return not any(check.blocks_claims for check in self.failed)

    @property
    def is_tuned(self) -> bool:
        """Whether the rates were tuned."""
        return self.label == "tuned"


@dataclass(frozen=True, eq=False)
class PolicyResult(PolicyChecks):
    """The reporting trials of one learning-rate policy, compared and checked."""

    comparison: Comparison  # of final losses, paired by seed
    sigma: Estimate | None  # standard deviation between seeds, in comparison.unit

    @property
    def best(self) -> int | None:
        """The batch size of the least mean loss; None unless every check passes."""
        return self.comparison.least if self.passes else None


def check_rows(evidence: Evidence, remedies: dict[str, str] | None = None) -> dict[str, Check]:
    """Evaluate the rules on one table; a rule is left out if such a table never has its columns."""
    checks = {}
    for code, rule in RULES.items():
        row, needs = TABLE[code], TABLE[code]["needs"]
        is_of_equal_budgets = row.get("equal_budgets", False)
        if not set(needs) <= set(evidence.rows) or (evidence.has_target and is_of_equal_budgets):
            continue
        absent = [name for name in needs if evidence.rows[name].isna().all()]
        missing = tuple(DERIVED_FROM.get(name, name) for name in absent)
        known = evidence.best.dropna(subset=[name for name in needs if name in evidence.best])
        verdict = None if absent else rule(evidence, known)
        if verdict is None:
            text = f"Not checked: {', '.join(missing)} is missing." if absent else "Not applicable."
            checks[code] = replace(build_check(code, text), missing_columns=missing)
        else:
            sizes, remedy = list(verdict[0]), (remedies or {}).get(code, "")
            checks[code] = build_check(code, verdict[1], bool(sizes), sizes, remedy)
    return checks


def check_own_rows(
    sweep: Sweep, label: str, cells: pd.DataFrame, sigma: Estimate | None, degrees: int
) -> tuple[dict[str, Check], tuple[TunedRate, ...]]:
    """Evaluate the rules on one policy of our own sweep, with commands as remedies.

    Args:
        sweep: as `load_sweep` returns it.
        label: of the policy.
        cells: of the policy, from `compare_batch_sizes`.
        sigma: standard deviation over seeds of a loss, or of log tokens to the target.
        degrees: degrees of freedom of sigma.
    """
    rows = rows_of_trials(sweep.trials, sweep.plan)
    evidence = prepare(rows[rows["label"] == label])
    if sigma:
        evidence = replace(evidence, rates=tuned_rates(evidence.rows, sigma.value, degrees))
    tuning, rerun = answering_command(sweep.plan) or "", "the same command again"
    has_seeds = int(cells["planned"].min()) >= SEEDS_FOR_SPREAD
    if cells["diverged"].any():
        rerun = "a lower rate, by --lr RATE"
        if label == "tuned":
            rerun = "a longer warmup or a lower clip: training is not stable at the best rates"
    remedies = {
        "fixed_learning_rate": tuning,
        "scaled_learning_rate": tuning,
        "learning_rate_at_edge": _beyond(evidence),
        "single_seed": rerun if has_seeds else f"--seeds {SEEDS_FOR_SPREAD} (5 recommended)",
        "missing_batch_size": rerun,
        "diverged": rerun,
    }
    return check_rows(evidence, remedies), evidence.rates


def _beyond(evidence: Evidence) -> str:
    """Name where to search next; a sweep has already extended its grid as far as it may."""
    parts = []
    for rate in (rate for rate in evidence.rates if not rate.optimum.is_inside):
        best, rates = rate.optimum.best, rate.trials["learning_rate"]
        centre = rates.max() if best and best > rates.min() else rates.min() / 4
        where = f"another --out with [tuning] centre = {centre:.2g}"
        if evidence.has_target and best is None:
            where = "a larger budget, or a higher target"
        parts.append(f"{where}, for batch size {rate.batch_size}")
    return "; ".join(parts)


def run_checks(sweep: Sweep, cells: pd.DataFrame) -> dict[str, PolicyResult]:
    """Evaluate every check for each policy of a sweep without a target, in the plan's order.

    Args:
        sweep: as `load_sweep` returns it.
        cells: from `compare_batch_sizes(sweep.trials)`.
    """
    labels = dict.fromkeys(str(label) for label in cells["label"])
    return {label: _policy(sweep, cells[cells["label"] == label], label) for label in labels}


def _policy(sweep: Sweep, cells: pd.DataFrame, label: str) -> PolicyResult:
    trials = report_trials(sweep.trials)
    trials = trials[trials["label"] == label]
    losses = _losses(trials)
    comparison = compare_pairs(losses, unit=sweep.plan.settings.traits.loss_unit)
    sigma, degrees = seeds_sd(losses), comparison.degrees_of_freedom
    checks, rates = check_own_rows(sweep, label, cells, sigma, degrees)
    seeds = checks["single_seed"]
    spread = _spread_sentence(comparison, sigma)
    checks["single_seed"] = replace(seeds, evidence=f"{seeds.evidence} {spread}".strip())
    complete = int(cells.loc[cells["is_comparable"], "batch_size"].nunique())
    loss_count = int(cells["complete"].sum())
    rest = (
        _differences(comparison, sigma),
        build_check(
            "nothing_to_compare",
            f"{complete} of {cells['batch_size'].nunique()} batch sizes are complete.",
            complete < 2,
        ),
        build_check(
            "final_losses",
            f"{loss_count} final losses of the whole validation split, after the last step of a "
            f"{sweep.plan.settings.schedule.name} schedule. The least loss of the evaluations is "
            "biased and takes no part.",
            False if loss_count else None,
        ),
        build_check("equal_steps", f"{why_no_equal_steps(sweep.plan)}."),
        build_check(
            "generalisation",
            "Why losses differ was not measured. A higher loss with the same gap between training "
            "and validation loss is no sign of worse generalisation.",
        ),
    )
    everything = (*checks.values(), *rest)
    return PolicyResult(label, everything, rates, scope_sentence(sweep, trials), comparison, sigma)


def _losses(trials: pd.DataFrame) -> dict[int, dict[int, float]]:
    """Return final losses by batch size and seed; infinite if a trial diverged."""
    losses: dict[int, dict[int, float]] = {int(size): {} for size in trials["batch_size"]}
    for row in trials.to_dict("records"):
        if row["state"] == "COMPLETE" or row["cause"] == "diverged":
            loss = float(row["final_valid_loss"]) if row["state"] == "COMPLETE" else float("inf")
            losses[int(row["batch_size"])][int(row["seed"])] = loss
    return losses


def _spread_sentence(comparison: Comparison, sigma: Estimate | None) -> str:
    """Return σ of seeds and the smallest difference that these seeds can show."""
    if sigma is None:
        return "σ of seeds is unknown."
    count, seeds, pairs = len(comparison.batch_sizes), len(comparison.seeds), len(comparison.pairs)
    least = minimal_detectable_difference(sigma.value, seeds, count, pairs) or float("nan")
    needed = seeds_to_detect(WANTED_DIFFERENCE, sigma.value, count, pairs)
    unit, wanted = comparison.unit, needed or f"more than {MOST_SEEDS}"
    return (
        f"σ of seeds is {sigma.value:.4f} [{sigma.low:.4f}, {sigma.high:.4f}] {unit}. {seeds} "
        f"seeds show a difference of {least:.4f} {unit} with power 0.8 over all pairs; "
        f"{WANTED_DIFFERENCE:g} {unit} would need {wanted} seeds."
    )


def _differences(comparison: Comparison, sigma: Estimate | None) -> Check:
    code, best = "undecided_differences", comparison.least
    if best is None or sigma is None:
        reason = comparison.not_applicable
        return build_check(code, f"{reason[:1].upper()}{reason[1:]}.")
    pairs = comparison.pairs_with(best)
    undecided = [pair for pair in pairs if not (pair.is_different or pair.is_equivalent)]
    different = sum(pair.is_different for pair in pairs)
    equal, unit = len(pairs) - different - len(undecided), comparison.unit
    evidence = (
        f"Paired by seed, Holm over all pairs: of {len(pairs)} batch sizes {different} differ from "
        f"batch size {best}, {equal} are equivalent within ±{comparison.margin:g} {unit}, "
        f"{len(undecided)} are undecided. The largest variance is {comparison.variance_ratio:.1f} "
        "times the smallest."
    )
    if not undecided:
        return build_check(code, evidence, False)
    wanted = max(min(abs(pair.difference.value) for pair in undecided), comparison.margin)
    count = len(comparison.batch_sizes)
    needed = seeds_to_detect(wanted, sigma.value, count, len(comparison.pairs))
    remedy = f"More than {MOST_SEEDS} seeds would be needed."
    if needed:
        seeds = max(needed, len(comparison.seeds) + 1)
        remedy = f"--seeds {seeds} for a difference of {wanted:.4f} {unit}"
    others = {size for pair in undecided for size in pair.batch_sizes} - {best}
    return build_check(code, evidence, True, others, remedy)


def why_no_equal_steps(plan: Plan) -> str:
    """Return why losses within a trial are not compared in a sweep without a target."""
    if plan.settings.schedule.name == "constant":
        return "Only final losses were measured on the whole validation split"
    return "The schedule knows its end, so a shorter trial would have had another loss there"


def data_name(data: dict[str, Any] | None) -> str:
    """Return the name of a data set from its identity."""
    return str((data or {}).get("name", "given by path"))


def scope_sentence(sweep: Sweep, trials: pd.DataFrame) -> str:
    """Return what a claim about these reporting trials holds for."""
    settings, plan = sweep.plan.settings, sweep.plan
    parts = [settings.model.name, *([data_name(plan.data)] if plan.data else [])]
    parts += [f"{format_count(plan.token_budget)} tokens", settings.optimizer.name]
    parts.append(f"{settings.schedule.name} schedule")
    tuned = sweep.trials[(sweep.trials["stage"] == "tune") & (sweep.trials["policy"] == "tuned")]
    if set(trials["policy"]) == {"tuned"} and len(tuned):
        counts = tuned.groupby("batch_size").size()
        tried = " to ".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))
        tokens = format_count(int(tuned["tokens"].min()))
        parts.append(
            f"{' and '.join(settings.tuning.dimensions)} tuned by {tried} trials of {tokens} "
            f"tokens at seed {TUNING_SEED}"
        )
    seeds = ", ".join(map(str, sorted({int(seed) for seed in trials["seed"]})))
    return f"This holds for {', '.join(parts)}, reported on seeds {seeds}."


def headline(result: PolicyResult) -> str:
    """Return the claim about the best batch size; empty unless every blocking check passes."""
    if result.best is None:
        return ""
    comparison, best = result.comparison, result.best
    unit, equal, worse = comparison.unit, [best], []
    for pair in comparison.pairs_with(best):
        is_second = pair.batch_sizes[0] == best
        other, sign = pair.batch_sizes[is_second], 1 if is_second else -1
        low, high = sorted((sign * pair.difference.low, sign * pair.difference.high))
        if pair.is_equivalent:
            equal.append(other)
        else:
            worse.append(f"{other} by {sign * pair.difference.value:.4f} [{low:.4f}, {high:.4f}]")
    claim = f"batch size {best} has the lowest final loss"
    if len(equal) > 1:
        sizes = [str(size) for size in sorted(equal)]
        claim = (
            f"batch sizes {', '.join(sizes[:-1])} and {sizes[-1]} have the lowest final loss and "
            f"are equivalent to {best} within ±{short(comparison.margin)} {unit}"
        )
    higher = f"; higher are {', '.join(worse)} {unit}" if worse else ""
    return f"At rates tuned for each, {claim}{higher}. {result.scope}"
