"""The figures of a report. Each `plot_*` function returns a matplotlib figure."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from sweep.analysis.answer import OUTSIDE, UNDECIDED, WITHIN, Answer
from sweep.analysis.checks import supports_fit
from sweep.analysis.frames import report_trials
from sweep.analysis.results import PolicyResult, Sweep
from sweep.config.numbers import format_count
from sweep.config.objective import Objective
from sweep.trial.files import replacing

Policies = Sequence[PolicyResult]
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DIVERGED_COLOR = "#B00020"
GREY = "#555555"
MARKERS, LINES = "os^DvPh", ("-", "--", ":", "-.")  # by policy
GREEN = "#009E73"
VERDICTS = {WITHIN: (GREEN, "D"), UNDECIDED: (GREY, "s"), OUTSIDE: ("#D55E00", "o")}
# Heights of marks of diverged trials by the objective's sign; pruned ones are at the other end.
EDGES = {1: 0.985, -1: 0.03}


def draw_figures(sweep: Sweep, cells: pd.DataFrame) -> dict[str, Figure | None]:
    """Draw the figures of a report; None for those that have nothing to show."""
    has_target = sweep.plan.settings.target is not None
    policies, answer = sweep.policies, sweep.answer()
    figures: dict[str, Figure | None] = {
        "answer": plot_answer(answer) if answer else None,
        "loss": None if has_target else plot_loss(sweep, cells),
        "steps": plot_steps(policies),
        "rates": plot_rates(policies, sweep.plan.settings.objective),
        "curves": plot_curves(sweep, cells),
        "throughput": plot_throughput(sweep, cells),
    }
    for axis in (axis for figure in figures.values() if figure for axis in figure.axes):
        if not np.isfinite(axis.dataLim.get_points()).all():
            axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", color=GREY)
            axis.set_yticks([])
    return figures


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG whose bytes depend on the picture alone."""
    with np.errstate(over="ignore"), replacing(path) as part:  # limits beyond the largest float
        figure.savefig(part, format="png", metadata={"Software": None})


def plot_answer(answer: Answer) -> Figure:
    """Plot the loss that each batch size gives up against the best, and its time of training."""
    figure, (gaps, times) = new_figure(panels=2)
    sizes = [row.batch_size for row in answer.batch_sizes]
    is_ratio, (scale, unit) = answer.compared.is_ratio, answer.compared.scale
    margin = scale * answer.tolerance
    known = [end for row in answer.batch_sizes for end in (row.gap, *row.gap_to_best) if end]
    top = 1.3 * max([2 * margin, *(scale * end for end in known)])
    for row in answer.batch_sizes:
        color, marker = VERDICTS[row.tolerance_verdict]
        low, high = row.gap_to_best
        style: dict[str, Any] = {"color": color, "label": row.tolerance_verdict}
        if (low, high) == (None, None):
            style |= {"fillstyle": "none", "label": "no interval"}
        else:
            ends = [scale * max(0.0, low or 0.0), top if high is None else scale * max(0.0, high)]
            gaps.plot([row.batch_size] * 2, ends, color=color, linewidth=2)
            if high is None:  # unbounded above
                gaps.plot(row.batch_size, top, "^", clip_on=False, color=color)
        if row.gap is not None:
            gaps.plot(row.batch_size, scale * max(0.0, row.gap), marker, clip_on=False, **style)
        if row.seconds is not None:
            times.plot(row.batch_size, row.seconds, marker, color=color)
    tolerance = f"tolerance, {answer.compared.write(answer.tolerance)}"
    gaps.axhspan(0, margin, color=GREEN, alpha=0.12, label=tolerance)
    gaps.set_yscale("symlog", linthresh=margin, subs=[2, 5])
    gaps.yaxis.set_major_formatter("{x:g}")
    gaps.yaxis.set_minor_formatter("{x:g}")
    gaps.set_ylim(0, top)
    what = "tokens" if is_ratio else answer.compared.title
    gaps.set_ylabel(f"{what} given up against the best [{unit}]".replace(" []", ""))
    longest = max((row.seconds or 0.0 for row in answer.batch_sizes), default=0.0) or 1.0
    purpose = "to the target" if is_ratio else "of training"
    times.set(ylim=(0, 1.1 * longest), ylabel=f"time {purpose}, median [seconds]")
    for axis in (gaps, times):
        _set_batch_axis(axis, sizes)
        axis.axvline(
            answer.recommended, color=GREY, linestyle=":", linewidth=1, label="recommended"
        )
    times.set_xlim(gaps.get_xlim())
    return with_legend(figure)


