"""Numbers as people write them."""

import pytest

from sweep.config.numbers import format_count, format_seconds, parse_batches, parse_count
from sweep.errors import SweepError

COUNTS = {"327.68M": 327680000, "3.2768e8": 327680000, "0.3268M": 326800, "200k": 200000}
COUNTS |= {"1B": 10**9, "16G": 16 * 10**9, "16GiB": 16 * 2**30, "1.5MiB": 3 * 2**19}
COUNTS |= {65536: 65536, "1_000": 1000}
NONSENSE = ("", "x", "-5", "0", "1.5", "nan", "inf", "1e99", "1e999999M", "3MM", "M", "1 2", "0x10")


@pytest.mark.parametrize(("text", "value"), COUNTS.items())
def test_counts(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", [*NONSENSE, "1.2345k"])
def test_nonsense_counts_are_refused_with_what_would_be_right(text):
    with pytest.raises(SweepError, match="budget must be"):
        parse_count(text, "budget")


def test_batches_are_lists_or_ranges_of_powers_of_two():
    assert parse_batches("32,1,8") == (1, 8, 32)
    assert parse_batches("1..512") == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert parse_batches("4..4") == (4,)
    assert parse_batches([3, 5]) == (3, 5)


@pytest.mark.parametrize(
    "text", ["", "1,,2", "0", "-1", "a", "8..4", "3..8", "1..100", "..", "4,4", "1.5"]
)
def test_nonsense_batches_are_refused(text):
    with pytest.raises(SweepError, match="batches"):
        parse_batches(text)


def test_counts_and_seconds_are_written_for_people():
    assert format_count(327_680_000) == "327.68M" and format_count(640) == "640"
    assert format_seconds(3.21) == "3.21 s" and format_seconds(7200) == "2 h"
