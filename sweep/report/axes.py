"""Colours, axes and legends shared by all figures.

Each batch size has one colour of a sequential, colour-blind safe map; each policy has a colour
(Okabe and Ito), a marker, a line style and a hatch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from sweep.config.numbers import format_count

POLICY_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "h")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx", "++")
DIVERGED_COLOUR = "#B00020"
GREY = "#555555"
LEGEND_SIZES = 12  # batch sizes; with more, the legend becomes a colour bar
TOP_EDGE = 0.985  # height of diverged trials, as a fraction of the axes
TICK_GAP = 0.045  # smallest distance of two batch size labels, as a fraction of the axis
TICK_CHARACTERS = 36  # with more, the labels are rotated


class PolicyStyle(NamedTuple):
    """How one policy is drawn."""

    colour: str
    marker: str
    line: str
    hatch: str


def policy_styles(cells: pd.DataFrame) -> dict[str, PolicyStyle]:
    """Return the style of each policy, in the plan's order."""
    options = (POLICY_COLOURS, MARKERS, LINES, HATCHES)
    return {
        str(label): PolicyStyle(*(values[index % len(values)] for values in options))
        for index, label in enumerate(dict.fromkeys(cells["label"]))
    }


def batch_colours(cells: pd.DataFrame) -> dict[int, Any]:
    """Return the colour of each batch size, dark for small and light for large."""
    sizes = sorted({int(batch) for batch in cells["batch_size"]})
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.88, len(sizes)))
    return {size: tuple(shade) for size, shade in zip(sizes, shades, strict=True)}


def new_figure(panels: int, width: float = 7.2) -> tuple[Figure, list[Axes]]:
    """Create a figure of one or more panels in a row; the width is in inches."""
    figure = Figure(figsize=(width, 4.3), layout="constrained", dpi=150)
    axes = [figure.add_subplot(1, panels, index + 1) for index in range(panels)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def batch_axis(axis: Axes, batches: Iterable[int]) -> None:
    """Label an x axis in log2 of the batch size with the batch sizes."""
    sizes = sorted({int(batch) for batch in batches})
    low, high = (float(np.log2(sizes[end])) if sizes else 0.0 for end in (0, -1))
    margin = 0.06 * (high - low) or 1.0
    axis.set_xlim(low - margin, high + margin)
    labels: dict[float, str] = {}
    for size in sizes:
        position = float(np.log2(size))
        if not labels or position - max(labels) >= TICK_GAP * (high - low):
            labels[position] = str(size)
    axis.xaxis.set_major_locator(FixedLocator(list(labels)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(lambda value, _: labels.get(value, ""))
    if sum(map(len, labels.values())) > TICK_CHARACTERS:
        axis.tick_params(axis="x", labelrotation=45)
    axis.set_xlabel("batch size [sequences per step]")


def loss_axis(axis: Axes) -> None:
    """Use a log scale with plain numbers if the largest loss is over twice the smallest."""
    low, high = axis.dataLim.y0, axis.dataLim.y1
    if np.isfinite([low, high]).all() and 0 < 2 * low < high:
        axis.set_yscale("log")
        plain_log_ticks(axis.yaxis, (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 100 * low else (1,))


def token_axis(axis: Axes) -> None:
    """Let x be training tokens, starting at 0."""
    axis.set_xlabel("training tokens")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(lambda value, _: format_count(value))
    axis.xaxis.set_major_locator(MaxNLocator(5))


def plain_log_ticks(axis: Axis, subs: Sequence[float]) -> None:
    """Write plain numbers at the multiples `subs` of each power of ten."""
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def mark_diverged(
    axis: Axes, positions: Iterable[float], count: int, colour: str = DIVERGED_COLOUR, by: str = ""
) -> None:
    """Draw a cross at the top edge for every diverged trial, with their number in the legend."""
    at = list(positions)
    if count:
        style: dict[str, Any] = {"color": colour, "marker": "X", "linestyle": "none"}
        style |= {"transform": axis.get_xaxis_transform(), "markersize": 7, "zorder": 5}
        axis.plot(at, [TOP_EDGE] * len(at), label=f"diverged ({count}){by}", **style)


def legend_above(axis: Axes, handles: Sequence[Any] | None = None) -> None:
    """Put the legend above the axes, where it hides no point."""
    handles = axis.get_legend_handles_labels()[0] if handles is None else handles
    if handles:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.01)}
        axis.legend(handles=handles, ncols=min(4, len(handles)), frameon=False, fontsize=9, **place)


def legend_outside(
    figure: Figure, cells: pd.DataFrame, more: Sequence[Any], style: Callable[[PolicyStyle], Any]
) -> None:
    """Explain batch sizes by colour, and policies by the line properties that `style` returns."""
    colours, styles = batch_colours(cells), policy_styles(cells)
    handles: list[Any] = []
    layout: dict[str, Any] = {"loc": "outside right upper"}
    if len(colours) > LEGEND_SIZES:
        layout = {"loc": "outside upper left", "ncols": 4}
        norm = mpl.colors.LogNorm(min(colours), max(colours))
        shades = mpl.colors.ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.88, 256)))
        scale = mpl.cm.ScalarMappable(norm, shades)
        bar = figure.colorbar(scale, ax=figure.axes, label="batch size [sequences per step]")
        bar.ax.yaxis.set_major_formatter("{x:g}")
        bar.ax.yaxis.set_minor_locator(NullLocator())
    else:
        handles += [Line2D([], [], color=c, lw=3, label=f"batch {b}") for b, c in colours.items()]
    if len(styles) > 1:
        handles += [
            Line2D([], [], color=GREY, label=label, **style(policy))
            for label, policy in styles.items()
        ]
    handles += more
    if handles:
        figure.legend(handles=handles, frameon=False, fontsize=9, **layout)
