"""Tables from folders and stores; cells and rules; gains of reward."""

import csv
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

import sweep
from sweep.analysis import tables
from sweep.analysis.table_answer import answer_of
from sweep.analysis.tables import TRIAL_COLUMNS
from sweep.config.numbers import short
from sweep.errors import SweepError
from sweep.trial.files import read_json, read_metrics, write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.result import COLUMNS
from tests.analysis.fake_sweeps import write_fake_sweep

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published" / "tinystories-small"
# The least that the design asks of result.json and trials.csv.
DESIGNED = """id, stage, policy, batch_size, seed, learning_rate, tokens, epochs, steps,
warmup_steps, devices, microbatch_size, gradient_accumulation_steps, state, cause, attempts,
final_train_loss, final_valid_loss, best_valid_loss, bits_per_byte, clipped_step_fraction,
seconds_total, seconds_compile, seconds_training, seconds_evaluation, seconds_checkpoint,
tokens_per_second, mfu, peak_memory_bytes, device, torch_version, git_commit, data_sha256"""

OF_THE_SWEEP = {
    *("tokens_per_sequence", "target", "expected_initial_loss", "loss_unit"),
    "has_looks",
    *("time_budget_seconds", "valid_slope", "planned_tokens", "budget"),
}


@pytest.fixture
def some(tmp_path):
    ends = {8: "diverged", 16: "out_of_memory", 32: "WAITING", 64: "RUNNING"}
    path = tmp_path / "some"
    write_fake_sweep(path, outcome=lambda row: ends.get(row.batch_size, "COMPLETE"))
    return path


def test_every_planned_trial_is_a_row_with_its_state(some):
    trials = sweep.load_sweep(some).trials
    assert list(trials.columns) == list(TRIAL_COLUMNS)
    assert trials["batch_size"].tolist() == [4, 8, 16, 32, 64]
    states = ["COMPLETE", "FAILED", "FAILED", "WAITING", "RUNNING"]
    assert trials["state"].tolist() == states
    assert trials["cause"].tolist() == [None, "diverged", "out_of_memory", None, None]
    assert trials["attempts"].tolist() == [1, 1, 1, 0, 1]
    assert trials["final_valid_loss"].notna().tolist() == [True, False, False, False, False]


def test_a_trial_without_a_result_has_what_its_last_line_says_and_nothing_that_was_planned(some):
    loaded = sweep.load_sweep(some)
    rows = loaded.trials.set_index("batch_size")
    assert rows["planned_tokens"].tolist() == [196_608] * 5
    running = read_metrics(SweepFolder(some).trial(rows.loc[64, "id"]).metrics_path)[-1]
    assert running["step"] == 19  # of 48
    expected = [19, 19 * 64 * 64, running["perf/seconds"]]
    assert rows.loc[64, ["steps", "tokens", "seconds_total"]].tolist() == expected
    parts = [name for name in TRIAL_COLUMNS if name.startswith("seconds_")]
    parts.remove("seconds_total")
    assert rows.loc[64, parts].isna().all()
    without_a_line = rows.loc[[16, 32], ["steps", "tokens", "seconds_total"]]
    assert without_a_line.isna().all(axis=None)


def test_the_seconds_of_a_curve_of_an_earlier_version_are_not_known(some):
    trial = SweepFolder(some).trials()[-1]
    lines = read_metrics(trial.metrics_path)
    for line in lines:
        del line["perf/seconds"]
    trial.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = sweep.load_sweep(some).trials.iloc[-1]
    assert (row["steps"], row["tokens"]) == (19, 19 * 64 * 64)
    assert math.isnan(row["seconds_total"])


def test_numbers_are_those_of_result_json(some):
    row = sweep.load_sweep(some).trials.iloc[0]
    result = read_json(SweepFolder(some).trial(row["id"]).result_path)
    for name in set(TRIAL_COLUMNS) - {"execution"} - OF_THE_SWEEP:
        if result[name] is None:
            assert pd.isna(row[name])
        else:
            assert row[name] == result[name], name
    assert json.loads(row["execution"]) == result["execution"]


