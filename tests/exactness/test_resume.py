"""Killed at any moment and started again, a trial ends with the same bits."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sweep.resources import sha256_of_file
from sweep.training.step import TrainingStep
from sweep.trial.files import find_sha256, read_metrics
from sweep.trial.folder import TrialFolder
from sweep.trial.result import Result
from sweep.trial.status import State
from tests.exactness.attempts import attempt, continued_from, plan_trial
from tests.hugging_face import save_model

STEPS = 30
DEATHS = [  # moment, its occurrence, and the steps that the next attempt need not take again
    ("in a checkpoint", 4, 3),
    ("before a checkpoint's rename", 2, 1),
    ("damaging a checkpoint", 4, 3),
    ("after a step", 17, 16),
    ("before the result", 1, STEPS),
    ("after the result", 1, None),  # no attempt goes on
    # Further cases.
    pytest.param("in a checkpoint", 1, 0, marks=pytest.mark.slow),
    pytest.param("after a checkpoint's rename", 1, 1, marks=pytest.mark.slow),
    pytest.param("in a log line", 1, 0, marks=pytest.mark.slow),
    pytest.param("in a log line", 7, 6, marks=pytest.mark.slow),
    pytest.param("after a step", 1, 0, marks=pytest.mark.slow),
    pytest.param("after a step", STEPS, STEPS - 1, marks=pytest.mark.slow),
]
ALWAYS = {"checkpoint_seconds": 0.0, "threads": 1}
SHORT = {"batches": "8", "budget": 8 * 64 * STEPS, "lr": "3e-3"}
GRPO = {
    "kind": "grpo",
    "prompt_tokens": 40,
    "new_tokens": 8,
    "group_size": 4,
    "num_iterations": 2,
    "kl": 0.1,
}
WORDS = {"batches": "8", "model": "quick", "data": "synthetic"}
COMPILED = {"compile": True}
TARGET = {"batches": "8", "budget": 8 * 64 * 100, "lr": "1e-2", "target": 5.5}


def planned_trial(
    path: Path, experiment: str = "quick", settings: dict[str, object] = SHORT, **execution: object
) -> TrialFolder:
    return plan_trial(path, experiment, settings, **ALWAYS | execution)


def run_to_the_end(trial: TrialFolder) -> Result:
    assert attempt(trial) == 0
    result = trial.read_result()
    assert result is not None and result.state is State.COMPLETE
    return result


def science_lines(trial: TrialFolder) -> list[dict[str, object]]:
    return [
        {k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")}
        for line in read_metrics(trial.metrics_path)
    ]


def assert_same(trial: TrialFolder, other: TrialFolder) -> None:
    weights, others = load_file(trial.weights_path), load_file(other.weights_path)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert science_lines(trial) == science_lines(other)
    assert find_sha256(trial.losses_path) == find_sha256(other.losses_path)  # None with GRPO
    result, other_result = trial.read_result(), other.read_result()
    keys = ("final_valid_loss", "final_train_loss", "best_valid_loss", "clipped_step_fraction")
    keys += ("final_valid", "initial_valid_reward", "final_train_reward", "tokens_to_target")
    for key in keys:
        assert getattr(result, key) == getattr(other_result, key)


@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        ("llama", 4),
        pytest.param("gpt2", None, marks=pytest.mark.slow),
        pytest.param("gpt2", 4, marks=pytest.mark.slow),
    ],
)
def test_fine_tuning_resumes_exactly_with_and_without_lora(tmp_path, kind, rank):
    pytest.importorskip("peft")
    init = save_model(kind, tmp_path / "model")
    settings = {**SHORT, "budget": 8 * 64 * 12, "init": str(init), "data": "synthetic"}
    settings |= {"lora": rank} if rank else {}
    whole, trial = (planned_trial(tmp_path / name, "quick", settings) for name in ("a", "b"))
    run_to_the_end(whole)
    assert attempt(trial, "after a step", 7) == -signal.SIGKILL
    stored = load_file(trial.checkpoints()[0].path / "state.safetensors")
    run_to_the_end(trial)
    assert_same(trial, whole)
    assert continued_from(trial) == [6]
    weights = {name for name in stored if name.startswith("model.")}
    assert weights and all("lora_" in name for name in weights) == bool(rank)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> TrialFolder:
    trial = planned_trial(tmp_path_factory.mktemp("whole"))
    run_to_the_end(trial)
    return trial


@pytest.mark.parametrize(("moment", "nth", "kept"), DEATHS)
def test_a_killed_trial_ends_with_the_same_bits(tmp_path, uninterrupted, moment, nth, kept):
    trial = planned_trial(tmp_path)
    assert attempt(trial, moment, nth) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, uninterrupted)
    assert continued_from(trial) == ([kept] if kept else [])


def test_a_trial_killed_again_and_again_ends_with_the_same_bits(tmp_path, uninterrupted):
    trial = planned_trial(tmp_path)
    kills = [("after a step", 9), ("in a checkpoint", 2), ("in a log line", 3)]
    for moment, nth in kills:
        assert attempt(trial, moment, nth) == -signal.SIGKILL
    run_to_the_end(trial)
    assert trial.read_status().attempts == len(kills) + 1
    assert_same(trial, uninterrupted)
    assert continued_from(trial) == [8, 9, 11]


@pytest.mark.parametrize(
    ("experiment", "settings", "execution", "death"),
    [
        ("quick", SHORT, {"threads": 2}, 10),
        ("quadratic", {"batches": "16", "budget": 16 * 100}, {}, 70),
        ("quick", {**SHORT, "optimizers": "muon"}, {}, 17),
        pytest.param("quick", {**SHORT, "optimizers": "adafactor"}, {}, 17, marks=pytest.mark.slow),
        ("grpo-words", {**WORDS, "workload": GRPO, "lr": "3e-3", "budget": 8 * 48 * 8}, {}, 5),
        pytest.param("quick", SHORT, COMPILED, 17, marks=pytest.mark.slow),
        pytest.param("quick", SHORT, COMPILED | {"threads": 2}, 17, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_trial_resumes_exactly(tmp_path, experiment, settings, execution, death):
    whole = planned_trial(tmp_path / "whole", experiment, settings, **execution)
    result = run_to_the_end(whole)
    trial = planned_trial(tmp_path / "killed", experiment, settings, **execution)
    assert attempt(trial, "after a step", death) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, whole)
    assert continued_from(trial) == [death - 1]
    assert bool(result.seconds_compile) == ("compile" in execution)
    if experiment == "grpo-words":
        assert_grpo_metrics(trial)


def assert_grpo_metrics(trial: TrialFolder) -> None:
    line = read_metrics(trial.metrics_path)[0]
    phases = ("generate", "score", "log_probs", "update")
    promised = {f"perf/{phase}_seconds" for phase in phases} | {"memory/allocated_bytes"}
    promised |= {"reward/mean", "reward/std", "reward/words", "completion/tokens"}
    promised |= {f"grpo/{name}" for name in ("kl", "ratio", "clip_fraction", "entropy")}
    assert promised <= line.keys()
    parameters = trial.read_result().parameters
    assert line["memory/allocated_bytes"] >= 3 * 4 * parameters  # with two moments


def test_averaged_weights_and_the_way_to_a_target_resume_exactly(tmp_path):
    whole = planned_trial(tmp_path / "whole", "quick", TARGET)
    result = run_to_the_end(whole)
    steps = result.steps
    assert result.tokens_to_target and steps % 5 == 0  # an evaluation is every 5 steps
    trial = planned_trial(tmp_path / "killed", "quick", TARGET)
    for nth in (steps - 7, 6):  # before the crossing, and between it and its confirmation
        assert attempt(trial, "after a step", nth) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, whole)
    assert continued_from(trial) == [steps - 8, steps - 3]


def test_grpo_starts_from_the_weights_of_a_pretraining_trial(tmp_path):
    settings = {**WORDS, "budget": 8 * 64 * 4, "lr": "1e-2"}
    first = planned_trial(tmp_path / "first", "quick", settings)
    run_to_the_end(first)
    settings |= {"workload": GRPO, "init": str(first.path), "budget": 8 * 48 * 2, "lr": "1e-9"}
    config = planned_trial(tmp_path / "second", "grpo-words", settings).read_config()
    weights = load_file(first.weights_path)
    started = TrainingStep(config, torch.device("cpu")).model.state_dict()
    assert all(torch.equal(started[name], weight) for name, weight in weights.items())
    assert config.science.start and len(weights) > 3


def test_result_and_metrics_agree_with_their_hashes(uninterrupted):
    result = uninterrupted.read_result()
    assert result.metrics_sha256 == sha256_of_file(uninterrupted.metrics_path)
    assert result.valid_losses_sha256 == sha256_of_file(uninterrupted.losses_path)
    last = json.loads(uninterrupted.metrics_path.read_text().splitlines()[-1])
    assert last["tokens"] == result.tokens == SHORT["budget"]
