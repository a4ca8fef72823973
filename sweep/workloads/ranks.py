"""The processes of one trial, one for each of its devices: who this one is, and what all agree on.

A trial on one device has one process; then nothing is sent.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def are_many() -> bool:
    """Tell whether this process is one of several of a trial."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if are_many() else 0


def count() -> int:
    """Return how many processes the trial has."""
    return dist.get_world_size() if are_many() else 1


def summed(value: Tensor) -> Tensor:
    """Return the sum over all processes; the given tensor becomes it."""
    if are_many():
        dist.all_reduce(value)
    return value


def largest(value: int) -> int:
    """Return the largest of what all processes have."""
    if not are_many():
        return value
    found = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def first(value: float) -> float:
    """Return what the first process has, to all."""
    if not are_many():
        return value
    found = torch.tensor(value, dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found)


def agreed(word: str | None) -> str | None:
    """Return the first process's word to all processes."""
    if not are_many():
        return word
    words = [word]
    dist.broadcast_object_list(words, src=0, device=torch.device("cpu"))
    return words[0]


def share_out(parts: list[Any], compute: Callable[[Any], Tensor]) -> list[Tensor]:
    """Return `compute(part)` of every part to all processes, which compute some each.

    All call it equally often, as sharded weights need it.

    Args:
        parts: the same in all processes; at least one.
        compute: returns tensors of one shape but for their first size.
    """
    if not are_many():
        return [compute(part) for part in parts]
    rounds, found = -(-len(parts) // count()), []
    for turn in range(rounds):
        place = turn * count() + rank()
        own = compute(parts[min(place, len(parts) - 1)])
        gathered: list[Any] = [None] * count()
        dist.all_gather_object(gathered, own.cpu() if place < len(parts) else None)
        found += [part.to(own.device) for part in gathered if part is not None]
    return found
