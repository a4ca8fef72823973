"""The progress of a trial, which its checkpoints contain, and how its losses end it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sweep.plan.rates import CONFIRMED

DIVERGED_MARGIN = 1.0  # loss above its start
DIVERGED_POINTS = 5  # log points in a row: 5 % of the tokens with 100 points
ShouldStop = Callable[[], str | None]  # a worker polls it; an answer says how to end


@dataclass
class Progress:
    """Counters, sums and seconds: plain numbers only."""

    step: int = 0
    start_loss: float = math.nan  # loss of the milestone set before any update
    first_loss: float | None = None  # loss of the first batch before any update
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
    recent_losses: list[float] = field(default_factory=list)  # recent evaluations, for a target
    seconds_compile: float = 0.0
    seconds_training: float = 0.0
    seconds_evaluation: float = 0.0
    seconds_checkpoint: float = 0.0
    seconds_noise: float = 0.0
    seconds_total: float = 0.0
    log_seconds: float = 0.0  # training seconds at the last log point
    charged_at: float = field(default_factory=time.perf_counter)  # valid in one process only
    peak_memory_bytes: int = 0  # over all attempts

    def charge(self, account: str) -> None:
        """Add the time since the last charge to `seconds_ACCOUNT` and the total.

        `other` counts in the total only.
        """
        now = time.perf_counter()
        elapsed, self.charged_at = now - self.charged_at, now
        self.seconds_total += elapsed
        if account != "other":
            name = f"seconds_{account}"
            setattr(self, name, getattr(self, name) + elapsed)

    def see_valid_loss(self, loss: float, target: float | None, window: int) -> str | None:
        """Record an evaluation; return `diverged` or `trained` if it ends the training.

        The mean of the last `window` evaluations must be at the target CONFIRMED times in a row.
        """
        if not math.isfinite(loss):
            return "diverged"
        if self.best_valid_loss is None or loss < self.best_valid_loss:
            self.best_valid_loss = loss
        if target is None:
            return None
        self.recent_losses = [*self.recent_losses, loss][-window:]
        is_there = len(self.recent_losses) == window and sum(self.recent_losses) <= window * target
        self.points_at_target = self.points_at_target + 1 if is_there else 0
        return "trained" if self.points_at_target >= CONFIRMED else None

    def is_diverging(self, loss: float, is_like_start: bool = True) -> bool:
        """Return True if a log point's loss is not finite, or above the start for long enough.

        `is_like_start`: whether it measures the same as the evaluation at the start.
        """
        if not math.isfinite(loss):
            return True
        is_above = is_like_start and loss > self.start_loss + DIVERGED_MARGIN
        self.points_above_start = self.points_above_start + 1 if is_above else 0
        return self.points_above_start >= DIVERGED_POINTS
