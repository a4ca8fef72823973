"""The figures of a report. Each `plot_*` function returns a matplotlib figure."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from sweep.analysis.checks import PolicyResult
from sweep.analysis.comparison import cell_records, report_trials
from sweep.analysis.frames import Sweep, curves_by_trial
from sweep.analysis.optimum import TunedRate
from sweep.analysis.target import Reached
from sweep.config.numbers import format_count
from sweep.report.context import Policies, noise_records, reported_pairs
from sweep.trial.files import replacing


class PolicyStyle(NamedTuple):
    """Colour, marker, line and hatch of one learning-rate policy."""

    colour: str
    marker: str
    line: str
    hatch: str


POLICY_STYLES = (
    PolicyStyle("#0072B2", "o", "-", ""),
    PolicyStyle("#D55E00", "s", "--", "//"),
    PolicyStyle("#009E73", "^", ":", ".."),
    PolicyStyle("#CC79A7", "D", "-.", "xx"),
    PolicyStyle("#E69F00", "v", "-", "++"),
    PolicyStyle("#56B4E9", "P", "--", ""),
    PolicyStyle("#000000", "h", ":", "//"),
)
TIME_PARTS = {
    "training": "#0072B2",
    "compile": "#E69F00",
    "evaluation": "#009E73",
    "checkpoint": "#CC79A7",
    "noise": "#56B4E9",
    "other": "#999999",
}
TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
VERDICTS = {"different": ("#D55E00", "o"), "equal": ("#009E73", "D"), "undecided": ("#555555", "s")}
DIVERGED_COLOUR = "#B00020"
GREY = "#555555"
TOP_EDGE = 0.985  # height of the crosses of diverged trials, as a fraction of the axes
MANY_SIZES = 8  # with more batch sizes, their labels are rotated


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
        if not np.isfinite(axis.dataLim.get_points()).all():
            axis.text(0.5, 0.5, "no data yet", transform=axis.transAxes, ha="center", color=GREY)
            axis.set_yticks([])
    return figures


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG atomically; its bytes depend on the picture alone."""
    with replacing(path) as part:
        figure.savefig(part, format="png", metadata={"Software": None})


