"""Killed at any moment and started again, a trial ends with the same bits."""

import json
import multiprocessing
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.orchestration.planning import make_plan, save_plan
from sweep.training.step import TrainingStep
from sweep.trial.files import read_metrics
from sweep.trial.folder import State, SweepFolder, TrialFolder

# Runs one attempt and kills its own process, with SIGKILL, at a named moment.
SUICIDE = """
import os, signal
from pathlib import Path
import sweep.trial.files, sweep.training.loop, sweep.training.checkpoint, sweep.training.result
from sweep.training.process import attempt_trial
from sweep.trial.folder import State, TrialFolder

calls = 0  # moment, nth and path are given

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def on_nth(action, real):
    def replacement(*arguments, **keywords):
        global calls
        calls += 1
        if calls == nth:
            action(*arguments, **keywords)
            die()
        return real(*arguments, **keywords)
    return replacement

class Os:
    def __getattr__(self, name):
        return getattr(os, name)

if moment == "middle of a checkpoint":
    real_save = sweep.training.checkpoint.save_file
    def half(tensors, path):
        real_save(tensors, path)
        os.truncate(path, path.stat().st_size // 2)
    sweep.training.checkpoint.save_file = on_nth(half, real_save)
elif moment == "before the checkpoint's rename":
    real = Path.replace
    Path.replace = lambda self, target: (
        on_rename(self, target) if "checkpoint" in str(target) else real(self, target))
    on_rename = on_nth(lambda self, target: None, real)
elif moment == "after the checkpoint's rename":
    real = Path.replace
    Path.replace = lambda self, target: (
        on_rename(self, target) if "checkpoint" in str(target) else real(self, target))
    on_rename = on_nth(lambda self, target: real(self, target), real)
elif moment == "middle of a log line":
    fake = Os()
    fake.write = on_nth(lambda fd, data: os.write(fd, data[: len(data) // 2]), os.write)
    sweep.trial.files.os = fake
elif moment == "between two steps":
    real_take = sweep.training.loop.Steps.take
    sweep.training.loop.Steps.take = on_nth(lambda *a: None, real_take)
elif moment == "before the result":
    sweep.training.result.write_json = on_nth(lambda *a: None, None)
elif moment == "after the result":
    real_json = sweep.training.result.write_json
    sweep.training.result.write_json = on_nth(real_json, real_json)

folder = TrialFolder(path)
status = folder.read_status()
folder.write_status(status.changed(state=State.RUNNING, attempts=status.attempts + 1,
                                   fencing=status.fencing + 1))
attempt_trial(path, lambda: None)
"""

STEPS = 60
MOMENTS = [  # and the steps that the next attempt need not take again
    ("middle of a checkpoint", 1, 0),
    ("middle of a checkpoint", 4, 3),
    ("before the checkpoint's rename", 2, 1),
    ("after the checkpoint's rename", 1, 1),
    ("after the checkpoint's rename", 5, 5),
    ("middle of a log line", 1, 0),
    ("middle of a log line", 7, 6),
    ("between two steps", 1, 0),
    ("between two steps", 33, 32),
    ("between two steps", 59, 58),
    ("before the result", 1, STEPS),
    ("after the result", 1, STEPS),
]


def planned_trial(path: Path, experiment: str, threads: int = 1, **settings: object) -> TrialFolder:
    """Plan one trial that checkpoints after every step."""
    folder = SweepFolder(path)
    plan = make_plan(load_experiment(experiment, settings), Execution(device="cpu"), folder).plan
    execution = plan.execution.model_copy(update={"checkpoint_seconds": 0.0, "threads": threads})
    save_plan(plan.model_copy(update={"execution": execution}), folder)
    return folder.trials()[0]


def pretrain_trial(path: Path, threads: int = 1) -> TrialFolder:
    return planned_trial(path, "quick", threads, batches="8", budget=8 * 64 * STEPS, lr="3e-3")


