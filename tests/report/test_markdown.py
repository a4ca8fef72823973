"""Tables and numbers as the report writes them."""

import math
from pathlib import Path

import pytest

from sweep.report import markdown as md
from sweep.report.html import to_html


def test_columns_of_numbers_are_aligned_right_and_bars_escaped() -> None:
    text = md.table(["name", "value", "gap"], [["a|b", "1 of 3", "-0.1"], ["c", "–", "0.2"]])
    assert text.splitlines() == [
        "| name | value | gap |",
        "| :-- | --: | --: |",
        "| a\\|b | 1 of 3 | -0.1 |",
        "| c | – | 0.2 |",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (md.loss(1.23456), "1.2346"),
        (md.loss(math.nan), "–"),
        (md.spread_loss(1.5, 0.01, 3), "1.5000 ± 0.0100"),
        (md.spread_loss(1.5, 0.01, 2), "1.5000"),
        (md.count(1234567.0), "1,234,567"),
        (md.count(math.nan), "–"),
        (md.percent(0.0043), "0.43 %"),
        (md.percent(1.0), "100 %"),
        (md.rate(7.0710678e-4), "0.000707"),
        (md.rate(3e-4), "3e-4"),
        (md.join_words(["a"]), "a"),
        (md.join_words(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_numbers_and_words(text: str, expected: str) -> None:
    assert text == expected


def test_markup_in_the_data_is_shown_and_not_interpreted(tmp_path: Path) -> None:
    page = to_html("a <script>alert(1)</script> b", "<t>", tmp_path)
    assert "<script>" not in page and "<title>&lt;t&gt;</title>" in page
