"""Claims about steps to a target, on made-up sweeps whose steps are known."""

import json
import math

import numpy as np
import pytest

from sweep.analysis.audit import audit
from sweep.analysis.checks import PASS, judge
from sweep.analysis.frames import load_sweep, write_trials_csv
from sweep.plan.steps import milestone_steps
from sweep.plan.tuning import crossing_tokens
from sweep.trial.files import sha256_of_file, write_json
from sweep.trial.folder import State, SweepFolder, TrialStatus
from tests.analysis.fake_sweeps import fake_result, write_fake_sweep

TARGET = 3.0
SIZES = (16, 32, 64, 128, 256)
CONTEXT = 64  # of the experiment quick


def hyperbola(size):
    return 600 + 60_000 / size  # B_crit 100


@pytest.fixture
def to_target(tmp_path):
    """Write a tuned sweep whose trials reach the target at given steps, or are pruned; judge it."""

    def write(steps=hyperbola, sizes=SIZES, pruned=lambda row: False, points=2000):
        path = tmp_path / "s"
        plan = write_fake_sweep(
            path, lrs=("tuned",), seeds=3, batches=",".join(map(str, sizes)), target=TARGET,
            budget=256 * CONTEXT * 6000, evaluation={"points": points, "noise_points": 0},
        )  # fmt: skip
        rng = np.random.default_rng(0)
        for row in plan.trials:
            if row.stage == "tune":
                off = math.log2(row.learning_rate / plan.tuning_centre(row.batch_size))
                taken = steps(row.batch_size) * (1 + 0.5 * off**2)
            else:
                taken = steps(row.batch_size) * math.exp(0.01 * rng.normal())
            write_trial(SweepFolder(path).trial(row.id), plan, row, taken, pruned(row), points)
        sweep = load_sweep(path)
        (reached,) = judge(sweep)
        return reached, sweep

    return write


def write_trial(trial, plan, row, taken, is_pruned, points):
    lines, below = [], 0
    for step in milestone_steps(row.steps, points):
        loss = TARGET * (taken / step) ** 0.3
        loss = max(loss, 1.01 * TARGET) if is_pruned else loss
        tokens = step * row.batch_size * CONTEXT
        lines.append({"time": 1.7e9 + step, "step": step, "tokens": tokens, "valid/loss": loss})
        below = below + 1 if loss <= TARGET else 0
        if below == 2 or (is_pruned and step >= 2 * taken):
            break
    trial.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if is_pruned:
        trial.result_path.unlink()
        trial.write_status(TrialStatus(state=State.PRUNED, attempts=1, fencing=1))
        return
    columns = [[line[name] for line in lines] for name in ("tokens", "valid/loss")]
    result = fake_result(plan, row) | {
        "steps": lines[-1]["step"],
        "tokens": lines[-1]["tokens"],
        "tokens_to_target": crossing_tokens(*columns, TARGET),
        "seconds_training": lines[-1]["tokens"] / 20_000,
        "final_valid_loss": lines[-1]["valid/loss"],
        "initial_train_loss": math.log(512),
        "metrics_sha256": sha256_of_file(trial.metrics_path),
    }
    write_json(trial.result_path, result)


def blocking(reached):
    return {check.code for check in reached.failed if check.blocks_claims}


def test_steps_on_the_curve_make_the_claim(to_target):
    reached, _ = to_target()
    assert blocking(reached) == set(), reached.failed
    passed = {check.code for check in reached.checks if check.status == PASS}
    assert {"critical_batch_size", "off_the_curve"} <= passed
    assert "the critical batch size is " in reached.headline
    assert reached.curve.fit.b_crit.low < 100 < reached.curve.fit.b_crit.high
    assert "lr tuned by 5 trials" in reached.scope and "seeds 0, 1, 2" in reached.scope


def test_a_crossing_before_the_first_evaluation_is_no_point_of_the_curve(to_target):
    reached, _ = to_target(points=10)
    assert "crossing_too_early" in blocking(reached)
    assert reached.curve.trials["is_early"].any() and reached.headline == ""


def test_steps_off_the_curve_make_no_claim(to_target):
    taken = {16: 4000, 32: 2100, 64: 1300, 128: 1000, 256: 1500}
    reached, _ = to_target(steps=taken.get)
    (check,) = (check for check in reached.failed if check.code == "off_the_curve")
    assert 256 in check.batch_sizes and reached.headline == ""


def test_pruned_seeds_are_data_and_not_missing(to_target, tmp_path):
    reached, sweep = to_target(pruned=lambda row: row.stage == "report" and row.seed == 2)
    assert reached.curve.trials["is_censored"].sum() == len(SIZES)
    assert reached.passes, reached.failed
    write_trials_csv(sweep, tmp_path / "trials.csv")
    assert audit(tmp_path / "trials.csv")["findings"] == []


def test_without_any_crossing_there_is_no_curve_and_no_claim(to_target):
    reached, _ = to_target(pruned=lambda row: row.stage == "report")
    assert reached.curve.fit is None and reached.headline == ""
    assert {"critical_batch_size", "target_not_reached"} <= blocking(reached)


def test_the_audit_of_an_own_sweep_to_a_target_finds_nothing_false(to_target, tmp_path):
    _, sweep = to_target()
    write_trials_csv(sweep, tmp_path / "trials.csv")
    document = audit(tmp_path / "trials.csv")
    assert document["findings"] == []
    assert any("tokens to it are compared" in note for note in document["notes"])