def attempt(trial: TrialFolder, moment: str = "", nth: int = 0) -> int | None:
    """Run one attempt in a fresh process that kills itself at a moment; return its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sweep.training.worker", "torch._dynamo"])
    names = {"moment": moment, "nth": nth, "path": trial.path}
    process = context.Process(target=exec, args=(SUICIDE, names))
    process.start()
    process.join()
    return process.exitcode


def run_to_the_end(trial: TrialFolder) -> None:
    assert attempt(trial) == 0
    assert trial.read_result()["state"] == State.COMPLETE


def gone_on_from(trial: TrialFolder) -> list[int]:
    """Return the step that each attempt continued from, if it did not start at 0."""
    steps = re.findall(r"continues from step (\d+) of", trial.log_path.read_text())
    return [int(step) for step in steps]


def science_lines(trial: TrialFolder) -> list[dict[str, object]]:
    """Metric lines without times and rates."""
    lines = read_metrics(trial.metrics_path)
    return [
        {k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")}
        for line in lines
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> TrialFolder:
    trial = pretrain_trial(tmp_path_factory.mktemp("whole"))
    run_to_the_end(trial)
    return trial


def assert_same(trial: TrialFolder, other: TrialFolder) -> None:
    weights, others = load_file(trial.weights_path), load_file(other.weights_path)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert science_lines(trial) == science_lines(other)
    assert trial.losses_path.read_bytes() == other.losses_path.read_bytes()
    result, other_result = trial.read_result(), other.read_result()
    for key in ("final_valid_loss", "final_train_loss", "best_valid_loss", "clipped_step_fraction"):
        assert result[key] == other_result[key]


@pytest.mark.parametrize(("moment", "nth", "kept"), MOMENTS)
def test_a_killed_trial_ends_with_the_same_bits(tmp_path, uninterrupted, moment, nth, kept):
    trial = pretrain_trial(tmp_path)
    assert attempt(trial, moment, nth) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, uninterrupted)
    assert gone_on_from(trial) == ([kept] if kept and moment != "after the result" else [])


def test_a_trial_killed_again_and_again_ends_with_the_same_bits(tmp_path, uninterrupted):
    trial = pretrain_trial(tmp_path)
    kills = [("between two steps", 9), ("middle of a checkpoint", 2), ("middle of a log line", 3)]
    for moment, nth in kills:
        assert attempt(trial, moment, nth) == -signal.SIGKILL
    run_to_the_end(trial)
    assert trial.read_status().attempts == len(kills) + 1
    assert_same(trial, uninterrupted)
    assert gone_on_from(trial) == [8, 9, 11]


def test_a_damaged_newest_checkpoint_falls_back_to_the_older_one(tmp_path, uninterrupted):
    trial = pretrain_trial(tmp_path)
    assert attempt(trial, "after the checkpoint's rename", 4) == -signal.SIGKILL
    (newest,) = trial.checkpoints()[0].path.glob("*.safetensors")
    newest.write_bytes(newest.read_bytes()[:1000])
    run_to_the_end(trial)
    assert_same(trial, uninterrupted)
    assert gone_on_from(trial) == [3]


def test_on_two_threads_a_killed_trial_ends_with_the_same_bits_too(tmp_path):
    whole, trial = pretrain_trial(tmp_path / "whole", 2), pretrain_trial(tmp_path / "killed", 2)
    run_to_the_end(whole)
    assert attempt(trial, "middle of a checkpoint", 5) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, whole)
    assert gone_on_from(trial) == [4]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_compiled_trial_resumes_exactly_too(tmp_path, threads):
    def compiled_trial(path: Path) -> TrialFolder:
        trial = pretrain_trial(path, threads)
        config = trial.read_config()
        execution = config.execution.model_copy(update={"compile": True})
        trial.write_config(config.model_copy(update={"execution": execution}))
        return trial

    whole, trial = compiled_trial(tmp_path / "whole"), compiled_trial(tmp_path / "killed")
    run_to_the_end(whole)
    assert attempt(trial, "between two steps", 33) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, whole)
    assert gone_on_from(trial) == [32] and whole.read_result()["seconds_compile"] > 0


def test_averaged_weights_and_the_way_to_a_target_resume_exactly_too(tmp_path):
    settings = {"batches": "8", "budget": 8 * 64 * 200, "lr": "3e-3", "target": 5.5}
    whole = planned_trial(tmp_path / "whole", "quick", **settings)
    run_to_the_end(whole)
    assert whole.read_result()["tokens_to_target"]
    steps = whole.read_result()["steps"]
    trial = planned_trial(tmp_path / "killed", "quick", **settings)
    for nth in (steps - 12, 6):  # before the crossing, and between it and what confirms it
        assert attempt(trial, "between two steps", nth) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, whole)
    assert gone_on_from(trial) == [steps - 13, steps - 8]
    assert trial.read_result()["tokens_to_target"] == whole.read_result()["tokens_to_target"]


def test_quadratic_trials_resume_exactly_too(tmp_path):
    settings = {"batches": "16", "budget": 16 * 100}
    whole = planned_trial(tmp_path / "whole", "quadratic", **settings)
    run_to_the_end(whole)
    trial = planned_trial(tmp_path / "killed", "quadratic", **settings)
    assert attempt(trial, "between two steps", 70) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, whole)
    assert gone_on_from(trial) == [69]


def test_grpo_trials_resume_exactly_too(tmp_path):
    grpo = {"prompt_tokens": 40, "new_tokens": 12, "group_size": 4, "num_iterations": 2, "kl": 0.1}
    settings = {"batches": "8", "budget": 8 * 52 * 20, "model": "quick", "data": "synthetic"}
    settings |= {"grpo": grpo, "lr": "3e-3"}
    whole = planned_trial(tmp_path / "whole", "grpo-words", **settings)
    run_to_the_end(whole)
    trial = planned_trial(tmp_path / "killed", "grpo-words", **settings)
    assert attempt(trial, "between two steps", 13) == -signal.SIGKILL
    run_to_the_end(trial)
    assert_same(trial, whole)
    assert gone_on_from(trial) == [12]
    (line, *_) = (json.loads(line) for line in trial.metrics_path.read_text().splitlines())
    phases = ("generate", "score", "log_probs", "update")
    promised = {f"perf/{phase}_{kind}" for phase in phases for kind in ("seconds", "peak_bytes")}
    promised |= {"reward/mean", "reward/std", "reward/words", "grpo/kl", "grpo/ratio"}
    promised |= {"grpo/clip_fraction", "grpo/entropy", "completion/tokens"}
    promised |= {"perf/completions_per_second", "memory/allocated_bytes"}
    assert promised <= line.keys()
    parameters = trial.read_result()["parameters"]
    assert line["memory/allocated_bytes"] >= 4 * 4 * parameters  # two moments and the reference


def test_grpo_starts_from_the_weights_of_a_pretraining_trial(tmp_path):
    fields = {"batches": "8", "budget": 8 * 64 * 4, "model": "quick", "data": "synthetic"}
    first = planned_trial(tmp_path / "first", "quick", **fields, lr="1e-2")
    run_to_the_end(first)
    grpo = {"prompt_tokens": 40, "new_tokens": 12, "group_size": 4}
    fields |= {"grpo": grpo, "init": str(first.path), "budget": 8 * 52 * 2}
    config = planned_trial(tmp_path / "second", "grpo-words", **fields, lr="1e-9").read_config()
    weights = load_file(first.weights_path)
    started = TrainingStep(config, torch.device("cpu"), 8).model.state_dict()
    assert all(torch.equal(started[name], weight) for name, weight in weights.items())
    assert config.science.start and len(weights) > 3


def test_result_and_metrics_agree_with_their_hashes(uninterrupted):
    from sweep.trial.files import sha256_of_file

    result = uninterrupted.read_result()
    assert result["metrics_sha256"] == sha256_of_file(uninterrupted.metrics_path)
    assert result["valid_losses_sha256"] == sha256_of_file(uninterrupted.losses_path)
    lines = [json.loads(line) for line in uninterrupted.metrics_path.read_text().splitlines()]
    assert lines[-1]["tokens"] == result["tokens"] == 8 * 64 * 60
