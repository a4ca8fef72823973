"""The data of the report: pairs, noise scales, recommendations."""

import json

import pytest

from sweep.analysis.checks import run_checks
from sweep.analysis.comparison import compare_batch_sizes
from sweep.analysis.frames import load_sweep
from sweep.report.context import build_context, noise_records, reported_pairs
from sweep.report.report import write_report
from sweep.trial.folder import SweepFolder


def context_of(path):
    sweep = load_sweep(path)
    cells = compare_batch_sizes(sweep.trials)
    return build_context(sweep, cells, tuple(run_checks(sweep, cells).values()))


@pytest.fixture
def tuned(tmp_path, write_fake_sweep):
    """Write a tuned sweep of three batch sizes and three seeds, with the same at a fixed rate."""
    write_fake_sweep(tmp_path / "s", lrs=("1e-3", "tuned"), seeds=3, batches="4,16,64")
    return tmp_path / "s"


def add_noise(path, trace, square):
    """Add noise measurements to every evaluation."""
    for trial in SweepFolder(path).trials():
        lines = [json.loads(line) for line in trial.metrics_path.read_text().splitlines()]
        for line in lines:
            if "valid/loss" in line:
                line |= {"noise/trace": trace(line["tokens"]), "noise/square": square}
        trial.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_noise_scale_is_that_of_the_later_half_of_training(tuned):
    last = max(row.tokens for row in load_sweep(tuned).plan.trials)
    add_noise(tuned, lambda tokens: 6.0 if tokens >= last / 2 else 900.0, 0.25)
    scales = {(row["label"], row["batch_size"]): row["scale"] for row in context_of(tuned)["noise"]}
    assert {batch for label, batch in scales if label == "tuned"} == {4, 16, 64}
    assert scales["tuned", 16].value.value == pytest.approx(24.0)
    assert "24 [24, 24]" in write_report(tuned).read_text()
    assert (tuned / "figures/noise.png").exists()


def test_a_noise_scale_that_is_not_resolved_is_reported_as_unresolved(tuned):
    add_noise(tuned, lambda tokens: 6.0, -0.01)
    assert all(row["scale"].value is None for row in context_of(tuned)["noise"])
    assert "| unresolved |" in write_report(tuned).read_text()


def test_a_sweep_without_noise_measurements_has_no_noise_section(tuned):
    assert len(noise_records(load_sweep(tuned))) == 0
    assert "noise.png" not in write_report(tuned).read_text()


@pytest.mark.parametrize(("epochs", "is_repeated"), [(0.9, False), (0.998, True), (3.0, True)])
def test_probed_epochs_are_known_if_training_saw_probed_sequences(
    tmp_path, write_fake_sweep, epochs, is_repeated
):
    write_fake_sweep(
        tmp_path / "s", seeds=3, change=lambda row: {"epochs": epochs}, budget="4M", batches="16,64"
    )
    assert (context_of(tmp_path / "s")["probed_epochs"] is not None) is is_repeated


def test_of_many_pairs_those_with_the_best_batch_size_are_reported(tmp_path, write_fake_sweep):
    write_fake_sweep(tmp_path / "s", seeds=3, batches="1,2,4,8,16,32,64")
    sweep = load_sweep(tmp_path / "s")
    (result,) = run_checks(sweep, compare_batch_sizes(sweep.trials)).values()
    pairs = reported_pairs(result)
    assert len(result.comparison.pairs) == 21 and len(pairs) == 6
    (best,) = set.intersection(*(set(pair.batch_sizes) for pair in pairs))
    assert best == sweep.trials.groupby("batch_size")["final_valid_loss"].mean().idxmin()


def test_a_recommendation_is_weakened_by_the_failed_checks_that_concern_it(
    tmp_path, write_fake_sweep
):
    def seconds(row):
        return {"seconds_total": 9.0 + 9.0 * (row.seed == 1)}

    write_fake_sweep(tmp_path / "s", seeds=3, change=seconds)
    items = {item["title"]: item for item in context_of(tmp_path / "s")["recommendations"]}
    codes = {title: {check.code for check in item["failed"]} for title, item in items.items()}
    assert "fixed_learning_rate" in codes["best quality"] & codes["balanced"] - codes["fastest"]
    assert "uneven_times" in codes["fastest"] & codes["balanced"] - codes["best quality"]


def test_only_a_sweep_with_rewards_has_a_section_on_them(tmp_path, write_fake_sweep):
    write_fake_sweep(
        tmp_path / "words",
        experiment="grpo-words",
        batches=[16, 32],
        seeds=3,
        data="synthetic",
        change=lambda row: {"initial_valid_loss": -0.05},
    )
    gain = context_of(tmp_path / "words")["gains"][0]
    text = write_report(tmp_path / "words").read_text()
    assert f"| {gain['difference'].value:+.3f} [" in text.split("## Rewards")[1]
    write_fake_sweep(tmp_path / "text", batches="4,8")
    assert context_of(tmp_path / "text")["gains"] == ()
