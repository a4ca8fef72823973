"""Number formats, escaping and the HTML page."""

import math

import pytest
from jinja2 import UndefinedError

from sweep.analysis.statistics import Estimate
from sweep.report.report import MARKDOWN, to_html


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1.23456 | loss", "1.2346"),
        ("nan | loss", "–"),
        ("1.5 | loss(0.01, 3)", "1.5000 ± 0.0100"),
        ("1.5 | loss(0.01, 2)", "1.5000"),
        ("1234567.0 | count", "1,234,567"),
        ("nan | count", "–"),
        ("none | seconds", "–"),
        ("0.0043 | percent", "0.43 %"),
        ("1.0 | percent", "100 %"),
        ("7.0710678e-4 | rate", "0.000707"),
        ("3e-4 | rate", "3e-4"),
        ("[3, nan, 1, none] | range", "1 to 3"),
        ("[2, 2.1] | range", "2"),
        ("[] | range", "–"),
        ("interval | estimate('.3g')", "24 [20, 30]"),
        ("point | estimate", "24"),
        ("none | estimate", "–"),
        ("12.345 | number", "12.3"),
        ("12345 | number", "12.35k"),
        ("0.0004 | p_value", "< 0.001"),
        ("none", "–"),
        ("nan", "–"),
    ],
)
def test_numbers_are_written_briefly_and_missing_ones_as_a_dash(expression, expected):
    template = MARKDOWN.from_string("{{ " + expression + " }}")
    estimates = {"interval": Estimate(24, 20, 30), "point": Estimate(24, math.nan, math.nan)}
    assert template.render(nan=math.nan, **estimates) == expected


HOSTILE = "a|b\n# c <script>alert(1)</script> ![x](http://example.com/x.png) [y](http://e.com) \\"


def test_text_in_a_table_stays_one_cell_of_text(tmp_path):
    template = MARKDOWN.from_string("| a | b |\n| :-- | :-- |\n| {{ text }} | {{ text }} |\n")
    page = to_html(template.render(text=HOSTILE), "t", tmp_path)
    assert page.count("<td") == 2 and page.count("a|b # c &lt;script&gt;") == 2
    assert not any(tag in page for tag in ("<script", "<img", "<a ", "<h1"))


def test_commands_cannot_leave_their_code_block(tmp_path):
    template = MARKDOWN.from_string("```\n{{ words|command }}\n```\n")
    page = to_html(template.render(words=["a", "|", "b\n```\n# c"]), "t", tmp_path)
    assert "<h1" not in page and page.count("<pre>") == 1


def test_html_in_the_report_and_its_title_is_escaped(tmp_path):
    page = to_html("a <script>alert(1)</script> b", "<t>|", tmp_path)
    assert "<script>" not in page and "<title>&lt;t&gt;|</title>" in page


def test_every_template_compiles_and_an_unknown_variable_is_an_error():
    names = MARKDOWN.list_templates()
    assert {"report.md.j2", "page.html.j2", "probe.md.j2"} <= set(names)
    for name in names:
        MARKDOWN.get_template(name)
    with pytest.raises(UndefinedError):
        MARKDOWN.from_string("{{ unknown }}").render()
