"""The figures of a report, and the colours, axes and legends that they share."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from sweep.analysis.checks import PolicyResult
from sweep.analysis.comparison import cell_records, report_trials
from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.optimum import TunedRate
from sweep.analysis.target import Reached
from sweep.config.numbers import format_count
from sweep.report.context import Policies, noise_records, reported_pairs

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


PARTS = ("training", "compile", "evaluation", "checkpoint", "noise")
PART_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#999999")
VERDICTS = {"different": ("#D55E00", "o"), "equal": ("#009E73", "D"), "undecided": ("#555555", "s")}
MANY_CELLS = 12  # with more, curves are means over seeds
MANY_SEEDS = 5
CURVE_POINTS = 400  # drawn of each curve
TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def draw_figures(sweep: Sweep, cells: pd.DataFrame, policies: Policies) -> dict[str, Figure | None]:
    """Draw the figures of a report; None for those that have nothing to show."""
    has_target = sweep.plan.settings.target is not None
    figures: dict[str, Figure | None] = {
        "loss": None if has_target else plot_loss(sweep, cells),
        "steps": plot_steps(sweep, policies),
        "differences": plot_differences(policies),
        "rates": plot_rates(sweep, policies),
        "curves": plot_curves(sweep, cells),
        "time": plot_time(sweep, cells),
        "pareto": None if has_target else plot_pareto(sweep, cells),
        "throughput": plot_throughput(sweep, cells),
        "noise": plot_noise(sweep, policies),
    }
    for axis in (axis for figure in figures.values() if figure for axis in figure.axes):
        if not (axis.lines or axis.collections or axis.patches):
            axis.text(0.5, 0.5, "no data yet", transform=axis.transAxes, ha="center", color=GREY)
            axis.set_yticks([])
    return figures


def plot_loss(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot final validation loss against batch size: seeds as points, means as lines."""
    figure, (axis,) = new_figure(1)
    _plot_by_batch(axis, sweep, cells, "final_valid_loss")
    axis.set_ylabel(f"final validation loss {_loss_label(sweep)}")
    styles, diverged = policy_styles(cells), _diverged(sweep)
    for label, style in styles.items():
        rows = diverged[diverged["label"] == label]
        at = np.log2(rows["batch_size"].astype(float))
        by = f", {label}" if len(styles) > 1 else ""
        mark_diverged(axis, at, len(rows), style.colour, by)
    legend_above(axis)
    return figure


