"""The order in which training reads the tokens, the same at every batch size.

Window i is tokens[iT … iT+T]: T inputs and, shifted by one, T targets. The stream concatenates one
permutation of all windows per epoch; its position p depends on the seed and p alone.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class SequenceStream:
    """An endless, seeded sequence of windows of T = `context` inputs, read from any position."""

    def __init__(self, token_count: int, context: int, seed: int) -> None:
        self.windows = (token_count - 1) // context  # per epoch
        self._context, self._seed = context, seed
        self._permutations: dict[int, Ints] = {}  # by epoch; those that the last call read

    def epochs(self, tokens: int) -> float:
        """Return how often `tokens` training tokens pass through all windows."""
        return tokens / (self.windows * self._context)

    def window_indices(self, start: int, count: int) -> Ints:
        """Return the windows at stream positions start … start + count − 1, (count,)."""
        permutations, parts = {}, [np.empty(0, np.int64)]
        for epoch in range(start // self.windows, (start + count - 1) // self.windows + 1):
            if (permutation := self._permutations.get(epoch)) is None:
                rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
                permutation = rng.permutation(self.windows)
            first = epoch * self.windows
            parts.append(permutation[max(start - first, 0) : start + count - first])
            permutations[epoch] = permutation
        self._permutations = permutations
        return np.concatenate(parts)


def gather(tokens: NDArray[np.integer], indices: Ints, context: int) -> Ints:
    """Return the tokens of windows, (n, T + 1): inputs are [:, :-1], targets [:, 1:]."""
    positions = indices[:, None] * context + np.arange(context + 1)
    return np.asarray(tokens[positions], dtype=np.int64)


def document_of_targets(tokens: NDArray[np.integer], separator: int) -> Ints:
    """Return the document of every target, (N − 1,); a separator belongs to the one it ends."""
    return np.cumsum(tokens[:-1] == separator, dtype=np.int64)
