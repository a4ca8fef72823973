"""The main job on text, as a newcomer runs it: plan, train, track, resume, report."""

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import sweep
from sweep.data.synthetic_stories import synthetic_documents, synthetic_identity
from sweep.tracking.store import default_tracking_uri
from sweep.trial.folder import SweepFolder
from tests.servers import load_stored_sweep


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run a sweep of the model small on a folder of text, with the command line."""
    folder = tmp_path_factory.mktemp("end-to-end")
    text, out = folder / "text", folder / "sweep"
    text.mkdir()
    for split in ("train", "valid"):
        stories = synthetic_documents(synthetic_identity(seed=1), split)
        (text / f"{split}.txt").write_text("\n<|endoftext|>\n".join(stories), "utf-8")
    command = [
        *(sys.executable, "-m", "sweep", "run", "--data", str(text), "--model", "small"),
        *("--budget", "32768", "--batches", "4,16", "--device", "cpu", "--out", str(out), "--yes"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out, done, command


def test_both_batch_sizes_learned_from_the_same_tokens(finished):
    out, _, _ = finished
    trials = pd.read_csv(out / "trials.csv")
    assert list(trials.batch_size) == [4, 16] and set(trials.tokens) == {32_768}
    assert (trials.steps * trials.batch_size * 128 == trials.tokens).all()
    assert (trials.final_valid_loss < trials.initial_train_loss - 0.1).all()
    assert trials.initial_train_loss.between(7.4, 8.2).all()  # ln 2048 = 7.62


def test_per_document_losses_add_up_to_the_final_loss(finished):
    for trial in SweepFolder(finished[0]).trials():
        summed, tokens = np.load(trial.losses_path).T
        result = trial.read_result()
        assert summed.sum() / tokens.sum() == pytest.approx(result.final_valid_loss, rel=1e-12)
        per_byte = result.final_valid_loss / np.log(2) / result.bytes_per_token
        assert result.bits_per_byte == pytest.approx(per_byte)


def test_the_plan_comes_before_anything_runs_and_the_report_with_its_figures_after(finished):
    out, done, _ = finished
    assert done.stderr.index("batch size") < done.stderr.index("2 of 2 trials")
    report = (out / "report.md").read_text()
    assert str(out / "report.md") in done.stdout
    figures = {"frontier", "answer", "loss", "curves", "throughput"}
    assert {path.stem for path in (out / "figures").glob("*.png")} == figures
    assert all(f"figures/{figure}.png" in report for figure in figures)
    assert (out / "report.html").read_text().count("data:image/png;base64,") == len(figures)


def test_the_same_command_does_nothing_more(finished):
    out, done, command = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and again.stdout == done.stdout and again.stderr == ""
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_python_reads_what_the_command_wrote_from_the_folder_and_from_mlflow(finished):
    loaded, folder = sweep.load_sweep(finished[0]), SweepFolder(finished[0])
    assert len(loaded.trials) == 2 and not loaded.warnings
    assert Path(sweep.write_report(finished[0])).exists()
    stored = load_stored_sweep(default_tracking_uri(folder), "tinystories")
    assert len(stored.trials) == 2 and stored.curves.groupby("id", observed=True).size().min() >= 16


def test_python_plans_and_runs(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("sweep"), "handlers", [])  # of the command line
    fields = {"batches": [4], "budget": 400, "out": tmp_path / "s", "device": "cpu"}
    plan = sweep.plan_sweep("quadratic", **fields)
    assert [row.steps for row in plan.trials] == [100]
    run = sweep.run_sweep("quadratic", **fields)
    assert run.trials.state.tolist() == ["COMPLETE"]
    assert run.answer() is None and "At batch size 4" in run._repr_html_()
    assert run.report == tmp_path / "s" / "report.html" and run.report.exists()
    assert "100%, 1 of 1 trials" in capfd.readouterr().err
    more = {**fields, "batches": [4, 8]}
    run = sweep.run_sweep("quadratic", show_progress=False, **more)
    assert run.answer().recommended in (4, 8) and "<table" in run._repr_html_()
    assert capfd.readouterr().err == ""
