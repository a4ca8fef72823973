"""Gradient noise as the increments of a random walk: the sum over any batch for a few draws.

W(0) = 0, and sequence i has the noise W(i + 1) - W(i), standard normal and independent of all
others; sequences a … b - 1 have the sum W(b) - W(a). Any W(t) is found by Lévy's construction: the
end of an interval of length n is drawn first, then its middle given both ends, normal around their
mean with variance n/4, then the middle of the half in which t lies, until it is t.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEQUENCES = 1 << 48  # of the whole walk

Vector = NDArray[np.float64]  # (dimensions)


def standard_normals(seed: int, node: int, dimensions: int) -> Vector:
    """Return the numbers of one node, by Box and Muller's transform of Philox's raw words.

    A node is named by where it lies on the walk; it has 2^64 counter values of its own.
    """
    counter = np.array([0, node, 0, 0], dtype=np.uint64)
    words = np.random.Philox(key=seed, counter=counter).random_raw(dimensions + dimensions % 2)
    uniform = ((words >> np.uint64(11)) + 0.5) * 2.0**-53  # in (0, 1)
    half = len(words) // 2
    radius, angle = np.sqrt(-2 * np.log(uniform[:half])), 2 * math.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:dimensions]


class Interval(NamedTuple):
    """A part of the walk whose middle was drawn."""

    first: int
    last: int
    start: Vector  # W(first)
    between: Vector  # W at the middle
    end: Vector  # W(last)

    @property
    def middle(self) -> int:
        """Where `between` is."""
        return (self.first + self.last) // 2

    def known(self, t: int) -> Vector | None:
        """Return W(t) where it is known."""
        if t == self.middle:
            return self.between
        if t == self.first:
            return self.start
        return self.end if t == self.last else None


class RandomWalk:
    """A walk of standard normal steps, drawn where it is looked at; the same at every look.

    The intervals last descended are kept, so that looks in order, at any stride, cost a draw or
    two each. Every look leaves a list of its own: threads may share a walk.
    """

    def __init__(self, seed: int, dimensions: int) -> None:
        self.seed, self.dimensions = seed, dimensions
        end = math.sqrt(SEQUENCES) * standard_normals(seed, SEQUENCES, dimensions)
        self._path = [self._draw(0, SEQUENCES, np.zeros(dimensions), end)]  # each within the last

    def at(self, t: int) -> Vector:
        """Return W(t)."""
        assert 0 <= t <= SEQUENCES, t
        path = list(self._path)
        while not path[-1].first <= t <= path[-1].last:
            path.pop()
        while (found := path[-1].known(t)) is None:
            first, last, start, between, end = path[-1]
            middle = path[-1].middle
            is_before = t < middle
            half = (first, middle, start, between) if is_before else (middle, last, between, end)
            path.append(self._draw(*half))
        self._path = path
        return found

    def _draw(self, first: int, last: int, start: Vector, end: Vector) -> Interval:
        normals = standard_normals(self.seed, (first + last) // 2, self.dimensions)
        between = (start + end) / 2 + math.sqrt(last - first) / 2 * normals
        return Interval(first, last, start, between, end)


@functools.lru_cache(maxsize=4)
def walk_of(seed: int, dimensions: int) -> RandomWalk:
    """Return the walk of a seed, with the intervals that it keeps."""
    return RandomWalk(seed, dimensions)


# An operator, so that compilers and fake tensors need not look inside. It has no gradient.
NAME = "sweep::noise_sum"
torch.library.define(NAME, "(Tensor indices, int seed, int dimensions) -> Tensor")


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _noise_sum(indices: Tensor, seed: int, dimensions: int) -> Tensor:
    first, last = int(indices[0]), int(indices[-1])
    assert last - first == len(indices) - 1, "sequences of a batch must be consecutive"
    walk = walk_of(seed, dimensions)
    start = walk.at(first)
    total = walk.at(last + 1) - start
    return torch.from_numpy(total.astype(np.float32)).to(indices.device)


@torch.library.register_fake(NAME)  # type: ignore[untyped-decorator]
def _fake_noise_sum(indices: Tensor, seed: int, dimensions: int) -> Tensor:
    return indices.new_empty(dimensions, dtype=torch.float32)


def noise_sum(indices: Tensor, seed: int, dimensions: int) -> Tensor:
    """Return the summed noise of consecutive sequences.

    Args:
        indices: of the sequences, int64.
        seed: of the walk.
        dimensions: of the noise.

    Returns:
        (dimensions), float32, on the device of the indices.
    """
    total: Tensor = torch.ops.sweep.noise_sum.default(indices, seed, dimensions)
    return total
