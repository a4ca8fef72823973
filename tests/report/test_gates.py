"""What the report claims, and shows for it."""

import json

import pytest

from sweep.analysis.comparison import compare_batch_sizes
from sweep.analysis.frames import load_sweep
from sweep.analysis.gates import judge
from sweep.report.gates import noise_by_batch, shown_pairs
from sweep.report.report import write_report
from sweep.trial.folder import SweepFolder


@pytest.fixture
def tuned(tmp_path, write_fake_sweep):
    """A tuned sweep of three batch sizes and three seeds, beside a fixed rate."""
    write_fake_sweep(tmp_path / "s", lrs=("1e-3", "tuned"), seeds=3, batches="4,16,64")
    return tmp_path / "s"


def add_noise(path, trace, square):
    """Append probes to every curve, at its evaluations."""
    for trial in SweepFolder(path).trials():
        lines = [json.loads(line) for line in trial.metrics_path.read_text().splitlines()]
        for line in lines:
            if "valid/loss" in line:
                line |= {"noise/trace": trace(line["tokens"]), "noise/square": square}
        trial.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_policy_has_its_gates_and_tuned_rates_their_figure(tuned):
    text = write_report(tuned).read_text()
    claims = text.split("## Claims and their gates\n")[1].split("\n## ")[0]
    assert claims.index("### fixed 1e-3") < claims.index("### tuned")
    assert claims.count("| 8 | The claim is scoped |") == 2
    for name in ("rates", "differences"):
        assert f"figures/{name}.png" in claims
        assert (tuned / "figures" / f"{name}.png").stat().st_size > 10_000
    assert "figures/noise.png" not in text and not (tuned / "figures/noise.png").exists()


def test_without_tuned_rates_there_is_no_such_figure_and_an_old_one_is_removed(
    tmp_path, write_fake_sweep
):
    write_fake_sweep(tmp_path / "s", seeds=1)
    (tmp_path / "s/figures").mkdir()
    (tmp_path / "s/figures/rates.png").write_bytes(b"old")
    text = write_report(tmp_path / "s").read_text()
    assert "rates.png" not in text and not (tmp_path / "s/figures/rates.png").exists()
    assert "INCONCLUSIVE: which batch size is best cannot be said" in text


def test_the_noise_scale_is_that_of_the_later_half_of_training(tuned):
    last = max(row.tokens for row in load_sweep(tuned).plan.trials)
    add_noise(tuned, lambda tokens: 6.0 if tokens >= last / 2 else 900.0, 0.25)
    found = noise_by_batch(load_sweep(tuned), "tuned")
    assert set(found) == {4, 16, 64}
    assert found[16].value.value == pytest.approx(24.0)
    text = write_report(tuned).read_text()
    assert "### Gradient noise scale" in text and "24 [24, 24]" in text
    assert (tuned / "figures/noise.png").exists()


@pytest.mark.parametrize(("epochs", "is_said"), [(0.9, False), (0.998, True), (3.0, True)])
def test_probes_of_sequences_that_training_saw_are_said_to_be_so(
    tmp_path, write_fake_sweep, epochs, is_said
):
    write_fake_sweep(
        tmp_path / "s", seeds=3, change=lambda row: {"epochs": epochs}, budget="4M", batches="16,64"
    )
    add_noise(tmp_path / "s", lambda tokens: 6.0, 0.25)
    text = write_report(tmp_path / "s").read_text()
    said = f"training took {epochs:.3g} epochs and the probes"
    assert (said in text) is is_said


def test_a_noise_scale_that_is_not_resolved_says_so(tuned):
    add_noise(tuned, lambda tokens: 6.0, -0.01)
    assert noise_by_batch(load_sweep(tuned), "tuned")[4].value is None
    assert "unresolved" in write_report(tuned).read_text()


def test_of_many_pairs_those_with_the_best_are_shown(tmp_path, write_fake_sweep):
    write_fake_sweep(tmp_path / "s", seeds=3, batches="1,2,4,8,16,32,64")
    sweep = load_sweep(tmp_path / "s")
    (judged,) = judge(sweep, compare_batch_sizes(sweep.trials))
    shown = shown_pairs(judged)
    assert len(judged.comparison.pairs) == 21 and len(shown) == 6
    (best,) = set.intersection(*(set(pair.batch_sizes) for pair in shown))
    means = {
        batch: sum(losses) for batch, losses in
        sweep.trials.groupby("batch_size")["final_valid_loss"].apply(list).items()
    }  # fmt: skip
    assert best == min(means, key=means.get)
