"""Draw the panels of a chart (`sweep.report.vega`) with matplotlib."""

import contextlib
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from sweep.config.numbers import format_count
from sweep.errors import printable
from sweep.report.vega import BOTTOM, COUNT, SIZE, Spec

MARKERS = {"circle": "o", "square": "s", "diamond": "D", "cross": "X"}
MARKERS |= {"triangle-up": "^", "triangle-down": "v"}
GREY = "#666666"
GROUPING = ("color", "shape", "strokeDash", "detail")  # channels that split rows into series
COLUMNS = 3  # most panels in a row


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Draw with matplotlib's defaults, whatever the user's matplotlibrc and rcParams say.

    The user's rcParams are as before afterwards.
    """
    with (
        rc_context(rcParamsDefault),
        rc_context({"text.parse_math": False}),  # a unit or a name may contain dollar signs
        warnings.catch_warnings(),
    ):
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        yield


def draw(panels: Sequence[Spec], title: str) -> Figure:
    """Draw panels side by side, below their title and above one legend."""
    with own_style():
        return _draw(panels, title)


def _draw(panels: Sequence[Spec], title: str) -> Figure:
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = 5.2 if columns == 1 else 3.6 * columns
    figure = Figure(figsize=(width, 0.7 + 3.6 * rows), layout="constrained", dpi=150)
    text = textwrap.fill(_drawable(title), int(width * 11))
    figure.suptitle(text, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for index, panel in enumerate(panels):
        axis = figure.add_subplot(rows, columns, index + 1)
        for layer in panel["layer"]:
            _draw_layer(axis, layer)
        for name in ("x", "y"):
            channels = (layer["encoding"].get(name, {}) for layer in panel["layer"])
            _set_axis(axis, name, next(channel for channel in channels if "axis" in channel))
        axis.set_title(_drawable(panel.get("title", "")), loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    if handles := _legend(panels):
        columns = min(len(handles), int(width / 1.7))
        position: dict[str, Any] = {"loc": "outside lower left", "ncols": columns}
        figure.legend(handles=handles, frameon=False, fontsize=9, **position)
    return figure


def _drawable(text: str) -> str:
    """Replace characters of one line of text that no font can draw."""
    line = " ".join(printable(text).split())
    return line.encode("utf-8", "replace").decode()


def _set_axis(axis: Axes, name: str, channel: Spec) -> None:
    scale, ticks, is_x = channel["scale"], channel["axis"], name == "x"
    if scale["type"] == "log":
        axis.set(**{f"{name}scale": "log"})
    elif scale["type"] == "symlog":
        (axis.set_xscale if is_x else axis.set_yscale)("asinh", linear_width=scale["constant"])
    form = format_count if ticks["format"] == COUNT else "{:g}".format
    labels = [form(value) for value in ticks["values"]]
    axis.set(**{f"{name}ticks": ticks["values"], f"{name}ticklabels": labels})
    axis.set(**{f"{name}lim": scale["domain"], f"{name}label": _drawable(channel["title"])})
    (axis.xaxis if is_x else axis.yaxis).set_minor_locator(NullLocator())


def _draw_layer(axis: Axes, layer: Spec) -> None:
    mark, encoding = layer["mark"], layer["encoding"]
    for rows in _series(layer):
        style = _style(layer, rows[0])
        fields = (encoding.get(name, {}).get("field") for name in ("x", "y", "x2", "y2"))
        x, y, x2, y2 = ([row[field] for row in rows if field] for field in fields)
        scale = encoding.get("y", {}).get("scale", {})
        if scale.get("clamp"):
            y, y2 = (np.clip(values, *scale["domain"]).tolist() for values in (y, y2))
        color, width, alpha = (style[name] for name in ("color", "linewidth", "alpha"))
        if mark["type"] == "rect" and x:
            axis.axvspan(x[0], x2[0], color=color, alpha=alpha, linewidth=0)
        elif mark["type"] == "rect":
            axis.axhspan(y[0], y2[0], color=color, alpha=alpha, linewidth=0)
        elif y2:
            axis.vlines(x, y, y2, color=color, linewidth=width, clip_on=False)
        elif mark["type"] == "rule":
            axis.axvline(x[0], **style)
        elif y:
            axis.plot(x, y, clip_on=mark["clip"], **style)
        else:  # at an edge
            heights = [0.02 if encoding["y"] == BOTTOM else 0.98] * len(x)
            axis.plot(x, heights, transform=axis.get_xaxis_transform(), **style)


def _series(layer: Spec) -> list[list[Spec]]:
    fields = [layer["encoding"].get(channel, {}).get("field") for channel in GROUPING]

    def key(row: Spec) -> list[str]:
        return [str(row.get(field)) for field in fields]

    rows = sorted(layer["data"]["values"], key=key)  # stable
    return [[*group] for _, group in groupby(rows, key)]


def _style(layer: Spec, row: Spec) -> dict[str, Any]:
    """Return the style of a series."""
    mark, values = layer["mark"], {}
    for channel in ("color", "shape", "strokeDash"):
        encoded = layer["encoding"].get(channel, {})
        values[channel] = encoded.get("value", mark.get(channel))
        if "scale" in encoded:
            scale = encoded["scale"]
            values[channel] = scale["range"][scale["domain"].index(row[encoded["field"]])]
    is_point = mark["type"] == "point"
    dash = values["strokeDash"] or [1, 0]
    style = {"color": values["color"] or GREY, "alpha": mark.get("opacity", 1.0)}
    style |= {"marker": MARKERS[values["shape"] or "circle"] if is_point else ""}
    style |= {"linestyle": "" if is_point else "-" if 0 in dash else (0, tuple(dash))}
    style |= {"markersize": mark.get("size", 40) ** 0.5, "linewidth": mark.get("strokeWidth", 1.5)}
    return style | ({} if mark.get("filled", True) else {"fillstyle": "none"})


def _legend(panels: Sequence[Spec]) -> list[Line2D]:
    """Return a handle for each color, unless the axis tells the batch sizes, shape and dash."""
    handles = dict[str, Line2D]()
    for layer in (layer for panel in panels for layer in panel["layer"]):
        encoding = layer["encoding"]
        for channel in ("color", "shape", "strokeDash"):
            made = encoding.get(channel, {})
            field, legend = made.get("field"), made.get("legend")
            names = legend["values"] if legend else made["scale"]["domain"] if field == SIZE else []
            if len(names) < 2 or encoding["x"].get("field") == SIZE == field:
                continue
            for name in names:
                style = _style(layer, {**layer["data"]["values"][0], field: name})
                text = f"{SIZE} {name}" if field == SIZE else _drawable(str(name))
                style |= {"alpha": 1.0} | ({} if channel == "color" else {"color": GREY})
                handle = handles.setdefault(text, Line2D([], [], **style, label=text))
                if channel == "shape":  # a line with such points
                    handle.set_marker(style["marker"])
    return [*handles.values()]