def plot_throughput(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot tokens per second and peak memory against batch size."""
    figure, (speed, memory) = new_figure(2, 11)
    _plot_by_batch(speed, sweep, cells, "tokens_per_second")
    _plot_by_batch(memory, sweep, cells, "peak_memory_bytes", 2.0**30)
    speed.set_ylabel("training tokens per second")
    memory.set_ylabel("peak memory [GiB]")
    for axis in (speed, memory):
        axis.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(lambda value, _: format_count(value))
    legend_above(speed)
    return figure


def _plot_by_batch(
    axis: Axes, sweep: Sweep, cells: pd.DataFrame, metric: str, scale: float = 1.0
) -> None:
    """Plot each complete trial as a point, and the means of comparable cells as a line."""
    trials = report_trials(sweep.trials)
    complete = trials[trials["state"] == "COMPLETE"]
    for label, style in policy_styles(cells).items():
        rows = complete[complete["label"] == label]
        if rows.empty:
            continue
        points: dict[str, Any] = {"markersize": 5, "alpha": 0.6, "markeredgewidth": 0}
        at, values = np.log2(rows["batch_size"].astype(float)), rows[metric].astype(float) / scale
        axis.plot(at, values, style.marker, color=style.colour, **points)
        means = cells[cells["is_comparable"] & (cells["label"] == label)]
        at, values = np.log2(means["batch_size"].astype(float)), means[metric] / scale
        axis.plot(at, values, style.line, color=style.colour, linewidth=1.5, label=label)
    batch_axis(axis, cells["batch_size"])


def plot_time(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot the mean time of a trial against batch size, stacked by part."""
    figure, (axis,) = new_figure(1)
    styles, complete = policy_styles(cells), cells[cells["complete"] > 0]
    longest = float(complete["seconds_total"].max()) if len(complete) else 0.0
    unit, name = next((unit for unit in TIME_UNITS if longest >= 2 * unit[0]), TIME_UNITS[-1])
    gaps = np.diff(np.log2(np.unique(cells["batch_size"].to_numpy(float))))
    gap = float(gaps.min()) if len(gaps) else 1.0
    width = 0.7 * gap / max(1, len(styles))
    handles = [
        Patch(color=colour, label=part)
        for part, colour, seconds in _time_parts(complete)
        if seconds.sum() > 0.001 * longest
    ]
    for index, (label, style) in enumerate(styles.items()):
        rows = complete[complete["label"] == label]
        at = np.log2(rows["batch_size"].to_numpy(float)) + (index - (len(styles) - 1) / 2) * width
        bottom = np.zeros(len(rows))
        bars: dict[str, Any] = {"edgecolor": "white", "hatch": style.hatch, "linewidth": 0.6}
        for _, colour, seconds in _time_parts(rows):
            axis.bar(at, seconds / unit, width, bottom, color=colour, **bars)
            bottom += seconds / unit
        if len(styles) > 1:
            policy: dict[str, Any] = {"facecolor": "#dddddd", "edgecolor": GREY}
            handles.append(Patch(**policy, hatch=style.hatch, label=label))
    batch_axis(axis, cells["batch_size"])
    low, high = axis.get_xlim()
    axis.set_xlim(low - gap / 2, high + gap / 2)
    axis.set_ylabel(f"time of one trial [{name}]")
    legend_above(axis, handles)
    return figure


def _time_parts(rows: pd.DataFrame) -> list[tuple[str, str, Any]]:
    """Return name, colour and seconds of each part; `other` is the rest of the total."""
    columns = [f"seconds_{part}" for part in ("total", *PARTS)]
    total, *parts = rows[columns].to_numpy(float, na_value=0.0).T
    parts.append(np.clip(total - sum(parts), 0, None))
    return list(zip((*PARTS, "other"), PART_COLOURS, parts, strict=True))


def plot_curves(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot training loss (or mean reward) and validation loss against tokens."""
    figure, axes = new_figure(2, 11)
    trials = report_trials(sweep.trials).set_index("id")
    colours, styles = batch_colours(cells), policy_styles(cells)
    diverged, unit = trials[trials["cause"] == "diverged"], _loss_label(sweep)
    panels = [("train/loss", f"training loss {unit}")]
    if sweep.plan.settings.traits.samples:  # the training loss is a surrogate close to 0
        panels = [("reward/mean", "mean reward of a step's completions")]
    panels.append(("valid/loss", f"validation loss, milestone set {unit}"))
    for axis, (metric, title) in zip(axes, panels, strict=True):
        for batch, label, tokens, values, width in _legible_curves(sweep, trials, metric):
            line: dict[str, Any] = {"color": colours[batch], "linewidth": width, "alpha": 0.75}
            axis.plot(tokens, values, styles[label].line, **line)
        axis.set_ylabel(title)
        if metric.endswith("/loss"):
            loss_axis(axis)
        mark_diverged(axis, diverged["tokens"], len(diverged))
        token_axis(axis)
    handles = axes[0].get_legend_handles_labels()[0]
    legend_outside(figure, cells, handles, lambda style: {"linestyle": style.line})
    return figure


def _legible_curves(
    sweep: Sweep, trials: pd.DataFrame, metric: str
) -> Iterator[tuple[int, str, Any, Any, float]]:
    """Yield batch size, policy, tokens, values and line width of each curve.

    If there are many curves, they are means over seeds, interpolated in tokens; diverged trials
    always have a curve each.
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
        keep = np.unique(np.linspace(0, len(tokens) - 1, CURVE_POINTS).astype(int))
        yield batch, label, tokens[keep], values[keep], 1.2
    for (label, batch), curves in groups.items():
        start, end = (max(tokens[index] for tokens, _ in curves) for index in (0, -1))
        grid = np.linspace(start, end, CURVE_POINTS)
        means = np.mean([np.interp(grid, x, y, right=np.nan) for x, y in curves], axis=0)
        yield batch, label, grid, means, 1.6


def plot_pareto(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot final validation loss against total time, with the Pareto front of the means."""
    figure, (axis,) = new_figure(1, 8.6)
    colours, styles = batch_colours(cells), policy_styles(cells)
    trials = report_trials(sweep.trials)
    complete = trials[trials["state"] == "COMPLETE"]
    measured = cells[cells["complete"] > 0]
    for label, style in styles.items():
        for table, size, edge in ((complete, 16, "none"), (measured, 70, "black")):
            rows = table[table["label"] == label]
            if rows.empty:
                continue
            points: dict[str, Any] = {"s": size, "edgecolors": edge, "zorder": 2 + size / 70}
            points["c"] = [colours[int(batch)] for batch in rows["batch_size"]]
            at = (rows["seconds_total"], rows["final_valid_loss"])
            axis.scatter(*at, marker=style.marker, **points)
    front = cells[cells["is_on_front"]].sort_values("seconds_total")
    is_crowded = len(cells) > MANY_CELLS and len(front) > 0
    for cell in cell_records(front.iloc[[0, -1]] if is_crowded else measured):
        end = (cell["seconds_total"], cell["final_valid_loss"])
        axis.annotate(str(cell["batch_size"]), end, (6, 6), textcoords="offset points", size=9)
    line: dict[str, Any] = {"color": GREY, "linewidth": 1.2}
    if len(front):
        at = (front["seconds_total"], front["final_valid_loss"])
        axis.plot(*at, drawstyle="steps-post", zorder=1, **line)
    seconds = complete["seconds_total"]
    if len(seconds) and seconds.max() > 10 * seconds.min() > 0:
        axis.set_xscale("log")
        plain_log_ticks(axis.xaxis, (1, 2, 5))
    axis.set_xlabel("total time of one trial [seconds]")
    axis.set_ylabel(f"final validation loss {_loss_label(sweep)}")
    diverged = _diverged(sweep)
    mark_diverged(axis, diverged["seconds_total"].dropna(), len(diverged))
    front_handle = Line2D([], [], label="Pareto front of the means", **line)
    handles = [front_handle, *axis.get_legend_handles_labels()[0]]
    legend_outside(
        figure, cells, handles, lambda style: {"linestyle": "none", "marker": style.marker}
    )
    return figure


def plot_rates(sweep: Sweep, policies: Policies) -> Figure | None:
    """Plot the loss (or the tokens to the target) of the tuning trials against the rate."""
    rates = [rate for policy in policies for rate in policy.rates]
    if not any(np.isfinite(rate.trials["loss"]).any() for rate in rates):
        return None
    has_target = sweep.plan.settings.target is not None
    figure, (axis,) = new_figure(1)
    colours = batch_colours(pd.DataFrame({"batch_size": [r.batch_size for r in rates]}))
    for rate in rates:
        _plot_rate(axis, rate, colours[rate.batch_size], has_target)
    axis.set_xscale("log")
    axis.set_xlabel("peak learning rate")
    if has_target:
        axis.set_yscale("log")
        axis.set_ylabel("training tokens to the target, tuning seed")
    else:
        axis.set_ylabel("final validation loss of the tuning seed")
        loss_axis(axis)
    legend_above(axis)
    return figure


def _plot_rate(axis: Axes, rate: TunedRate, colour: Any, has_target: bool) -> None:
    """Plot the tuning trials of one batch size, with a quadratic in log rate near the best."""
    to_height: Any = np.exp if has_target else np.asarray  # with a target, losses are log tokens
    table, style = rate.trials, {"color": colour}
    finite = table[np.isfinite(table["loss"])]
    rates, losses = finite["learning_rate"], finite["loss"]
    label = f"batch {rate.batch_size}"
    axis.plot(rates, to_height(losses), "o", markersize=5, label=label, **style)
    style |= {"transform": axis.get_xaxis_transform()}
    pruned = table[table["state"] == "PRUNED"]["learning_rate"]
    axis.plot(pruned, [0.03] * len(pruned), "|", markersize=8, **style)
    missed = (table["state"] == "COMPLETE") & np.isinf(table["loss"])  # the target
    failed = table[(table["state"] == "FAILED") | missed]["learning_rate"]
    axis.plot(failed, [TOP_EDGE] * len(failed), "X", **style)
    if (vertex := rate.optimum.rate) is None:
        return
    best = int(np.argmin(losses.to_numpy()))
    near = slice(max(0, best - 2), best + 3)
    logs = np.log(rates.to_numpy()[near])
    coefficients = np.polyfit(logs, losses.to_numpy()[near], 2)
    grid = np.linspace(logs.min(), logs.max(), 60)
    axis.plot(np.exp(grid), to_height(np.polyval(coefficients, grid)), color=colour, linewidth=1)
    star: dict[str, Any] = {"color": colour, "markersize": 11, "markeredgecolor": "white"}
    axis.plot([vertex], [to_height(np.polyval(coefficients, np.log(vertex)))], "*", **star)


def plot_differences(policies: Policies) -> Figure | None:
    """Plot the paired differences between batch sizes with their intervals, tuned rates first."""
    results = [policy for policy in policies if isinstance(policy, PolicyResult)]
    compared = [policy for policy in results if policy.comparison.pairs]
    if not compared:
        return None
    policy = next((policy for policy in compared if policy.rates), compared[0])
    pairs, margin, unit = reported_pairs(policy), policy.comparison.margin, policy.comparison.unit
    figure, (axis,) = new_figure(1)
    heights, explained = np.arange(len(pairs))[::-1], set[str]()
    for height, pair in zip(heights, pairs, strict=True):
        verdict = "different" if pair.is_different else "undecided"
        verdict = "equal" if pair.is_equivalent else verdict
        colour, marker = VERDICTS[verdict]
        ends = [pair.difference.low, pair.difference.high]
        axis.plot(ends, [height, height], color=colour, linewidth=2)
        label = "" if verdict in explained else verdict
        axis.plot([pair.difference.value], [height], marker, color=colour, label=label)
        explained.add(verdict)
    axis.axvspan(-margin, margin, color="#009E73", alpha=0.12, label=f"±{margin:g} {unit}")
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.set_yticks(heights, [f"{p.batch_sizes[1]} − {p.batch_sizes[0]}" for p in pairs])
    axis.set_xlabel(f"difference of the final validation loss [{unit}], {policy.label}, 95 %")
    legend_above(axis)
    return figure


def plot_noise(sweep: Sweep, policies: Policies) -> Figure | None:
    """Plot the gradient noise scale against tokens."""
    tuned = next((policy for policy in policies if policy.rates), None)
    records = noise_records(sweep)
    policy = tuned or next(iter(policies), None)
    records = records[records["label"] == (policy.label if policy else "")]
    if not len(records):
        return None
    figure, (axis,) = new_figure(1)
    colours = batch_colours(records)
    for batch, group in records.groupby("batch_size"):
        means = group.groupby("tokens")[["trace", "square"]].mean()
        smooth = means.rolling(3, center=True, min_periods=1).mean()
        ratio = (smooth["trace"] / smooth["square"]).where(smooth["square"] > 0)
        size = int(str(batch))
        axis.plot(ratio.index, ratio, "o-", color=colours[size], label=f"batch {size}")
    axis.set_yscale("log")
    token_axis(axis)
    axis.set_ylabel("gradient noise scale [sequences]")
    legend_above(axis)
    return figure


def plot_steps(sweep: Sweep, policies: Policies) -> Figure | None:
    """Plot steps to the target against batch size, with the fitted curve and B_crit."""
    reached = [policy for policy in policies if isinstance(policy, Reached)]
    sizes = sorted({int(size) for policy in reached for size in policy.trials["batch_size"]})
    if not sizes:
        return None
    figure, (axis,) = new_figure(1)
    for index, policy in enumerate(reached):
        colour = POLICY_COLOURS[index % len(POLICY_COLOURS)]
        for is_censored, marker, suffix in ((False, "o", ""), (True, "^", ", more than")):
            rows = policy.trials[policy.trials["is_censored"] == is_censored]
            style: dict[str, Any] = {"color": colour, "linestyle": "none", "markersize": 5}
            label = f"{policy.label}{suffix}" if len(rows) else ""
            at = np.log2(rows["batch_size"].astype(float))
            axis.plot(at, rows["steps"], marker, label=label, **style)
        if policy.fit is None:
            continue
        grid, critical = np.geomspace(sizes[0], sizes[-1], 100), policy.fit.b_crit
        at, linear = np.log2(grid), policy.fit.e_min.value / grid
        fitted = policy.fit.s_min.value + linear
        axis.plot(at, fitted, color=colour, linewidth=1, label="S_min+E_min/B")
        axis.plot(at, linear, ":", color=GREY, linewidth=1, label="E_min/B")
        if sizes[0] < critical.value < sizes[-1]:
            axis.axvline(math.log2(critical.value), color=colour, linewidth=1, linestyle="--")
            ends = np.clip([critical.low, critical.high], sizes[0], sizes[-1])
            if np.isfinite(ends).all():
                label = f"B_crit {critical.value:.3g}"
                axis.axvspan(*np.log2(ends), color=colour, alpha=0.12, label=label)
    axis.set_yscale("log")
    axis.set_ylabel(f"steps to a validation loss of {sweep.plan.settings.target:g}")
    batch_axis(axis, sizes)
    legend_above(axis)
    return figure


def _loss_label(sweep: Sweep) -> str:
    label = sweep.plan.settings.traits.loss_label
    return f"[{label}]" if label else ""


def _diverged(sweep: Sweep) -> pd.DataFrame:
    trials = report_trials(sweep.trials)
    return trials[trials["cause"] == "diverged"]
