"""Rate, β2 and weight decay by batch size, and the search for them."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sweep.config.experiment import EvaluationSettings
from sweep.config.optimizers import OptimizerSettings, optimizer_facts
from sweep.errors import SweepError, did_you_mean
from sweep.plan.steps import milestone_steps
from sweep.resources import read_toml

BETA2_TOKENS = 8192  # β2(B) = β2^(B·T/8192): 5,675,422 tokens of half-life at .999
RULES: dict[str, str] = read_toml(__file__, "policies.toml")
GRID = (1.0, 0.5, 2.0, 0.25, 4.0)
CONFIRMATION = (0.5, 1.0, 2.0)  # factors on a winner that was found at fewer tokens
REFINEMENTS = 4  # rates between those of the grid, at most; √2 needs two, and the best may move
EXTENSIONS = 4  # most steps of a factor 2 beyond either end of the grid
FINEST = math.sqrt(2)  # ratio of neighbouring rates at which refinement ends
RUNGS = (Fraction(1, 4), Fraction(1, 2))  # shares of a trial at which the worse ones are pruned
ROUNDING = 1 + 1e-9
CONFIRMED = 2  # consecutive evaluations at or below the target that end a trial
PATIENCE = 2  # a trial is pruned at this multiple of the least tokens of its batch size


@dataclass(frozen=True)
class Policy:
    kind: str  # fixed, sqrt, linear, tuned
    rate: float = 0.0  # peak rate at `base`; if fixed, at every batch size
    base: int = 32  # batch size

    @property
    def name(self) -> str:
        is_scaled = self.kind in ("sqrt", "linear")
        return f"{self.kind}:{self.rate:g}@{self.base}" if is_scaled else self.kind

    def rate_at(self, batch_size: int, optimizer: str = "adamw") -> float:
        """Return the peak rate; for `tuned`, the centre of an optimizer's grid."""
        ratio = batch_size / self.base
        if self.kind == "tuned":
            exponent = 1 / 8 if ratio < 1 else 1 / 2
            centre = 1e-3 * min(ratio, 256 / 32) ** exponent
            return float(centre * optimizer_facts(optimizer)["rate"])
        return self.rate * {"fixed": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[self.kind]

    def optimizer_at(
        self, batch_size: int, tokens_per_sequence: int, optimizer: OptimizerSettings
    ) -> OptimizerSettings:
        if self.kind == "fixed":
            return optimizer
        factor = 1.0 if self.kind == "linear" else math.sqrt(batch_size / self.base)
        beta2 = optimizer.beta2 ** (batch_size * tokens_per_sequence / BETA2_TOKENS)
        decay = optimizer.weight_decay * factor
        if self.kind == "tuned":
            decay /= optimizer_facts(optimizer.name)["rate"]
        return optimizer.model_copy(update={"beta2": beta2, "weight_decay": decay})


def parse_policy(text: str) -> Policy:
    """Read `3e-4`, `sqrt`, `sqrt:1e-3@32`, `linear:1e-3@32` or `tuned`."""
    text = text.strip()
    if text == "tuned":
        return Policy("tuned")
    pattern = r"(?:(sqrt|linear):)?([^@:]+?)(?:@(\d+))?"
    match = re.fullmatch(pattern, "sqrt:1e-3@32" if text == "sqrt" else text)
    if match and bool(match[1]) == bool(match[3]):
        with suppress(ValueError):
            policy = Policy(match[1] or "fixed", float(match[2]), int(match[3] or 32))
            if 0 < policy.rate <= 1e6 and policy.base > 0:
                return policy
    forms = "a positive RATE, sqrt, sqrt:RATE@BATCH, linear:RATE@BATCH or tuned"
    hint = did_you_mean(text, ("tuned", "sqrt")) or "Write it such as 3e-4 or sqrt:1e-3@32."
    raise SweepError(f"lr must be {forms}, got {text!r}. {hint}")


def describe_policy(name: str, dimensions: Collection[str], is_rate_only: bool = False) -> str:
    text = RULES[name.partition(":")[0]].format(dimensions=", ".join(dimensions))
    return text.partition(";")[0] if is_rate_only else text


@dataclass(frozen=True)
class RateTrial:
    """A rate and its loss: final, or tokens to the target; inf if diverged, None while open."""

    rate: float
    loss: float | None


Trial = TypeVar("Trial", bound=RateTrial)


def next_rates(
    tried: Sequence[RateTrial], grid: Sequence[float], finest: float = FINEST, least_count: int = 0
) -> tuple[float, ...]:
    """Return the rates to try next; none while a trial is open, or once the search has settled.

    First comes the grid. While the best rate is at an edge, one step beyond that edge follows.
    Then the wider gap next to the best rate (the upper one of equal gaps) is halved in log rate,
    until neighbours are within `finest` and `least_count` rates were tried.
    """
    rates = [trial.rate for trial in tried]
    if missing := tuple(rate for rate in grid if not is_in(rate, rates)):
        return missing
    if any(trial.loss is None for trial in tried):
        return ()
    best, reach = best_of(tried), 2.0**EXTENSIONS
    if best.rate == min(rates) and best.rate > min(grid) / reach * ROUNDING:
        return (best.rate / 2,)
    top = max(tried, key=lambda trial: trial.rate)  # which may be as good as the best
    if top.loss == best.loss != math.inf and top.rate * ROUNDING < max(grid) * reach:
        return (top.rate * 2,)
    gaps = [(round(abs(math.log(t.rate / best.rate)), 9), t.rate) for t in neighbours(tried)]
    if not gaps:
        return ()
    gap, other = max(gaps)
    is_wide = gap > math.log(finest * ROUNDING)
    return (math.sqrt(other * best.rate),) if is_wide or len(tried) < least_count else ()


def best_of(tried: Iterable[Trial]) -> Trial:
    """Return the trial with the least loss; in a tie, the one with the lowest rate."""
    return min(tried, key=lambda t: (math.inf if t.loss is None else t.loss, t.rate))


def neighbours(tried: Sequence[Trial]) -> list[Trial]:
    """Return the trials next to the best rate, which bound it; none without a finite loss."""
    best, ordered = best_of(tried), sorted(tried, key=lambda trial: trial.rate)
    if best.loss is None or not math.isfinite(best.loss):
        return []
    index = ordered.index(best)
    return [*ordered[max(0, index - 1) : index], *ordered[index + 1 : index + 2]]


def is_in(rate: float, grid: Iterable[float]) -> bool:
    return any(math.isclose(rate, other, rel_tol=1e-6) for other in grid)


def rung_steps(steps: int, evaluation: EvaluationSettings) -> tuple[int, ...]:
    """Return the steps at which tuning trials pause to be compared: evaluation milestones."""
    milestones = milestone_steps(steps, evaluation.points)
    indices = [math.ceil(share * len(milestones)) - 1 for share in RUNGS]
    return tuple(sorted({milestones[index] for index in indices} - {steps}))


def survivors(at_rung: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the better half and the best's neighbours, from rate and loss at a rung."""
    # Not only the better half: a high rate looks worse before its decay than at its end.
    ranked = sorted(at_rung, key=lambda trial: at_rung[trial][1])
    by_rate = sorted(at_rung, key=lambda trial: at_rung[trial][0])
    best = by_rate.index(ranked[0])
    return {*ranked[: math.ceil(len(ranked) / 2)], *by_rate[max(0, best - 1) : best + 2]}


def smoothed(
    tokens: Sequence[float], losses: Sequence[float], window: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return means over `window` consecutive evaluations: their mean log tokens and mean loss."""
    when, values = np.asarray(tokens, float), np.asarray(losses, float)
    if window == 1 or len(when) < window:
        return (when, values) if window == 1 else (when[:0], values[:0])
    logs = sliding_window_view(np.log(when), window)
    return np.exp(logs.mean(-1)), sliding_window_view(values, window).mean(-1)


def crossing_tokens(
    tokens: Sequence[float], losses: Sequence[float], target: float, window: int = 1
) -> float | None:
    """Return the tokens from which on the loss stays at or below the target, or None.

    The first mean over `window` evaluations at or below the target counts if the next one, if any,
    is too. It is interpolated in log tokens from the one before, if that is finite.
    """
    when, values = smoothed(tokens, losses, window)
    below = np.isfinite(values) & (values <= target)
    confirmed = np.flatnonzero(below & np.append(below[1:], True))
    if not len(confirmed):
        return None
    k = int(confirmed[0])
    if k == 0 or not math.isfinite(values[k - 1]):
        return float(when[k])
    share = (values[k - 1] - target) / (values[k - 1] - values[k])
    return float(when[k - 1] * (when[k] / when[k - 1]) ** share)


def last_step(least_tokens: float, step_tokens: int, steps: int, points: int) -> int | None:
    """Return the first evaluation at PATIENCE times the least tokens to the target, or None."""
    bound = PATIENCE * least_tokens
    later = (step for step in milestone_steps(steps, points) if step * step_tokens >= bound)
    return next(later, None)
