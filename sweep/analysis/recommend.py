"""Recommend a batch size and a rate for a larger training, from sweeps at smaller budgets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from sweep.analysis.answer import Answer
from sweep.analysis.answer_data import join
from sweep.analysis.budget_laws import NOT_TUNED, describe_budget, describe_left_out, law_of_range
from sweep.analysis.law import (
    LEAST_BUDGETS,
    LEAST_MODELS,
    Law,
    Optimum,
    fit_law,
)
from sweep.analysis.measured_budgets import (
    SAME_SIZE,
    Measured,
    describe_unanswered,
    is_near,
    measure_budgets,
    model_sizes,
    refuse_different,
    refuse_repeated,
    without_repetitive,
)
from sweep.analysis.next_step import BUDGET_FACTOR, command_for_budget, command_for_model
from sweep.analysis.published_laws import Published, Scale, published_at
from sweep.analysis.recommendation import Recommendation
from sweep.analysis.results import Sweep, load_sweep
from sweep.config.numbers import format_count, format_seconds
from sweep.decision.decision import ALPHA
from sweep.errors import SweepError
from sweep.plan.policies import parse_policy

PROVISIONAL_FACTOR = 10.0  # beyond the largest budget or model
LARGEST_FACTOR = 100.0  # beyond which the answer is the cap
WIDEST_EXPONENT = 1.0  # width of the interval of the exponent above which nothing is recommended
LARGEST_CORRELATION = 0.98  # between log tokens and log model sizes, for a law with both
LEAST_DEGREES = 2  # of freedom, for the growth of the largest batch size within the tolerance
NO_REGRET: dict[str, float | None] = {"this": None, "kept": None, "published": None}
NO_EXPONENT: dict[str, Any] = {"exponent": None, "interval": None}
NO_RATE: dict[str, Any] = {"value": None, "interval": None}
NOT_KNOWN: dict[str, Any] = {
    **NO_RATE,
    "range_within_tolerance": None,
    "range_for_whole_interval": None,
    "interval_of_largest": None,
}


@dataclass(frozen=True)
class Choice:
    """A batch size in tokens with its settings, as far as they are known."""

    batch_size: dict[str, Any] = field(default_factory=lambda: NOT_KNOWN)
    learning_rate: dict[str, Any] = field(default_factory=lambda: NO_RATE)
    weight_decay: float | None = None
    beta2: float | None = None
    reasons: Sequence[str] = ()
    is_provisional: bool = False  # also without reasons
    at_budget: str | None = None  # why, and the range, at a measured budget


def recommend(
    folders: Sequence[str | Path], tokens: int, params: float | None = None
) -> Recommendation:
    """Recommend a batch size for a training on so many tokens.

    Args:
        folders: of sweeps, with one or several budgets each.
        tokens: what the training takes.
        params: of its model, without embeddings; by default those of the sweeps.

    Raises:
        SweepError: if the sweeps cannot be compared.
    """
    sweeps = [load_sweep(folder, pursues="tokens") for folder in folders]
    measured = measure_budgets(sweeps)
    refuse_repeated(measured)
    refuse_different(measured)
    measured, repetitive = without_repetitive(measured)
    own, reasons = _of_model(measured, params)
    reasons = describe_unanswered(sweeps) + repetitive + reasons
    validated = own if own else measured
    largest = max(validated, key=lambda each: each.budget.tokens)
    size = params if params is not None else largest.parameters
    beyond = _factor_beyond(validated, tokens, size)
    is_capped = beyond > LARGEST_FACTOR
    published: list[Published] = []
    is_pretraining = largest.sweep.plan.settings.expected_initial_loss is not None
    if size is not None and is_pretraining:
        published = published_at(Scale(size, tokens))

    law = None
    law_within = None
    if own:
        law, problems = _fit(own)
        is_tuned = all(each.budget.is_tuned for each in own)
        if law is None and is_tuned and len(model_sizes(own)) <= 1:
            law_within = law_of_range([each.budget for each in own])
    at_budget = _at_budget(own, tokens, size)
    choice = Choice()
    if at_budget is not None:
        choice = _choose_at_budget(at_budget)
        reasons = []  # other budgets do not weaken its answer
    elif own:
        reasons += problems
        if not is_capped:
            choice = _choose_by_law(own, law, law_within, tokens, size)
    reasons += choice.reasons
    has_number = choice.batch_size["value"] or choice.batch_size["range_within_tolerance"]
    if has_number and PROVISIONAL_FACTOR < beyond <= LARGEST_FACTOR:
        reasons.append(
            f"It is {beyond:.3g} times beyond what was measured, and provisional from "
            f"{PROVISIONAL_FACTOR:g} times on."
        )
    if at_budget is not None:
        settle, seconds = _next_trials([at_budget])
    elif own:
        settle, seconds, problems = _next_of_law(own, choice, tokens)
        reasons += problems
    else:
        settle, seconds, problems = _next_model(measured, size)
        reasons += problems
    return Recommendation(
        tokens=tokens,
        params=size,
        token_unit=largest.sweep.plan.settings.token_unit,
        optimizer=(at_budget if at_budget is not None else largest).budget.answer.optimizer,
        at_budget=choice.at_budget,
        law=_describe_law(law, law_within, measured),
        batch_size_tokens=choice.batch_size,
        learning_rate=choice.learning_rate,
        weight_decay=choice.weight_decay,
        adam_beta2=choice.beta2,
        regret=_regret(own, _predicted_below(own, tokens, size), tokens, published),
        cap=_cap(validated, tokens, size) if is_capped else None,
        measured_up_to=largest.budget.tokens,
        recommended_there=largest.budget.answer.recommended * largest.tokens_per_sequence,
        factor_beyond=1.0 if at_budget is not None else beyond,
        outside=_outside(validated, tokens, size),
        provisional=len(reasons) > 0 or is_capped or choice.is_provisional,
        reasons=reasons,
        tokens_per_sequence=largest.tokens_per_sequence,
        published=published,
        settle=settle,
        settle_seconds=seconds,
    )


def _factor_beyond(measured: Sequence[Measured], tokens: int, size: float | None) -> float:
    """Return how far a training lies outside of the budgets and model sizes; 1 inside."""
    budgets = [each.budget.tokens for each in measured]
    factors = [1.0, tokens / max(budgets), min(budgets) / tokens]
    sizes = model_sizes(measured)
    if size is not None and sizes:
        factors += [size / max(sizes), min(sizes) / size]
    return max(factors)


def _of_model(
    measured: Sequence[Measured], params: float | None
) -> tuple[list[Measured], list[str]]:
    """Return the budgets that tell of a model size, and why there are none.

    Those of all sizes do if at least three sizes have best batch sizes for a law.
    """
    sizes = model_sizes(measured)
    is_unknown = [each.parameters is None for each in measured]
    if any(is_unknown) and not all(is_unknown):
        raise SweepError(
            "the model size must be known of all these sweeps, or of none. Leave out those without."
        )
    if params is None and len(sizes) > 1:
        raise SweepError(
            f"these sweeps have {len(sizes)} model sizes, and the training needs one. Name it with "
            "--params."
        )
    if params is None:
        return [*measured], []
    inside = [each for each in measured if each.optimum is not None]
    if len(model_sizes(inside)) >= LEAST_MODELS:
        return [*measured], []
    own = [
        each
        for each in measured
        if each.parameters is not None and 1 / SAME_SIZE <= each.parameters / params <= SAME_SIZE
    ]
    if own:
        return own, []
    known = "models of unknown size"
    if sizes:
        known = f"{join(map(format_count, sizes))} without embeddings"
    reason = (
        f"Not measured: a model of {format_count(params)} parameters. These sweeps have {known}; "
        f"a law over sizes needs at least {LEAST_MODELS} whose best batch sizes lie inside those "
        "tried."
    )
    for each in measured:
        whole = each.sweep.plan.model.parameters
        if whole and each.parameters and is_near(whole, params):
            reason += f" Name that model without its embeddings: --params {each.parameters:.0f}."
            break
    return [], [reason]


def _fit(own: Sequence[Measured]) -> tuple[Law | None, list[str]]:
    """Fit the law; return it with what weakens it, or with why there is none."""
    if not all(each.budget.is_tuned for each in own):
        return None, [NOT_TUNED]
    if len({each.budget.answer.optimizer for each in own}) > 1:
        return None, ["No law is fitted, because the best optimizer differs between budgets."]
    optima = [each.optimum for each in own if each.optimum is not None]
    is_of_sizes = len(model_sizes(own)) > 1
    least = LEAST_BUDGETS + 1 if is_of_sizes else LEAST_BUDGETS
    if len(optima) < least:
        problems = [
            f"A law needs at least {least} budgets whose best batch size lies inside those tried, "
            f"with its interval; there are {len(optima)}."
        ]
        unsure = [each for each in own if each.budget.best.value and each.optimum is None]
        if unsure:
            problems.append(
                f"At {len(unsure)} of {len(own)} budgets the best one lies inside, but its "
                "interval reaches an end. More seeds narrow it."
            )
        at_one = [each for each in own if each.is_best_one]
        if at_one:
            problems.append(
                f"At {len(at_one)} of {len(own)} budgets the best one is batch size 1, and none is "
                "smaller. Larger budgets or shorter sequences may have it inside."
            )
        return None, problems
    if is_of_sizes and _vary_together(optima):
        return None, ["Budgets and model sizes vary together, so that no law tells them apart."]
    different = {optimum.tokens for optimum in optima}
    if not is_of_sizes and len(different) < LEAST_BUDGETS:
        return None, [
            f"A law needs at least {LEAST_BUDGETS} different budgets; there are {len(different)}."
        ]

    sizes = model_sizes(own) if is_of_sizes else []
    law = fit_law([replace(each, parameters=_nearest(each.parameters, sizes)) for each in optima])
    return law, describe_left_out(len(own) - len(optima))


def _nearest(parameters: float | None, sizes: Sequence[float]) -> float | None:
    """Return the size that counts for a model, so that nearly equal ones are one; None if none."""
    if parameters is None or not sizes:
        return None
    return min(sizes, key=lambda size: abs(math.log(size / parameters)))


def _vary_together(optima: Sequence[Optimum]) -> bool:
    """Return True if log tokens and log parameters hardly differ from a line."""
    log_tokens = np.log([optimum.tokens for optimum in optima])
    log_sizes = np.log([optimum.parameters or math.nan for optimum in optima])
    if np.ptp(log_tokens) == 0 or np.ptp(log_sizes) == 0:
        return True
    return bool(abs(np.corrcoef(log_tokens, log_sizes)[0, 1]) > LARGEST_CORRELATION)


def _at_budget(own: Sequence[Measured], tokens: int, size: float | None) -> Measured | None:
    """Return the budget with the tokens and the model of a training; None if there is none.

    If several folders have it, it is that with the most trainings.
    """
    same = []
    for each in own:
        is_same_model = size is None or each.parameters is None or is_near(each.parameters, size)
        if is_same_model and is_near(each.budget.tokens, tokens):
            same.append(each)
    return max(same, key=_trainings_of, default=None)


def _trainings_of(each: Measured) -> int:
    return sum(row.seeds for row in each.budget.answer.batch_sizes)


def _choose_at_budget(each: Measured) -> Choice:
    """Choose as the answer of a measured budget does."""
    answer = each.budget.answer
    best = each.budget.best
    unit = each.tokens_per_sequence
    batch_size = answer.recommended * unit
    row = answer[answer.recommended]
    rate = NO_RATE
    if row.best_learning_rate is not None:
        rate = {"value": row.best_learning_rate, "interval": row.learning_rate_interval}
    decay, beta2 = _values_of_trials(each, answer.recommended)
    return Choice(
        batch_size={
            "value": batch_size,
            "interval": None,  # that of the best one is in `law`
            "range_within_tolerance": tuple(end * unit for end in best.range_within_tolerance),
            "range_for_whole_interval": None,
            "interval_of_largest": None,
        },
        learning_rate=rate,
        weight_decay=decay,
        beta2=beta2,
        reasons=answer.reasons,
        is_provisional=answer.provisional,
        at_budget=f"{answer.basis}. {describe_budget(each.budget, each.sweep.plan)}",
    )


def _choose_by_law(
    own: Sequence[Measured],
    law: Law | None,
    law_within: Law | None,
    tokens: int,
    size: float | None,
) -> Choice:
    """Choose by how the best batch size grows, or the largest one within the tolerance."""
    batch_size, reasons = _batch_size(own, law, law_within, tokens, size)
    choice = Choice(batch_size=batch_size)
    if batch_size["value"] is not None:
        rate, problems = _learning_rate(own, tokens, batch_size["value"])
        reasons = reasons + problems
        largest = max(own, key=lambda each: each.budget.tokens)
        decay, beta2 = _rules_of_policy(largest, batch_size["value"])
        choice = replace(choice, learning_rate=rate, weight_decay=decay, beta2=beta2)
    if any(each.budget.answer.provisional for each in own):
        reasons.append("The answer at some budget is provisional.")
    if any(each.budget.epochs is None for each in own):
        reasons.append("How often the data are repeated is not known at some budget.")
    return replace(choice, reasons=reasons)


def _batch_size(
    own: Sequence[Measured],
    law: Law | None,
    law_within: Law | None,
    tokens: int,
    size: float | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return the best batch size, its interval and the range within the tolerance, in tokens.

    The reasons say what is not known.

    Args:
        own: the budgets, ascending.
        law: how the best batch size grows; None: not known.
        law_within: how the largest batch size within the tolerance grows, if there is no law.
        tokens: what the training takes.
        size: its model size.
    """
    grows = law if law is not None else law_within
    if grows is None:
        return NOT_KNOWN, []
    if grows.width > WIDEST_EXPONENT:
        return NOT_KNOWN, [
            f"The exponent is not known well enough: with the errors of the points its interval is "
            f"{grows.width:.2g} wide. More seeds, or a further budget, narrow it."
        ]
    if law is None and grows.degrees < LEAST_DEGREES:
        return NOT_KNOWN, [
            "The largest batch size within the tolerance is known at three budgets, which may lie "
            "on a line by luck. A further budget tells whether it grows so."
        ]
    if law is None:
        unit = own[0].tokens_per_sequence
        grown = grows.at(tokens)
        return {
            **NOT_KNOWN,
            "range_within_tolerance": _range_by_growth(own, grows, tokens),
            "interval_of_largest": (max(unit, grown.low * unit), max(unit, grown.high * unit)),
        }, []

    best = law.at(tokens, size)
    unit = own[0].tokens_per_sequence
    largest = max(own, key=lambda each: each.budget.tokens).budget.best
    reasons = []
    within = None
    for_whole = None
    if largest.value is None:
        reasons.append("The range is not known, because the largest budget has none.")
    else:
        ends = [end / largest.value for end in largest.range_within_tolerance]
        within = tuple(max(unit, best.value * share) for share in ends)
        low, high = best.high * ends[0], best.low * ends[1]
        if low <= high:
            for_whole = max(unit, low), max(unit, high)
        if any(largest.is_range_open):
            reasons.append(
                "The range may be wider: at the largest budget it ends with the batch sizes tried."
            )
    batch_size = {
        "value": max(unit, best.value),
        "interval": (max(unit, best.low), max(unit, best.high)),
        "range_within_tolerance": within,
        "range_for_whole_interval": for_whole,
        "interval_of_largest": None,
    }
    return batch_size, reasons


