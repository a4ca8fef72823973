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
LARGEST = 1e150  # bound of values and of inverse values, so that limits and ticks are finite
DIGITS = 6  # significant digits of numbers in a specification
RESERVED = re.compile(r"[.\[\]\\'\"]")  # Vega-Lite takes a field with these for a path


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
    drawn = [float(value) for value in values if abs(value) < LARGEST]
    low = min(drawn, default=1.0)
    high = max(drawn, default=1.0)

    is_wide = high > 2 * low
    wants_log = scale == "log" or (scale == "narrow" and is_wide)
    if wants_log and low > 1 / LARGEST:
        kind = "log"
        low, high = _log_domain(low, high)
        subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
        ticks = LogLocator(subs=subs, numticks=15).tick_values(low, high)
    else:
        kind = "linear"
        low, high = _linear_domain(low, high)
        ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)

    if not form:
        form = ".6~g"
    return {
        "field": field_of(field),
        "type": "quantitative",
        "title": title if title else field,
        "scale": {"type": kind, "domain": [low, high], "nice": False},
        "axis": {
            "values": [float(f"{tick:.6g}") for tick in ticks if low <= tick <= high],
            "format": form,
            "labelExpr": f"format(datum.value, '{form}')",  # else 0 would be 0k
        },
    }


def _log_domain(low: float, high: float) -> tuple[float, float]:
    margin = (high / low) ** 0.04 if high > low else 1.1
    return low / margin, high * margin


def _linear_domain(low: float, high: float) -> tuple[float, float]:
    """Widen a range by a margin on both sides, or only above if it begins at 0."""
    margin = 0.05 * (high - low)
    if margin == 0:
        margin = abs(high)
    if margin == 0:
        margin = 1.0
    if low == 0:
        return low, high + margin
    return low - margin, high + margin


def unit_of_sizes(tokens_per_sequence: int) -> str:
    """Return the unit of batch sizes on an axis."""
    if tokens_per_sequence == 1:
        return "sequences"
    return f"sequences of {tokens_per_sequence} tokens"


def batch_axis(sizes: Iterable[int], tokens_per_sequence: int = 1) -> Spec:
    """Return the position of the batch size, with a tick for each."""
    title = SIZE
    if tokens_per_sequence > 1:
        title = f"{SIZE} [{unit_of_sizes(tokens_per_sequence)}]"
    axis = channel(SIZE, sizes, title, scale="log")
    axis["scale"]["base"] = 2
    axis["axis"] = {"values": sorted({*sizes}), "format": "d", "grid": False}
    return axis


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
    marks_of_labels = [marks[index % len(marks)] for index in range(len(labels))]
    scale = {"domain": [*labels], "range": marks_of_labels}
    if present is None:
        present = labels
    legend = None
    if len(present) > 1:
        legend = {"title": None, "orient": "top", "values": [*present]}
    return {"field": field_of(field), "type": "nominal", "scale": scale, "legend": legend}


def layer(mark: str, rows: Any, x: Spec | None, y: Spec | None, **more: Any) -> Spec:
    """Return a layer; `more` are channels (dicts), and properties of the mark.

    Rows without a finite number at each position are left out.
    """
    parts = {"x": x, "y": y, **more}
    encoding = {name: part for name, part in parts.items() if isinstance(part, dict)}
    properties = {name: part for name, part in more.items() if name not in encoding}

    frame = pd.DataFrame(rows).rename(columns=field_of)
    for name in ("x", "y", "x2", "y2"):
        field = encoding.get(name, {}).get("field")
        if field and len(frame):
            frame = frame[np.isfinite(frame[field].astype(float))]
    values = [_plain(row) for row in frame.to_dict("records")]

    is_point = mark == "point"
    kind: Spec = {"type": mark, "clip": mark == "line"}
    if is_point:
        kind |= {"filled": True, "opacity": 1}
    if properties.pop("tooltip", is_point):
        kind["tooltip"] = {"content": "data"}

    spec: Spec = {"data": {"values": values}, "mark": kind | properties, "encoding": encoding}
    if SIZE in frame:
        spec["transform"] = [{"filter": f"indexof(shown, datum['{SIZE}']) >= 0"}]
    return spec


def _plain(row: dict[Any, Any]) -> Spec:
    """Return the values of a row that are known, as JSON has them."""
    plain = {}
    for key, value in row.items():
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float):
            if not math.isfinite(value):
                continue
            value = float(f"{value:.{DIGITS}g}")
        if value is not None:
            plain[key] = value
    return plain


def panel(layers: Iterable[Spec], sizes: Iterable[int], title: str = "") -> Spec:
    """Return a panel; its parameter `shown` holds the batch sizes that the reader selects."""
    shown = {"name": "shown", "value": sorted({*sizes})}
    drawn = [layer for layer in layers if layer["data"]["values"]]
    spec: Spec = {"$schema": SCHEMA, "width": "container", "height": HEIGHT, "params": [shown]}
    if title:
        spec["title"] = title
    spec["layer"] = drawn
    return spec
