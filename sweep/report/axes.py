"""Colours, axes and legends that all figures share.

Batch sizes have one colour each in every figure that tells them apart by colour (a sequential,
colour-blind safe map); policies have a colour, a marker and a line style (Okabe and Ito).
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from sweep.config.numbers import format_count

POLICY_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DIVERGED_COLOUR = "#B00020"
GREY = "#555555"
MARKERS = ("o", "s", "^", "D", "v", "P", "h")
LINES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx", "++")
LEGEND_SIZES = 12  # more batch sizes than this get a colour bar
TOP_EDGE = 0.985  # of the axes, where diverged trials stand
TICK_GAP = 0.045  # of the axis, that a batch size's number needs
TICK_CHARACTERS = 36  # more than this are written aslant


def new_figure(panels: int, width: float = 7.2) -> tuple[Figure, list[Axes]]:
    """Make a figure of one or two panels side by side; the width is in inches."""
    figure = Figure(figsize=(width, 4.3), layout="constrained", dpi=150)
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def say_if_empty(figure: Figure) -> None:
    """Write into panels without data that there are none yet."""
    for axis in figure.axes:
        if not (axis.lines or axis.collections or axis.patches):
            place: dict[str, Any] = {"transform": axis.transAxes, "ha": "center", "color": GREY}
            axis.text(0.5, 0.5, "no data yet", **place)
            axis.set_yticks([])


def batch_colours(cells: pd.DataFrame) -> dict[int, Any]:
    """Give each batch size its colour, dark for small and light for large."""
    sizes = sorted({int(batch) for batch in cells["batch_size"]})
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.88, len(sizes)))
    return {size: tuple(shade) for size, shade in zip(sizes, shades, strict=True)}


def policy_labels(cells: pd.DataFrame) -> list[str]:
    """Return the policies of a sweep in the plan's order."""
    return [str(label) for label in dict.fromkeys(cells["label"])]


def batch_axis(axis: Axes, batches: Iterable[int]) -> None:
    """Make x log2 of the batch size, which callers draw at, with the real sizes on the ticks."""
    sizes = sorted({int(batch) for batch in batches})
    places = [float(np.log2(size)) for size in sizes]
    low, high = (places[0], places[-1]) if places else (0.0, 0.0)
    margin = 0.06 * (high - low) or 1.0
    axis.set_xlim(low - margin, high + margin)
    shown: dict[float, str] = {}
    for place, size in zip(places, sizes, strict=True):
        if not shown or place - max(shown) >= TICK_GAP * (high - low):
            shown[place] = str(size)
    axis.xaxis.set_major_locator(FixedLocator(list(shown)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: shown.get(value, "")))
    if sum(len(name) for name in shown.values()) > TICK_CHARACTERS:
        axis.tick_params(axis="x", labelrotation=45)
    axis.set_xlabel("batch size [sequences per step]")


def loss_axis(axis: Axes) -> None:
    """Use a log scale where the start is far above the end, with plain numbers on it."""
    low, high = axis.dataLim.y0, axis.dataLim.y1
    if np.isfinite([low, high]).all() and 0 < 2 * low < high:
        axis.set_yscale("log")
        subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 100 * low else (1,)
        axis.yaxis.set_major_locator(LogLocator(subs=subs))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def token_axis(axis: Axes) -> None:
    """Let x be training tokens from the first on, written as people write them."""
    axis.set_xlabel("training tokens")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axis.xaxis.set_major_locator(MaxNLocator(5))


def time_axis(axis: Axes, seconds: pd.Series) -> None:
    """Use a log scale where times span more than a decade, with plain numbers on it."""
    axis.set_xlabel("total time of one trial [seconds]")
    if len(seconds) and seconds.max() > 10 * seconds.min() > 0:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def mark_diverged(
    axis: Axes, places: Iterable[float], count: int, colour: str = DIVERGED_COLOUR, name: str = ""
) -> None:
    """Put a cross at the top edge for every diverged trial, and say how many there are."""
    at = list(places)
    if count:
        style: dict[str, Any] = {"color": colour, "marker": "X", "linestyle": "none"}
        edge = axis.get_xaxis_transform()
        label = f"diverged ({count}){name}"
        heights = [TOP_EDGE] * len(at)
        axis.plot(at, heights, transform=edge, markersize=7, zorder=5, label=label, **style)


def legend_above(axis: Axes, handles: Sequence[Any] | None = None) -> None:
    """Put the legend above the axes, where no point can lie under it."""
    found = axis.get_legend_handles_labels()[0] if handles is None else handles
    if found:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.01)}
        axis.legend(handles=found, ncols=min(4, len(found)), frameon=False, fontsize=9, **place)


def legend_beside(
    figure: Figure, axes: Sequence[Axes], cells: pd.DataFrame, more: Sequence[Any], is_line: bool
) -> None:
    """Explain batch sizes by colour, and policies by line style or marker."""
    colours, labels = batch_colours(cells), policy_labels(cells)
    handles: list[Any] = []
    if len(colours) > LEGEND_SIZES:
        norm = mpl.colors.LogNorm(min(colours), max(colours))
        shades = mpl.colors.ListedColormap(mpl.colormaps["viridis"](np.linspace(0, 0.88, 256)))
        scale = mpl.cm.ScalarMappable(norm, shades)
        bar = figure.colorbar(scale, ax=list(axes), label="batch size [sequences per step]")
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.ax.yaxis.set_minor_locator(NullLocator())
    else:
        handles += [Line2D([], [], color=c, lw=3, label=f"batch {b}") for b, c in colours.items()]
    for place, label in enumerate(labels if len(labels) > 1 else []):
        handle = Line2D([], [], color=GREY, label=label)
        handle.set_linestyle(LINES[place % len(LINES)] if is_line else "none")
        handle.set_marker("" if is_line else MARKERS[place % len(MARKERS)])
        handles.append(handle)
    handles += more
    if handles:
        is_bar = len(colours) > LEGEND_SIZES
        place_outside: dict[str, Any] = {"loc": "outside right upper"}
        if is_bar:
            place_outside = {"loc": "outside upper left", "ncols": 4}
        figure.legend(handles=handles, frameon=False, fontsize=9, **place_outside)
