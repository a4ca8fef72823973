"""A recommendation for a larger training: its values, and its sentences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sweep.analysis.budget_laws import describe_exponent
from sweep.analysis.published_laws import Published
from sweep.analysis.tables import Estimate
from sweep.config.numbers import format_count, format_seconds

# The first command of docs/larger-runs.md.
TO_MEASURE = (
    "To measure how the best batch size grows: sweep run --model small --data FOLDER --budget "
    "1M,4M,16M,64M --batches auto --lr tuned --seeds auto --out results/mine"
)


@dataclass(frozen=True)
class Recommendation:
    """The keys of `sweep recommend --json`; batch sizes in tokens."""

    tokens: int
    params: float | None
    token_unit: str  # what budgets count: tokens, or examples
    optimizer: str  # that the recommendation is for; "" if the sweeps have one
    at_budget: str | None  # why, and the range, if this budget was measured
    # exponent and interval, null without a law, those of the largest batch size within the
    # tolerance, which counts without it, and points
    law: dict[str, Any]
    # value, interval, range_within_tolerance, and range_for_whole_interval: within the tolerance
    # wherever in the interval the best one is, by the curve of the largest budget;
    # interval_of_largest, if the range is that of its growth
    batch_size_tokens: dict[str, Any]
    learning_rate: dict[str, Any]  # value and interval
    weight_decay: float | None
    adam_beta2: float | None
    # by choice (this, kept, published), in the unit of the metric; null unless budgets bracket it
    regret: dict[str, float | None]
    cap: str | None  # a sentence, if the training is too far from what was measured
    measured_up_to: int | None  # tokens of the largest budget; null without a sweep
    recommended_there: int | None  # batch size in tokens that its answer recommends
    # how far the training lies outside of the budgets and model sizes; 1 inside
    factor_beyond: float | None
    outside: str  # by which factors of tokens and parameters, in words; "" inside
    provisional: bool
    reasons: list[str]  # why it is provisional, or why there is no number, sentences
    tokens_per_sequence: int | None  # in the sweeps; null without one
    published: list[Published]
    settle: str | None  # the command of the next budget towards the training
    settle_seconds: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_recommendation(answer: Recommendation) -> list[str]:
    """Write a recommendation in sentences."""
    lines = _describe_batch_size(answer)
    is_known = answer.batch_size_tokens["value"] is not None
    if answer.measured_up_to and answer.recommended_there and not is_known:
        lines.append(
            f"At {format_count(answer.measured_up_to)} {answer.token_unit} `sweep answer` "
            f"recommends batch size {_batch_sizes([answer.recommended_there], answer)}."
        )
    if answer.learning_rate["value"] is not None:
        lines.append(_describe_rate(answer))
    if answer.cap is not None:
        lines.append(answer.cap)
    elif answer.measured_up_to is not None:
        lines.append(_describe_validity(answer))
    lines += answer.reasons
    lines += _describe_exponents(answer.law)
    lines += _describe_regret(answer)
    lines += describe_published(answer.published)
    if answer.settle is not None:
        seconds = answer.settle_seconds
        cost = f", about {format_seconds(seconds)} of training" if seconds else ""
        lines.append(f"Next{cost}: {answer.settle}")
    return lines


def _describe_rate(answer: Recommendation) -> str:
    """Write the learning rate with its interval, and weight decay and β2 as far as known."""
    rate = answer.learning_rate
    text = f"Learning rate there: {rate['value']:.2g}"
    if rate["interval"] is not None:
        low, high = rate["interval"]
        text += f" (95 % interval {low:.2g} to {high:.2g})"
    others = []
    if answer.weight_decay is not None:
        others.append(f"weight decay {answer.weight_decay:.3g}")
    if answer.adam_beta2 is not None:
        others.append(f"β2 {answer.adam_beta2:.7g}")
    if others:
        text += f"; {' and '.join(others)}"
        if answer.at_budget is None:
            text += " by the rules of the policy"
    return f"{text}."


def _describe_validity(answer: Recommendation) -> str:
    """Write up to which budget the sweeps reach, and how far outside this training is."""
    assert answer.measured_up_to is not None and answer.factor_beyond is not None
    text = f"Validated up to {format_count(answer.measured_up_to)} {answer.token_unit}"
    if not answer.outside or answer.at_budget is not None:
        return f"{text}."
    if answer.outside.endswith(f"times as many {answer.token_unit}"):
        return f"{text}; this is {answer.factor_beyond:.3g} times beyond."
    return f"{text}; this training has {answer.outside}."


def _describe_batch_size(answer: Recommendation) -> list[str]:
    """Write the batch size and the range within the tolerance, or that they are not known."""
    size = answer.batch_size_tokens
    training = f"{format_count(answer.tokens)} {answer.token_unit}"
    within = size["range_within_tolerance"]
    if size["value"] is None and within is None:
        return [f"The best batch size for {training} is not known."]
    if size["value"] is None:
        end = "the range within the tolerance is about"
        if within[0] is None:
            within, end = within[1:], "the largest one within the tolerance is about"
        ends = _batch_sizes(size["interval_of_largest"], answer)
        return [
            f"The best batch size for {training} is not known. By its growth, {end} "
            f"{_batch_sizes(within, answer)}; the 95 % interval of its end: {ends}."
        ]
    start = "Provisionally, use" if answer.provisional else "Use"
    text = f"{start} batch size {_batch_sizes([size['value']], answer)}"
    if answer.optimizer:
        text += f" with {answer.optimizer}"
    text += f" for {training}"
    if answer.at_budget is not None:
        return [f"{text}, which was measured: {answer.at_budget}"]
    low, high = size["interval"]
    interval = f"Its 95 % interval: {_batch_sizes((low, high), answer)}."
    if low == high:
        interval = "Its 95 % interval ends below one sequence."
    lines = [f"{text}. {interval}"]
    if within is not None:
        lines.append(
            f"Within the tolerance, if this is the best one: {_batch_sizes(within, answer)}."
        )
        lines.append(_describe_whole_interval(answer))
    return lines


def _describe_whole_interval(answer: Recommendation) -> str:
    """Write the range that the error of the best batch size leaves."""
    anywhere = "wherever in its interval the best one is"
    within = answer.batch_size_tokens["range_for_whole_interval"]
    if within is None:
        return f"No batch size is within the tolerance {anywhere}."
    sizes = _batch_sizes(within, answer)
    return f"Within the tolerance, {anywhere}: {sizes}."


def _describe_exponents(law: Mapping[str, Any]) -> list[str]:
    subjects = {
        "The best batch size": law,
        "The largest batch size within the tolerance": law["largest_within_tolerance"],
    }
    lines = []
    for subject, known in subjects.items():
        if known["exponent"] is not None:
            exponent = Estimate(known["exponent"], *known["interval"])
            lines.append(f"{subject} grows as {describe_exponent(exponent)}.")
    return lines


def _describe_regret(answer: Recommendation) -> list[str]:
    """Write what three choices give up at a training between the budgets."""
    choices = {
        "this": "the batch size that the smaller budgets predict",
        "kept": "the best one of the smallest budget",
        "published": "that of a published law",
    }
    best = [law.name for law in answer.published if law.kind == "best" and law.value is not None]
    if best:
        choices["published"] = f"that of {best[0]}"
    known = {name: loss for name, loss in answer.regret.items() if loss is not None}
    if not known:
        return []
    parts = [f"{loss:.2g} by {choices[name]}" for name, loss in known.items()]
    return [f"Given up there, by the curves of the budgets on both sides: {', '.join(parts)}."]


def describe_published(published: Sequence[Published]) -> list[str]:
    """Write what published laws say, and where the others hold."""
    lines = []
    for law in published:
        if law.value is None:
            continue
        text = f"{law.name}: {_rounded(law.value)} tokens per step"
        if law.kind != "best":
            text += f", a {law.kind} batch size, not a best one"
        if law.learning_rate is not None:
            text += f", learning rate {law.learning_rate:.2g}"
        lines.append(f"{text}; fitted to {law.range} ({law.source}).")

    others = [f"{law.name} was fitted to {law.range}" for law in published if law.value is None]
    if others:
        subject = "These published laws give" if lines else "No published law gives"
        no_number = "no number here" if lines else "a number here"
        lines.append(f"{subject} {no_number}: {'; '.join(others)}.")
    return lines


def describe_suggestion(answer: Recommendation) -> list[str]:
    """Write what published laws say, and how a search begins with their rates."""
    lines = describe_published(answer.published)
    best = [law.value for law in answer.published if law.kind == "best" and law.value is not None]
    if len(best) > 1:
        lines.append(f"The best batch sizes differ by a factor of {max(best) / min(best):.2g}.")
    rates = [law.learning_rate for law in answer.published if law.learning_rate is not None]
    if rates:
        middle = math.exp(float(np.mean(np.log(rates))))
        lines.append(
            f"`--tune-centre {middle:.2g}` begins a search of the rates there. Its grid still has "
            "to bracket the best one."
        )
    return [*lines, *answer.reasons, TO_MEASURE]


def _batch_sizes(ends: Sequence[float], answer: Recommendation) -> str:
    """Write one batch size, or a range, in tokens and in sequences."""
    tokens = " to ".join(_rounded(end) for end in ends)
    unit = answer.tokens_per_sequence
    if unit is None or unit == 1:
        return f"{tokens} {answer.token_unit}"
    sequences = " to ".join(f"{float(f'{end / unit:.3g}'):,g}" for end in ends)
    noun = "sequence" if sequences == "1" else "sequences"
    return f"{tokens} tokens ({sequences} {noun} of {unit:,})"


def _rounded(number: float) -> str:
    return format_count(float(f"{number:.3g}"))