def test_values_of_the_sweep_are_in_every_row(some):
    loaded = sweep.load_sweep(some)
    assert {n for n, column in COLUMNS.items() if not column.is_in_file} == OF_THE_SWEEP
    settings = loaded.plan.settings
    assert loaded.trials["has_looks"].to_list() == [False] * len(loaded.trials)
    expected = {
        "budget": 196_608,
        "tokens_per_sequence": settings.model.context,
        "expected_initial_loss": np.log(settings.model.vocabulary),
        "loss_unit": "nats",
    }
    for name, value in expected.items():
        assert set(loaded.trials[name]) == {value}
    for name in ("target", "time_budget_seconds", "valid_slope"):
        assert loaded.trials[name].isna().all()


def test_curves_are_those_of_metrics_jsonl(some):
    loaded = sweep.load_sweep(some)
    trial = loaded.trials["id"].iloc[0]
    lines = read_metrics(SweepFolder(some).trial(trial).metrics_path)
    rows = loaded.curves[loaded.curves["id"] == trial]
    assert list(loaded.curves.columns[:4]) == ["id", "time", "step", "tokens"]
    for name in rows.columns[1:]:
        expected = np.array([line.get(name) for line in lines], dtype=float)
        np.testing.assert_array_equal(rows[name].to_numpy(float), expected)
    by_trial = {key: values for key, _, values in tables.curves_by_trial(loaded, "valid/loss")}
    assert by_trial[trial].tolist() == [x["valid/loss"] for x in lines if "valid/loss" in x]


def test_null_is_not_a_number_and_a_torn_last_line_is_left_out(some):
    folder = SweepFolder(some)
    running = next(trial for trial in folder.trials() if trial.read_status().state == "RUNNING")
    before = len(read_metrics(running.metrics_path))
    with running.metrics_path.open("a") as file:
        file.write('{"time": 1.0, "step": 47, "tokens": 192512, "train/loss": null}\n{"time": 2.')
    loaded = sweep.load_sweep(some)
    rows = loaded.curves[loaded.curves["id"] == running.id]
    assert len(rows) == before + 1
    assert rows["step"].iloc[-1] == 47
    assert np.isnan(rows["train/loss"].iloc[-1])
    assert loaded.warnings == ()


