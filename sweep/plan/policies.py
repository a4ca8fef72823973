"""Learning-rate policies: the rate, β2 and weight decay of each batch size.

A policy is a class in `POLICIES`, or in another package that registers it in the entry-point group
`sweep.policies`. Plans and tables record its name, from which `policy_class` finds it again.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Self

from sweep.config.numbers import short
from sweep.config.optimizers import OptimizerSettings, optimizer_facts
from sweep.config.schedule import ScheduleSettings
from sweep.errors import SweepError, did_you_mean
from sweep.usercode.extensions import all_classes

BETA2_TOKENS = 8192  # β2(B) = β2^(B·T/8192): 5,675,422 tokens of half-life at .999
REFERENCE = 32  # batch size at which the optimizer's own settings apply
LARGEST_RATE = 1e6
LEAST_SEEDS = 3  # least seeds for a claim about batch sizes, and to print a spread
HALF_LIFE = "constant half-life of β2 in tokens, if the optimizer has one (Marek et al. 2025)"


@dataclass(frozen=True)
class Policy(ABC):
    """How the learning rate depends on the batch size. `--lr` names it."""

    kind: ClassVar[str]  # first word of its name
    forms: ClassVar[tuple[str, ...]]  # how people write it
    rate_rule: ClassVar[str]  # the rule for the rate, with its source
    other_rules: ClassVar[str]  # the rules for the other settings of the optimizer
    is_tuned: ClassVar[bool] = False  # whether the rate of each batch size is searched for
    default_seeds: ClassVar[int] = LEAST_SEEDS

    @property
    def name(self) -> str:
        """The name that plans and tables record; it begins with the kind.

        `--lr` must read that of a tuned policy, because reports propose commands with it.
        """
        return self.kind

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """Read what people write; None if it is another policy."""

    @abstractmethod
    def rate_at(self, batch_size: int, optimizer: str = "adamw") -> float:
        """Return the peak rate of a batch size; if tuned, the centre of an optimizer's grid."""

    @abstractmethod
    def optimizer_at(
        self, batch_size: int, tokens_per_sequence: int, optimizer: OptimizerSettings
    ) -> OptimizerSettings:
        """Return the settings of the optimizer at a batch size, except the rate."""

    def adapt_schedule(self, schedule: ScheduleSettings) -> ScheduleSettings:
        """Return the schedule of every batch size."""
        return schedule.model_copy(update={"warmup_min_steps": 0})

    def is_policy_of(self, name: str, learning_rate: float | None) -> bool:
        """Return True for a trial of this policy, by the recorded name and its rate."""
        return name == self.name

    @classmethod
    def label(cls, name: str, learning_rate: float) -> str:
        """Return how reports name the policy of a trial."""
        return name

    @classmethod
    def describe(cls, dimensions: Collection[str], is_rate_only: bool = False) -> str:
        """Return the rules and their sources, for a search in these dimensions."""
        rule = cls.describe_rate(dimensions)
        return rule if is_rate_only else f"{rule}; {cls.other_rules}"

    @classmethod
    def describe_rate(cls, dimensions: Collection[str]) -> str:
        return cls.rate_rule


@dataclass(frozen=True)
class Fixed(Policy):
    """One rate, and one set of other settings, for every batch size."""

    kind: ClassVar[str] = "fixed"
    forms: ClassVar[tuple[str, ...]] = ("a positive RATE",)
    rate_rule: ClassVar[str] = "the same rate at every batch size"
    other_rules: ClassVar[str] = "the same β2 and weight decay"
    default_seeds: ClassVar[int] = 1

    rate: float

    @classmethod
    def parse(cls, text: str) -> Self | None:
        rate = _parse_rate(text)
        return None if rate is None else cls(rate)

    def rate_at(self, batch_size: int, optimizer: str = "adamw") -> float:
        return self.rate

    def optimizer_at(
        self, batch_size: int, tokens_per_sequence: int, optimizer: OptimizerSettings
    ) -> OptimizerSettings:
        return optimizer

    def adapt_schedule(self, schedule: ScheduleSettings) -> ScheduleSettings:
        return schedule

    def is_policy_of(self, name: str, learning_rate: float | None) -> bool:
        return name == self.name and learning_rate == self.rate

    @classmethod
    def label(cls, name: str, learning_rate: float) -> str:
        return f"{name} {short(learning_rate)}"


@dataclass(frozen=True)
class Scaled(Policy):
    """A rate at one batch size, from which a rule gives the others."""

    default: ClassVar[str] = ""  # the form that the kind alone stands for

    rate: float  # at `base`
    base: int  # batch size

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.rate:g}@{self.base}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        if text == cls.kind and cls.default:
            text = cls.default
        match = re.fullmatch(rf"{cls.kind}:([^@:]+)@(\d{{1,18}})", text)
        if match is None:
            return None
        rate = _parse_rate(match[1])
        base = int(match[2])
        return None if rate is None or base == 0 else cls(rate, base)

    @staticmethod
    @abstractmethod
    def scale(ratio: float) -> float:
        """Return the factor of the rate, for a batch size `ratio` times the base."""

    @staticmethod
    @abstractmethod
    def scale_decay(ratio: float) -> float:
        """Return the factor of the weight decay, for the same."""

    def rate_at(self, batch_size: int, optimizer: str = "adamw") -> float:
        return self.rate * self.scale(batch_size / self.base)

    def optimizer_at(
        self, batch_size: int, tokens_per_sequence: int, optimizer: OptimizerSettings
    ) -> OptimizerSettings:
        beta2 = _beta2_at(batch_size * tokens_per_sequence, optimizer)
        decay = optimizer.weight_decay * self.scale_decay(batch_size / self.base)
        return optimizer.model_copy(update={"beta2": beta2, "weight_decay": decay})


