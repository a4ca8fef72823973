"""The increments of the walk are white noise at any position, in any order, at any stride."""

import numpy as np
import pytest
import torch

from sweep.workloads.quadratic import SEQUENCES, noise_sum, random_walk

DIMENSIONS = 1000


def values(first, count, stride=1, seed=0):
    """Return W at `count` positions, (count, dimensions)."""
    return np.stack([random_walk(first + k * stride, seed, DIMENSIONS) for k in range(count)])


def test_the_walk_starts_at_zero_and_has_an_end():
    assert not random_walk(0, 0, 3).any()
    assert abs(random_walk(SEQUENCES, 0, 3)).max() < 5 * SEQUENCES**0.5
    for t in (-1, SEQUENCES + 1):
        with pytest.raises(AssertionError):
            random_walk(t, 0, 3)


def test_a_value_does_not_depend_on_what_was_read_before():
    generator = np.random.default_rng(0)
    near = generator.integers(0, 300, 150).tolist()
    far = generator.integers(0, SEQUENCES, 50).tolist()
    positions = [*near, *far, *reversed(near), 0, SEQUENCES, SEQUENCES // 2]
    kept = [random_walk(t, 7, 5) for t in positions]
    for t, value in zip(positions, kept, strict=True):
        random_walk.cache_clear()
        assert np.array_equal(value, random_walk(t, 7, 5))


@pytest.mark.parametrize("first", [0, 1 << 20, (1 << 40) + 12_345, SEQUENCES - 1001])
def test_increments_are_standard_normal_and_independent(first):
    noise = np.diff(values(first, 1001), axis=0)
    count = noise.size
    assert abs(noise.mean()) < 5 / count**0.5
    assert noise.var() == pytest.approx(1, abs=5 * (2 / count) ** 0.5)
    assert (noise**3).mean() == pytest.approx(0, abs=5 * (15 / count) ** 0.5)
    assert (noise**4).mean() == pytest.approx(3, abs=5 * (96 / count) ** 0.5)
    for lag in (1, 2, 3, 16, 500):
        assert abs((noise[lag:] * noise[:-lag]).mean()) < 5 / noise[lag:].size ** 0.5
    assert abs((noise[:, 1:] * noise[:, :-1]).mean()) < 5 / count**0.5


@pytest.mark.parametrize("length", [3, 1000, 8192, 1 << 30])
def test_sums_have_their_length_as_variance_and_disjoint_sums_are_independent(length):
    sums = np.diff(values(5 * length, 101, length), axis=0) / length**0.5
    assert abs(sums.mean()) < 5 / sums.size**0.5
    assert sums.var() == pytest.approx(1, abs=5 * (2 / sums.size) ** 0.5)
    for lag in (1, 2, 7):
        assert abs((sums[lag:] * sums[:-lag]).mean()) < 5 / sums[lag:].size ** 0.5


def test_seeds_have_independent_walks():
    noise = [np.diff(values(0, 201, seed=seed), axis=0) for seed in range(4)]
    for seed in range(1, 4):
        assert abs((noise[0] * noise[seed]).mean()) < 5 / noise[0].size ** 0.5


@pytest.mark.parametrize("batch_size", [1, 16, 1 << 13, 1 << 20, 3, 1000, 3 << 10, 8191])
def test_a_step_needs_few_draws_at_every_batch_size(batch_size):
    steps = 1024
    random_walk.cache_clear()
    for t in range(steps + 1):
        random_walk(t * batch_size, 0, 4)
    odd_part = batch_size // (batch_size & -batch_size)
    assert random_walk.cache_info().misses < 2 * steps * odd_part.bit_length()


def test_the_operator_is_registered_correctly():
    torch.library.opcheck(noise_sum, (torch.arange(8, 16), 0, 30))
    compiled = torch.compile(noise_sum, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.arange(8, 16), 0, 30), noise_sum(torch.arange(8, 16), 0, 30))


def test_sequences_that_are_not_consecutive_are_refused():
    with pytest.raises(AssertionError, match="consecutive"):
        noise_sum(torch.tensor([3, 5]), 0, 30)