def _range_by_growth(own: Sequence[Measured], law: Law, tokens: int) -> tuple[float | None, float]:
    """Return the range whose end the growth of the largest batch size within the tolerance tells.

    It begins at batch size 1 if that is the best one of all budgets; else its begin is not known.
    In tokens.

    Args:
        own: the budgets, ascending.
        law: how that largest batch size grows.
        tokens: what the training takes.
    """
    unit = own[-1].tokens_per_sequence
    smallest = unit if all(each.is_best_one for each in own) else None
    return smallest, max(unit, law.at(tokens).value * unit)


def _learning_rate(
    own: Sequence[Measured], tokens: int, batch_size: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the best rate at a batch size in tokens, by a plane through the best log rates.

    The reasons say why it is not known.
    """
    if len(model_sizes(own)) > 1:
        return NO_RATE, ["The rate is not known, because the sweeps have several model sizes."]
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
        return NO_RATE, ["The rate is not known: too few batch sizes and budgets have tuned rates."]
    coefficients, squares, _, _ = np.linalg.lstsq(design, np.array(values), rcond=None)
    point = np.array([1.0, math.log(tokens), math.log(batch_size)])
    variance = float(squares[0]) / degrees
    spread = variance * (1 + point @ np.linalg.inv(design.T @ design) @ point)
    half = float(stdtrit(degrees, 1 - ALPHA / 2)) * math.sqrt(spread)
    log_rate = float(point @ coefficients)
    ends = math.exp(log_rate - half), math.exp(log_rate + half)
    return {"value": math.exp(log_rate), "interval": ends}, []


def _rules_of_policy(each: Measured, batch_size: float) -> tuple[float | None, float | None]:
    """Return weight decay and β2 at a batch size in tokens, by the rules of the policy.

    One that was tuned, or that trainings do not receive, is not known.
    """
    settings = each.sweep.plan.settings
    unit = each.tokens_per_sequence
    policy = parse_policy(settings.lr)
    sequences = max(1, round(batch_size / unit))
    own = settings.optimizer.of(each.budget.answer.optimizer)
    optimizer = policy.optimizer_at(sequences, unit, own)
    tuned = {*settings.tuning.dimensions}

    def is_known(name: str) -> bool:
        return settings.workload.receives(name) and name not in tuned

    return (
        optimizer.weight_decay if is_known("weight_decay") else None,
        optimizer.beta2 if is_known("beta2") else None,
    )


def _values_of_trials(each: Measured, batch_size: int) -> tuple[float | None, float | None]:
    """Return weight decay and β2 of the final trials of a measured budget; None if not known."""
    settings = each.sweep.plan.settings
    optimizer = each.budget.answer.optimizer
    rows = []
    for of_budget in each.sweep.by_budget:
        if of_budget.plan.token_budget == each.budget.tokens:
            rows = [row for row in of_budget.plan.known_trials if row.stage == "final"]
    rows = [row for row in rows if row.batch_size == batch_size]
    rows = [row for row in rows if not optimizer or row.optimizer == optimizer]
    decays = {row.weight_decay for row in rows if settings.workload.receives("weight_decay")}
    betas = {row.beta2 for row in rows if settings.workload.receives("beta2")}
    return (
        decays.pop() if len(decays) == 1 else None,
        betas.pop() if len(betas) == 1 else None,
    )


def _predicted_below(own: Sequence[Measured], tokens: int, size: float | None) -> float | None:
    """Return the batch size that the smaller budgets predict, in tokens; None if they do not."""
    smaller = [each for each in own if each.budget.tokens < tokens]
    law = _fit(smaller)[0]
    if law is None or law.width > WIDEST_EXPONENT:
        return None
    return max(own[0].tokens_per_sequence, law.at(tokens, size).value)


def _regret(
    own: Sequence[Measured], value: float | None, tokens: int, published: Sequence[Published]
) -> dict[str, float | None]:
    """Return what three choices give up; null unless budgets of one model bracket the training.

    The first, `value`, is what the smaller budgets predict, if they do. The best batch size and the
    curvature of the loss over log batch sizes are interpolated, in log tokens, between the budgets
    on both sides.
    """
    if len(model_sizes(own)) > 1:
        return NO_REGRET
    below = [each for each in own if each.budget.tokens <= tokens]
    above = [each for each in own if each.budget.tokens >= tokens]
    if not below or not above:
        return NO_REGRET
    ends = [below[-1], above[0]]
    best_sizes = [each.budget.best.value for each in ends if each.budget.best.value is not None]
    if len(best_sizes) < len(ends):
        return NO_REGRET
    log_tokens = [math.log(each.budget.tokens) for each in ends]
    share = 0.0
    if log_tokens[1] > log_tokens[0]:
        share = (math.log(tokens) - log_tokens[0]) / (log_tokens[1] - log_tokens[0])

    def between(values: Sequence[float]) -> float:
        return (1 - share) * values[0] + share * values[1]

    unit = own[0].tokens_per_sequence
    log_best = between([math.log(size * unit) for size in best_sizes])
    curvature_below = between([each.budget.best.curvatures[0] for each in ends])
    curvature_above = between([each.budget.best.curvatures[1] for each in ends])

    def given_up(batch_size: float) -> float:
        distance = math.log(batch_size) - log_best
        return (curvature_above if distance > 0 else curvature_below) * distance**2

    smallest = own[0].budget.best.value
    of_laws = [law.value for law in published if law.kind == "best" and law.value is not None]
    return {
        "this": None if value is None else given_up(value),
        "kept": None if smallest is None else given_up(smallest * unit),
        "published": given_up(of_laws[0]) if of_laws else None,
    }


def _describe_law(
    law: Law | None, law_within: Law | None, measured: Sequence[Measured]
) -> dict[str, Any]:
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
    return {
        **_describe_exponent(law),
        "largest_within_tolerance": _describe_exponent(law_within),
        "points": points,
    }


def _describe_exponent(law: Law | None) -> dict[str, Any]:
    if law is None:
        return NO_EXPONENT
    exponent = law.exponent
    return {"exponent": exponent.value, "interval": (exponent.low, exponent.high)}


def _cap(validated: Sequence[Measured], tokens: int, size: float | None) -> str:
    """Write how far the sweeps tell, for a training far outside of them."""
    budgets = [each.budget.tokens for each in validated]
    text = f"Validated at {_write_range(budgets)} tokens"
    sizes = model_sizes(validated)
    if sizes:
        text += f" and {_write_range(sizes)} parameters without embeddings"
    return f"{text}; this training has {_outside(validated, tokens, size)}."


def _outside(validated: Sequence[Measured], tokens: int, size: float | None) -> str:
    """Write by which factors a training lies outside of what was measured; "" inside."""
    factors = [_write_factor("tokens", tokens, [each.budget.tokens for each in validated])]
    sizes = model_sizes(validated)
    if sizes and size is not None:
        factors.append(_write_factor("parameters", size, sizes))
    return " and ".join(filter(None, factors))


def _write_range(values: Sequence[float]) -> str:
    ends = dict.fromkeys([format_count(min(values)), format_count(max(values))])
    return " to ".join(ends)


def _write_factor(unit: str, value: float, measured: Sequence[float]) -> str:
    """Write how far a number lies outside of those measured; "" inside."""
    above = value / max(measured)
    if above > SAME_SIZE:
        return f"{float(f'{above:.3g}'):,g} times as many {unit}"
    below = min(measured) / value
    if below > SAME_SIZE:
        return f"{float(f'{below:.3g}'):,g} times fewer {unit}"
    return ""


def _next_of_law(
    own: Sequence[Measured], choice: Choice, tokens: int
) -> tuple[str | None, float | None, list[str]]:
    """Return the command that would narrow a law most, its time, and why there is none."""
    if not all(each.budget.is_tuned for each in own):
        return *_next_trials(own), []
    largest = max(own, key=lambda each: each.budget.tokens)
    is_known = choice.batch_size["value"] is not None
    towards = tokens
    if not is_known:  # any further budget would narrow the law
        towards = max(tokens, BUDGET_FACTOR * largest.budget.tokens)
    settle, seconds, problems = _next_budget(load_sweep(largest.sweep.path), towards)
    if settle is None and not is_known:
        settle, seconds = _next_trials([each for each in own if each.optimum is None])
    return settle, seconds, problems


def _next_budget(sweep: Sweep, tokens: int) -> tuple[str | None, float | None, list[str]]:
    """Return the command of the next budget towards a training, its time, and why there is none.

    The time is that of all trials of the largest budget, times the ratio of the budgets.
    """
    if tokens <= sweep.plan.budget_tokens:
        return None, None, []
    try:
        command, following = command_for_budget(sweep, tokens)
    except SweepError as error:
        return None, None, [str(error)]
    total = float(sweep.trials["seconds_total"].sum())
    seconds = total * following / sweep.plan.budget_tokens
    return command, seconds if seconds > 0 else None, []


def _next_trials(budgets: Sequence[Measured]) -> tuple[str | None, float | None]:
    """Return the cheapest command that narrows the answer of a budget, and its least time."""
    answers = []
    for path in dict.fromkeys(each.sweep.path for each in budgets):
        tokens = {each.budget.tokens for each in budgets if each.sweep.path == path}
        # as the sweep's own command asks: fewest tokens, or soonest
        answers += [each.answer for each in load_sweep(path).budgets if each.tokens in tokens]
    known = [answer for answer in answers if answer.settle is not None]

    def seconds_of(answer: Answer) -> float:
        return math.inf if answer.settle_seconds is None else answer.settle_seconds

    if not known:
        return None, None
    cheapest = min(known, key=seconds_of)
    return cheapest.settle, cheapest.settle_seconds


def _next_model(
    measured: Sequence[Measured], size: float | None
) -> tuple[str | None, float | None, list[str]]:
    """Return the command of a sweep of a further model size, for a size that was not measured."""
    largest = max(measured, key=lambda each: each.parameters if each.parameters else 0.0)
    command = None
    if size is not None and largest.parameters is not None and size > largest.parameters:
        sweep = load_sweep(largest.sweep.path)
        command = command_for_model(sweep, SAME_SIZE * largest.parameters)
    if command is not None:
        times = [each.trials["seconds_total"].sum() for each in largest.sweep.by_budget]
        reason = (
            f"The trials of {largest.sweep.path} took {format_seconds(float(sum(times)))}; those "
            "of a larger model take longer. `sweep plan` estimates them."
        )
        return command, None, [reason]
    return None, None, ["Sweep further model sizes at the same budgets, and name all folders."]


def suggest(params: float, tokens: int) -> Recommendation:
    """Return what published laws say about a training, without a sweep."""
    return Recommendation(
        tokens=tokens,
        params=params,
        law=_describe_law(None, None, []),
        batch_size_tokens=NOT_KNOWN,
        learning_rate=NO_RATE,
        weight_decay=None,
        adam_beta2=None,
        regret=NO_REGRET,
        cap=None,
        token_unit="tokens",
        optimizer="",
        at_budget=None,
        measured_up_to=None,
        recommended_there=None,
        factor_beyond=None,
        outside="",
        provisional=True,
        reasons=["Nothing was measured: published laws are of other models and data."],
        tokens_per_sequence=None,
        published=published_at(Scale(params, tokens)),
        settle=None,
        settle_seconds=None,
    )
