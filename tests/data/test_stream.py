import numpy as np
import pytest

from sweep.data.tokens import SequenceStream, document_of_targets, gather


def test_every_epoch_is_a_permutation_of_all_windows():
    stream = SequenceStream(token_count=1001, context=10, seed=3)
    assert stream.windows == 100
    for epoch in range(4):
        assert sorted(stream.window_indices(epoch * 100, 100)) == list(range(100))
    first, second = stream.window_indices(0, 100), stream.window_indices(100, 100)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50, 99, 100, 101, 333])
def test_any_slice_equals_the_slice_of_the_whole_stream(count):
    whole = SequenceStream(701, 7, seed=1).window_indices(0, 1000)
    stream = SequenceStream(701, 7, seed=1)
    starts = np.random.default_rng(count).integers(0, 1000 - count, 20)
    for start in starts.tolist():
        part = stream.window_indices(start, count)
        assert part.dtype == np.int64
        np.testing.assert_array_equal(part, whole[start : start + count])


def test_seeds_give_different_streams_and_equal_seeds_equal_ones():
    streams = [SequenceStream(501, 10, seed).window_indices(0, 50).tolist() for seed in (0, 1, 0)]
    assert streams[0] == streams[2] != streams[1]


def test_the_order_is_fixed_forever():
    assert SequenceStream(81, 10, seed=0).window_indices(6, 4).tolist() == [1, 7, 1, 3]


def test_windows_overlap_by_the_one_token_between_input_and_target():
    tokens = np.arange(1000, dtype=np.uint16)
    windows = gather(tokens, np.array([2, 0]), context=8)
    assert windows.dtype == np.int64
    np.testing.assert_array_equal(windows, [np.arange(16, 25), np.arange(0, 9)])


@pytest.mark.parametrize("count", [9, 16, 17, 18])
def test_the_last_window_has_its_last_target(count):
    stream = SequenceStream(count, 8, seed=0)
    windows = gather(np.arange(count), np.arange(stream.windows), 8)
    assert windows.max() <= count - 1
    assert count - 1 - windows.max() < 8


def test_epochs_are_tokens_over_the_tokens_in_windows():
    assert SequenceStream(1005, 10, seed=0).epochs(1500) == 1.5


def test_a_target_belongs_to_its_document_and_a_separator_to_the_one_it_ends():
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 0])  # documents: 5 6 | 7 | (empty) | 8
    assert document_of_targets(tokens, separator=0).tolist() == [0, 0, 1, 1, 2, 3, 3]
