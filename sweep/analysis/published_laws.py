"""Published laws of the best batch size and learning rate of language models.

Each holds inside the range in which it was fitted; outside of it, it gives no number. Power Lines
(arXiv 2505.13738) is left out: its exponent, 0.383, is known, and its coefficient was not checked.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sweep.config.numbers import format_count


@dataclass(frozen=True)
class Scale:
    """The training that a law is asked about."""

    parameters: float  # without embeddings
    tokens: float

    @property
    def flops(self) -> float:
        """Training FLOPs, 6·N·D."""
        return 6 * self.parameters * self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Range:
    """A range of trainings that a law was fitted to."""

    quantity: str  # a property of Scale
    low: float
    high: float

    def contains(self, scale: Scale) -> bool:
        value = float(getattr(scale, self.quantity))
        return self.low <= value <= self.high

    def describe(self) -> str:
        if self.quantity == "flops":
            return f"{self.low:.0e} to {self.high:.0e} FLOPs"
        name = self.quantity.replace("_", " ")
        return f"{format_count(self.low)} to {format_count(self.high)} {name}"


@dataclass(frozen=True)
class PublishedLaw:
    name: str
    source: str
    kind: str  # best or critical batch size
    ranges: tuple[Range, ...]
    batch_size: Callable[[Scale], float]  # in tokens
    learning_rate: Callable[[Scale], float] | None = None  # that of AdamW; None: it has no law

    def contains(self, scale: Scale) -> bool:
        """Return True if the law was fitted to such trainings."""
        return all(part.contains(scale) for part in self.ranges)

    def describe_range(self) -> str:
        return ", ".join(part.describe() for part in self.ranges)


def step_law_rate(scale: Scale) -> float:
    """Return the learning rate of Li et al. 2025 (arXiv 2503.04715), also outside its range."""
    return float(1.79 * scale.parameters**-0.713 * scale.tokens**0.307)


# Exponents of the best batch size in training tokens: Power Lines, and Step Law.
EXPONENTS = (0.38, 0.57)
STEP_LAW = PublishedLaw(
    name="Step Law",
    source="arXiv 2503.04715, and the means of the authors' 1,000 released fits",
    kind="best",
    ranges=(Range("parameters", 0.2e9, 1.1e9), Range("tokens", 4e9, 100e9)),
    batch_size=lambda scale: 0.58 * scale.tokens**0.571,
    learning_rate=step_law_rate,
)
LAWS = (
    STEP_LAW,
    PublishedLaw(
        name="DeepSeek LLM",
        source="arXiv 2401.02954, section 3.1, formula 1",
        kind="best",
        ranges=(Range("flops", 1e17, 2e19),),
        batch_size=lambda scale: 0.2920 * scale.flops**0.3271,
        learning_rate=lambda scale: 0.3118 * scale.flops**-0.1250,
    ),
    PublishedLaw(
        name="Zhang et al.",
        source="arXiv 2410.21676; about 20 tokens per parameter, context 512",
        kind="critical",
        ranges=(Range("parameters", 85e6, 1.2e9), Range("tokens_per_parameter", 15, 25)),
        batch_size=lambda scale: 93.2 * (scale.parameters / 1e6) ** 0.468 * 512,
    ),
)


@dataclass(frozen=True)
class Published:
    """The numbers of a law at one training."""

    name: str
    source: str
    kind: str
    value: float | None  # batch size in tokens; None outside of the law's range
    learning_rate: float | None
    range: str
    inside: bool


def published_at(scale: Scale) -> list[Published]:
    """Apply each law to a training; there are no numbers outside of a law's range."""
    rows = []
    for law in LAWS:
        is_inside = law.contains(scale)
        rate = None
        if is_inside and law.learning_rate is not None:
            rate = law.learning_rate(scale)
        rows.append(
            Published(
                name=law.name,
                source=law.source,
                kind=law.kind,
                value=law.batch_size(scale) if is_inside else None,
                learning_rate=rate,
                range=law.describe_range(),
                inside=is_inside,
            )
        )
    return rows
