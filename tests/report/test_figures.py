"""What the figures show, read back from their artists."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweep.analysis.comparison import compare_batch_sizes
from sweep.analysis.frames import Sweep, load_sweep
from sweep.report import figures
from sweep.report.figures import TOP_EDGE, batch_colours


@pytest.fixture
def mixed(mixed_sweep: Path) -> tuple[Sweep, Any]:
    loaded = load_sweep(mixed_sweep)
    return loaded, compare_batch_sizes(loaded.trials)


def test_every_complete_seed_is_a_point_and_only_whole_cells_are_joined(mixed: Any) -> None:
    loaded, cells = mixed
    (axis,) = figures.plot_loss(loaded, cells).axes
    drawn = np.concatenate([x.get_ydata() for x in axis.lines if x.get_linestyle() == "None"])
    losses = loaded.trials["final_valid_loss"].dropna()
    assert sorted(y for y in drawn if y != TOP_EDGE) == sorted(losses)
    lines = {x.get_label(): x for x in axis.lines if x.get_linestyle() != "None"}
    assert list(lines["fixed 1e-3"].get_xdata()) == [4.0]
    means = cells.loc[cells["policy"] != "fixed", "final_valid_loss"]
    assert list(lines["sqrt:0.001@32"].get_ydata()) == list(means)


def test_ticks_are_the_batch_sizes(mixed: Any) -> None:
    figure = figures.plot_loss(*mixed)
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["4", "8", "16", "32", "64"]


@pytest.mark.parametrize("plot", [figures.plot_loss, figures.plot_curves, figures.plot_pareto])
def test_diverged_trials_stand_at_the_top_edge_and_are_counted(plot: Any, mixed: Any) -> None:
    axis = plot(*mixed).axes[0]
    (cross,) = [line for line in axis.lines if str(line.get_label()).startswith("diverged (1)")]
    assert cross.get_marker() == "X" and list(cross.get_ydata()) == [TOP_EDGE]
    if plot is figures.plot_loss:
        assert list(cross.get_xdata()) == [math.log2(64)]


def test_bars_add_up_to_the_total_time(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "s")
    loaded = load_sweep(tmp_path / "s")
    cells = compare_batch_sizes(loaded.trials)
    (axis,) = figures.plot_time(loaded, cells).axes
    tops = {}
    for bar in axis.patches:
        centre = round(bar.get_x() + bar.get_width() / 2, 6)
        tops[centre] = max(tops.get(centre, 0), bar.get_y() + bar.get_height())
    assert axis.get_ylabel() == "time of one trial [seconds]"
    assert sorted(tops.values()) == pytest.approx(sorted(cells["seconds_total"]))


def test_curves_hold_every_point_of_every_trial(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "s", batches="4,8")
    loaded = load_sweep(tmp_path / "s")
    cells = compare_batch_sizes(loaded.trials)
    train, valid = figures.plot_curves(loaded, cells).axes
    assert [len(line.get_xdata()) for line in train.lines] == [100, 100]
    assert [len(line.get_xdata()) for line in valid.lines] == [20, 20]
    assert train.lines[0].get_color() == batch_colours(cells)[4]


def test_many_seeds_are_drawn_as_means(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "s", batches="4,8", seeds=6)
    loaded = load_sweep(tmp_path / "s")
    _, axis = figures.plot_curves(loaded, compare_batch_sizes(loaded.trials)).axes
    assert len(axis.lines) == 2
    ends = loaded.curves[loaded.curves["valid/loss"].notna()].groupby("id", observed=True).last()
    ends["batch_size"] = loaded.trials.set_index("id")["batch_size"]
    expected = ends.groupby("batch_size")["valid/loss"].mean()
    assert [line.get_ydata()[-1] for line in axis.lines] == pytest.approx(list(expected))


def test_the_front_is_a_staircase_of_means(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "s", seeds=3)
    loaded = load_sweep(tmp_path / "s")
    cells = compare_batch_sizes(loaded.trials)
    (axis,) = figures.plot_pareto(loaded, cells).axes
    (front,) = [line for line in axis.lines if line.get_drawstyle() == "steps-post"]
    assert sorted(front.get_ydata()) == sorted(cells.loc[cells["is_on_front"], "final_valid_loss"])
