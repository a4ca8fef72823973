"""The data in the figures, read back from their artists."""

import numpy as np
import pytest

from sweep.analysis.frames import compare_batch_sizes
from sweep.analysis.results import load_sweep
from sweep.config.objective import Objective
from sweep.report import figures
from sweep.report.figures import EDGES, batch_colors


def read(path):
    sweep = load_sweep(path)
    return sweep, compare_batch_sizes(sweep.trials)


def test_every_complete_seed_is_a_point_and_only_whole_cells_are_joined(mixed):
    sweep, cells = read(mixed)
    (axis,) = figures.plot_loss(sweep, cells).axes
    drawn = np.concatenate([x.get_ydata() for x in axis.lines if x.get_linestyle() == "None"])
    losses = sweep.trials["final_valid_loss"].dropna()
    assert sorted(y for y in drawn if y != EDGES[1]) == sorted(losses)
    lines = {x.get_label(): x for x in axis.lines if x.get_linestyle() != "None"}
    assert list(lines["fixed 1e-3"].get_xdata()) == [16]
    means = cells.loc[cells["policy"] != "fixed", "final_valid_loss"]
    assert list(lines["sqrt:0.001@32"].get_ydata()) == list(means)


def test_ticks_are_the_batch_sizes(mixed):
    figure = figures.plot_loss(*read(mixed))
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["4", "8", "16", "32", "64"]


@pytest.mark.parametrize("plot", [figures.plot_loss, figures.plot_curves])
def test_diverged_trials_are_at_the_top_edge_and_are_counted(plot, mixed):
    axis = plot(*read(mixed)).axes[0]
    (cross,) = [line for line in axis.lines if line.get_label() == "diverged (1)"]
    assert cross.get_marker() == "X" and list(cross.get_ydata()) == [EDGES[1]]
    if plot is figures.plot_loss:
        assert list(cross.get_xdata()) == [64]


def test_curves_hold_every_point_of_every_trial(plain):
    sweep, cells = read(plain)
    axes = figures.plot_curves(sweep, cells).axes
    for axis, metric in zip(axes, ("train/loss", "valid/loss"), strict=True):
        counts = sweep.curves.groupby("id", observed=True)[metric].count()
        lengths = [len(line.get_xdata()) for line in axis.lines]
        assert [length for length in lengths if length] == counts.to_list()
    assert axes[0].lines[0].get_color() == batch_colors(cells["batch_size"])[4]


def test_a_curve_is_the_mean_of_the_complete_seeds_and_other_trials_have_their_own(mixed):
    sweep, cells = read(mixed)
    axis = figures.plot_curves(sweep, cells).axes[0]
    curves = [line for line in axis.lines if len(line.get_xdata()) and line.get_marker() == "None"]
    is_complete = sweep.trials["state"] == "COMPLETE"
    points = sweep.curves[sweep.curves["train/loss"].notna()]
    others = set(points["id"]) - set(sweep.trials.loc[is_complete, "id"])
    assert len(curves) == len(cells) + len(others) and others
    is_first = (sweep.trials["batch_size"] == 4) & (sweep.trials["policy"] == "fixed")
    points = points[points["id"].isin(sweep.trials.loc[is_complete & is_first, "id"])]
    means = points.groupby("tokens")["train/loss"].mean()
    assert points["id"].nunique() == 2
    assert any(list(line.get_ydata()) == pytest.approx(means.to_list()) for line in curves)


def test_the_rates_have_their_points_curve_and_vertex_and_marks_of_pruned_trials(tuned):
    sweep, _ = read(tuned)
    is_lowest = (sweep.trials["stage"] == "tune") & (sweep.trials["batch_size"] == 4)
    lowest = sweep.trials.loc[is_lowest, "learning_rate"].idxmin()
    sweep.trials.loc[lowest, "state"] = "PRUNED"
    sweep.trials.loc[lowest, "final_valid_loss"] = np.nan
    policies = sweep.policies
    (axis,) = figures.plot_rates(policies, sweep.plan.settings.objective).axes
    rates = [rate for policy in policies for rate in policy.rates]
    lines = [line for line in axis.lines if len(line.get_xdata())]
    stars = [line for line in lines if line.get_marker() == "*"]
    assert [line.get_xdata()[0] for line in stars] == [
        rate.optimum for rate in rates if rate.is_inside
    ]
    rates = [rate for rate in rates if rate.is_inside]
    for rate, star in zip(rates, stars, strict=True):
        own = [line for line in lines if line.get_color() == star.get_color()]
        (points,) = [line for line in own if line.get_marker() == "o"]
        measured = rate.trials.dropna(subset=["loss"])
        assert list(points.get_xdata()) == list(measured["learning_rate"])
        (curve,) = [line for line in own if line.get_marker() == "None"]
        assert min(curve.get_ydata()) == pytest.approx(star.get_ydata()[0], abs=1e-3)
        assert star.get_ydata()[0] <= min(curve.get_ydata()) + 1e-9
        pruned = [line for line in own if line.get_marker() == "|"]
        assert len(pruned) == (rate.batch_size == 4)
        for line in pruned:
            assert list(line.get_xdata()) == [sweep.trials.loc[lowest, "learning_rate"]]
            assert list(line.get_ydata()) == [EDGES[-1]]


def test_the_rates_show_a_maximized_objective_by_its_own_name_and_sign(tuned):
    sweep, _ = read(tuned)
    accuracy = Objective("final_valid_accuracy", "maximize")
    losses, shown = (
        figures.plot_rates(sweep.policies, objective).axes[0]
        for objective in (sweep.plan.settings.objective, accuracy)
    )
    assert shown.get_ylabel() == "final validation accuracy, tuning seed"
    for line, other in zip(losses.lines, shown.lines, strict=True):
        if line.get_marker() == "o":
            assert list(other.get_ydata()) == [-value for value in line.get_ydata()]