def plot_loss(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot final validation loss against batch size: seeds as points, means as lines."""
    figure, (axis,) = new_figure()
    _plot_by_batch(axis, sweep, cells, "final_valid_loss")
    axis.set_ylabel(f"{sweep.plan.settings.traits.objective.title} {_loss_unit(sweep)}")
    sign = sweep.plan.settings.objective.sign
    _mark_diverged(axis, report_trials(sweep.trials), "batch_size", sign)
    return with_legend(figure)


def plot_throughput(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot tokens per second and peak memory against batch size."""
    figure, (speed, memory) = new_figure(panels=2)
    _plot_by_batch(speed, sweep, cells, "tokens_per_second")
    _plot_by_batch(memory, sweep, cells, "peak_memory_bytes", 2.0**30)
    for axis, label in (
        (speed, f"training {sweep.plan.settings.traits.tokens} per second"),
        (memory, "peak memory [GiB]"),
    ):
        axis.axhline(0, linewidth=0)  # the margin at the top is a share of the whole height
        axis.set(ylabel=label, ylim=(0, None))
    speed.yaxis.set_major_formatter(lambda value, _: format_count(value))
    return with_legend(figure)


def _plot_by_batch(
    axis: Axes, sweep: Sweep, cells: pd.DataFrame, metric: str, scale: float = 1.0
) -> None:
    trials = report_trials(sweep.compared)
    complete = trials[trials["state"] == "COMPLETE"].astype({metric: float}).groupby("label")
    means = cells[cells["is_comparable"]]
    for label, (color, marker, line) in policy_styles(cells).items():
        if label in complete.groups:
            rows = complete.get_group(label)
            style: dict[str, Any] = {"markersize": 5, "alpha": 0.6, "markeredgewidth": 0}
            axis.plot(rows["batch_size"], rows[metric] / scale, marker, color=color, **style)
            rows = means[means["label"] == label]
            axis.plot(rows["batch_size"], rows[metric] / scale, line, color=color, label=label)
    _set_batch_axis(axis, cells["batch_size"])


def plot_curves(sweep: Sweep, cells: pd.DataFrame) -> Figure:
    """Plot training loss (or mean reward) and validation loss against tokens.

    Curves are means over the complete seeds; other trials have their own.
    """
    figure, axes = new_figure(panels=2)
    trials = report_trials(sweep.trials)
    unit = _loss_unit(sweep)
    colors = batch_colors(cells["batch_size"])
    styles = policy_styles(cells)
    metrics = {"train/loss": f"training loss {unit}"}
    if sweep.plan.settings.traits.samples:  # the training loss is a surrogate close to 0
        metrics = {"reward/mean": "mean reward of a step's completions"}
    objective = sweep.plan.settings.traits.objective
    metrics[objective.curve] = f"{objective.title.removeprefix('final ')} {unit}"
    own = trials["id"].where(trials["state"] != "COMPLETE", "")
    curves = trials[["id", "label", "batch_size"]].assign(curve=own)
    points = sweep.curves.astype({"id": object}).merge(curves, on="id")
    for axis, (metric, title) in zip(axes, metrics.items(), strict=True):
        measured = points.dropna(subset=metric) if metric in points else points.iloc[:0]
        for (label, batch, _), rows in measured.groupby(["label", "batch_size", "curve"]):
            groups = rows.groupby("tokens")[metric]
            means = groups.mean()[groups.size() == rows["id"].nunique()]  # all seeds
            _, _, line = styles[label]
            style = {"marker": "." if len(means) == 1 else "None", "color": colors[batch]}
            axis.plot(means.index, means, line, label=f"batch {batch}", **style)
        axis.set_ylabel(title)
        if metric.endswith("/loss"):
            _set_log_scale(axis, "y", least_ratio=2)
        _mark_diverged(axis, trials, "tokens", objective.sign if metric == objective.curve else 1)
        axis.set(xlabel=f"training {sweep.plan.settings.traits.tokens}", xlim=(0, None))
        axis.xaxis.set_major_formatter(lambda value, _: format_count(value))
        axis.xaxis.set_major_locator(MaxNLocator(5))
    for label, (_, _, line) in styles.items():
        axes[0].plot([], [], line, color=GREY, label=label)
    return with_legend(figure)


def plot_rates(policies: Policies, objective: Objective) -> Figure | None:
    """Plot the objective (or the tokens to the target) of the tuning trials against the rate."""
    tuned = [*zip((p for p in policies if p.rates), cycle(MARKERS), cycle(LINES))]
    rates = [rate for policy, _, _ in tuned for rate in policy.rates]
    if not any(np.isfinite(rate.trials["loss"]).any() for rate in rates):
        return None
    figure, (axis,) = new_figure()
    height_of = np.vectorize(objective.value, [float])
    colors = batch_colors(rate.batch_size for rate in rates)
    for rate, marker, line in ((r, marker, line) for p, marker, line in tuned for r in p.rates):
        color = colors[rate.batch_size]
        trials = rate.trials.set_index("learning_rate")
        losses, is_pruned = trials["loss"], trials["state"] == "PRUNED"
        measured = losses[np.isfinite(losses)]
        style: dict[str, Any] = {"color": color, "label": f"batch {rate.batch_size}"}
        axis.plot(measured.index, height_of(measured), marker, markersize=5, **style)
        pruned, lost = losses.index[is_pruned], losses.index[(losses == np.inf) & ~is_pruned]
        style = {"color": color, "markersize": 8, "transform": axis.get_xaxis_transform()}
        axis.plot(pruned, [EDGES[-objective.sign]] * len(pruned), "|", **style)
        axis.plot(lost, [EDGES[objective.sign]] * len(lost), "X", **style)
        if rate.optimum is not None:
            log_rates = rate.points.log_rates[np.isfinite(rate.points.log_rates)]
            log_rates = np.linspace(log_rates.min(), log_rates.max(), 100)
            fitted = height_of(rate.fit.losses_at(log_rates))
            axis.plot(np.exp(log_rates), fitted, line, color=color, linewidth=1)
            lowest = height_of(rate.fit.level)
            axis.plot(rate.optimum, lowest, "*", color=color, markersize=11, mec="white")
    for policy, marker, line in tuned if len(tuned) > 1 else ():
        axis.plot([], [], marker + line, color=GREY, label=policy.label)
    _set_log_scale(axis, "x")
    _set_log_scale(axis, "y", least_ratio=2)
    measure = "training tokens to the target" if objective.is_ratio else objective.title
    if objective.is_ratio:
        axis.yaxis.set_major_formatter(lambda value, _: format_count(value))
    axis.set(xlabel="peak learning rate", ylabel=f"{measure}, tuning seed")
    return with_legend(figure)


def plot_steps(policies: Policies) -> Figure | None:
    """Plot steps to the target against batch size, with the fitted curve and B_crit."""
    curves = {policy.label: policy.curve for policy in policies if policy.curve}
    sizes = sorted({n for curve in curves.values() for n in curve.trials["batch_size"]})
    if not sizes:
        return None
    figure, (axis,) = new_figure()
    for (name, curve), color in zip(curves.items(), COLORS, strict=False):
        for is_censored, rows in curve.trials.groupby("is_censored"):
            marker, label = ("^", f"{name}, more than") if is_censored else ("o", name)
            axis.plot(rows["batch_size"], rows["steps"], marker, color=color, label=label)
        if curve.fit is None:
            continue
        grid = np.geomspace(sizes[0], sizes[-1], 100)
        critical = curve.fit.b_crit
        linear = curve.fit.e_min.value / grid
        fitted = curve.fit.s_min.value + linear
        axis.plot(grid, fitted, color=color, linewidth=1, label="S_min+E_min/B")
        axis.plot(grid, linear, ":", color=GREY, linewidth=1, label="E_min/B")
        if supports_fit(curve) and curve.covers(critical.value):
            label = f"B_crit {critical.value:.3g}"
            axis.axvline(critical.value, color=color, linewidth=1, linestyle="--", label=label)
            low, high = np.clip(critical[1:], sizes[0], sizes[-1])
            axis.axvspan(low, high, color=color, alpha=0.12)
    _set_log_scale(axis, "y")
    _set_batch_axis(axis, sizes)
    axis.set_ylabel(f"steps to a validation loss of {next(iter(curves.values())).target:g}")
    return with_legend(figure)


def new_figure(panels: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.4 + 3.8 * panels, 4.3), layout="constrained", dpi=150)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def with_legend(figure: Figure) -> Figure:
    """Put a legend above the panels, where it hides no point; each label appears once."""
    by_label: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            by_label.setdefault(label, handle)
    if by_label:
        columns = min(len(by_label), int(figure.get_figwidth() / 1.7))
        position: dict[str, Any] = {"loc": "outside upper left", "ncols": columns}
        figure.legend(by_label.values(), by_label, frameon=False, fontsize=9, **position)
    return figure


