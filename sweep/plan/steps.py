"""Steps, warmup, schedule, milestones and accumulation. Pure arithmetic."""

import math
from collections.abc import Collection
from fractions import Fraction

from sweep.config.numbers import nearest_multiples
from sweep.config.schedule import ScheduleSettings
from sweep.errors import SweepError, user_code
from sweep.usercode.objects import load_object


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
        name, flag = ("tuning.budget", "tune-budget") if is_of_tuning else ("budget", "budget")
        raise SweepError(
            f"{name} must hold at least one step of batch size {largest}, got {budget}. "
            f"Use --{flag} {step_tokens[largest]} or more, or smaller batch sizes."
        )
    common = math.lcm(*step_tokens.values())
    rounded = budget // common * common
    if rounded and 100 * (budget - rounded) <= budget:
        return dict.fromkeys(batches, rounded), True
    own = {batch: budget // step * step for batch, step in step_tokens.items()}
    return own, len(set(own.values())) == 1


def common_budget(budget: int, batches: Collection[int], tokens_per_sequence: int) -> int:
    """Return the budget nearest to this one that all batch sizes use up in whole steps."""
    common = math.lcm(*batches) * tokens_per_sequence
    return max(1, round(budget / common)) * common


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


def milestone_steps(steps: int, points: int) -> tuple[int, ...]:
    """Return for k = 1 … M the first step with at least k/M of the trial's tokens, ascending."""
    points = min(points, steps)
    return tuple(-(-k * steps // points) for k in range(1, points + 1))


def legal_microbatches(number: int, group_size: int = 1) -> list[int]:
    """Return the divisors of `number` that are whole groups or equal parts of one, ascending."""
    divisors = (size for size in range(1, number + 1) if number % size == 0)
    return [size for size in divisors if size % group_size == 0 or group_size % size == 0]


def largest_divisor(number: int, at_most: int, group_size: int = 1) -> int:
    """Return the largest legal microbatch of `number` that is at most `at_most` (at least 1)."""
    return max(d for d in legal_microbatches(number, group_size) if d <= max(1, at_most))


def choose_microbatch(
    batch_size: int,
    at_most: int,
    *,
    alone_at_most: int | None = None,
    devices: int = 1,
    group_size: int = 1,
    microbatch: int | None = None,
    accumulation: int | None = None,
) -> int:
    """Return the microbatch size that the user chose, or the largest legal one.

    A step of several microbatches needs more memory than a step of one, so `alone_at_most` may
    allow a larger only microbatch than `at_most`.
    """
    if batch_size % devices:
        raise SweepError(
            f"batch size must be a multiple of devices ({devices}), got {batch_size}. "
            f"Use {nearest_multiples(batch_size, devices)}."
        )
    per_device = batch_size // devices
    legal = legal_microbatches(per_device, group_size)
    if accumulation is not None:
        name, value = "gradient_accumulation_steps", accumulation
        legal = [per_device // size for size in reversed(legal)]
    elif microbatch is not None:
        name, value = "microbatch_size", min(microbatch, per_device)
    elif per_device <= (alone_at_most or at_most):
        return per_device
    else:
        return largest_divisor(per_device, at_most, group_size)
    if value not in legal:
        neighbours = [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]
        raise SweepError(
            f"{name} must divide batch_size / devices ({per_device}), got {value}. "
            f"Use {' or '.join(map(str, neighbours))}."
        )
    size = per_device // accumulation if accumulation else value
    if accumulation and microbatch not in (None, size):
        raise SweepError(
            f"microbatch_size must be {size} with {accumulation} accumulation steps, got "
            f"{microbatch}. Leave one of the two out."
        )
    return size
