"""Which error of a paired difference is robust to a noisy batch size?

python experiments/studies/errors_of_pairs/simulate.py [--draws 20000]

Losses of k batch sizes and n seeds are drawn from normal distributions. The statistic is the
largest |mean difference| / (error / √n) over all pairs; its critical value is the simulated 95 %
quantile, the largest over patterns of standard deviations. Power is that of one pair, 4 σ apart.
"""

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.95
NOISE_OF_ANOTHER = (1, 4, 10, 30)


def own(variances: Floats, pairs: NDArray[np.int64]) -> Floats:
    return variances


def pooled(variances: Floats, pairs: NDArray[np.int64]) -> Floats:
    return np.asarray(np.maximum(variances, variances.mean(axis=1, keepdims=True)))


def pooled_without_noisiest(variances: Floats, pairs: NDArray[np.int64]) -> Floats:
    sums = []
    for size in range(int(pairs.max()) + 1):
        is_pair = (pairs == size).any(axis=1)
        sums.append(variances[:, is_pair].sum(axis=1))
    noisiest = np.stack(sums, 1).argmax(axis=1)

    is_quiet = ~(pairs[None] == noisiest[:, None, None]).any(axis=2)
    quiet = np.where(is_quiet, variances, 0.0).sum(axis=1) / is_quiet.sum(axis=1)
    return np.asarray(np.maximum(variances, quiet[:, None]))


ERRORS: dict[str, Callable[[Floats, NDArray[np.int64]], Floats]] = {
    "its own": own,
    "at least the mean of all pairs": pooled,
    "at least the mean of the pairs without the noisiest batch size": pooled_without_noisiest,
}


def patterns(k: int) -> list[Floats]:
    """Return standard deviations of k batch sizes: equal, noisier, quieter, and geometric."""
    deviations = [np.ones(k), np.geomspace(1, 10, k)]
    deviations += [np.r_[ratio, np.ones(k - 1)] for ratio in (2, 3, 5, 10, 30, 1 / 3, 1 / 10)]
    if k > 3:
        deviations += [np.r_[ratio, ratio, np.ones(k - 2)] for ratio in (3, 10)]
    return deviations


def statistics(
    losses: Floats, error: Callable[[Floats, NDArray[np.int64]], Floats]
) -> tuple[Floats, NDArray[np.int64]]:
    """Return |t| of every pair, (draws, pairs), from losses (draws, k, n), and the pairs."""
    pairs = np.stack(np.triu_indices(losses.shape[1], 1), axis=1)
    by_seed = losses[:, pairs[:, 1]] - losses[:, pairs[:, 0]]
    variances = error(by_seed.var(axis=2, ddof=1), pairs)
    return np.abs(by_seed.mean(axis=2)) / np.sqrt(variances / losses.shape[2]), pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=20_000)
    draws = parser.parse_args().draws
    print("| k | n | variance of a pair | critical value | power with 1× / 4× / 10× / 30× |")
    print("| --: | --: | :-- | --: | --: |")
    for k, n in ((3, 3), (3, 5), (5, 3), (5, 5), (5, 8)):
        for name, error in ERRORS.items():
            rng = np.random.default_rng(0)
            normal = rng.standard_normal((draws, k, n))
            quantiles = []
            for deviations in patterns(k):
                values, _ = statistics(normal * deviations[:, None], error)
                quantiles.append(np.quantile(values.max(1), LEVEL))
            critical = max(quantiles)

            power = []
            for ratio in NOISE_OF_ANOTHER:
                losses = rng.standard_normal((draws, k, n))
                losses[:, 0] *= ratio
                losses[:, -1] += 4
                values, pairs = statistics(losses, error)
                is_pair = (pairs == (k - 2, k - 1)).all(axis=1)
                is_found = values[:, is_pair] > critical
                power.append(f"{is_found.mean():.2f}")
            print(f"| {k} | {n} | {name} | {critical:.1f} | {' / '.join(power)} |")


if __name__ == "__main__":
    main()
