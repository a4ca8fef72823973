"""Steps, warmup, schedule, milestones and accumulation (DESIGN.md §6). Pure arithmetic."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from sweep.config.experiment import ScheduleSettings
from sweep.config.numbers import nearest_multiples
from sweep.errors import SweepError

LEAST_PROBED, MOST_PROBED = 8, 512  # sequences per noise measurement
LEAST_PART, MOST_PARTS = 4, 16  # smaller parts are far slower than the same sequences in a step
FAR = 1 << 44  # stream position beyond any training, for data that never repeat
LARGEST_LOSS = Fraction(1, 100)  # of the budget, for a token count that all batch sizes share


def tokens_per_trial(
    budget: int, batches: Iterable[int], tokens_per_sequence: int
) -> tuple[dict[int, int], bool]:
    """Round the budget to whole steps.

    Returns:
        Training tokens by batch size, and whether they are the same for all: the largest common
        multiple of every step within the budget, if that loses at most 1 % of it.

    Raises:
        SweepError: if the budget is smaller than one step.
    """
    batches = tuple(batches)
    for batch in batches:
        if budget < batch * tokens_per_sequence:
            raise SweepError(
                f"budget must hold at least one step of every batch size, got {budget} tokens for "
                f"batch size {batch} with {tokens_per_sequence} tokens per sequence. Use --budget "
                f"{batch * tokens_per_sequence} or more, or smaller batch sizes."
            )
    common = math.lcm(*batches) * tokens_per_sequence
    rounded = budget // common * common
    if rounded and budget - rounded <= LARGEST_LOSS * budget:
        return dict.fromkeys(batches, rounded), True
    steps = {batch: batch * tokens_per_sequence for batch in batches}
    own = {batch: budget // step * step for batch, step in steps.items()}
    return own, len(set(own.values())) == 1


def warmup_steps(steps: int, schedule: ScheduleSettings) -> int:
    """W = max(1, min(max(floor(fraction·S + ½), warmup_min_steps), floor(S/10)))."""
    proportional = math.floor(Fraction(str(schedule.warmup_fraction)) * steps + Fraction(1, 2))
    return max(1, min(max(proportional, schedule.warmup_min_steps), steps // 10))


def learning_rate_at(
    step: int, peak: float, steps: int, warmup: int, schedule: ScheduleSettings
) -> float:
    """Return the rate of step t = 1 … S: linear warmup, then cosine decay or a constant rate."""
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
    return tuple(sorted({-(-k * steps // points) for k in range(1, points + 1)}))


@dataclass(frozen=True)
class ProbeSizes:
    """How the gradient noise scale of a trial is measured."""

    points: int  # measurements, evenly spaced; the same at every batch size of a sweep
    sequences: int  # of each measurement; the same at every batch size
    part: int  # sequences per gradient, on each device


def probe_sizes(
    sequences: int, points: int, share: float, microbatch_size: int, devices: int = 1
) -> ProbeSizes:
    """Return the sizes of noise measurements, all 0 if the share is too small for one.

    Args:
        sequences: of the budget, which all batch sizes share.
        points: most measurements; fewer if each would have too few sequences.
        share: of the sequences, for all measurements together.
        microbatch_size: upper bound of a part.
        devices: per trial; each takes equally many sequences.
    """
    points = min(points, int(share * sequences / LEAST_PROBED))
    if not points:
        return ProbeSizes(0, 0, 0)
    count = min(MOST_PROBED, int(share * sequences / points))
    parts = min(MOST_PARTS, count // LEAST_PART)
    part = max(1, count // parts // devices)
    return ProbeSizes(points, parts * part * devices, largest_divisor(part, microbatch_size))


def first_probed(probed: int, windows: int | None) -> int:
    """Return the stream position of the first sequence used by noise measurements.

    They use the last sequences of the first epoch, the same at every batch size. Training does
    not see them if it takes less than an epoch without them.

    Args:
        probed: sequences of all measurements together.
        windows: sequences per epoch; None if the data never repeat.
    """
    return FAR if windows is None else max(0, windows - probed)


def legal_microbatches(number: int, group_size: int = 1) -> list[int]:
    """Return the divisors of `number` that are whole groups or equal parts of one, ascending."""
    divisors = (size for size in range(1, number + 1) if number % size == 0)
    return [size for size in divisors if size % group_size == 0 or group_size % size == 0]


def largest_divisor(number: int, at_most: int, group_size: int = 1) -> int:
    """Return the largest legal microbatch of `number` that is at most `at_most` (at least 1)."""
    return max(d for d in legal_microbatches(number, group_size) if d <= max(1, at_most))


def per_device_of(batch_size: int, devices: int, group_size: int = 1) -> int:
    """Return the sequences of a step on each device of a trial.

    Raises:
        SweepError: if they are not a whole number of groups, with the nearest legal batch sizes.
    """
    step = devices * group_size
    if devices == 1 or batch_size % step == 0:
        return batch_size // devices
    groups = f" × group_size ({group_size})" * (group_size > 1)
    raise SweepError(
        f"batch size must be a multiple of devices ({devices}){groups}, got {batch_size}. "
        f"Use {nearest_multiples(batch_size, step)}."
    )


def devices_from_split(batches: Sequence[int], microbatch: int, accumulation: int) -> int:
    """Return the devices per trial that a microbatch size and accumulation steps imply.

    Args:
        batches: all batch sizes of the sweep, whose trials run on equally many devices.
        microbatch: sequences per device per forward-backward.
        accumulation: forward-backward passes per step.

    Raises:
        SweepError: if that is not one whole number, with the nearest legal values if there are any.
    """
    if len(set(batches)) > 1:
        raise SweepError(
            f"microbatch × accumulation ({microbatch} × {accumulation}) must imply the same number "
            f"of devices at every batch size, got {', '.join(map(str, batches))}. Leave one of "
            "them out, or run one batch size."
        )
    batch = batches[0]
    whole = f"batch_size ({batch})"
    _check_divides("microbatch_size", microbatch, legal_microbatches(batch), whole)
    parts = batch // microbatch
    whole, name = f"batch_size / microbatch_size ({parts})", "gradient_accumulation_steps"
    _check_divides(name, accumulation, legal_microbatches(parts), whole)
    return parts // accumulation


def choose_microbatch(
    per_device: int,
    chosen: int | None,
    at_most: int,
    group_size: int = 1,
    accumulation: int | None = None,
) -> int:
    """Choose how many sequences one forward-backward takes.

    batch size = microbatch size × devices × gradient accumulation steps.

    Args:
        per_device: sequences of one step on one device.
        chosen: the setting `microbatch`, or None; if larger than `per_device`, that is used.
        at_most: bound if nothing was chosen.
        group_size: sequences that belong together: whole groups, or equal parts of one.
        accumulation: the setting `accumulation`, or None.

    Raises:
        SweepError: if a setting does not divide, with the nearest legal values.
    """
    legal = legal_microbatches(per_device, group_size)
    whole = f"batch_size / devices ({per_device})"
    if accumulation is not None:
        parts = [per_device // size for size in reversed(legal)]
        _check_divides("gradient_accumulation_steps", accumulation, parts, whole, group_size)
        size = per_device // accumulation
        if chosen not in (None, size):
            raise SweepError(
                "microbatch_size × gradient_accumulation_steps must be batch_size / devices "
                f"({per_device}), got {chosen} × {accumulation}. Give one of them, or {size} × "
                f"{accumulation}."
            )
        return size
    if chosen is None:
        return largest_divisor(per_device, at_most, group_size)
    chosen = min(chosen, per_device)
    _check_divides("microbatch_size", chosen, legal, whole, group_size)
    return chosen


def _check_divides(
    name: str, value: int, legal: list[int], whole: str, group_size: int = 1
) -> None:
    """Refuse a value that is not legal, and name its neighbours."""
    if value in legal:
        return
    lower = [size for size in legal if size < value][-1:]
    upper = [size for size in legal if size > value][:1]
    groups = f" into whole groups of {group_size} or equal parts of one" * (group_size > 1)
    nearest = " or ".join(str(size) for size in lower + upper)
    raise SweepError(f"{name} must divide {whole}{groups}, got {value}. Use {nearest}.")


def next_microbatch(per_device: int, failed: int, group_size: int = 1) -> int | None:
    """Return the microbatch to try after `failed` ran out of memory, or None after 1."""
    return None if failed <= 1 else largest_divisor(per_device, failed // 2, group_size)
