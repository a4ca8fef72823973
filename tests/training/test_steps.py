"""Trials on a GPU: steps do not wait for it, and a trial resumes."""

import pytest
import torch

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.experiments.synthetic_stories import synthetic_identity
from sweep.training.checkpoint import Progress
from sweep.training.loop import Steps
from sweep.training.step import TrainingStep
from sweep.training.worker import run_attempt
from sweep.trial.files import read_metrics
from sweep.trial.folder import State, TrialFolder, TrialStatus
from tests.plans import build_plan

BATCH = 4
pytestmark = pytest.mark.gpu


def trial_config(**execution):
    fields = {"batches": [BATCH], "precision": "fp32", "budget": 200 * BATCH * 64}
    chosen = Execution(device="cuda", threads=2, loss_chunk_rows=100, **execution)
    plan = build_plan(load_experiment("quick", fields), chosen, data=synthetic_identity())
    row = plan.trials[0].model_copy(update={"learning_rate": 1e-3, "id": "x"})
    return plan.trial_config(row, "sweep")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("compile", [False, True])
def test_between_log_points_no_step_waits_for_a_gpu(compile):
    config, device = trial_config(compile=compile), torch.device("cuda")
    step = TrainingStep(config, device)
    steps = Steps(config, step, Progress())
    for t in range(1, 10):
        steps.take(t)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(10, 40):
            steps.take(t)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_trial_on_a_gpu_continues_from_its_checkpoints(tmp_path):
    config, trials = trial_config(checkpoint_seconds=0.0), []
    for name, stops in (("whole", ()), ("parts", (61, 130))):
        trial = TrialFolder(tmp_path / name)
        trial.path.mkdir()
        trial.write_config(config)
        for number, stop in enumerate((*stops, None), 1):
            status = TrialStatus(State.RUNNING, attempts=number, fencing=number, pause_step=stop)
            trial.write_status(status)
            kind = run_attempt(trial.path, lambda: None).kind
            assert kind == ("complete" if stop is None else "paused")
        trials.append(trial)
    whole, parts = (trial.read_result() for trial in trials)
    assert parts["final_valid_loss"] == pytest.approx(whole["final_valid_loss"], rel=1e-3)
    for metric in ("step", "train/loss", "train/lr", "train/grad_norm"):
        curves = [[line[metric] for line in read_metrics(t.metrics_path)] for t in trials]
        assert curves[1] == pytest.approx(curves[0], rel=2e-2)
