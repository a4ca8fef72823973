"""Divide the sequences of a step into microbatches."""

from collections.abc import Collection

from sweep.config.numbers import nearest_multiples
from sweep.errors import SweepError


def legal_microbatches(number: int, sequences_per_group: int = 1) -> list[int]:
    """Return the divisors of `number` that are whole groups or equal parts of one, ascending."""
    divisors = (size for size in range(1, number + 1) if number % size == 0)
    return [
        size
        for size in divisors
        if size % sequences_per_group == 0 or sequences_per_group % size == 0
    ]


def largest_divisor(number: int, at_most: int, sequences_per_group: int = 1) -> int:
    """Return the largest legal microbatch of `number` that is at most `at_most` (at least 1)."""
    return max(d for d in legal_microbatches(number, sequences_per_group) if d <= max(1, at_most))


def common_microbatch(
    batch_sizes: Collection[int], at_most: int, sequences_per_group: int = 1
) -> int:
    """Return the largest microbatch that `--microbatch` may be for all these batch sizes.

    It divides each one, or is larger; `batch_sizes` are those of a device.
    """
    sizes = range(min(at_most, max(batch_sizes)), 0, -1)
    return next(
        size
        for size in sizes
        if all(
            min(size, number) in legal_microbatches(number, sequences_per_group)
            for number in batch_sizes
        )
    )


def choose_microbatch(
    batch_size: int,
    at_most: int,
    *,
    alone_at_most: int | None = None,
    devices: int = 1,
    sequences_per_group: int = 1,
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
    legal = legal_microbatches(per_device, sequences_per_group)
    if accumulation is not None:
        name = "gradient_accumulation_steps"
        value = accumulation
        legal = [per_device // size for size in reversed(legal)]
    elif microbatch is not None:
        name = "microbatch_size"
        value = min(microbatch, per_device)
    elif per_device <= (alone_at_most or at_most):
        return per_device
    else:
        return largest_divisor(per_device, at_most, sequences_per_group)

    if value not in legal:
        smaller = [number for number in legal if number < value]
        larger = [number for number in legal if number > value]
        neighbours = [*smaller[-1:], *larger[:1]]
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