def policy_styles(cells: pd.DataFrame) -> dict[Any, tuple[str, str, str]]:
    """Return color, marker and line of each policy."""
    styles = zip(*map(cycle, (COLORS, MARKERS, LINES)), strict=False)
    return dict(zip(cells["label"].unique(), styles, strict=False))


def batch_colors(batch_sizes: Iterable[int]) -> dict[Any, Any]:
    """Return the color of each batch size, dark for small and light for large."""
    sizes = sorted(set(batch_sizes))
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.88, len(sizes)))
    return dict(zip(sizes, map(tuple, shades), strict=True))


def _set_batch_axis(axis: Axes, batches: Iterable[int]) -> None:
    sizes = sorted(set(batches))
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes], rotation=45 if len(sizes) > 8 else 0)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("batch size")


def _set_log_scale(axis: Axes, name: Literal["x", "y"], least_ratio: float = 1.0) -> None:
    """Use a log scale with plain numbers if the largest value is over `least_ratio` the least."""
    low, high = axis.dataLim.intervalx if name == "x" else axis.dataLim.intervaly
    if not 0 < least_ratio * low < high:  # without data the limits are infinite
        return
    with np.errstate(over="ignore"):
        axis.set(**{f"{name}scale": "log"})
    scaled = axis.xaxis if name == "x" else axis.yaxis
    subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
    scaled.set_major_locator(LogLocator(subs=subs))
    scaled.set_minor_locator(NullLocator())
    scaled.set_major_formatter("{x:g}")


def _mark_diverged(axis: Axes, trials: pd.DataFrame, x: str, sign: int) -> None:
    diverged = trials.loc[trials["cause"] == "diverged", x]
    if len(diverged):
        style: dict[str, Any] = {"color": DIVERGED_COLOR, "label": f"diverged ({len(diverged)})"}
        style |= {"zorder": 5, "transform": axis.get_xaxis_transform()}
        axis.plot(diverged, [EDGES[sign]] * len(diverged), "X", **style)


def _loss_unit(sweep: Sweep) -> str:
    label = sweep.plan.settings.traits.objective.label
    return f"[{label}]" if label else ""