@dataclass(frozen=True)
class SquareRoot(Scaled):
    kind: ClassVar[str] = "sqrt"
    forms: ClassVar[tuple[str, ...]] = ("sqrt", "sqrt:RATE@BATCH")
    default: ClassVar[str] = "sqrt:1e-3@32"
    rate_rule: ClassVar[str] = "rate ∝ √B (Malladi et al. 2022)"
    other_rules: ClassVar[str] = (
        "weight decay ∝ √B, which keeps its time scale (Wang & Aitchison 2024); " + HALF_LIFE
    )

    @staticmethod
    def scale(ratio: float) -> float:
        return math.sqrt(ratio)

    @staticmethod
    def scale_decay(ratio: float) -> float:
        return math.sqrt(ratio)


@dataclass(frozen=True)
class Linear(Scaled):
    kind: ClassVar[str] = "linear"
    forms: ClassVar[tuple[str, ...]] = ("linear:RATE@BATCH",)
    rate_rule: ClassVar[str] = "rate ∝ B (Goyal et al. 2017)"
    other_rules: ClassVar[str] = (
        "the same weight decay, which keeps its time scale (Wang & Aitchison 2024); " + HALF_LIFE
    )

    @staticmethod
    def scale(ratio: float) -> float:
        return ratio

    @staticmethod
    def scale_decay(ratio: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Tuned(Policy):
    """A search at each batch size; other settings follow the square root of the batch size."""

    kind: ClassVar[str] = "tuned"
    forms: ClassVar[tuple[str, ...]] = ("tuned",)
    rate_rule: ClassVar[str] = "tuned at each batch size: {dimensions} (Marek et al. 2025)"
    other_rules: ClassVar[str] = (
        "otherwise weight decay ∝ √B and a constant half-life of β2 in tokens, if the optimizer "
        "has one (Marek et al. 2025)"
    )
    is_tuned: ClassVar[bool] = True

    @classmethod
    def describe_rate(cls, dimensions: Collection[str]) -> str:
        return cls.rate_rule.format(dimensions=", ".join(dimensions))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        return cls() if text == cls.kind else None

    def rate_at(self, batch_size: int, optimizer: str = "adamw") -> float:
        ratio = batch_size / REFERENCE
        exponent = 1 / 8 if ratio < 1 else 1 / 2
        centre = 1e-3 * min(ratio, 256 / REFERENCE) ** exponent
        return float(centre * optimizer_facts(optimizer)["rate"])

    def optimizer_at(
        self, batch_size: int, tokens_per_sequence: int, optimizer: OptimizerSettings
    ) -> OptimizerSettings:
        beta2 = _beta2_at(batch_size * tokens_per_sequence, optimizer)
        decay = optimizer.weight_decay * math.sqrt(batch_size / REFERENCE)
        decay /= optimizer_facts(optimizer.name)["rate"]
        return optimizer.model_copy(update={"beta2": beta2, "weight_decay": decay})


POLICIES: tuple[type[Policy], ...] = (Fixed, SquareRoot, Linear, Tuned)


def parse_policy(text: str) -> Policy:
    """Read what `--lr` was given, such as `3e-4`, `sqrt:1e-3@32` or `tuned`."""
    text = text.strip()
    classes = _all_policies()
    for policy_kind in classes:
        policy = policy_kind.parse(text)
        if policy is not None:
            return policy

    forms: list[str] = []
    for policy_kind in classes:
        forms += policy_kind.forms
    words = [form for form in forms if form.islower()]
    hint = did_you_mean(text, words) or "Write it such as 3e-4 or sqrt:1e-3@32."
    raise SweepError(f"lr must be {', '.join(forms[:-1])} or {forms[-1]}, got {text!r}. {hint}")


def policy_class(name: str) -> type[Policy] | None:
    """Return the class of a policy by its recorded name; None if it is not known here."""
    kind = name.partition(":")[0]
    return next((policy for policy in _all_policies() if policy.kind == kind), None)


def is_tuned(name: str) -> bool:
    """Return True if a policy searches for the rate; an unknown one does not."""
    policy = policy_class(name)
    return policy is not None and policy.is_tuned


def describe_policy(name: str, dimensions: Collection[str], is_rate_only: bool = False) -> str:
    """Return the rules of a policy by its recorded name, or the name if it is not known."""
    policy = policy_class(name)
    return policy.describe(dimensions, is_rate_only) if policy else name


def label_policy(name: str, learning_rate: float) -> str:
    """Return how reports name the policy of a trial: `fixed 3e-4`, `tuned`."""
    policy = policy_class(name)
    return policy.label(name, learning_rate) if policy else name


def _all_policies() -> tuple[type[Policy], ...]:
    return all_classes("sweep.policies", Policy, POLICIES, "kind")


def _parse_rate(text: str) -> float | None:
    try:
        rate = float(text)
    except ValueError:
        return None
    return rate if 0 < rate <= LARGEST_RATE else None


def _beta2_at(step_tokens: int, optimizer: OptimizerSettings) -> float:
    return float(optimizer.beta2 ** (step_tokens / BETA2_TOKENS))
