"""Recommend a batch size and a rate for a larger training, from sweeps at smaller budgets."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from sweep.analysis.budgets import BudgetAnswer
from sweep.analysis.law import LEAST_BUDGETS, LEAST_MODELS, Law, Optimum, fit_law
from sweep.analysis.published_laws import Published, Scale, published_at
from sweep.analysis.results import Sweep, load_sweep
from sweep.analysis.tables import Estimate
from sweep.config.numbers import format_count
from sweep.decision.decision import ALPHA
from sweep.decision.proposal import command_with
from sweep.errors import SweepError
from sweep.plan.policies import parse_policy

MOST_EPOCHS = 4.0  # above which repeated data change the best batch size
PROVISIONAL_FACTOR = 10.0  # beyond the largest budget or model
LARGEST_FACTOR = 100.0  # beyond which the answer is the cap
WIDEST_EXPONENT = 1.0  # width of the interval of the exponent above which nothing is recommended
SAME_SIZE = 1.02  # ratio of model sizes that count as equal
NEXT_FACTOR = 4  # of the next budget over the largest
NO_REGRET = {"this": None, "kept": None, "published": None}
NOT_KNOWN = {"value": None, "interval": None, "range_within_tolerance": None}


@dataclass(frozen=True)
class Measured:
    """One budget of one sweep."""

    sweep: Sweep
    budget: BudgetAnswer
    parameters: float | None  # of the model, without embeddings; None: not known

    @property
    def tokens_per_sequence(self) -> int:
        return self.sweep.plan.tokens_per_sequence


@dataclass(frozen=True)
class Recommendation:
    """The keys of `sweep recommend --json`; batch sizes in tokens."""

    tokens: int
    params: float | None
    law: dict[str, Any]  # exponent, interval and points; the exponent is null without a law
    batch_size_tokens: dict[str, Any]  # value, interval and range_within_tolerance
    learning_rate: dict[str, Any]  # value and interval
    weight_decay: float | None
    adam_beta2: float | None
    regret: dict[str, float | None]  # this, kept and published; null unless budgets bracket it
    cap: str | None  # a sentence, if the training is too far from what was measured
    measured_up_to: int  # tokens of the largest budget
    factor_beyond: float  # tokens over those of the largest budget
    provisional: bool
    reasons: list[str]  # why it is provisional, or why there is no number, sentences
    published: list[Published]
    settle: str | None  # the command of the budget that would narrow it most
    settle_seconds: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def recommend(
    folders: Sequence[str | Path], tokens: int, params: float | None = None
) -> Recommendation:
    """Recommend a batch size for a training on so many tokens.

    Args:
        folders: of sweeps, with one or several budgets each.
        tokens: of the training.
        params: of its model, without embeddings; by default those of the sweeps.

    Raises:
        SweepError: if the sweeps cannot be compared.
    """
    measured = _measure([load_sweep(folder) for folder in folders])
    _refuse_different(measured)
    own, reasons = _of_model(measured, params)
    largest = max(measured, key=lambda each: each.budget.tokens)
    reference = max(own, key=lambda each: each.budget.tokens) if own else largest
    known = [each.parameters for each in measured if each.parameters is not None]
    size = params if params is not None else reference.parameters
    factor = tokens / largest.budget.tokens
    of_model = size / max(known) if size is not None and known else 1.0
    published: list[Published] = []
    is_language_model = reference.sweep.plan.settings.model.vocabulary is not None
    if size is not None and is_language_model:
        published = published_at(Scale(size, tokens))

    law = _fit(own, reasons) if own else None
    is_capped = max(factor, of_model) > LARGEST_FACTOR
    batch_size: dict[str, Any] = dict(NOT_KNOWN)
    rate: dict[str, Any] = {"value": None, "interval": None}
    decay = None
    beta2 = None
    if own and not is_capped:
        batch_size = _batch_size(own, law, tokens, size, reasons)
    if batch_size["value"] is not None:
        rate = _learning_rate(own, tokens, batch_size["value"], reasons)
        decay, beta2 = _rules_of_policy(reference, batch_size["value"])
    if PROVISIONAL_FACTOR < max(factor, of_model) <= LARGEST_FACTOR:
        reasons.append(
            f"It is {max(factor, of_model):.3g} times beyond what was measured, and provisional "
            f"from {PROVISIONAL_FACTOR:g} times on."
        )
    provisional = any(each.budget.answer.provisional for each in own)
    if provisional:
        reasons.append("The answer at some budget is provisional.")
    settle, seconds = _next_budget(reference, tokens)
    return Recommendation(
        tokens=tokens,
        params=size,
        law=_describe_law(law, measured),
        batch_size_tokens=batch_size,
        learning_rate=rate,
        weight_decay=decay,
        adam_beta2=beta2,
        regret=_regret(own, batch_size["value"], tokens, published),
        cap=_cap(largest, factor, of_model) if is_capped else None,
        measured_up_to=largest.budget.tokens,
        factor_beyond=factor,
        provisional=len(reasons) > 0 or is_capped,
        reasons=reasons,
        published=published,
        settle=settle,
        settle_seconds=seconds,
    )


def _measure(sweeps: Sequence[Sweep]) -> list[Measured]:
    measured = []
    for sweep in sweeps:
        if not sweep.budgets:
            raise SweepError(
                f"{sweep.path} must have an answer at a budget of tokens. Finish the sweep, or "
                "leave it out."
            )
        model = sweep.plan.model
        parameters = None
        if model.parameters:
            parameters = float(model.parameters - (model.embedding_parameters or 0))
        measured += [Measured(sweep, budget, parameters) for budget in sweep.budgets]
    return sorted(measured, key=lambda each: each.budget.tokens)


def _refuse_different(measured: Sequence[Measured]) -> None:
    """Refuse sweeps that differ in what a law must share, and too many epochs."""
    first = measured[0]
    for each in measured:
        for name, of_first, value in (
            ("policy", first.budget.answer.policy, each.budget.answer.policy),
            ("metric", first.budget.answer.metric, each.budget.answer.metric),
            ("optimizer", first.sweep.plan.settings.optimizer.name, _optimizer(each)),
            ("data", first.sweep.plan.data, each.sweep.plan.data),
            ("tokens per sequence", first.tokens_per_sequence, each.tokens_per_sequence),
        ):
            if of_first != value:
                raise SweepError(
                    f"budgets must have the same {name}, got {of_first!r} in {first.sweep.path} "
                    f"and {value!r} in {each.sweep.path}. Leave one out."
                )
    for each in measured:
        for of_budget in each.sweep.by_budget:
            epochs = of_budget.plan.epochs
            if epochs is not None and epochs > MOST_EPOCHS:
                raise SweepError(
                    f"a budget must have at most {MOST_EPOCHS:g} epochs, got {epochs:.3g} in "
                    f"{each.sweep.path}. Use more data, or leave it out."
                )


def _optimizer(each: Measured) -> str:
    return each.sweep.plan.settings.optimizer.name


def _of_model(
    measured: Sequence[Measured], params: float | None
) -> tuple[list[Measured], list[str]]:
    """Return the budgets that tell of a model size, and why there are none."""
    sizes = _model_sizes(measured)
    if len(sizes) >= LEAST_MODELS:
        if params is None:
            raise SweepError(
                f"these sweeps have {len(sizes)} model sizes, and the training needs one. Name it "
                "with --params."
            )
        return [*measured], []
    if params is None:
        if len(sizes) > 1:
            raise SweepError(
                "these sweeps have two model sizes, and the training needs one. Name it with "
                "--params."
            )
        return [*measured], []
    own = [
        each
        for each in measured
        if each.parameters is not None and 1 / SAME_SIZE <= each.parameters / params <= SAME_SIZE
    ]
    if own:
        return own, []
    known = " and ".join(format_count(size) for size in sizes) or "models of unknown size"
    return [], [
        f"Not measured: a model of {format_count(params)} parameters. These sweeps have {known}; "
        f"a law over sizes needs at least {LEAST_MODELS}."
    ]


def _model_sizes(measured: Sequence[Measured]) -> list[float]:
    """Return the different model sizes, ascending."""
    sizes: list[float] = []
    for size in sorted(each.parameters for each in measured if each.parameters is not None):
        if not sizes or size > SAME_SIZE * sizes[-1]:
            sizes.append(size)
    return sizes


def _optimum(each: Measured) -> Optimum | None:
    """Return the best batch size in tokens; None at an edge, or without a bounded interval."""
    best = each.budget.best
    low, high = best.interval
    if best.value is None or low is None or high is None:
        return None
    unit = each.tokens_per_sequence
    return Optimum(
        tokens=each.budget.tokens,
        batch_size=best.value * unit,
        low=low * unit,
        high=high * unit,
        parameters=each.parameters,
    )


def _fit(own: Sequence[Measured], reasons: list[str]) -> Law | None:
    """Fit the law, or append why there is none."""
    optima = [optimum for optimum in map(_optimum, own) if optimum is not None]
    least = LEAST_BUDGETS
    if len({optimum.parameters for optimum in optima}) >= LEAST_MODELS:
        least += 1
    if len(optima) < least:
        reasons.append(
            f"A law needs at least {least} budgets whose best batch size lies inside those tried; "
            f"there are {len(optima)}."
        )
        return None
    return fit_law(optima)


def _batch_size(
    own: Sequence[Measured],
    law: Law | None,
    tokens: int,
    size: float | None,
    reasons: list[str],
) -> dict[str, Any]:
    """Return the best batch size, its interval and the range within the tolerance, in tokens."""
    nothing: dict[str, Any] = dict(NOT_KNOWN)
    if law is None:
        return nothing | {"range_within_tolerance": _range_without_law(own, tokens)}
    exponent = law.exponent
    if exponent.high - exponent.low > WIDEST_EXPONENT:
        reasons.append(
            f"The exponent is not known well enough: {exponent.low:.2f} to {exponent.high:.2f}."
        )
        return nothing
    best = law.at(tokens, size)
    reference = max(own, key=lambda each: each.budget.tokens)
    inside = reference.budget.best
    relative = [1.0, 1.0]
    if inside.value is not None:
        relative = [end / inside.value for end in inside.range_within_tolerance]
    return {
        "value": best.value,
        "interval": (best.low, best.high),
        "range_within_tolerance": tuple(best.value * share for share in relative),
    }


def _range_without_law(own: Sequence[Measured], tokens: int) -> tuple[float, float] | None:
    """Return the range that the growth of the largest batch size within the tolerance predicts.

    None unless it is known at three budgets.
    """
    points = [
        (math.log(each.budget.tokens), math.log(each.budget.best.range_within_tolerance[1]))
        for each in own
        if not each.budget.best.is_range_open[1]
    ]
    if len(points) < LEAST_BUDGETS:
        return None
    x, y = np.array(points).T
    slope, level = np.polyfit(x, y, 1)
    unit = own[-1].tokens_per_sequence
    largest = math.exp(level + slope * math.log(tokens)) * unit
    smallest = own[-1].budget.best.range_within_tolerance[0] * unit
    return min(smallest, largest), largest


def _learning_rate(
    own: Sequence[Measured], tokens: int, batch_size: float, reasons: list[str]
) -> dict[str, Any]:
    """Return the best rate at a batch size in tokens, by a plane through the best log rates."""
    rows = []
    values = []
    for each in own:
        for row in each.budget.answer.batch_sizes:
            if row.best_learning_rate is not None:
                size = row.batch_size * each.tokens_per_sequence
                rows.append([1.0, math.log(each.budget.tokens), math.log(size)])
                values.append(math.log(row.best_learning_rate))
    design = np.array(rows)
    degrees = len(rows) - 3
    if degrees < 1 or np.linalg.matrix_rank(design) < 3:
        reasons.append("The rate is not known: too few batch sizes and budgets have tuned rates.")
        return {"value": None, "interval": None}
    coefficients, squares, _, _ = np.linalg.lstsq(design, np.array(values), rcond=None)
    point = np.array([1.0, math.log(tokens), math.log(batch_size)])
    variance = float(squares[0]) / degrees
    spread = variance * (1 + point @ np.linalg.inv(design.T @ design) @ point)
    half = float(stdtrit(degrees, 1 - ALPHA / 2)) * math.sqrt(spread)
    log_rate = float(point @ coefficients)
    return {
        "value": math.exp(log_rate),
        "interval": (math.exp(log_rate - half), math.exp(log_rate + half)),
    }


def _rules_of_policy(each: Measured, batch_size: float) -> tuple[float, float]:
    """Return weight decay and β2 at a batch size in tokens, by the rules of the policy."""
    settings = each.sweep.plan.settings
    unit = each.tokens_per_sequence
    policy = parse_policy(settings.lr)
    sequences = max(1, round(batch_size / unit))
    optimizer = policy.optimizer_at(sequences, unit, settings.optimizer)
    return optimizer.weight_decay, optimizer.beta2


def _regret(
    own: Sequence[Measured], value: float | None, tokens: int, published: Sequence[Published]
) -> dict[str, float | None]:
    """Return what three choices give up; null unless budgets of one model bracket the training.

    The best batch size and the curvature of the loss over log batch sizes are interpolated, in log
    tokens, between the budgets on both sides.
    """
    if len(_model_sizes(own)) > 1:
        return dict(NO_REGRET)
    below = [each for each in own if each.budget.tokens <= tokens]
    above = [each for each in own if each.budget.tokens >= tokens]
    if value is None or not below or not above:
        return dict(NO_REGRET)
    ends = [below[-1], above[0]]
    if any(each.budget.best.value is None for each in ends):
        return dict(NO_REGRET)
    log_tokens = [math.log(each.budget.tokens) for each in ends]
    share = 0.0
    if log_tokens[1] > log_tokens[0]:
        share = (math.log(tokens) - log_tokens[0]) / (log_tokens[1] - log_tokens[0])

    def between(values: Sequence[float]) -> float:
        return (1 - share) * values[0] + share * values[1]

    unit = own[0].tokens_per_sequence
    log_best = between([math.log((each.budget.best.value or 1.0) * unit) for each in ends])
    curvature_below = between([each.budget.best.curvatures[0] for each in ends])
    curvature_above = between([each.budget.best.curvatures[1] for each in ends])

    def given_up(batch_size: float) -> float:
        distance = math.log(batch_size) - log_best
        return (curvature_above if distance > 0 else curvature_below) * distance**2

    smallest = own[0].budget.best.value
    of_laws = [law.value for law in published if law.kind == "best" and law.value is not None]
    return {
        "this": given_up(value),
        "kept": None if smallest is None else given_up(smallest * unit),
        "published": given_up(of_laws[0]) if of_laws else None,
    }


def _describe_law(law: Law | None, measured: Sequence[Measured]) -> dict[str, Any]:
    points = []
    for each in measured:
        best = each.budget.best
        unit = each.tokens_per_sequence
        low, high = best.interval
        points.append(
            {
                "tokens": each.budget.tokens,
                "params": each.parameters,
                "value": None if best.value is None else best.value * unit,
                "interval": (
                    None if low is None else low * unit,
                    None if high is None else high * unit,
                ),
                "range_within_tolerance": tuple(end * unit for end in best.range_within_tolerance),
                "edge": best.edge,
            }
        )
    exponent: Estimate | None = law.exponent if law is not None else None
    return {
        "exponent": None if exponent is None else exponent.value,
        "interval": None if exponent is None else (exponent.low, exponent.high),
        "points": points,
    }


def _cap(largest: Measured, factor: float, of_model: float) -> str:
    """Write how far the sweeps tell, for a training far beyond them."""
    if factor >= of_model:
        return (
            f"Validated up to {format_count(largest.budget.tokens)} tokens; this is {factor:,.0f} "
            "times beyond."
        )
    return f"Validated for smaller models; this is {of_model:,.0f} times larger."


def _next_budget(reference: Measured, tokens: int) -> tuple[str | None, float | None]:
    """Return the command of the next budget towards a training, and its estimated time."""
    largest = reference.budget.tokens
    following = min(tokens, NEXT_FACTOR * largest)
    if following <= largest:
        return None, None
    plan = reference.sweep.plan
    try:
        command = command_with(plan, budget=following, batches="auto")
    except SweepError:
        return None, None
    trials = reference.sweep.trials
    seconds = float(trials["seconds_total"].sum()) * following / largest
    return command, seconds if seconds > 0 else None


def suggest(params: float, tokens: int) -> Recommendation:
    """Return what published laws say about a training, without a sweep."""
    return Recommendation(
        tokens=tokens,
        params=params,
        law={"exponent": None, "interval": None, "points": []},
        batch_size_tokens=dict(NOT_KNOWN),
        learning_rate={"value": None, "interval": None},
        weight_decay=None,
        adam_beta2=None,
        regret=dict(NO_REGRET),
        cap=None,
        measured_up_to=0,
        factor_beyond=math.inf,
        provisional=True,
        reasons=["Nothing was measured: published laws are of other models and data."],
        published=published_at(Scale(params, tokens)),
        settle=None,
        settle_seconds=None,
    )


def describe_recommendation(answer: Recommendation) -> list[str]:
    """Write a recommendation in sentences."""
    size = answer.batch_size_tokens
    lines = []
    training = f"{format_count(answer.tokens)} tokens"
    if size["value"] is not None:
        low, high = size["interval"]
        start = "Provisionally, use" if answer.provisional else "Use"
        lines.append(
            f"{start} {_tokens(size['value'])} per step for {training} "
            f"(95 % interval {_tokens(low)} to {_tokens(high)})."
        )
    if size["range_within_tolerance"] is not None:
        low, high = size["range_within_tolerance"]
        text = "Within the tolerance of the best" if size["value"] else "By its growth, the range"
        lines.append(f"{text}: {_tokens(low)} to {_tokens(high)} per step.")
    rate = answer.learning_rate
    if rate["value"] is not None:
        low, high = rate["interval"]
        lines.append(
            f"Learning rate there: {rate['value']:.2g} (95 % interval {low:.2g} to {high:.2g}); "
            f"weight decay {answer.weight_decay:.3g} and β2 {answer.adam_beta2:.4g} by the rules "
            "of the policy."
        )
    if answer.law["exponent"] is not None:
        low, high = answer.law["interval"]
        lines.append(
            f"The best batch size grows as D^{answer.law['exponent']:.2f} (95 % interval "
            f"{low:.2f} to {high:.2f})."
        )
    if answer.cap is not None:
        lines.append(answer.cap)
    elif answer.factor_beyond > 1:
        lines.append(
            f"Validated up to {format_count(answer.measured_up_to)} tokens; this is "
            f"{answer.factor_beyond:.3g} times beyond."
        )
    lines += answer.reasons
    lines += describe_published(answer.published)
    if answer.settle is not None:
        lines.append(f"Next: {answer.settle}")
    return lines


def describe_published(published: Sequence[Published]) -> list[str]:
    """Write what published laws say, and their ranges."""
    lines = []
    for law in published:
        if law.value is None:
            lines.append(f"{law.name} gives no number here: fitted to {law.range} ({law.source}).")
            continue
        text = f"{law.name}: {_tokens(law.value)} per step"
        if law.kind != "best":
            text += f", a {law.kind} batch size, not a best one"
        if law.learning_rate is not None:
            text += f", learning rate {law.learning_rate:.2g}"
        lines.append(f"{text}; fitted to {law.range} ({law.source}).")
    return lines


def _tokens(number: float) -> str:
    return f"{format_count(float(f'{number:.3g}'))} tokens"
