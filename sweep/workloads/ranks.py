"""Communication between the processes of one trial, one per device; a single one sends nothing."""

from typing import TypeVar

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
