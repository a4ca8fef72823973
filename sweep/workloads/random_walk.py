"""Gradient noise as the increments of a random walk: the sum over any batch for a few draws.

W(0) = 0, and sequence i has the noise W(i + 1) - W(i), standard normal and independent of all
others; sequences a … b - 1 have the sum W(b) - W(a). Any W(t) is found by Lévy's construction: the
end of an interval of length n is drawn first, then its middle given both ends, normal around their
mean with variance n/4, then the middle of the half in which t lies, until it is t.
"""

import functools
import math
import threading
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEQUENCES = 1 << 48  # of the whole walk

Vector = NDArray[np.float64]  # (dimensions)


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

    def half_of(self, t: int) -> tuple[int, int, Vector, Vector]:
        """Return first, last and W at both of the half in which t lies."""
        if t < self.middle:
            return self.first, self.middle, self.start, self.between
        return self.middle, self.last, self.between, self.end


class RandomWalk:
    """A walk of standard normal steps, drawn where it is looked at; the same at every look.

    The intervals last descended are kept, so that looks in order cost a draw each where the stride
    is a power of two, and else up to as many more as its odd factor has bits.
    """

    def __init__(self, seed: int, dimensions: int) -> None:
        self.dimensions = dimensions
        self._philox, self._lock = np.random.Philox(key=seed), threading.Lock()
        self._generator = np.random.Generator(self._philox)
        self._state = self._philox.state  # set anew for each draw: faster than a new generator
        end = math.sqrt(SEQUENCES) * self._normals(SEQUENCES)
        self._path = [self._draw(0, SEQUENCES, np.zeros(dimensions), end)]  # each within the last

    def at(self, t: int) -> Vector:
        """Return W(t)."""
        assert 0 <= t <= SEQUENCES, t
        with self._lock:
            path = self._path
            while not path[-1].first <= t <= path[-1].last:
                path.pop()
            while (found := path[-1].known(t)) is None:
                path.append(self._draw(*path[-1].half_of(t)))
            return found

    def _draw(self, first: int, last: int, start: Vector, end: Vector) -> Interval:
        normals = self._normals((first + last) // 2)
        between = (start + end) / 2 + math.sqrt(last - first) / 2 * normals
        return Interval(first, last, start, between, end)

    def _normals(self, node: int) -> Vector:
        """Return the numbers of a node, named by where it lies; it has 2^64 counter values."""
        self._state["state"]["counter"][:] = (0, node, 0, 0)
        self._philox.state = self._state
        return self._generator.standard_normal(self.dimensions)


@functools.lru_cache(maxsize=4)
def walk_of(seed: int, dimensions: int) -> RandomWalk:
    """Return the walk of a seed, with the intervals that it keeps."""
    return RandomWalk(seed, dimensions)


# An operator, so that compilers and fake tensors need not look inside. It has no gradient.
NAME = "sweep::noise_sum"
torch.library.define(NAME, "(Tensor indices, int seed, int dimensions) -> Tensor")


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _noise_sum(indices: Tensor, seed: int, dimensions: int) -> Tensor:
    ends = indices[:: max(1, len(indices) - 1)].tolist()  # the first and the last, in one read
    first, last = ends[0], ends[-1]
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
