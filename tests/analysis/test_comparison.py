"""Cells, rules and the Pareto front, on tables small enough to check by hand."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from sweep.analysis.frames import (
    TRIAL_COLUMNS,
    compare_batch_sizes,
    policy_labels,
    recommend,
    short,
)


def trial(batch, seed, loss, seconds=10.0, **more):
    row: dict[str, Any] = dict.fromkeys(TRIAL_COLUMNS, np.nan)
    row |= {"stage": "report", "policy": "fixed", "state": "COMPLETE", "cause": None}
    row |= {"tokens": 6400, "steps": 100, "warmup_steps": 1, "learning_rate": 1e-3}
    row |= {"batch_size": batch, "seed": seed, "final_valid_loss": loss, "seconds_total": seconds}
    row |= {"final_train_loss": loss - 0.25, "peak_memory_bytes": 1000.0 + seed}
    return row | more


def cells_of(*rows):
    return compare_batch_sizes(pd.DataFrame(rows))


def picks(cells):
    return {name: [cell["batch_size"] for cell in best] for name, best in recommend(cells).items()}


def test_a_cell_is_the_mean_and_spread_of_its_seeds():
    cells = cells_of(trial(8, 0, 1.0), trial(8, 1, 2.0), trial(8, 2, 3.0), trial(4, 0, 5.0))
    assert cells["batch_size"].tolist() == [4, 8]
    cell = cells.iloc[1]
    assert (cell["final_valid_loss"], cell["loss_sd"]) == (2.0, 1.0)
    assert (cell["loss_min"], cell["loss_max"]) == (1.0, 3.0)
    assert cell["train_valid_gap"] == pytest.approx(0.25)
    assert cell["peak_memory_bytes"] == 1002.0
    assert np.isnan(cells.iloc[0]["loss_sd"])


def test_tuning_trials_take_no_part():
    cells = cells_of(trial(8, 0, 1.5), trial(8, 1000, 0.1, stage="tune"))
    assert cells["final_valid_loss"].tolist() == [1.5]


def test_diverged_and_failed_trials_are_counted_and_their_cells_not_compared():
    gone = {"state": "FAILED", "cause": "diverged", "tokens": 640, "steps": 10}
    cells = cells_of(
        trial(8, 0, np.nan, **gone),
        trial(8, 1, 0.5, seconds=1.0),
        trial(16, 0, np.nan, state="FAILED", cause="out_of_memory"),
        trial(32, 0, np.nan, state="WAITING"),
        trial(64, 0, 2.0),
    )
    counts = cells[["planned", "complete", "diverged", "failed", "unfinished"]].to_numpy().tolist()
    assert counts == [[2, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1], [1, 1, 0, 0, 0]]
    assert cells["steps"].tolist() == [100] * 4
    assert picks(cells) == {"best quality": [64], "fastest": [64], "balanced": [64]}
    assert cells["is_comparable"].tolist() == [False, False, False, True]


def test_each_rule_picks_its_cell():
    cells = cells_of(
        trial(8, 0, 2.000, seconds=40.0),
        trial(16, 0, 2.019, seconds=30.0),  # within 1 % of the lowest
        trial(32, 0, 2.021, seconds=20.0),  # not within
        trial(64, 0, 3.000, seconds=10.0),
    )
    assert picks(cells) == {"best quality": [8], "fastest": [64], "balanced": [16]}


def test_ties_are_all_named():
    cells = cells_of(trial(8, 0, 2.0), trial(16, 0, 2.0), trial(32, 0, 2.5))
    assert picks(cells)["best quality"] == [8, 16]
    assert picks(cells)["fastest"] == [8, 16, 32]


def test_without_a_complete_trial_nothing_is_recommended():
    for rows in ((trial(8, 0, np.nan, state="WAITING"),), (trial(8, 0, 1.0, stage="tune"),)):
        cells = cells_of(*rows)
        assert recommend(cells) == {}


def test_the_front_holds_the_cells_that_no_other_dominates():
    points = [(3.0, 1.0), (2.0, 2.0), (2.5, 3.0), (1.0, 9.0), (1.0, 8.0), (1.0, 8.0)]
    rows = [trial(2**k, 0, loss, seconds) for k, (loss, seconds) in enumerate(points)]
    cells = cells_of(*rows, trial(64, 0, 0.5), trial(64, 1, np.nan, state="RUNNING"))
    assert cells["is_on_front"].tolist() == [True, True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("number", "text"),
    [(3e-4, "3e-4"), (1e-3, "1e-3"), (0.05, "0.05"), (1.25e-4, "0.000125"), (32, "32"), (0.0, "0")],
)
def test_short_numbers_read_back_the_same(number, text):
    assert short(number) == text
    assert float(short(number / 7)) == number / 7


def test_policies_keep_their_names():
    table = pd.DataFrame({"policy": ["sqrt:0.001@32", "fixed"], "learning_rate": [5e-4, 5e-4]})
    assert policy_labels(table) == ["sqrt:0.001@32", "fixed 5e-4"]
