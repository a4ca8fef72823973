"""Tables from folders and stores."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sweep
from sweep.analysis.frames import TRIAL_COLUMNS, curves_by_trial, write_trials_csv
from sweep.errors import SweepError
from sweep.trial.files import read_json, read_metrics, write_json
from sweep.trial.folder import SweepFolder
from tests.analysis.fake_sweeps import write_fake_sweep

ROOT = Path(__file__).parents[2]
# The least that the design asks of result.json and trials.csv.
DESIGNED = """id, stage, policy, batch_size, seed, learning_rate, tokens, epochs, steps,
warmup_steps, devices, microbatch_size, gradient_accumulation_steps, state, cause, attempts,
final_train_loss, final_valid_loss, best_valid_loss, bits_per_byte, clipped_step_fraction,
seconds_total, seconds_compile, seconds_training, seconds_evaluation, seconds_checkpoint,
tokens_per_second, mfu, peak_memory_bytes, device, torch_version, git_commit, data_sha256"""


@pytest.fixture
def some(tmp_path):
    """One trial of each kind of end."""
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


def test_numbers_are_those_of_result_json(some):
    folder = SweepFolder(some)
    loaded = sweep.load_sweep(some)
    row = loaded.trials.iloc[0]
    result = read_json(folder.trial(row["id"]).result_path)
    for name in set(TRIAL_COLUMNS) - {"execution"}:
        if result[name] is None:
            assert pd.isna(row[name])
        else:
            assert row[name] == result[name], name
    assert json.loads(row["execution"]) == result["execution"]


def test_curves_are_those_of_metrics_jsonl(some):
    loaded = sweep.load_sweep(some)
    trial = loaded.trials["id"].iloc[0]
    lines = read_metrics(SweepFolder(some).trial(trial).metrics_path)
    rows = loaded.curves[loaded.curves["id"] == trial]
    assert list(loaded.curves.columns[:4]) == ["id", "time", "step", "tokens"]
    for name in rows.columns[1:]:
        expected = np.array([line.get(name) for line in lines], dtype=float)
        np.testing.assert_array_equal(rows[name].to_numpy(float), expected)
    by_trial = {key: values for key, _, values in curves_by_trial(loaded, "valid/loss")}
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
    write_trials_csv(loaded, tmp_path / "trials.csv")
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
    assert set(result) == {*documented, *also}


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
