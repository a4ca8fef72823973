"""The variables of the report: noise scales, pairs, recommendations, rewards."""

import pytest

from sweep.analysis.checks import judge
from sweep.analysis.frames import compare_batch_sizes, load_sweep
from sweep.report.report import build_context, write_report
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.report.conftest import NOISE_SCALE


def context_of(path):
    sweep = load_sweep(path)
    cells = compare_batch_sizes(sweep.trials)
    return build_context(sweep, cells, judge(sweep))


def test_the_noise_scale_is_that_of_the_later_half_of_training(tuned):
    rows = context_of(tuned)["noise"]
    scales = {row["batch_size"]: row["scale"] for row in rows if row["label"] == "tuned"}
    assert set(scales) == {4, 16, 64} and scales[4].value is None  # not resolved
    assert scales[16].value.value == pytest.approx(NOISE_SCALE)
    text = (tuned / "report.md").read_text()
    assert "24 [24, 24]" in text and text.count("| unresolved |") == 2
    assert (tuned / "figures/noise.png").exists()


def test_only_a_sweep_with_rewards_has_a_section_on_them(tmp_path, plain):
    settings = {"experiment": "grpo-words", "batches": [16, 32], "data": "synthetic"}
    before = {"initial_valid_loss": -0.05}
    write_fake_sweep(tmp_path / "words", seeds=3, change=lambda row: before, **settings)
    gain = context_of(tmp_path / "words")["gains"][0]
    text = write_report(tmp_path / "words").read_text()
    assert f"| {gain['difference'].value:+.3f} [" in text.split("## Rewards")[1]
    assert context_of(plain)["gains"] == ()
