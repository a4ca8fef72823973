"""The progress of a trial: counters, sums and seconds that its checkpoints carry."""

import math
import time
from dataclasses import dataclass, field
from typing import Literal

from sweep.plan.tuning import CONFIRMED

DIVERGED_MARGIN = 1.0  # loss above its start
DIVERGED_POINTS = 5  # log points in a row: 5 % of the tokens with 100 points


@dataclass
class Progress:
    """Plain numbers only; written into checkpoints."""

    step: int = 0
    start_loss: float = math.nan  # of the milestone set, before any update
    first_loss: float | None = None  # of the first step's batch, before any update
    best_valid_loss: float | None = None  # least of the milestone evaluations
    clipped_steps: float = 0.0
    # Sums over the steps since the last log point.
    log_step: int = 0
    loss_sum: float = 0.0
    norm_sum: float = 0.0
    clipped_sum: float = 0.0
    watched: dict[str, list[float]] = field(default_factory=dict)  # by the workload: sum, count
    points_above_start: int = 0
    points_at_target: int = 0  # milestone evaluations in a row
    recent_losses: list[float] = field(default_factory=list)  # of evaluations, for a target
    seconds_compile: float = 0.0
    seconds_training: float = 0.0
    seconds_evaluation: float = 0.0
    seconds_checkpoint: float = 0.0
    seconds_noise: float = 0.0
    seconds_total: float = 0.0
    log_seconds: float = 0.0  # of training, at the last log point
    peak_memory_bytes: int = 0  # over all attempts

    def interval_metrics(self) -> dict[str, float]:
        """Return means over the steps since the last log point."""
        steps = self.step - self.log_step
        return {
            "train/loss": self.loss_sum / steps,
            "train/grad_norm": self.norm_sum / steps,
            "train/clipped": self.clipped_sum / steps,
            **{name: total / count for name, (total, count) in self.watched.items() if count},
        }

    def interval_seconds(self) -> float:
        """Return the training seconds since the last log point."""
        return max(self.seconds_training - self.log_seconds, 1e-9)

    def start_interval(self) -> None:
        """Start a new log interval at the current step."""
        self.clipped_steps += self.clipped_sum
        self.log_step, self.log_seconds = self.step, self.seconds_training
        self.loss_sum = self.norm_sum = self.clipped_sum = 0.0

    def see_valid_loss(self, loss: float) -> bool:
        """Record an evaluation; return True if its loss is not finite (the trial diverged)."""
        if math.isfinite(loss) and (self.best_valid_loss is None or loss < self.best_valid_loss):
            self.best_valid_loss = loss
        return not math.isfinite(loss)

    def has_reached(self, target: float | None, loss: float, window: int) -> bool:
        """Record an evaluation; return True if the mean of the last `window` confirms the target.

        The mean must be at the target in CONFIRMED evaluations in a row.
        """
        if target is None:
            return False
        self.recent_losses = [*self.recent_losses, loss][-window:]
        is_there = len(self.recent_losses) == window and sum(self.recent_losses) <= window * target
        self.points_at_target = self.points_at_target + 1 if is_there else 0
        return self.points_at_target >= CONFIRMED

    def is_diverging(self, loss: float, is_like_start: bool = True) -> bool:
        """Return True if a log point's loss is not finite, or above the start for long enough.

        Args:
            loss: mean training loss since the last log point.
            is_like_start: whether training loss and the start's evaluation measure the same. For
                GRPO they do not: a surrogate around 0, and minus a reward of any size.
        """
        if not math.isfinite(loss):
            return True
        is_above = is_like_start and loss > self.start_loss + DIVERGED_MARGIN
        self.points_above_start = self.points_above_start + 1 if is_above else 0
        return self.points_above_start >= DIVERGED_POINTS


class Clock:
    """Charges the time since its last charge to one account of a trial's seconds.

    Args:
        progress: holds the accounts.
        start: of the attempt, by `time.perf_counter`.
    """

    def __init__(self, progress: Progress, start: float) -> None:
        self._progress, self._mark = progress, start

    def charge(
        self,
        account: Literal["compile", "training", "evaluation", "checkpoint", "noise", "other"],
    ) -> None:
        """Add the time since the last charge; `other` counts in the total only."""
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        self._progress.seconds_total += elapsed
        if account != "other":
            name = f"seconds_{account}"
            setattr(self._progress, name, getattr(self._progress, name) + elapsed)
