"""The order in which training reads the tokens, the same at every batch size (DESIGN.md §6).

Window i is tokens[iT … iT+T]: T inputs and, shifted by one, T targets. The stream concatenates one
permutation of all windows per epoch; its position p depends on the seed and p alone.
"""

import numpy as np
from numpy.typing import NDArray

from sweep.errors import SweepError

Ints = NDArray[np.int64]


class SequenceStream:
    """An endless, seeded sequence of windows that can be read from any position.

    Args:
        token_count: tokens of the training split.
        context: T, the inputs of a window.
        seed: ≥ 0; equal seeds give equal streams.

    Raises:
        SweepError: if the tokens do not fill one window.
    """

    def __init__(self, token_count: int, context: int, seed: int) -> None:
        check_window(token_count, context, "the data")
        self.windows = (token_count - 1) // context  # per epoch
        self._context, self._seed = context, seed
        self._permutations: dict[int, Ints] = {}  # of the epochs that the last call read

    def epochs(self, tokens: int) -> float:
        """Return how often `tokens` training tokens pass through all windows."""
        return tokens / (self.windows * self._context)

    def window_indices(self, start: int, count: int) -> Ints:
        """Return the windows at stream positions start … start + count − 1, (count,)."""
        if count <= 0:
            return np.empty(0, dtype=np.int64)
        epochs = range(start // self.windows, (start + count - 1) // self.windows + 1)
        self._permutations = {epoch: self._permutation(epoch) for epoch in epochs}
        parts = []
        for epoch, permutation in self._permutations.items():
            first = epoch * self.windows
            parts.append(permutation[max(start - first, 0) : start + count - first])
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> Ints:
        if epoch in self._permutations:
            return self._permutations[epoch]
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return rng.permutation(self.windows)


def check_window(token_count: int, context: int, subject: str) -> None:
    """Refuse tokens that do not fill one window."""
    if token_count < context + 1:
        raise SweepError(
            f"{subject} must hold at least one window of context + 1 = {context + 1} tokens, got "
            f"{token_count}. Use more text, or a smaller context."
        )


def gather(tokens: NDArray[np.integer], indices: Ints, context: int) -> Ints:
    """Return the tokens of windows, (n, T + 1): inputs are [:, :-1], targets [:, 1:]."""
    positions = indices[:, None] * context + np.arange(context + 1)
    return np.asarray(tokens[positions], dtype=np.int64)


def document_of_targets(tokens: NDArray[np.integer], separator: int) -> Ints:
    """Return the document index of every target, positions 1 … N − 1, (N − 1,).

    A separator belongs to the document that it ends.
    """
    return np.cumsum(tokens[:-1] == separator, dtype=np.int64)
