"""The course of a training: its batch size, and how steps, sequences and tokens belong together."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from sweep.config.experiment import TrainingSettings
from sweep.config.numbers import format_seconds
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError

MOST_TOKEN_RATIO = 1.01  # largest ratio of tokens at which losses are compared
MOST_EPOCHS = 4  # above which repeated data change the losses and the best batch size
EVALUATIONS = 20  # about so many in a training that is told how often; at most twice as many


@dataclass(frozen=True)
class Course:
    """A constant batch size from the first step t = 1 to the last, t = S."""

    batch_size: int  # sequences of a step, over all devices
    tokens_per_sequence: int
    steps: int  # S

    @classmethod
    def of_settings(cls, settings: TrainingSettings, batch_size: int, tokens: int) -> Self:
        """Return the course that trains on so many tokens, in whole steps."""
        tokens_per_sequence = settings.tokens_per_sequence
        steps = tokens // (batch_size * tokens_per_sequence)
        return cls(batch_size, tokens_per_sequence, steps)

    @classmethod
    def of_trial(cls, config: TrialConfig) -> Self:
        return cls(config.science.batch_size, config.tokens_per_sequence, config.steps)

    def batch_at(self, step: int) -> int:
        """Return the sequences of step t."""
        return self.batch_size

    def first_sequence(self, step: int) -> int:
        """Return the number of sequences before step t, at which its batch begins."""
        return (step - 1) * self.batch_size

    def sequences_at(self, step: int) -> int:
        """Return the sequences of steps 1 … t."""
        return step * self.batch_size

    def tokens_at(self, step: int) -> int:
        """Return the tokens of steps 1 … t."""
        return self.sequences_at(step) * self.tokens_per_sequence

    def step_at(self, tokens: float) -> float:
        """Return the step after which so many tokens are trained, between two steps a fraction."""
        return tokens / (self.batch_size * self.tokens_per_sequence)

    def steps_between_evaluations(self) -> int:
        """Return a divisor of the steps with about 20 evaluations, the last one after all steps."""
        counts = [count for count in range(1, 2 * EVALUATIONS + 1) if self.steps % count == 0]
        return self.steps // min(counts, key=lambda count: abs(math.log(count / EVALUATIONS)))

    def milestones(self, points: int) -> tuple[int, ...]:
        """Return for k = 1 … M the first step with at least k/M of all tokens, ascending."""
        points = min(points, self.steps)
        return tuple(-(-k * self.steps // points) for k in range(1, points + 1))


def tokens_per_trial(
    budget: int, batches: Collection[int], tokens_per_sequence: int, is_of_tuning: bool = False
) -> tuple[dict[int, int], bool]:
    """Return training tokens by batch size, in whole steps, and whether they are all equal.

    Raises:
        SweepError: if the budget, or that of tuning, is less than a step of a batch size.
    """
    step_tokens = {batch: batch * tokens_per_sequence for batch in batches}
    largest = max(batches)
    if budget < step_tokens[largest]:
        name = "tuning.budget" if is_of_tuning else "budget"
        flag = "tune-budget" if is_of_tuning else "budget"
        step = f"one step of batch size {largest}"
        if tokens_per_sequence > 1:
            step += f" ({step_tokens[largest]} tokens)"
        raise SweepError(
            f"{name} must hold at least {step}, got {budget}. "
            f"Use --{flag} {step_tokens[largest]} or more, or smaller batch sizes."
        )

    common = math.lcm(*step_tokens.values())
    rounded = budget // common * common
    if rounded and 100 * (budget - rounded) <= budget:
        return dict.fromkeys(batches, rounded), True

    tokens = {batch: budget // step * step for batch, step in step_tokens.items()}
    return tokens, len(set(tokens.values())) == 1


def steps_within(seconds: float, seconds_per_step: float, batch_size: int) -> int:
    """Return the whole steps of a budget of time.

    Raises:
        SweepError: if it is less than a step.
    """
    steps = math.floor(seconds / seconds_per_step)
    if steps < 1:
        raise SweepError(
            f"the budget must hold at least one step of batch size {batch_size}, which takes "
            f"{format_seconds(seconds_per_step)}, got {format_seconds(seconds)}. Raise --budget, "
            "or leave this batch size out."
        )
    return steps


def repeats_too_often(epochs: float | None) -> bool:
    """Return True if the data are known to be repeated more often than a comparison allows."""
    return epochs is not None and epochs > MOST_EPOCHS


def are_close(tokens: Collection[float]) -> bool:
    """Return True if losses on so many tokens can be compared, with an allowance for the slope."""
    return max(tokens) <= MOST_TOKEN_RATIO * min(tokens)


def common_budget(budget: int, batches: Collection[int], tokens_per_sequence: int) -> int:
    """Return the budget nearest to this one that all batch sizes use up in whole steps."""
    common = math.lcm(*batches) * tokens_per_sequence
    return max(1, round(budget / common)) * common