def plot_loss(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot final validation loss against batch size: seeds as points, means as lines."""
    figure, (axis,) = new_figure()
    _plot_by_batch(axis, sweep, cells, "final_valid_loss")
    axis.set_ylabel(f"final validation loss {_loss_unit(sweep)}")
    trials, styles = report_trials(sweep.trials), policy_styles(cells)
    for label, style in styles.items():
        suffix = f", {label}" if len(styles) > 1 else ""
        rows = trials[trials["label"] == label]
        _mark_diverged(axis, rows, "batch_size", style.colour, suffix)
    add_legend(axis)
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
    add_legend(speed)
    return figure


def _plot_by_batch(
    axis: Axes, sweep: Sweep, cells: pd.DataFrame, metric: str, scale: float = 1.0
) -> None:
    """Plot each complete trial as a point, and the means of comparable cells as a line."""
    trials = report_trials(sweep.trials)
    complete = trials[trials["state"] == "COMPLETE"]
    comparable = cells[cells["is_comparable"]]
    for label, style in policy_styles(cells).items():
        rows, means = (table[table["label"] == label] for table in (complete, comparable))
        if rows.empty:
            continue
        points: dict[str, Any] = {"markersize": 5, "alpha": 0.6, "markeredgewidth": 0}
        values = rows[metric].astype(float) / scale
        axis.plot(rows["batch_size"], values, style.marker, color=style.colour, **points)
        line: dict[str, Any] = {"color": style.colour, "linewidth": 1.5, "label": label}
        axis.plot(means["batch_size"], means[metric] / scale, style.line, **line)
    _set_batch_axis(axis, cells["batch_size"])


def plot_time(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot the mean time of a trial against batch size, stacked by part."""
    figure, (axis,) = new_figure()
    styles, complete = policy_styles(cells), cells[cells["complete"] > 0]
    seconds = complete[[f"seconds_{part}" for part in TIME_PARTS if part != "other"]].fillna(0.0)
    seconds["seconds_other"] = (complete["seconds_total"] - seconds.sum(axis=1)).clip(lower=0)
    longest = complete["seconds_total"].max()
    unit, name = next((unit for unit in TIME_UNITS if longest >= 2 * unit[0]), TIME_UNITS[-1])
    sizes = np.unique(cells["batch_size"].to_numpy(int))
    width = 0.7 / max(1, len(styles))
    for index, (label, style) in enumerate(styles.items()):
        rows = complete[complete["label"] == label]
        shift = (index - (len(styles) - 1) / 2) * width
        positions = np.searchsorted(sizes, rows["batch_size"].to_numpy(int)) + shift
        bottom = np.zeros(len(rows))
        for part, colour in TIME_PARTS.items():
            heights = seconds.loc[rows.index, f"seconds_{part}"].to_numpy(float) / unit
            bars: dict[str, Any] = {"edgecolor": "white", "hatch": style.hatch, "linewidth": 0.6}
            axis.bar(positions, heights, width, bottom, color=colour, **bars)
            bottom += heights
    axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axis.set_xlim(-0.6, len(sizes) - 0.4)
    axis.set_xlabel("batch size [sequences per step]")
    axis.set_ylabel(f"time of one trial [{name}]")
    handles = [
        Patch(color=colour, label=part)
        for part, colour in TIME_PARTS.items()
        if seconds[f"seconds_{part}"].sum() > 0.001 * longest
    ]
    if len(styles) > 1:
        policy: dict[str, Any] = {"facecolor": "#dddddd", "edgecolor": GREY}
        handles += [Patch(**policy, hatch=s.hatch, label=label) for label, s in styles.items()]
    add_legend(axis, handles)
    return figure


def plot_curves(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot training loss (or mean reward) and validation loss of every trial against tokens."""
    figure, axes = new_figure(2, 11)
    trials = report_trials(sweep.trials)
    rows = trials.set_index("id").to_dict("index")
    colours, styles, unit = batch_colours(cells), policy_styles(cells), _loss_unit(sweep)
    training = ("train/loss", f"training loss {unit}")
    if sweep.plan.settings.traits.samples:  # the training loss is a surrogate close to 0
        training = ("reward/mean", "mean reward of a step's completions")
    validation = ("valid/loss", f"validation loss, milestone set {unit}")
    for axis, (metric, title) in zip(axes, (training, validation), strict=True):
        for trial, tokens, values in curves_by_trial(sweep, metric):
            if row := rows.get(trial):
                colour, style = colours[row["batch_size"]], styles[row["label"]]
                axis.plot(tokens, values, style.line, color=colour, linewidth=1.2, alpha=0.75)
        axis.set_ylabel(title)
        if metric.endswith("/loss"):
            _set_log_scale(axis, "y", least_ratio=2)
        _mark_diverged(axis, trials, "tokens")
        _set_token_axis(axis)
    _add_side_legend(figure, cells, lambda style: {"linestyle": style.line})
    return figure


def plot_pareto(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot final validation loss against total time, with the Pareto front of the means."""
    figure, (axis,) = new_figure(width=8.6)
    colours, styles = batch_colours(cells), policy_styles(cells)
    trials, x, y = report_trials(sweep.trials), "seconds_total", "final_valid_loss"
    complete, measured = trials[trials["state"] == "COMPLETE"], cells[cells["complete"] > 0]
    for label, style in styles.items():
        for table, size, edge in ((complete, 16, "none"), (measured, 70, "black")):
            rows = table[table["label"] == label]
            points: dict[str, Any] = {"s": size, "edgecolors": edge, "zorder": 2 + size / 70}
            points["c"] = [colours[batch] for batch in rows["batch_size"]]
            axis.scatter(rows[x], rows[y], marker=style.marker, **points)
    for cell in cell_records(measured):
        text, offset = str(cell["batch_size"]), (6, 6)
        axis.annotate(text, (cell[x], cell[y]), offset, textcoords="offset points", size=9)
    front = cells[cells["is_on_front"]].sort_values(x)
    line: dict[str, Any] = {"color": GREY, "linewidth": 1.2, "label": "Pareto front of the means"}
    axis.plot(front[x], front[y], drawstyle="steps-post", zorder=1, **line)
    _set_log_scale(axis, "x", least_ratio=10)
    axis.set_xlabel("total time of one trial [seconds]")
    axis.set_ylabel(f"final validation loss {_loss_unit(sweep)}")
    _mark_diverged(axis, trials, x)
    _add_side_legend(figure, cells, lambda style: {"linestyle": "none", "marker": style.marker})
    return figure


def plot_rates(sweep: Sweep, policies: Policies) -> Figure | None:
    """Plot the loss (or the tokens to the target) of the tuning trials against the rate."""
    rates = [rate for policy in policies for rate in policy.rates]
    if not any(np.isfinite(rate.trials["loss"]).any() for rate in rates):
        return None
    has_target = sweep.plan.settings.target is not None
    figure, (axis,) = new_figure()
    colours = batch_colours(pd.DataFrame({"batch_size": [rate.batch_size for rate in rates]}))
    for rate in rates:
        _plot_rate(axis, rate, colours[rate.batch_size], has_target)
    _set_log_scale(axis, "x")
    _set_log_scale(axis, "y", least_ratio=2)
    measure = "training tokens to the target" if has_target else "final validation loss"
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel(f"{measure}, tuning seed")
    add_legend(axis)
    return figure


def _plot_rate(axis: Axes, rate: TunedRate, colour: Any, has_target: bool) -> None:
    """Plot the tuning trials of one batch size, with a quadratic in log rate near the best."""
    to_height: Any = np.exp if has_target else np.asarray  # with a target, losses are log tokens
    table, style = rate.trials, {"color": colour}
    finite = table[np.isfinite(table["loss"])]
    rates, losses = finite["learning_rate"].to_numpy(), finite["loss"].to_numpy()
    label = f"batch {rate.batch_size}"
    axis.plot(rates, to_height(losses), "o", markersize=5, label=label, **style)
    edge: dict[str, Any] = {**style, "transform": axis.get_xaxis_transform()}
    pruned = table.loc[table["state"] == "PRUNED", "learning_rate"]
    axis.plot(pruned, [0.03] * len(pruned), "|", markersize=8, **edge)
    missed = (table["state"] == "COMPLETE") & np.isinf(table["loss"])  # missed the target
    failed = table.loc[(table["state"] == "FAILED") | missed, "learning_rate"]
    axis.plot(failed, [TOP_EDGE] * len(failed), "X", **edge)
    if (vertex := rate.optimum.rate) is None:
        return
    best = int(np.argmin(losses))
    near = slice(max(0, best - 2), best + 3)
    quadratic = np.polynomial.Polynomial.fit(np.log(rates[near]), losses[near], 2)
    grid, fitted = quadratic.linspace(60)
    axis.plot(np.exp(grid), to_height(fitted), linewidth=1, **style)
    star: dict[str, Any] = {**style, "markersize": 11, "markeredgecolor": "white"}
    axis.plot([vertex], [to_height(quadratic(np.log(vertex)))], "*", **star)


def plot_differences(policies: Policies) -> Figure | None:
    """Plot the paired differences between batch sizes with their intervals, tuned rates first."""
    results = [policy for policy in policies if isinstance(policy, PolicyResult)]
    compared = [policy for policy in results if policy.comparison.pairs]
    if not compared:
        return None
    policy = next((policy for policy in compared if policy.rates), compared[0])
    pairs, margin, unit = reported_pairs(policy), policy.comparison.margin, policy.comparison.unit
    figure, (axis,) = new_figure()
    heights = range(len(pairs))[::-1]
    for height, pair in zip(heights, pairs, strict=True):
        verdict = "different" if pair.is_different else "undecided"
        verdict = "equal" if pair.is_equivalent else verdict
        colour, marker = VERDICTS[verdict]
        ends = [pair.difference.low, pair.difference.high]
        axis.plot(ends, [height, height], color=colour, linewidth=2)
        axis.plot([pair.difference.value], [height], marker, color=colour, label=verdict)
    axis.axvspan(-margin, margin, color="#009E73", alpha=0.12, label=f"±{margin:g} {unit}")
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.set_yticks(heights, [f"{p.batch_sizes[1]} − {p.batch_sizes[0]}" for p in pairs])
    axis.set_xlabel(f"difference of the final validation loss [{unit}], {policy.label}, 95 %")
    add_legend(axis)
    return figure


def plot_noise(sweep: Sweep, policies: Policies) -> Figure | None:
    """Plot the gradient noise scale against tokens, of the tuned policy if there is one."""
    policy = next((policy for policy in policies if policy.rates), next(iter(policies), None))
    records = noise_records(sweep)
    records = records[records["label"] == (policy.label if policy else "")]
    if records.empty:
        return None
    figure, (axis,) = new_figure()
    colours = batch_colours(records)
    for batch, group in records.groupby("batch_size"):
        means = group.groupby("tokens")[["trace", "square"]].mean()
        smooth = means.rolling(3, center=True, min_periods=1).mean()
        ratio = (smooth["trace"] / smooth["square"]).where(smooth["square"] > 0)
        axis.plot(ratio.index, ratio, "o-", color=colours[int(str(batch))], label=f"batch {batch}")
    _set_log_scale(axis, "y")
    _set_token_axis(axis)
    axis.set_ylabel("gradient noise scale [sequences]")
    add_legend(axis)
    return figure


def plot_steps(sweep: Sweep, policies: Policies) -> Figure | None:
    """Plot steps to the target against batch size, with the fitted curve and B_crit."""
    reached = [policy for policy in policies if isinstance(policy, Reached)]
    sizes = sorted({int(size) for policy in reached for size in policy.trials["batch_size"]})
    if not sizes:
        return None
    figure, (axis,) = new_figure()
    for policy, (colour, *_) in zip(reached, POLICY_STYLES, strict=False):
        for is_censored, marker, suffix in ((False, "o", ""), (True, "^", ", more than")):
            rows = policy.trials[policy.trials["is_censored"] == is_censored]
            if len(rows):
                style: dict[str, Any] = {"color": colour, "linestyle": "none", "markersize": 5}
                style["label"] = policy.label + suffix
                axis.plot(rows["batch_size"], rows["steps"], marker, **style)
        if policy.fit is None:
            continue
        grid, critical = np.geomspace(sizes[0], sizes[-1], 100), policy.fit.b_crit
        linear = policy.fit.e_min.value / grid
        fitted = policy.fit.s_min.value + linear
        axis.plot(grid, fitted, color=colour, linewidth=1, label="S_min+E_min/B")
        axis.plot(grid, linear, ":", color=GREY, linewidth=1, label="E_min/B")
        if sizes[0] < critical.value < sizes[-1]:
            label = f"B_crit {critical.value:.3g}"
            axis.axvline(critical.value, color=colour, linewidth=1, linestyle="--", label=label)
            ends = np.clip([critical.low, critical.high], sizes[0], sizes[-1])
            axis.axvspan(*ends, color=colour, alpha=0.12)
    _set_log_scale(axis, "y")
    axis.set_ylabel(f"steps to a validation loss of {sweep.plan.settings.target:g}")
    _set_batch_axis(axis, sizes)
    add_legend(axis)
    return figure


def new_figure(panels: int = 1, width: float = 7.2) -> tuple[Figure, list[Axes]]:
    """Create a figure with panels in a row; the width is in inches."""
    figure = Figure(figsize=(width, 4.3), layout="constrained", dpi=150)
    axes = [figure.add_subplot(1, panels, index + 1) for index in range(panels)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def add_legend(axis: Axes, handles: Sequence[Artist] = ()) -> None:
    """Put a legend above the axes, where it hides no point; each label appears once."""
    handles = handles or axis.get_legend_handles_labels()[0]
    by_label = {artist.get_label(): artist for artist in handles}
    if by_label:
        position: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.01)}
        position["ncols"] = min(4, len(by_label))
        axis.legend(handles=list(by_label.values()), frameon=False, fontsize=9, **position)


def _add_side_legend(
    figure: Figure, cells: pd.DataFrame, policy_handle: Callable[[PolicyStyle], dict[str, Any]]
) -> None:
    """Explain colours of batch sizes, styles of policies, and what the first panel labels."""
    styles = policy_styles(cells)
    handles: list[Any] = [
        Line2D([], [], color=colour, linewidth=3, label=f"batch {batch}")
        for batch, colour in batch_colours(cells).items()
    ]
    if len(styles) > 1:
        handles += [
            Line2D([], [], color=GREY, label=label, **policy_handle(style))
            for label, style in styles.items()
        ]
    handles += figure.axes[0].get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)


