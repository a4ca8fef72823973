"""Texts of users in figures and pages are shown as they are; figures depend on the trials alone."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.text import Text

from sweep.analysis.results import load_sweep
from sweep.config.objective import Objective
from sweep.errors import printable
from sweep.report import charts, vega
from sweep.report.drawing import draw
from sweep.report.report import MARKDOWN
from sweep.report.vega import BOTTOM
from tests.analysis.fake_sweeps import write_fake_sweep

ROOT = Path(__file__).parents[2]
HOSTILE = r"$\frac{1}{2}$ a.b [c] 'd' \e |f| `g` *h* _i_ <b>j</b> ~k~ &amp; #"
MARKS = list("\\`*_$~|<>[]()!#&;:'\"{}^.\n\t ab1-+=@")
characters = st.one_of(st.sampled_from(MARKS), st.characters(exclude_categories=["Cs"]))
texts = st.text(characters, max_size=30)
USER_STYLES = {
    "usetex": {"text.usetex": True},
    "dots": {"savefig.dpi": 3000, "figure.dpi": 3000},
    "fonts": {"font.family": "serif", "font.size": 30, "axes.titlesize": 50},
    "lines": {"lines.linewidth": 9, "axes.prop_cycle": matplotlib.cycler("color", ["red"])},
    "layout": {"savefig.bbox": "tight", "figure.autolayout": True, "savefig.transparent": True},
    "numbers": {"axes.unicode_minus": False, "text.parse_math": True, "path.sketch": (1, 100, 2)},
}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    path = tmp_path_factory.mktemp("styles") / "s"
    write_fake_sweep(path, lrs=("1e-3", "tuned"), seeds=3, batches="4,16", points=20)
    return load_sweep(path)


# ---- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", USER_STYLES)
def test_figures_have_the_same_bytes_whatever_the_users_settings_are(sweep, style):
    expected = charts.plot_answer(sweep).png
    with matplotlib.rc_context(USER_STYLES[style]):
        before = dict(matplotlib.rcParams)
        assert charts.plot_answer(sweep).png == expected
        assert charts.plot_answer(sweep)._repr_png_() == expected
        charts.plot_answer(sweep).draw()
        assert dict(matplotlib.rcParams) == before


FILES = {
    "another style": (b"text.usetex: True\nsavefig.dpi: 3000\nbackend: TkAgg\n", None),
    "wrong values": (b"text.usetex: maybe\nno.such: key\nsavefig.dpi\n", None),
    "not a text": (b"\xff\xfe\x00", None),
    "not a text and no backend": (b"\xff\xfe\x00", "nonsense"),
    "a backend that does not exist": (b"", "nonsense"),
    "a backend of a notebook": (b"", "module://no_such_backend"),
}


PLACES_OF_FILES = [
    ("not a text", "MATPLOTLIBRC"),
    *(pytest.param(case, "current folder", marks=pytest.mark.slow) for case in FILES),
]


@pytest.mark.parametrize(("case", "place"), PLACES_OF_FILES)
def test_a_configuration_of_matplotlib_changes_no_figure(sweep, tmp_path, case, place):
    content, backend = FILES[case]
    (tmp_path / "matplotlibrc").write_bytes(content)
    script = "import sys, sweep; p = sweep.plot_loss(sweep.load_sweep(sys.argv[1])).png; "
    script += "sys.stdout.buffer.write(p)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment |= {"MPLBACKEND": backend} if backend else {}
    folder = tmp_path
    if place == "MATPLOTLIBRC":
        environment |= {"MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
        folder = tmp_path / "elsewhere"
        folder.mkdir()
    command = [sys.executable, "-c", script, sweep.path]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == charts.plot_loss(sweep).png


def shown(text):
    """Return one line of a text as figures show it."""
    return " ".join(printable(text).split())


def words_of(figure):
    return {" ".join(text.get_text().split()) for text in figure.findobj(Text)}


@settings(max_examples=30, deadline=None)
@given(name=texts, unit=texts, policy=texts, other=texts)
def test_any_name_is_drawn_as_it_is(name, unit, policy, other):
    other = other if other != policy else f"{other}2"
    sizes, axis = [4, 8], f"{name} [{unit}]"
    rows = [{vega.SIZE: size, "policy": label} for size in sizes for label in (policy, other)]
    y = vega.channel(f"value of {name}", [1, 2], axis)
    values = [row | {f"value of {name}": row[vega.SIZE] / 4} for row in rows]
    x, labels = vega.batch_axis(sizes), [policy, other]
    shape = vega.names("policy", labels, vega.SHAPES)
    layers = [
        vega.layer("line", values, x, y, strokeDash=vega.names("policy", labels, vega.DASHES)),
        vega.layer("point", values, x, y, color=vega.size_color(sizes), shape=shape),
        vega.layer("point", rows, x, BOTTOM, shape=shape),
    ]
    figure = draw([vega.panel(layers, sizes, policy)], f"Title {name}")
    assert {shown(axis), shown(policy), shown(f"Title {name}")} <= words_of(figure)
    assert shown(other) in words_of(figure)
    assert not any(text.get_parse_math() for text in figure.findobj(Text))
    chart = charts.Chart(f"Title {name}", [vega.panel(layers, sizes, policy)])
    assert chart.png.startswith(b"\x89PNG")


@settings(max_examples=200, deadline=None)
@given(texts)
def test_fields_have_no_character_that_vega_lite_reads_as_a_path(name):
    y = vega.channel(name, [1], name)
    layer = vega.layer("point", [{vega.SIZE: 1, name: 1.5}], vega.batch_axis([1]), y)
    (row,) = layer["data"]["values"]
    assert row[layer["encoding"]["y"]["field"]] == 1.5
    assert not re.search(r"[.\[\]\\'\"\n]", "".join(row))
    assert layer["encoding"]["y"]["title"] == (name or vega.field_of(name))


def test_a_sweep_with_a_hostile_unit_and_metric_has_all_its_figures_and_pages(tmp_path):
    objective = Objective("final_valid_a.b [c]", "maximize", HOSTILE, 0.01, HOSTILE)
    assert objective.title == "final validation a.b [c]"
    y = vega.channel(objective.title, [1, 2], f"{objective.title} [{objective.label}]")
    layer = vega.layer("point", [{vega.SIZE: 4, objective.title: 1}], vega.batch_axis([4]), y)
    figure = draw([vega.panel([layer], [4])], HOSTILE)
    assert shown(f"{objective.title} [{HOSTILE}]") in words_of(figure)


# ---- Markdown ------------------------------------------------------------------------------------

PAGE = """# a: {{ text }}

**Name: {{ text }}.**

![picture {{ text }}](figures/a.png)

- item {{ text }}

| a | b |
| :-- | :-- |
| {{ text }} | b |
"""
PLACES = {
    "<h1>(.*?)</h1>": "a: {}",
    "<p><strong>(.*?)</strong></p>": "Name: {}.",
    '<img src="figures/a.png" alt="(.*?)"': "picture {}",
    "<li>(.*?)</li>": "item {}",
    "<td[^>]*>(.*?)</td>": "{}",
}


@settings(max_examples=200, deadline=None)
@given(texts)
def test_a_text_in_markdown_is_shown_as_it_is(text):
    source = MARKDOWN.from_string(PAGE).render(text=text)
    page = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    html = page.render(source)
    plain = printable(re.sub(r"[\r\n\t]+", " ", text))
    for pattern, form in PLACES.items():
        content = re.search(pattern, html, re.DOTALL)
        assert unescape(content[1]).split() == form.format(plain).split()
    assert not re.search(r"(?<!\\)(?:\\\\)*[$~]", source)  # GitHub's mathematics and strikethrough
