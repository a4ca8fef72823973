"""The noisy quadratic model: a training whose expected loss is known in closed form."""

import functools
import math
import threading
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.models import build_model
from sweep.models.quadratic import Quadratic
from sweep.workloads.protocol import Batch, FinalEvaluation

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


class NoisyQuadratic:
    """One token per sequence; evaluations are exact, gradients are noisy."""

    tokens_per_sequence = 1

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        assert config.science.model.kind == "quadratic"
        self.config, self.device = config, device
        self.seed, self.dimensions = config.science.seed, config.science.model.dimensions

    def build_model(self) -> nn.Module:
        """Build the model, whose weights are ±1."""
        return build_model(self.config.science.model, self.seed)

    def build_batch(self, first: int, count: int) -> Batch:
        """Return the numbers of the sequences, (count,)."""
        return (torch.arange(first, first + count, device=self.device),)

    def random_batch(self, count: int) -> Batch:
        """Return the first sequences, which cost as much as any others."""
        return self.build_batch(0, count)

    def loss_tokens(self, batch: Batch) -> int:
        """Return the number of sequences."""
        return batch[0].shape[0]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed noisy loss."""
        noise = noise_sum(batch[0], self.seed, self.dimensions)
        return model(noise, self.loss_tokens(batch))  # type: ignore[no-any-return]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the expected loss."""
        assert isinstance(model, Quadratic)
        return model.expected_loss().item()

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Return the expected loss as that of one document of one token."""
        loss = self.evaluate(model)
        return FinalEvaluation(np.array([[loss, 1.0]]), loss, None)

    def epochs(self) -> None:
        """Return None: the noise never repeats."""
        return
