"""Trials that one process runs one after the other have the bits of fresh processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sweep.config.execution import Services
from sweep.orchestration.executors.local import LocalExecutor
from sweep.plan.retry import begin_attempt
from sweep.training.attempt import run_attempt
from sweep.training.parallel import Parallel
from sweep.training.process import run_job
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import read_owner
from tests.exactness.attempts import plan_trial
from tests.exactness.test_resume import COMPILED, GRPO, SHORT, WORDS, assert_same, run_to_the_end
from tests.hugging_face import save_model

TEXT = {"batches": "4,8", "budget": 8 * 64 * 6, "lr": "3e-3", "seeds": 2}
WORDS_OF_GRPO = {**WORDS, **TEXT, "workload": GRPO, "budget": 8 * 48 * 4}
LORA = {**TEXT, "data": "synthetic", "lora": 4}


def process_of(trial: TrialFolder) -> int:
    return int(read_owner(trial.lease_path)["pid"])


def run_in_turn(trials: list[TrialFolder]) -> None:
    """Run trials as `sweep run` does on this machine, the batch sizes of each seed in turn."""
    sweep = SweepFolder(trials[0].path.parents[1])
    executor = LocalExecutor(Services(), trials[0].read_config().execution, sweep)
    for trial in trials:
        trial.write_status(begin_attempt(trial.read_status()))
        assert executor.submit(trial, {}).result().kind == "complete"
    executor.close()


def trials_of(path: Path, *arguments: object, **execution: object) -> list[TrialFolder]:
    plan_trial(path, *arguments, threads=1, **execution)
    trials = SweepFolder(path).trials()
    sciences = {trial.id: trial.read_config().science for trial in trials}
    return sorted(trials, key=lambda t: (sciences[t.id].seed, sciences[t.id].batch_size))


@pytest.mark.parametrize("execution", [{}, pytest.param(COMPILED, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("experiment", "settings"),
    [("quick", TEXT), ("quick", LORA), ("grpo-words", WORDS_OF_GRPO)],
    ids=["dense", "lora", "grpo"],
)
def test_trials_in_turn_have_the_bits_of_fresh_processes(tmp_path, experiment, settings, execution):
    if settings is LORA:
        pytest.importorskip("peft")
        settings = {**LORA, "init": str(save_model("llama", tmp_path / "model"))}
    shared, fresh = (
        trials_of(tmp_path / name, experiment, settings, **execution) for name in ("a", "b")
    )
    assert len(shared) == 4
    run_in_turn(shared)
    assert len({process_of(trial) for trial in shared}) == 1
    for one, other in zip(shared, fresh, strict=True):
        run_to_the_end(other)
        assert_same(one, other)
        assert bool(other.read_result().seconds_compile) == bool(execution)


def run_with_counted_graphs(trials: list[TrialFolder]) -> list[tuple[str, int]]:
    """Run trials in this process; return how each ended, and how many graphs it compiled."""
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def compiled(self: Parallel, loss_sum: Any) -> Any:
        return torch.compile(loss_sum, dynamic=False, backend=count)

    Parallel.compiled = compiled  # type: ignore[method-assign]
    ends = []
    for trial in trials:
        before = graphs
        trial.write_status(begin_attempt(trial.read_status()))
        outcome = run_attempt(trial.path, lambda: None)
        ends.append((outcome.kind, graphs - before))
    return ends


def test_a_process_compiles_more_shapes_than_torch_allows_of_one_function(tmp_path):
    limit = torch.compiler.config.recompile_limit
    batches = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert len(batches) > limit
    settings = {"batches": batches, "budget": 48 * 64, "seeds": 2}
    trials = trials_of(tmp_path, "quick", settings, compile=True)
    ends = run_job(run_with_counted_graphs, trials)
    assert {kind for kind, _ in ends} == {"complete"}
    counts = [count for _, count in ends]
    assert all(count > 0 for count in counts[: len(batches)])
    assert not any(counts[len(batches) :])  # the second seed of each


def test_the_shape_of_a_trial_depends_on_all_but_its_place_its_seed_and_its_rate(tmp_path):
    trials = trials_of(tmp_path / "a", "quick", {**SHORT, "batches": "4,8", "seeds": 2})
    small, large, small_again, _ = (trial.read_config() for trial in trials)
    assert small.id != small_again.id and small.shape == small_again.shape != large.shape
    assert small.shape != small.with_microbatch(2).shape
    assert small.shape != small.with_microbatch(4, threads=3).shape
