"""The data in the charts, read back from their specifications."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.analysis.results import load_sweep
from sweep.analysis.tables import compare_batch_sizes
from sweep.config.arms import batch_colors
from sweep.report import charts
from sweep.report.vega import SIZE, TOP, channel, layer
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.analysis.made_up_sweeps import MAXIMIZED, write_clear_results, write_clear_sweep


def layers(chart, mark, panel=0, **properties):
    """Return the layers of a panel with this mark and these properties."""
    found = [layer for layer in chart.panels[panel]["layer"] if layer["mark"]["type"] == mark]
    return [layer for layer in found if properties.items() <= layer["mark"].items()]


def values(chart, mark, field, panel=0, **properties):
    rows = [
        row for layer in layers(chart, mark, panel, **properties) for row in layer["data"]["values"]
    ]
    return [row[field] for row in rows]


def test_every_complete_seed_is_a_point_and_only_whole_cells_are_joined(mixed):
    sweep = load_sweep(mixed)
    chart = charts.plot_loss(sweep)
    losses = sweep.trials["final_valid_loss"].dropna()
    seeds = values(chart, "point", "final validation loss", opacity=0.5)
    assert sorted(seeds) == pytest.approx(sorted(losses), rel=1e-5)
    (lines,) = layers(chart, "line")
    joined = {(row["policy"], row[SIZE]) for row in lines["data"]["values"]}
    assert {size for policy, size in joined if policy == "fixed 1e-3"} == {16}
    assert {size for policy, size in joined if policy != "fixed 1e-3"} == {4, 8, 16, 32, 64}


def test_the_mean_has_its_interval_from_three_seeds_on(tuned, plain):
    sweep = load_sweep(tuned)
    (rules,) = layers(charts.plot_loss(sweep), "rule")
    cells = compare_batch_sizes(sweep.trials).set_index(["label", "batch_size"])
    for row in rules["data"]["values"]:
        cell = cells.loc[(row["policy"], row[SIZE])]
        half = 4.303 * cell["spread"] / 3**0.5  # t, 2 degrees of freedom
        assert row["high"] - row["low"] == pytest.approx(2 * half, abs=2e-4)
    assert not layers(charts.plot_loss(load_sweep(plain)), "rule")


def test_a_policy_that_others_squeeze_has_a_panel_of_its_own(tmp_path):
    def change(row):
        return {"final_valid_loss": 3 + row.batch_size / (1000 if row.policy == "tuned" else 10)}

    write_fake_sweep(tmp_path / "s", lrs=("1e-3", "tuned"), seeds=3, batches="4,64", change=change)
    both, alone = charts.plot_loss(load_sweep(tmp_path / "s")).panels
    domains = [panel["layer"][0]["encoding"]["y"]["scale"]["domain"] for panel in (both, alone)]
    assert domains[0][1] > 9 and domains[1][1] < 3.1
    assert {row["policy"] for row in alone["layer"][0]["data"]["values"]} == {"tuned"}


def test_a_batch_size_has_one_color_in_every_chart_and_a_tick(mixed):
    sweep = load_sweep(mixed)
    expected = batch_colors([4, 8, 16, 32, 64])
    drawn = [chart for chart in charts.plot_all(sweep).values() if chart]
    encodings = [la["encoding"] for c in drawn for panel in c.panels for la in panel["layer"]]
    scales = [e["color"]["scale"] for e in encodings if e.get("color", {}).get("field") == SIZE]
    assert len(scales) > 10
    for scale in scales:
        assert dict(zip(scale["domain"], scale["range"], strict=True)) == expected
    ticks = [e["x"]["axis"]["values"] for e in encodings if e.get("x", {}).get("field") == SIZE]
    assert ticks and all(values == [4, 8, 16, 32, 64] for values in ticks)


@pytest.mark.parametrize("plot", [charts.plot_loss, charts.plot_curves])
def test_diverged_trials_are_at_the_top_edge(plot, mixed):
    (crosses,) = layers(plot(load_sweep(mixed)), "point", shape="cross")
    assert crosses["encoding"]["y"] == TOP
    assert [row[SIZE] for row in crosses["data"]["values"]] == [64]


def test_curves_hold_every_point_of_every_trial(plain):
    sweep = load_sweep(plain)
    chart = charts.plot_curves(sweep)
    drawn = values(chart, "line", "training loss")
    points = sweep.curves.dropna(subset="train/loss")
    assert sorted(drawn) == pytest.approx(sorted(points["train/loss"]), rel=1e-5)

    against_tokens, against_time = range(2)
    evaluated = sweep.curves.dropna(subset="valid/loss")
    chart = charts.plot_frontier(sweep)
    for panel in (against_tokens, against_time):
        drawn = values(chart, "line", "validation loss", panel)
        assert sorted(drawn) == pytest.approx(sorted(evaluated["valid/loss"]), rel=1e-5)


def test_the_frontier_is_drawn_at_the_times_of_training_with_their_ends(tuned):
    sweep = load_sweep(tuned)
    answer = sweep.answer()
    chart = charts.plot_frontier(sweep)
    for panel, amount in enumerate(("tokens", "seconds")):
        lines = [row for la in layers(chart, "line", panel) for row in la["data"]["values"]]
        points = [row for la in layers(chart, "point", panel) for row in la["data"]["values"]]
        for row in answer.batch_sizes:
            key = answer.policy, row.batch_size
            (end,) = [p for p in points if (p["policy"], p[SIZE]) == key]
            curve = [p for p in lines if (p["policy"], p[SIZE]) == key]
            assert end["validation loss"] == pytest.approx(row.mean, rel=1e-5)
            assert max(p[amount] for p in curve) == pytest.approx(end[amount], rel=1e-5)
            if amount == "seconds":
                assert end[amount] == pytest.approx(row.seconds, rel=1e-5)
        assert {row["policy"] for row in [*lines, *points]} == {answer.policy}


def test_a_curve_is_the_mean_of_the_complete_seeds_and_other_trials_have_their_own(mixed):
    sweep = load_sweep(mixed)
    (line,) = layers(charts.plot_curves(sweep), "line")
    series = {}
    for row in line["data"]["values"]:
        key = row["policy"], row[SIZE], row.get("trial")
        series.setdefault(key, []).append(row["training loss"])
    is_complete = sweep.trials["state"] == "COMPLETE"
    points = sweep.curves[sweep.curves["train/loss"].notna()]
    others = set(points["id"]) - set(sweep.trials.loc[is_complete, "id"])
    assert {key[2] for key in series} == {None, *others} and others
    assert len(series) == len(compare_batch_sizes(sweep.trials)) + len(others)
    is_first = (sweep.trials["batch_size"] == 4) & (sweep.trials["policy"] == "fixed")
    points = points[points["id"].isin(sweep.trials.loc[is_complete & is_first, "id"])]
    assert points["id"].nunique() == 2
    means = points.groupby("tokens")["train/loss"].mean()
    sweep.trials.loc[is_complete, "state"] = "WAITING"
    assert not re.search(r"\d", charts.plot_curves(sweep).title)  # no curve has ended
    assert series["fixed 1e-3", 4, None] == pytest.approx(means.to_list(), rel=1e-5)


def test_the_rates_have_their_points_curve_and_optimum_and_marks_of_pruned_trials(tuned):
    sweep = load_sweep(tuned)
    is_lowest = (sweep.trials["stage"] == "tune") & (sweep.trials["batch_size"] == 4)
    lowest = sweep.trials.loc[is_lowest, "learning_rate"].idxmin()
    sweep.trials.loc[lowest, "state"] = "PRUNED"
    sweep.trials.loc[lowest, "final_valid_loss"] = np.nan
    chart = charts.plot_rates(sweep)
    (rates,) = [result.rates for result in sweep.policies if result.rates]
    optima = [rate.optimum for rate in rates if rate.optimum]
    drawn = values(chart, "point", "learning rate", shape="diamond")
    assert drawn == pytest.approx(optima, rel=1e-5)
    measured = sum(len(rate.trials.dropna(subset=["value"])) for rate in rates)
    assert len(values(chart, "point", "learning rate", size=35)) == measured
    curve = values(chart, "line", "final validation loss")
    best = values(chart, "point", "final validation loss", shape="diamond")
    assert min(curve) == pytest.approx(min(best), abs=1e-3)
    (pruned,) = layers(chart, "point", shape="triangle-down")
    assert pruned["encoding"]["y"] == TOP  # where the worst losses are
    (row,) = pruned["data"]["values"]
    assert row["learning rate"] == pytest.approx(
        sweep.trials.loc[lowest, "learning_rate"], rel=1e-5
    )


def test_a_rate_whose_loss_is_far_off_does_not_squeeze_the_others(tuned):
    sweep = load_sweep(tuned)
    is_highest = (sweep.trials["stage"] == "tune") & (sweep.trials["batch_size"] == 64)
    highest = sweep.trials.loc[is_highest, "learning_rate"].idxmax()
    sweep.trials.loc[highest, "final_valid_loss"] = 900.0
    chart = charts.plot_rates(sweep)
    (far,) = layers(chart, "point", shape="triangle-up")
    assert [row["final validation loss"] for row in far["data"]["values"]] == [900.0]
    assert chart.panels[0]["layer"][0]["encoding"]["y"]["scale"]["domain"][1] < 20


def test_a_tooltip_at_the_edge_shows_the_objective_as_the_axis_does(tmp_path):
    levels = {4: 1.0, 16: 1.1}
    plan = write_clear_sweep(tmp_path / "s", levels)
    settings = plan.settings.model_copy(update={"workload": MAXIMIZED})
    write_clear_results(tmp_path / "s", plan.model_copy(update={"settings": settings}), levels)
    sweep = load_sweep(tmp_path / "s")
    is_tuning = sweep.trials["stage"] == "tune"
    worst = sweep.trials.loc[is_tuning, "learning_rate"].idxmax()
    sweep.trials.loc[worst, "final_valid_accuracy"] = -50.0
    (far,) = layers(charts.plot_rates(sweep), "point", shape="triangle-up")
    (row,) = far["data"]["values"]
    assert row["final validation accuracy"] == -50.0 and "value" not in row


def test_the_answer_shows_every_interval_and_the_tolerance(tuned):
    answer = load_sweep(tuned).answer()
    chart = charts.plot_answer(load_sweep(tuned))
    (band,) = values(chart, "rect", "at most")
    assert band == answer.tolerance
    assert values(chart, "rule", "recommended", strokeDash=[3, 3]) == [answer.recommended]
    high = [row.gap_to_best[1] for row in answer.batch_sizes if row.gap_to_best[1] is not None]
    drawn = values(chart, "rule", "at most", strokeWidth=2.5)
    assert {*np.round(high, 4)} <= {*np.round(drawn, 4)}
    # A tooltip tells the interval itself, also an end below 0 or without a bound.
    tips = {row[SIZE]: row for row in layers(chart, "point", size=90)[0]["data"]["values"]}
    for row in answer.batch_sizes:
        ends = [tips[row.batch_size].get(name) for name in ("at least", "at most")]
        assert ends == [end and pytest.approx(end, rel=1e-5) for end in row.gap_to_best]
    times = values(chart, "point", "seconds of training", panel=1, size=70)
    assert times == pytest.approx([row.seconds for row in answer.batch_sizes], rel=1e-5)
    ranges = values(chart, "rule", "high", panel=1, strokeWidth=1)  # three seeds give no interval
    assert ranges == pytest.approx([row.seconds_range[1] for row in answer.batch_sizes], rel=1e-5)


def test_one_batch_size_is_compared_with_nothing(tmp_path):
    write_fake_sweep(tmp_path / "one", batches="8", seeds=3)
    drawn = charts.plot_all(load_sweep(tmp_path / "one"))
    assert not any(drawn.values())


def test_specifications_are_json_without_nan_and_the_reader_selects_the_batch_sizes(mixed, tuned):
    for path in (mixed, tuned):
        for chart in filter(None, charts.plot_all(load_sweep(path)).values()):
            text = json.dumps(chart.panels, allow_nan=False)
            assert "http" not in text.replace("https://vega.github.io/schema", "")
            for panel in chart.panels:
                assert panel["params"][0]["name"] == "shown"
                for drawn in panel["layer"]:
                    has_size = SIZE in drawn["data"]["values"][0]
                    assert has_size is ("transform" in drawn)


def test_fields_have_no_character_that_vega_reads_as_a_path(mixed, tuned):
    for path in (mixed, tuned):
        for chart in filter(None, charts.plot_all(load_sweep(path)).values()):
            for panel in chart.panels:
                for drawn in panel["layer"]:
                    names = {name for row in drawn["data"]["values"] for name in row}
                    assert not any(set(".[]") & set(name) for name in names)


def test_png_and_specification_have_the_same_panels(tuned):
    for chart in filter(None, charts.plot_all(load_sweep(tuned)).values()):
        figure = chart.draw()
        assert len(figure.axes) == len(chart.panels)
        for axis, panel in zip(figure.axes, chart.panels, strict=True):
            encodings = [drawn["encoding"] for drawn in panel["layer"]]
            y = next(e["y"] for e in encodings if "axis" in e.get("y", {}))
            assert list(axis.get_ylim()) == pytest.approx(y["scale"]["domain"])
            assert [label.get_text() for label in axis.get_xticklabels()]
        assert chart.png.startswith(b"\x89PNG") and chart._repr_png_() == chart.png


@pytest.mark.parametrize(
    ("scale", "numbers", "kind"),
    [
        ("narrow", [3.0, 3.3], "linear"),
        ("narrow", [3.0, 30.0], "log"),
        ("log", [1e-4, 1e-3], "log"),
        ("linear", [0, 5], "linear"),
    ],
)
def test_ticks_lie_in_the_domain_and_a_scale_from_zero_begins_there(scale, numbers, kind):
    made = channel("x", numbers, scale=scale)
    low, high = made["scale"]["domain"]
    assert made["scale"]["type"] == kind and len(made["axis"]["values"]) >= 3
    assert all(low <= tick <= high for tick in made["axis"]["values"])
    assert low <= numbers[0] and high > numbers[-1] and (low == 0) == (numbers[0] == 0)


def test_rows_without_a_position_are_left_out():
    x, y = channel("a", [1]), channel("b", [1])
    rows = [
        {"a": 1.0, "b": np.inf, "c": None},
        {"a": np.nan, "b": 1.0},
        {"a": 1, "b": 2.123456789, "c": np.nan},
    ]
    assert layer("point", rows, x, y)["data"]["values"] == [{"a": 1.0, "b": 2.12346}]


@given(
    st.lists(st.floats(), min_size=1, max_size=5),
    st.sampled_from(["linear", "log", "narrow"]),
)
def test_an_axis_has_finite_limits_and_ticks_within_them_for_any_values(values, scale):
    made = channel("x", values, scale=scale)
    low, high = made["scale"]["domain"]
    assert math.isfinite(low) and math.isfinite(high) and low < high
    assert made["scale"]["type"] == "linear" or low > 0
    assert all(math.isfinite(tick) for tick in made["axis"]["values"])
