"""Draw the panels of a chart (`sweep.report.vega`) with matplotlib."""

import contextlib
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, product
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
            _set_axis(axis, name, _channel_with_axis(panel, name))
        axis.set_title(_drawable(panel.get("title", "")), loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)

    handles = _legend(panels)
    if handles:
        columns = min(len(handles), int(width / 1.7))
        position: dict[str, Any] = {"loc": "outside lower left", "ncols": columns}
        figure.legend(handles=handles, frameon=False, fontsize=9, **position)
    return figure


def _channel_with_axis(panel: Spec, name: str) -> Spec:
    """Return the first channel of a panel's layers that has ticks: others are at an edge."""
    channels = (layer["encoding"].get(name, {}) for layer in panel["layer"])
    return next(channel for channel in channels if "axis" in channel)


def _drawable(text: str) -> str:
    """Replace characters of one line of text that no font can draw."""
    line = " ".join(printable(text).split())
    return line.encode("utf-8", "replace").decode()


def _set_axis(axis: Axes, name: str, channel: Spec) -> None:
    scale = channel["scale"]
    ticks = channel["axis"]
    is_x = name == "x"
    set_scale = axis.set_xscale if is_x else axis.set_yscale
    if scale["type"] == "log":
        set_scale("log")
    elif scale["type"] == "symlog":
        set_scale("asinh", linear_width=scale["constant"])

    form = format_count if ticks["format"] == COUNT else "{:g}".format
    labels = [form(value) for value in ticks["values"]]
    axis.set(**{f"{name}ticks": ticks["values"], f"{name}ticklabels": labels})
    axis.set(**{f"{name}lim": scale["domain"], f"{name}label": _drawable(channel["title"])})
    ruler = axis.xaxis if is_x else axis.yaxis
    ruler.set_minor_locator(NullLocator())


def _draw_layer(axis: Axes, layer: Spec) -> None:
    mark = layer["mark"]
    encoding = layer["encoding"]
    scale = encoding.get("y", {}).get("scale", {})
    for rows in _series(layer):
        x = _positions(encoding, "x", rows)
        y = _positions(encoding, "y", rows)
        x2 = _positions(encoding, "x2", rows)
        y2 = _positions(encoding, "y2", rows)
        if scale.get("clamp"):
            y = np.clip(y, *scale["domain"]).tolist()
            y2 = np.clip(y2, *scale["domain"]).tolist()

        style = _style(layer, rows[0])
        color = style["color"]
        if mark["type"] == "rect" and x:
            axis.axvspan(x[0], x2[0], color=color, alpha=style["alpha"], linewidth=0)
        elif mark["type"] == "rect":
            axis.axhspan(y[0], y2[0], color=color, alpha=style["alpha"], linewidth=0)
        elif x2:
            axis.hlines(y, x, x2, clip_on=False, **_line_style(style))
        elif y2:
            axis.vlines(x, y, y2, clip_on=False, **_line_style(style))
        elif mark["type"] == "rule":
            axis.axvline(x[0], **style)
        elif y:
            axis.plot(x, y, clip_on=mark["clip"], **style)
        else:  # at an edge
            heights = [0.02 if encoding["y"] == BOTTOM else 0.98] * len(x)
            axis.plot(x, heights, transform=axis.get_xaxis_transform(), **style)


def _positions(encoding: Spec, name: str, rows: Sequence[Spec]) -> list[Any]:
    """Return the values of a channel; none if the layer lacks it, or places it at an edge."""
    field = encoding.get(name, {}).get("field")
    if not field:
        return []
    return [row[field] for row in rows]


def _series(layer: Spec) -> list[list[Spec]]:
    fields = [layer["encoding"].get(channel, {}).get("field") for channel in GROUPING]

    def key(row: Spec) -> list[str]:
        return [str(row.get(field)) for field in fields]

    rows = sorted(layer["data"]["values"], key=key)  # stable
    return [[*group] for _, group in groupby(rows, key)]


def _style(layer: Spec, row: Spec) -> dict[str, Any]:
    """Return the style of a series."""
    mark = layer["mark"]
    style = {
        "color": _value_of(layer, "color", row, default=GREY),
        "alpha": mark.get("opacity", 1.0),
        "marker": "",
        "linestyle": "-",
        "markersize": mark.get("size", 40) ** 0.5,
        "linewidth": mark.get("strokeWidth", 1.5),
    }
    dash = _value_of(layer, "strokeDash", row, default=[1, 0])
    if mark["type"] == "point":
        style["marker"] = MARKERS[_value_of(layer, "shape", row, default="circle")]
        style["linestyle"] = ""
    elif 0 not in dash:
        style["linestyle"] = (0, tuple(dash))
    if not mark.get("filled", True):
        style["fillstyle"] = "none"
    return style


def _line_style(style: dict[str, Any]) -> dict[str, Any]:
    """Return what applies to lines between two positions."""
    return {name: style[name] for name in ("color", "alpha", "linewidth")}


def _value_of(layer: Spec, channel: str, row: Spec, default: Any) -> Any:
    """Return the color, shape or dash of a row: by its field, or that of the whole layer."""
    encoded = layer["encoding"].get(channel, {})
    if "scale" in encoded:
        scale = encoded["scale"]
        index = scale["domain"].index(row[encoded["field"]])
        value = scale["range"][index]
    else:
        value = encoded.get("value", layer["mark"].get(channel))
    return value if value else default


def _legend(panels: Sequence[Spec]) -> list[Line2D]:
    """Return a handle for each color, unless the axis tells the batch sizes, shape and dash."""
    handles = dict[str, Line2D]()
    layers = chain.from_iterable(panel["layer"] for panel in panels)
    for layer, channel in product(layers, ("color", "shape", "strokeDash")):
        encoded = layer["encoding"].get(channel, {})
        field = encoded.get("field")
        for name in _names_in_legend(layer, channel):
            row = {**layer["data"]["values"][0], field: name}
            style = _style(layer, row) | {"alpha": 1.0}
            if channel != "color":
                style["color"] = GREY
            text = f"{SIZE} {name}" if field == SIZE else _drawable(str(name))
            handle = handles.setdefault(text, Line2D([], [], **style, label=text))
            if channel == "shape":  # a line with such points
                handle.set_marker(style["marker"])
    return [*handles.values()]


def _names_in_legend(layer: Spec, channel: str) -> Sequence[Any]:
    encoded = layer["encoding"].get(channel, {})
    if encoded.get("legend"):
        names: Sequence[Any] = encoded["legend"]["values"]
    elif encoded.get("field") == SIZE:
        names = encoded["scale"]["domain"]
    else:
        return []
    is_on_axis = encoded["field"] == SIZE and layer["encoding"]["x"].get("field") == SIZE
    if len(names) < 2 or is_on_axis:
        return []
    return names
