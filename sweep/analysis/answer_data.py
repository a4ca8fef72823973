"""The answer of a sweep as data: the keys of answer.json."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sweep.analysis.checks.trials import LEAST_CLIP_RATE, MOST_CLIP_RATES
from sweep.analysis.tables import Estimate
from sweep.config.objective import Objective
from sweep.decision.decision import UNDECIDED

MISSING = "–"  # a value that is not known
LEAST_CLIPPED = 0.5  # share of clipped steps at which the clip acts like another optimizer


def join(items: Iterable[Any], word: str = "and") -> str:
    """Write `2, 4 and 8`."""
    *first, last = map(str, items)
    if not first:
        return last
    return f"{', '.join(first)} {word} {last}"


@dataclass(frozen=True)
class BatchSizeAnswer:
    batch_size: int  # sequences
    batch_size_tokens: int | None  # None if it is not known, or for examples without tokens
    mean: float | None  # metric at the rate used; None if no seed completed or one diverged
    seeds: int  # complete
    missed_seeds: int  # that diverged or missed the target
    gap: float | None  # to the best of the others, at the best rates; the best one's is negative
    gap_to_best: tuple[float | None, float | None]  # its interval; None: unbounded
    may_be_best: bool
    tolerance_verdict: str  # within, outside or undecided
    learning_rate: float | None  # used
    best_learning_rate: float | None  # estimated; None without a fit
    learning_rate_interval: tuple[float, float] | None  # interval of the best rate
    estimated_regret: float | None  # loss that the rate used gives up; None without a fit
    regret_interval: tuple[float, float] | None
    microbatch_size: int | None
    seconds: float | None  # median time of a training, or to the target; None if it is not known
    seconds_interval: tuple[float, float] | None  # the median's; None with too few times
    seconds_range: tuple[float, float] | None  # least and largest time
    price: float | None  # that of this time on its devices; None without a price per hour
    price_interval: tuple[float, float] | None  # as the time has one
    price_range: tuple[float, float] | None
    dominated: bool | None  # whether another batch size is better and sooner; None: not known
    clipped_step_fraction: float | None  # share of the steps whose gradient was clipped
    # share of its tokens that the best could save, least and largest; None: not known, not bounded
    worth_in_tokens: tuple[float, float | None] | None = None

    @property
    def seconds_bounds(self) -> tuple[float, float] | None:
        """The interval of the time, or its range if there are too few times."""
        if self.seconds_interval is None:
            return self.seconds_range
        return self.seconds_interval

    @property
    def price_bounds(self) -> tuple[float, float] | None:
        """The interval of the price, or its range."""
        return self.price_range if self.price_interval is None else self.price_interval


@dataclass(frozen=True)
class Pair:
    """Two batch sizes at the rates used: the larger one minus the smaller one."""

    batch_sizes: tuple[int, int]
    difference: Estimate  # the interval holds for all pairs together
    tolerance: float

    @property
    def verdict(self) -> str:
        if -self.tolerance <= self.difference.low and self.difference.high <= self.tolerance:
            return "equivalent"
        is_different = self.difference.low > 0 or self.difference.high < 0
        return "different" if is_different else UNDECIDED


SIDES = ("tokens", "time", "steps")  # what may count, in the order of the report


def side_of_losses(time_budget_seconds: float | None) -> str:
    """Return the side that losses tell: tokens, or time if they are compared at equal time."""
    return "tokens" if time_budget_seconds is None else "time"


@dataclass(frozen=True)
class Side:
    """A batch size for one of the things that may count: tokens, time or steps."""

    batch_size: int | None  # None if it is not known
    candidates: list[int]  # batch sizes that may be it
    basis: str  # why this one, a clause; "" if it is not known
    value: float | None  # its tokens, seconds or steps
    interval: tuple[float, float] | None
    reason: str | None = None  # why it is not known, or only provisionally, sentences
    settle: str | None = None  # the command that would tell


@dataclass(frozen=True, repr=False)
class AnswerData:
    """The keys of answer.json, where `pursues` is called `for`."""

    policy: str
    metric: str
    direction: str
    unit: str
    tolerance: float
    candidates: list[int]  # batch sizes that may be the best
    pursues: str  # tokens, time or steps: the side that is recommended
    recommended: int
    provisional: bool
    basis: str  # why this one of the batch sizes, a clause
    reasons: list[str]  # why the recommendation is provisional, sentences
    question: str  # which: one batch size to use; order: the verdicts of all
    decided: bool  # whether this question is answered
    scope: str  # what was measured, for which the answer holds
    time_budget_seconds: float | None  # losses are compared at equal time; None: at equal tokens
    price_per_device_hour: float | None
    batch_sizes: list[BatchSizeAnswer]
    fewest_tokens: Side
    soonest: Side
    fewest_steps: Side
    times_reasons: list[str]  # why statements about times are provisional, sentences
    times_device: str  # where the times were measured; "" if that is not known
    times_are_elsewhere: bool  # whether the trials ran on another device or with other settings
    settle: str | None  # the command that would settle the open question
    settle_seconds: float | None  # its least time
    settle_reason: str | None  # why no command would, or what to know about it, sentences
    settle_longer: str | None  # the command that tells about longer trainings
    pairs: list[Pair]
    has_budgets: bool = False  # whether other budgets were measured too
    optimizer: str = ""  # if the sweep has several
    optimizers: "Ranking | None" = None  # if the sweep has several

    @property
    def compared(self) -> Objective:
        return Objective(self.metric, self.direction, self.unit, self.tolerance)

    @property
    def compared_side(self) -> str:
        """The side that the losses tell: tokens, or time if they are compared at equal time."""
        return side_of_losses(self.time_budget_seconds)

    @property
    def headline(self) -> str:
        """The recommendation; another batch size that needs the fewest tokens is named too."""
        start = "Provisionally, use" if self.provisional else "Use"
        text = f"{start} batch size {self.recommended}"
        tokens = self[self.recommended].batch_size_tokens
        if tokens is not None:
            text += f" ({tokens:,} tokens)"
        text += f"{self.with_optimizer}: {self.basis}"
        if self.pursues == self.compared_side or self.fewest_tokens.batch_size is None:
            return f"{text}."
        if self.candidates == [self.recommended]:
            return f"{text}, and with the fewest tokens."
        fewest = join(self.candidates, "or")
        return f"{text}. With the fewest tokens: {fewest}."

    @property
    def clipping(self) -> str:
        """A sentence about shares of clipped steps that differ by an order of magnitude, or ""."""
        shares = {
            row.batch_size: row.clipped_step_fraction
            for row in self.batch_sizes
            if row.clipped_step_fraction is not None
        }
        if not shares:
            return ""
        most = max(shares, key=shares.__getitem__)
        least = min(shares, key=shares.__getitem__)
        if shares[most] <= MOST_CLIP_RATES * max(shares[least], LEAST_CLIP_RATE):
            return ""
        text = (
            f"The clip shortens {100 * shares[most]:.3g} % of the steps at batch size {most} and "
            f"{100 * shares[least]:.3g} % at {least}"
        )
        if shares[most] >= LEAST_CLIPPED:
            text += ", as if these had different optimizers"
        return f"{text}."

    @property
    def sides(self) -> dict[str, Side]:
        """The sides by what counts, in the order of the report."""
        return dict(zip(SIDES, (self.fewest_tokens, self.soonest, self.fewest_steps), strict=True))

    @property
    def of_all_optimizers(self) -> "list[AnswerData]":
        """This answer, and those for the other optimizers."""
        return [self, *(self.optimizers.answers if self.optimizers else ())]

    @property
    def with_optimizer(self) -> str:
        """The end of a clause that names the optimizer; "" if the sweep has one."""
        return f" with {self.optimizer}" if self.optimizer else ""

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        return {"for" if name == "pursues" else name: value for name, value in document.items()}

    def write_gap(self, estimate: float | None, interval: tuple[float | None, float | None]) -> str:
        """Write a gap with its interval, rounded outwards."""
        low, high = interval
        if low is None and high is None:
            return MISSING
        _, unit = self.compared.scale
        if low is None:
            ends = f"{self._write_number(high, np.ceil)} or less"
        elif high is None:
            ends = f"{self._write_number(low, np.floor)} or more"
        else:
            ends = f"{self._write_number(low, np.floor)} to {self._write_number(high, np.ceil)}"
        if estimate is None:
            return f"{ends} {unit}".rstrip()
        return f"{self._write_number(estimate, np.round)} ({ends}) {unit}".rstrip()

    def _write_number(self, gap: float | None, rounded: Callable[..., Any]) -> str:
        """Write a gap without its unit."""
        assert gap is not None, "unbounded ends are written in words"
        return self.compared.write(gap, rounded, "+").split()[0]

    def __getitem__(self, batch_size: int) -> BatchSizeAnswer:
        return next(row for row in self.batch_sizes if row.batch_size == batch_size)


@dataclass(frozen=True)
class OptimizerGap:
    """Two optimizers at one batch size, each at its best rate."""

    batch_size: int
    better: str  # by the estimates
    worse: str
    estimate: float | None  # what the worse one gives up
    gap: tuple[float | None, float | None]  # its interval; None: unbounded
    is_decided: bool


@dataclass(frozen=True)
class Ranking:
    """The optimizers of a sweep against each other; the intervals hold for all arms together."""

    is_same: bool | None  # at all batch sizes; None: undecided
    best_first: dict[int, list[str]]  # optimizers by batch size, by the estimates
    gaps: list[OptimizerGap]
    candidates: list[tuple[str, int]]  # optimizers and batch sizes that may be the best of all
    answers: Sequence[AnswerData]  # answers for the other optimizers
