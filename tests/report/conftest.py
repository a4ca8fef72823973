"""Sweep folders with made-up results, each written once for all tests of the report."""

import json

import pytest

from sweep.report.report import write_report
from sweep.resources import sha256_of_file
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import SweepFolder
from tests.analysis.fake_sweeps import write_fake_sweep

NOISE_SCALE = 24.0  # of the later half of the tuned sweep's training


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "plain"
    write_fake_sweep(path)
    write_report(path)
    return path


@pytest.fixture(scope="session")
def mixed(tmp_path_factory):
    ends = {(4, 2): "WAITING", (8, 1): "RUNNING", (32, 0): "out_of_memory", (64, 0): "diverged"}

    def outcome(row):
        return ends.get((row.batch_size, row.seed if row.policy == "fixed" else -1), "COMPLETE")

    path = tmp_path_factory.mktemp("mixed") / "mixed"
    write_fake_sweep(path, lrs=("1e-3", "sqrt"), seeds=3, outcome=outcome)
    return path


@pytest.fixture(scope="session")
def tuned(tmp_path_factory):
    path = tmp_path_factory.mktemp("tuned") / "tuned"
    plan = write_fake_sweep(path, lrs=("1e-3", "tuned"), seeds=3, batches="4,16,64")
    half = max(row.tokens for row in plan.trials) / 2
    for trial in SweepFolder(path).trials():
        lines, result = trial.read_metrics(), read_json(trial.result_path)
        square = -0.01 if result["batch_size"] == 4 else 0.25
        for line in lines:
            if "valid/loss" in line:
                trace = NOISE_SCALE / 4 if line["tokens"] >= half else 900.0
                line |= {"noise/trace": trace, "noise/square": square}
        trial.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result["metrics_sha256"] = sha256_of_file(trial.metrics_path)
        write_json(trial.result_path, result)
    write_report(path)
    return path
