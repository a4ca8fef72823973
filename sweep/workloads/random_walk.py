"""Gradient noise as increments of a random walk, whose sum over any batch costs a few draws.

W(0) = 0, and the noise of sequence i is W(i + 1) - W(i): standard normal and independent of all
others. Sequences a … b - 1 have the sum W(b) - W(a). Lévy's construction computes any W(t): draw
the end of an interval of length n, then its middle given both ends (normal around their mean with
variance n/4), then the middle of the half that contains t, until the middle is t.
"""

import functools
import math
import threading
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SEQUENCES = 1 << 48  # length of the walk

Vector = NDArray[np.float64]  # (dimensions,)


class Interval(NamedTuple):
    """A part of the walk, with its values at both ends and in the middle."""

    first: int
    middle: int
    last: int
    values: tuple[Vector, Vector, Vector]


class RandomWalk:
    """A walk of standard normal steps that is computed on demand, the same in any order.

    The intervals of the last descent are kept. Positions in order cost one draw each if the stride
    is a power of two, and otherwise at most one more for each bit of its odd factor.
    """

    def __init__(self, seed: int, dimensions: int) -> None:
        self.dimensions = dimensions
        self._philox, self._lock = np.random.Philox(key=seed), threading.Lock()
        self._generator = np.random.Generator(self._philox)
        self._state = self._philox.state  # set before each draw; faster than a new generator
        end = math.sqrt(SEQUENCES) * self.normals(SEQUENCES)
        self._path = [self._halved(0, SEQUENCES, np.zeros(dimensions), end)]  # nested intervals

    def at(self, t: int) -> Vector:
        """Return W(t)."""
        assert 0 <= t <= SEQUENCES, t
        with self._lock:
            while not self._path[-1].first <= t <= self._path[-1].last:
                self._path.pop()
            while t not in (interval := self._path[-1])[:3]:
                first, middle, last, (start, between, end) = interval
                lower, upper = (first, middle, start, between), (middle, last, between, end)
                self._path.append(self._halved(*(lower if t < middle else upper)))
            return interval.values[interval.index(t)]

    def _halved(self, first: int, last: int, start: Vector, end: Vector) -> Interval:
        middle = (first + last) // 2
        between = (start + end) / 2 + math.sqrt(last - first) / 2 * self.normals(middle)
        return Interval(first, middle, last, (start, between, end))

    def normals(self, position: int) -> Vector:
        """Return the random numbers of a position, which has 2^64 counter values of its own."""
        self._state["state"]["counter"][:] = (0, position, 0, 0)
        self._philox.state = self._state
        return self._generator.standard_normal(self.dimensions)


_walk = functools.lru_cache(maxsize=4)(RandomWalk)  # one per seed and dimension


@torch.library.custom_op("sweep::noise_sum", mutates_args=())
def noise_sum(indices: Tensor, seed: int, dimensions: int) -> Tensor:
    """Return the summed noise of consecutive sequences, (dimensions,) in float32.

    A custom operator without a gradient, which torch.compile and fake tensors do not trace.
    """
    ends = indices[:: max(1, len(indices) - 1)].tolist()  # one read from the device
    first, last = ends[0], ends[-1]
    assert last - first == len(indices) - 1, "sequences of a batch must be consecutive"
    walk = _walk(seed, dimensions)
    start = walk.at(first)
    total = walk.at(last + 1) - start
    return torch.from_numpy(total.astype(np.float32)).to(indices.device)


@noise_sum.register_fake
def _(indices: Tensor, seed: int, dimensions: int) -> Tensor:
    return indices.new_empty(dimensions, dtype=torch.float32)
