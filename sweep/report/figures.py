"""The figures of the report, each from a `Sweep` and the cells of `compare_batch_sizes`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from sweep.analysis.comparison import cell_records, report_trials
from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.config.numbers import format_count
from sweep.report import axes as look

PART_COLOURS = {
    "training": "#0072B2",
    "compile": "#E69F00",
    "evaluation": "#009E73",
    "checkpoint": "#CC79A7",
    "noise": "#56B4E9",
    "other": "#999999",
}
MANY_CELLS = 12  # from here curves are means over seeds
MANY_SEEDS = 5
DRAWN_POINTS = 400  # of a curve; tables keep all
TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def plot_loss(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Draw final validation loss against batch size: every seed a point, the mean a line."""
    figure, (axis,) = look.new_figure(1)
    _draw_by_batch(axis, sweep, cells, "final_valid_loss")
    axis.set_ylabel(f"final validation loss {loss_unit(sweep)}")
    labels, gone = look.policy_labels(cells), _diverged(sweep)
    for place, label in enumerate(labels):
        rows = gone[gone["label"] == label]
        colour = look.POLICY_COLOURS[place % len(look.POLICY_COLOURS)]
        name = f", {label}" if len(labels) > 1 else ""
        at = np.log2(rows["batch_size"].astype(float))
        look.mark_diverged(axis, at, len(rows), colour, name)
    look.legend_above(axis)
    return figure