def test_csv_has_every_trial_in_full_precision(some, tmp_path):
    loaded = sweep.load_sweep(some)
    tables.write_trials_csv(loaded, tmp_path / "trials.csv")
    with (tmp_path / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(TRIAL_COLUMNS)
    assert [row["id"] for row in rows] == loaded.trials["id"].tolist()
    for name in ("final_valid_loss", "seconds_training", "learning_rate", "beta2"):
        again = [float(row[name] or "nan") for row in rows]
        np.testing.assert_array_equal(again, loaded.trials[name])
    assert rows[0]["peak_memory_bytes"].isdigit()


def test_documentation_columns_and_design_agree(some):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    columns, only_json = text.split("## Only in result.json")
    documented = re.findall(r"^\| `(\w+)` \|", columns, re.MULTILINE)
    assert documented == list(TRIAL_COLUMNS)
    assert set(re.split(r",\s+", DESIGNED)) <= set(documented)
    result = json.loads(SweepFolder(some).trials()[0].result_path.read_text())
    also = re.findall(r"^\| `(\w+)` \|", only_json.split("\n## ")[0], re.MULTILINE)
    assert set(result) == {*documented, *also, "format_version", "sha256"} - OF_THE_SWEEP


def test_damaged_results_are_warned_of_and_left_out(some):
    trial = SweepFolder(some).trials()[0]
    text = trial.result_path.read_text()
    trial.result_path.write_text(text.replace('"final_valid_loss": 1', '"final_valid_loss": 0'))
    loaded = sweep.load_sweep(some)
    assert np.isnan(loaded.trials["final_valid_loss"].iloc[0])
    assert len(loaded.warnings) == 1 and trial.id in loaded.warnings[0]


def test_damaged_curves_are_warned_of(some):
    changed, damaged = SweepFolder(some).trials()[:2]
    with changed.metrics_path.open("a") as file:
        file.write('{"time": 1.0, "step": 1, "tokens": 1, "train/loss": 1.0}\n')
    damaged.metrics_path.write_text("not json\n")
    loaded = sweep.load_sweep(some)
    assert len(loaded.warnings) == 2
    assert damaged.id not in set(loaded.curves["id"])


def test_a_microbatch_that_shrank_after_out_of_memory_is_shown(some):
    trial = SweepFolder(some).trials()[2]
    trial.write_status(trial.read_status().changed(microbatch_size=4))
    row = sweep.load_sweep(some).trials.iloc[2]
    assert (row["microbatch_size"], row["gradient_accumulation_steps"]) == (4, 4)


def test_a_folder_without_a_whole_plan_is_refused(some, tmp_path):
    with pytest.raises(SweepError, match=r"plan\.json"):
        sweep.load_sweep(tmp_path)
    folder = SweepFolder(some)
    plan = read_json(folder.plan_path)
    del plan["tokens_per_sequence"]
    write_json(folder.plan_path, plan)
    with pytest.raises(SweepError, match="tokens_per_sequence"):
        sweep.load_sweep(some)


def test_reading_never_imports_torch():
    code = (
        "import sys, sweep.analysis.audit, sweep.analysis.critical_batch_size;"
        "print({'torch', 'mlflow', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def trial(batch, seed, loss, seconds=10.0, **more):
    row: dict[str, Any] = dict.fromkeys(TRIAL_COLUMNS, np.nan)
    row |= {"stage": "final", "policy": "fixed", "state": "COMPLETE", "cause": None}
    row |= {"tokens": 6400, "steps": 100, "warmup_steps": 1, "learning_rate": 1e-3}
    row |= {"batch_size": batch, "seed": seed, "final_valid_loss": loss, "seconds_total": seconds}
    row |= {"final_train_loss": loss - 0.25, "peak_memory_bytes": 1000.0 + seed}
    return row | more


def cells_of(*rows):
    return tables.compare_batch_sizes(pd.DataFrame(rows))


def test_a_cell_is_the_mean_and_spread_of_its_seeds():
    tuned = trial(8, 1000, 0.1, stage="tune")  # takes no part
    cells = cells_of(*(trial(8, k, k + 1.0) for k in range(3)), trial(4, 0, 5.0), tuned)
    assert cells["batch_size"].tolist() == [4, 8]
    cell = cells.iloc[1]
    assert (cell["final_valid_loss"], cell["spread"]) == (2.0, 1.0)
    assert (cell["least"], cell["largest"]) == (1.0, 3.0)
    assert cell["train_valid_gap"] == pytest.approx(0.25)
    assert cell["peak_memory_bytes"] == 1002.0
    assert np.isnan(cells.iloc[0]["spread"])


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
    assert cells["is_comparable"].tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("number", "text"),
    [(3e-4, "3e-4"), (1e-3, "1e-3"), (0.05, "0.05"), (1.25e-4, "0.000125"), (32, "32"), (0.0, "0")],
)
def test_short_numbers_read_back_the_same(number, text):
    assert short(number) == text
    assert float(short(number / 7)) == number / 7


def test_policies_keep_their_names():
    table = pd.DataFrame({"policy": ["sqrt:0.001@32", "fixed"], "learning_rate": [5e-4, 5e-4]})
    assert tables.policy_labels(table) == ["sqrt:0.001@32", "fixed 5e-4"]


START = {0: 0.05, 1: 0.06, 2: 0.04}


def written(folder, seeds, change=None, **settings):
    options = {"experiment": "grpo-words", "batches": [16, 32], "data": "synthetic", **settings}
    options["change"] = lambda row: {"initial_valid_reward": START[row.seed], **(change or {})}
    write_fake_sweep(folder, seeds=seeds, **options)
    return sweep.load_sweep(folder)


def test_gains_are_paired_by_seed(tmp_path):
    gains = tables.find_gains(written(tmp_path / "s", 3))
    assert [gain["batch_size"] for gain in gains] == [16, 32]
    for gain in gains:
        assert gain["start"] == START
        test = ttest_rel([gain["end"][s] for s in range(3)], [gain["start"][s] for s in range(3)])
        low, high = test.confidence_interval(0.95)
        assert gain["difference"].low == pytest.approx(low, rel=1e-9)
        assert gain["difference"].high == pytest.approx(high, rel=1e-9)


def test_without_a_final_reward_gains_follow_from_the_curves(tmp_path):
    """A class derived from Grpo may have another objective."""
    loaded = written(tmp_path / "s", 3, evaluation={"sequences": tables.FINAL_PROMPTS})
    without = loaded.trials.drop(columns="final_valid_reward")
    gains = tables.find_gains(loaded)
    assert gains and tables.find_gains(dataclasses.replace(loaded, trials=without)) == gains


def test_one_seed_has_no_interval_and_an_older_result_no_gain(tmp_path):
    (first, _) = tables.find_gains(written(tmp_path / "one", 1))
    assert first["difference"] is None and set(first["end"]) == {0}
    older = written(tmp_path / "older", 3, {"initial_valid_reward": None})
    assert tables.find_gains(older) == []


def test_a_complete_trial_without_its_metric_has_a_value_that_is_not_known(tmp_path):
    of_earlier_commits = {"final_valid_reward": None, "final_valid_loss": -0.1}
    loaded = written(tmp_path / "s", 1, of_earlier_commits, batches=[16])
    assert "reward is not known. Nothing is compared." in loaded.sentences()[0]


@pytest.mark.parametrize("change", ["double", "remove", "rename"])
def test_a_published_table_must_have_the_trials_of_its_plan(tmp_path, change):
    shutil.copytree(PUBLISHED, tmp_path / "published")
    path = tmp_path / "published" / "trials.csv"
    table = pd.read_csv(path, dtype=str)
    changed = {
        "double": pd.concat([table, table[:1]]),
        "remove": table[1:],
        "rename": table.assign(id=["0" * 12, *table["id"][1:]]),
    }
    changed[change].to_csv(path, index=False)
    with pytest.raises(SweepError, match=r"trials\.csv must have each trial"):
        tables.load_tables(tmp_path / "published")


@pytest.mark.parametrize("size", ["7", "-4", "4.5", "1e300", ""])
def test_what_was_planned_is_read_from_the_plan_of_published_results(tmp_path, size):
    shutil.copytree(PUBLISHED, tmp_path / "published")
    path = tmp_path / "published" / "trials.csv"
    table = pd.read_csv(path, dtype=str)
    table.assign(batch_size=size).to_csv(path, index=False)
    read = tables.load_tables(tmp_path / "published")
    assert read.trials["batch_size"].tolist() == [row.batch_size for row in read.plan.trials]


@pytest.mark.parametrize("name", ["devices", "microbatch_size", "gradient_accumulation_steps"])
@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_a_trial_whose_batch_size_has_impossible_parts_is_no_trial(name, number):
    table = pd.read_csv(PUBLISHED / "trials.csv").astype({name: object})
    table.loc[0, name] = number
    with pytest.raises(SweepError, match=f"its {name} {number} is no positive whole number"):
        sweep.answer(table)


def test_a_table_without_stage_policy_state_and_seed_is_answered_and_says_so(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("batch_size,lr,val_loss\n8,1e-3,2.5\n32,2e-3,2.6\n")
    answer = answer_of(path, "final_valid_loss", "minimize", None).answer
    assert answer.recommended == 8 and answer.provisional
    for words in ("all rows are final trials", "each row with a value is complete", "one seed"):
        assert words in answer.scope
    path.write_text("batch_size,lr,val_loss\n8,1e-3,2.5\n8,1e-3,2.51\n32,2e-3,2.6\n")
    with pytest.raises(SweepError, match="without a column seed"):
        answer_of(path, "final_valid_loss", "minimize", None)
    path.write_text("batch_size,val_loss\n8,2.5\n32,2.6\n")
    with pytest.raises(SweepError, match="must have the column learning_rate"):
        answer_of(path, "final_valid_loss", "minimize", None)
