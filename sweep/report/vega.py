"""The panels of a chart: the part of Vega-Lite that the report uses, with domains and ticks.

https://vega.github.io/vega-lite/docs. Fields have the names that a tooltip shows to readers.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator, MaxNLocator

from sweep.config.arms import batch_colors
from sweep.errors import printable

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
SIZE = "batch size"  # a row that has this field is drawn while the reader selects its batch size
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
HEIGHT = 260  # height of a panel in pixels
TOP: Spec = {"value": 5}  # positions at an edge, whatever the scale
BOTTOM: Spec = {"value": HEIGHT - 5}
COUNT = "~s"  # format of large tick labels: 12k
LARGEST = 1e150  # of values in figures, also of inverse ones; limits and ticks cannot overflow
DIGITS = 6  # significant digits of numbers in a specification
RESERVED = re.compile(
    r"[.\[\]\\'\"]"
)  # with these, Vega-Lite takes a field for a path in an object


def field_of(name: str) -> str:
    """Return the field of a column, for its rows and channels; titles show the name as it is."""
    return RESERVED.sub("·", " ".join(printable(name).split()))


def channel(
    field: str, values: Iterable[Any], title: str = "", form: str = "", scale: str = "linear"
) -> Spec:
    """Return the channel of a position, with a domain and ticks for these values.

    Args:
        form: format of the ticks.
        scale: linear (which begins at 0 if the least value is 0), log, or narrow: log if the
            largest value is over twice the least.
    """
    drawn = [float(value) for value in values if abs(value) < LARGEST] or [1.0]
    low, high = min(drawn), max(drawn)
    is_log = low > 1 / LARGEST and (scale == "log" or (scale == "narrow" and high > 2 * low))
    if is_log:
        margin = (high / low) ** 0.04 if high > low else 1.1
        low, high = low / margin, high * margin
        subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
        ticks = LogLocator(subs=subs, numticks=15).tick_values(low, high)
    else:
        margin = 0.05 * (high - low) or abs(high) or 1.0
        low, high = low and low - margin, high + margin
        ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    form = form or ".6~g"
    axis: Spec = {"values": [float(f"{tick:.6g}") for tick in ticks if low <= tick <= high]}
    axis |= {"format": form, "labelExpr": f"format(datum.value, '{form}')"}  # else 0 would be 0k
    return {
        "field": field_of(field),
        "type": "quantitative",
        "title": title or field,
        "scale": {"type": "log" if is_log else "linear", "domain": [low, high], "nice": False},
        "axis": axis,
    }


def batch_axis(sizes: Iterable[int]) -> Spec:
    """Return the position of the batch size, with a tick for each."""
    made = channel(SIZE, sizes, scale="log")
    made["scale"]["base"] = 2
    made["axis"] = {"values": sorted({*sizes}), "format": "d", "grid": False}
    return made


def size_color(sizes: Iterable[int]) -> Spec:
    """Return the channel that gives each batch size its color; the page explains the colors."""
    colors = batch_colors(sizes)
    scale = {"domain": [*colors], "range": [*colors.values()]}
    return {"field": SIZE, "type": "nominal", "scale": scale, "legend": None}


def names(
    field: str, labels: Sequence[str], marks: Sequence[Any], present: Sequence[str] | None = None
) -> Spec:
    """Return the channel that gives each label a shape or a dash.

    The legend has those that are present, all by default; a single one has none.
    """
    scale = {"domain": [*labels], "range": [marks[i % len(marks)] for i in range(len(labels))]}
    present = [*(labels if present is None else present)]
    legend = {"title": None, "orient": "top", "values": present} if len(present) > 1 else None
    return {"field": field_of(field), "type": "nominal", "scale": scale, "legend": legend}


def layer(mark: str, rows: Any, x: Spec | None, y: Spec | None, **more: Any) -> Spec:
    """Return a layer; `more` are channels (dicts), and properties of the mark.

    Rows without a finite number at each position are left out.
    """
    parts = {"x": x, "y": y, **more}
    encoding = {key: made for key, made in parts.items() if isinstance(made, dict)}
    properties = {key: made for key, made in more.items() if key not in encoding}
    frame = pd.DataFrame(rows).rename(columns=field_of)
    for key in ("x", "y", "x2", "y2"):
        if (field := encoding.get(key, {}).get("field")) and len(frame):
            frame = frame[np.isfinite(frame[field].astype(float))]
    kind: Spec = {"type": mark, "clip": mark == "line"}
    if mark == "point":
        kind |= {"filled": True, "opacity": 1}
    if properties.pop("tooltip", mark == "point"):
        kind["tooltip"] = {"content": "data"}
    values = [_plain(row) for row in frame.to_dict("records")]
    made: Spec = {"data": {"values": values}, "mark": kind | properties, "encoding": encoding}
    if SIZE in frame:
        made["transform"] = [{"filter": f"indexof(shown, datum['{SIZE}']) >= 0"}]
    return made


def _plain(row: dict[Any, Any]) -> Spec:
    """Return the values of a row that are known, as JSON has them."""
    plain = {}
    for key, value in row.items():
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, float):
            value = float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        if value is not None:
            plain[key] = value
    return plain


def panel(layers: Iterable[Spec], sizes: Iterable[int], title: str = "") -> Spec:
    """Return a panel; its parameter `shown` holds the batch sizes that the reader selects."""
    shown = {"name": "shown", "value": sorted({*sizes})}
    drawn = [layer for layer in layers if layer["data"]["values"]]
    made: Spec = {"$schema": SCHEMA, "width": "container", "height": HEIGHT, "params": [shown]}
    return made | ({"title": title} if title else {}) | {"layer": drawn}