def plot_time(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Draw time by part, stacked, against batch size: means over the complete seeds."""
    figure, (axis,) = look.new_figure(1)
    labels, done = look.policy_labels(cells), cells[cells["complete"] > 0]
    longest = float(done["seconds_total"].max()) if len(done) else 0.0
    unit, name = next(((s, n) for s, n in TIME_UNITS if longest >= 2 * s), TIME_UNITS[-1])
    places = np.log2(np.unique(cells["batch_size"].to_numpy(float)))
    gap = float(np.diff(places).min()) if len(places) > 1 else 1.0
    width = 0.7 * gap / max(1, len(labels))
    for place, label in enumerate(labels):
        rows = done[done["label"] == label]
        at = np.log2(rows["batch_size"].to_numpy(float)) + (place - (len(labels) - 1) / 2) * width
        bottom, hatch = np.zeros(len(rows)), look.HATCHES[place % len(look.HATCHES)]
        for part, heights in _time_parts(rows):
            if rows.empty:
                continue
            style: dict[str, Any] = {"color": PART_COLOURS[part], "edgecolor": "white"}
            axis.bar(at, heights / unit, width, bottom, hatch=hatch, linewidth=0.6, **style)
            bottom += heights / unit
    look.batch_axis(axis, cells["batch_size"])
    low, high = axis.get_xlim()
    axis.set_xlim(low - gap / 2, high + gap / 2)
    axis.set_ylabel(f"time of one trial [{name}]")
    look.legend_above(axis, _time_handles(done, labels, longest))
    return figure


def plot_curves(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Draw training and validation loss against tokens, one colour per batch size."""
    figure, axes = look.new_figure(2, 11)
    trials = report_trials(sweep.trials).set_index("id")
    colours, labels = look.batch_colours(cells), look.policy_labels(cells)
    gone = trials[trials["cause"] == "diverged"]
    for axis, (metric, title, is_loss) in zip(axes, _panels(sweep), strict=True):
        for batch, label, tokens, values, width in _drawn_curves(sweep, trials, metric):
            line = look.LINES[labels.index(label) % len(look.LINES)]
            axis.plot(tokens, values, line, color=colours[batch], linewidth=width, alpha=0.75)
        axis.set_ylabel(title)
        if is_loss:
            look.loss_axis(axis)
        look.mark_diverged(axis, gone["tokens"], len(gone))
        look.token_axis(axis)
    look.legend_beside(figure, axes, cells, axes[0].get_legend_handles_labels()[0], is_line=True)
    return figure


def _panels(sweep: Sweep) -> tuple[tuple[str, str, bool], ...]:
    """Return metric and title of both pictures of curves, and whether it is a loss."""
    unit = loss_unit(sweep)
    valid = ("valid/loss", f"validation loss, milestone set {unit}", True)
    if sweep.plan.settings.workload == "grpo":  # whose training loss is a surrogate near 0
        return ("reward/mean", "mean reward of a step's completions", False), valid
    return ("train/loss", f"training loss {unit}", True), valid


def plot_pareto(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Draw final validation loss against total seconds: final points only, with the front."""
    figure, (axis,) = look.new_figure(1, 8.6)
    colours, labels = look.batch_colours(cells), look.policy_labels(cells)
    trials = report_trials(sweep.trials)
    done = trials[trials["state"] == "COMPLETE"]
    for place, label in enumerate(labels):
        marker = look.MARKERS[place % len(look.MARKERS)]
        seeds, means = (rows[rows["label"] == label] for rows in (done, cells))
        for rows, size, edge in ((seeds, 16, "none"), (means[means["complete"] > 0], 70, "black")):
            if rows.empty:
                continue
            style: dict[str, Any] = {"s": size, "edgecolors": edge, "zorder": 2 + size / 70}
            shades = [colours[int(batch)] for batch in rows["batch_size"]]
            points = (rows["seconds_total"], rows["final_valid_loss"])
            axis.scatter(*points, c=shades, marker=marker, **style)
    front = cells[cells["is_on_front"]].sort_values("seconds_total")
    is_crowded = len(cells) > MANY_CELLS
    named = front.iloc[[0, -1]] if is_crowded and len(front) else cells[cells["complete"] > 0]
    for cell in cell_records(named):
        at = (cell["seconds_total"], cell["final_valid_loss"])
        axis.annotate(str(cell["batch_size"]), at, (6, 6), textcoords="offset points", size=9)
    if len(front):
        steps: dict[str, Any] = {"drawstyle": "steps-post", "color": look.GREY, "zorder": 1}
        axis.plot(front["seconds_total"], front["final_valid_loss"], linewidth=1.2, **steps)
    look.time_axis(axis, done["seconds_total"])
    axis.set_ylabel(f"final validation loss {loss_unit(sweep)}")
    gone = _diverged(sweep)
    look.mark_diverged(axis, gone["seconds_total"].dropna(), len(gone))
    front_line = Line2D([], [], color=look.GREY, lw=1.2, label="Pareto front of the means")
    more = [front_line, *axis.get_legend_handles_labels()[0]]
    look.legend_beside(figure, [axis], cells, more, is_line=False)
    return figure


def plot_throughput(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Draw tokens per second and peak memory against batch size."""
    figure, axes = look.new_figure(2, 11)
    for axis, metric, name, scale in (
        (axes[0], "tokens_per_second", "training tokens per second", 1.0),
        (axes[1], "peak_memory_bytes", "peak memory [GiB]", 2.0**30),
    ):
        _draw_by_batch(axis, sweep, cells, metric, scale)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    look.legend_above(axes[0])
    return figure


def loss_unit(sweep: Sweep) -> str:
    """Return the unit of losses as an axis shows it, where it is known."""
    known = {"pretrain": "[nats per token]", "grpo": "[minus mean reward]"}
    return known.get(sweep.plan.settings.workload, "")


def _diverged(sweep: Sweep) -> pd.DataFrame:
    trials = report_trials(sweep.trials)
    return trials[trials["cause"] == "diverged"]


def _draw_by_batch(
    axis: Axes, sweep: Sweep, cells: pd.DataFrame, metric: str, scale: float = 1.0
) -> None:
    """Draw each complete trial as a point, and a line through the cells that are whole."""
    trials = report_trials(sweep.trials)
    done = trials[trials["state"] == "COMPLETE"]
    for place, label in enumerate(look.policy_labels(cells)):
        rows = done[done["label"] == label]
        if rows.empty:
            continue
        style: dict[str, Any] = {"color": look.POLICY_COLOURS[place % len(look.POLICY_COLOURS)]}
        marker = look.MARKERS[place % len(look.MARKERS)]
        at, values = np.log2(rows["batch_size"].astype(float)), rows[metric].astype(float) / scale
        axis.plot(at, values, marker, markersize=5, alpha=0.6, markeredgewidth=0, **style)
        whole = cells[cells["is_comparable"] & (cells["label"] == label)]
        at, values = np.log2(whole["batch_size"].astype(float)), whole[metric] / scale
        line = look.LINES[place % len(look.LINES)]
        axis.plot(at, values, line, linewidth=1.5, label=label, **style)
    look.batch_axis(axis, cells["batch_size"])


def _time_parts(rows: pd.DataFrame) -> Iterator[tuple[str, Any]]:
    """Yield each part's seconds; `other` is what the total holds beside the named parts."""
    total = np.nan_to_num(rows["seconds_total"].to_numpy(float))
    named = np.zeros(len(rows))
    for part in ("training", "compile", "evaluation", "checkpoint", "noise"):
        heights = np.nan_to_num(rows[f"seconds_{part}"].to_numpy(float))
        named += heights
        yield part, heights
    yield "other", np.clip(total - named, 0, None)


def _time_handles(done: pd.DataFrame, labels: list[str], longest: float) -> list[Any]:
    """Explain the parts that are large enough to be seen, and the policies by hatch."""
    seen = [part for part, heights in _time_parts(done) if heights.sum() > 0.001 * longest]
    handles = [Patch(color=PART_COLOURS[part], label=part) for part in seen]
    for place, label in enumerate(labels if len(labels) > 1 else []):
        hatch = look.HATCHES[place % len(look.HATCHES)]
        handles.append(Patch(facecolor="#dddddd", edgecolor=look.GREY, hatch=hatch, label=label))
    return handles


def _drawn_curves(
    sweep: Sweep, trials: pd.DataFrame, metric: str
) -> Iterator[tuple[int, str, Any, Any, float]]:
    """Yield batch size, label, tokens, values and line width of what is drawn.

    Each trial where that stays legible, else the mean over the seeds of a cell, interpolated in
    tokens; diverged trials are always drawn one by one.
    """
    sizes = trials.groupby(["label", "batch_size"]).size().tolist()
    is_crowded = len(sizes) > MANY_CELLS or max(sizes, default=0) > MANY_SEEDS
    groups: dict[tuple[str, int], list[tuple[Any, Any]]] = {}
    rows = trials[["label", "batch_size", "cause"]].to_dict("index")
    for trial, tokens, values in curves_by_trial(sweep, metric):
        if trial not in rows:
            continue
        label, batch = str(rows[trial]["label"]), int(rows[trial]["batch_size"])
        if is_crowded and rows[trial]["cause"] != "diverged":
            groups.setdefault((label, batch), []).append((tokens, values))
            continue
        keep = np.unique(np.linspace(0, len(tokens) - 1, DRAWN_POINTS).astype(int))
        yield batch, label, tokens[keep], values[keep], 1.2
    for (label, batch), curves in groups.items():
        start, end = (max(tokens[k] for tokens, _ in curves) for k in (0, -1))
        grid = np.linspace(start, end, DRAWN_POINTS)
        means = np.mean([np.interp(grid, x, y, right=np.nan) for x, y in curves], axis=0)
        yield batch, label, grid, means, 1.6