def policy_styles(cells: pd.DataFrame) -> dict[str, PolicyStyle]:
    """Return the style of each policy, in the plan's order."""
    labels = dict.fromkeys(cells["label"])
    return {label: POLICY_STYLES[i % len(POLICY_STYLES)] for i, label in enumerate(labels)}


def batch_colours(cells: pd.DataFrame) -> dict[int, Any]:
    """Return the colour of each batch size, dark for small and light for large."""
    sizes = sorted({int(batch) for batch in cells["batch_size"]})
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.88, len(sizes)))
    return {size: tuple(shade) for size, shade in zip(sizes, shades, strict=True)}


def _set_batch_axis(axis: Axes, batches: Iterable[int]) -> None:
    """Use a log scale for x with the batch sizes as ticks."""
    sizes = sorted({int(batch) for batch in batches})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    if len(sizes) > MANY_SIZES:
        axis.tick_params(axis="x", labelrotation=45)
    axis.set_xlabel("batch size [sequences per step]")


def _set_token_axis(axis: Axes) -> None:
    axis.set_xlabel("training tokens")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(lambda value, _: format_count(value))
    axis.xaxis.set_major_locator(MaxNLocator(5))


def _set_log_scale(axis: Axes, name: Literal["x", "y"], least_ratio: float = 1.0) -> None:
    """Use a log scale with plain numbers if the largest value is over `least_ratio` the least."""
    low, high = axis.dataLim.intervalx if name == "x" else axis.dataLim.intervaly
    if not 0 < least_ratio * low < high:  # without data the limits are infinite
        return
    axis.set(**{f"{name}scale": "log"})
    scaled = axis.xaxis if name == "x" else axis.yaxis
    subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
    scaled.set_major_locator(LogLocator(subs=subs))
    scaled.set_minor_locator(NullLocator())
    scaled.set_major_formatter("{x:g}")


def _mark_diverged(
    axis: Axes, trials: pd.DataFrame, x: str, colour: str = DIVERGED_COLOUR, suffix: str = ""
) -> None:
    """Draw a cross at the top edge for each diverged trial; their number is in the legend."""
    diverged = trials[trials["cause"] == "diverged"]
    if len(diverged):
        label = f"diverged ({len(diverged)}){suffix}"
        style: dict[str, Any] = {"color": colour, "markersize": 7, "zorder": 5, "label": label}
        style["transform"] = axis.get_xaxis_transform()
        axis.plot(diverged[x], [TOP_EDGE] * len(diverged), "X", **style)


def _loss_unit(sweep: Sweep) -> str:
    label = sweep.plan.settings.traits.loss_label
    return f"[{label}]" if label else ""
