"""The learning rate of each step: warmup, then decay or a constant rate."""

import math
from fractions import Fraction

from sweep.config.schedule import ScheduleSettings
from sweep.errors import user_code
from sweep.usercode.objects import load_object


def warmup_steps(steps: int, schedule: ScheduleSettings) -> int:
    """W = max(1, min(max(floor(fraction·S + ½), warmup_min_steps), floor(S/10)))."""
    proportional = math.floor(Fraction(str(schedule.warmup_fraction)) * steps + Fraction(1, 2))
    return max(1, min(max(proportional, schedule.warmup_min_steps), steps // 10))


def learning_rate_at(
    step: int, peak: float, steps: int, warmup: int, schedule: ScheduleSettings
) -> float:
    """Return the rate of step t = 1 … S: linear warmup, then cosine decay or a constant rate.

    A user's function returns it as a share of the peak, the warmup included.
    """
    if ":" in schedule.name:
        requirement = "must return the rate of a step as a finite share of the peak, at least 0"
        with user_code(f"schedule {schedule.name!r} {requirement}"):
            share = float(load_object(schedule.name)(step, steps, warmup))
            if not 0 <= share < math.inf:
                raise ValueError(f"it returned {share:g} at step {step}")
            return peak * share
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    if step == steps:
        return peak * schedule.final_fraction
    progress = (step - warmup) / (steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * cosine)
