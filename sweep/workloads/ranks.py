"""Communication between the processes of one trial, one per device; a single one sends nothing."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def count() -> int:
    return dist.get_world_size() if is_distributed() else 1


def all_gather(value: Value) -> list[Value]:
    """Return the values of all processes, by rank."""
    values = [value] * count()
    if is_distributed():
        dist.all_gather_object(values, value)
    return values


def all_reduce_(value: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place, and return it."""
    if is_distributed():
        dist.all_reduce(value)
    return value


def broadcast(value: Value) -> Value:
    """Return the value of the first process in all processes."""
    values = [value]
    if is_distributed():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def share_out(parts: list[Any], compute: Callable[[Any], Tensor]) -> list[Tensor]:
    """Return `compute(part)` for every part in all processes; each process computes some."""
    if not is_distributed():
        return [compute(part) for part in parts]
    results: list[Tensor] = []
    for first in range(0, len(parts), count()):
        index = first + rank()
        result = compute(parts[min(index, len(parts) - 1)])  # equally often, for sharded weights
        every = all_gather(result.cpu() if index < len(parts) else None)
        results += [other.to(result.device) for other in every if other is not None]
    return results
