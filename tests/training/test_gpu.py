"""Trials on a GPU, in processes that were forked for them. Most cases also run on a CPU.

The file needs no package that a bare worker lacks, except pytest.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.data.synthetic_stories import synthetic_identity
from sweep.errors import SweepError
from sweep.training.attempt import run_attempt
from sweep.training.checkpoint import Progress
from sweep.training.device import use_device, visible_gpus, visible_name
from sweep.training.loop import Steps
from sweep.training.process import FreshProcess
from sweep.training.step import TrainingStep
from sweep.trial.files import read_metrics
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import read_owner
from sweep.trial.status import State, TrialStatus
from tests.plans import build_plan

ROOT = Path(__file__).parents[2]
BATCH, STEPS = 4, 80
NO_GRAPHS = "steps are not CUDA graphs"
CURVES = ("step", "train/loss", "train/lr", "train/grad_norm")

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def trial_config(device, compile=False, **execution):
    fields = {"batches": [BATCH], "precision": "fp32", "budget": STEPS * BATCH * 64, "lr": "1e-3"}
    chosen = Execution(
        device=device, compile=compile, threads=2, loss_chunk_rows=100, evaluation_batch_size=32
    )
    chosen = chosen.model_copy(update=execution)
    plan = build_plan(load_experiment("quick", fields), chosen, data=synthetic_identity())
    return plan.trial_config(plan.trials[0], "sweep")


def prepared(path, config) -> TrialFolder:
    """Write the folder of a trial, as `sweep plan --out` does, for `python -m sweep.training`."""
    trial = SweepFolder(path).trial(config.id)
    trial.path.mkdir(parents=True)
    trial.write_config(config)
    return trial


def start_worker(trial, python=sys.executable, **environment):
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    return subprocess.Popen(
        [python, "-m", "sweep.training", str(trial.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def curves_of(trial):
    lines = read_metrics(trial.metrics_path)
    return [[line[metric] for line in lines if metric in line] for metric in CURVES]


def assert_same_training(trial, whole):
    results = [folder.read_result() for folder in (trial, whole)]
    losses = [result.final_valid_loss for result in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for curve, expected in zip(curves_of(trial), curves_of(whole), strict=True):
        assert curve == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(
    ("compile", "graph_bound"),
    [
        (False, 0),
        pytest.param(True, 0, marks=pytest.mark.gpu),
        pytest.param(False, BATCH, marks=pytest.mark.gpu),
    ],
)
def test_a_forked_attempt_that_is_killed_resumes_from_its_checkpoint(
    tmp_path, device, compile, graph_bound
):
    plain = trial_config(device, compile, checkpoint_seconds=0.0)
    graphed = trial_config(device, compile, checkpoint_seconds=0.0, graph_bound=graph_bound)
    whole = prepared(tmp_path / "whole", plain)
    killed = prepared(tmp_path / "killed", graphed)
    process = start_worker(whole)
    output, _ = process.communicate()
    assert process.returncode == 0, output + whole.log_path.read_text()

    process = start_worker(killed)
    while not (checkpoints := killed.checkpoints()) or checkpoints[0].step < 20:
        assert process.poll() is None, process.communicate()[0] + killed.log_path.read_text()
        time.sleep(0.05)
    os.kill(read_owner(killed.lease_path)["pid"], signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output + killed.log_path.read_text()
    assert "continues from step" in killed.log_path.read_text()
    result = killed.read_result()
    assert result.attempts == 2 and result.execution["compile"] is compile
    assert NO_GRAPHS not in killed.log_path.read_text()
    assert_same_training(killed, whole)


@pytest.mark.gpu
def test_a_trial_on_a_gpu_continues_from_its_checkpoints_in_one_process(tmp_path):
    config = trial_config("cuda", checkpoint_seconds=0.0)
    trials = []
    for name, stops in (("whole", ()), ("parts", (25, 52))):
        trial = prepared(tmp_path / name, config)
        for number, stop in enumerate((*stops, None), 1):
            status = TrialStatus(State.RUNNING, attempts=number, fencing=number, pause_step=stop)
            trial.write_status(status)
            kind = run_attempt(trial.path, lambda: None).kind
            assert kind == ("complete" if stop is None else "paused")
        trials.append(trial)
    assert_same_training(trials[1], trials[0])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("graph_bound", [0, BATCH])
@pytest.mark.parametrize("compile", [False, True])
def test_between_log_points_no_step_waits_for_a_gpu(compile, graph_bound):
    config = trial_config("cuda", compile, graph_bound=graph_bound)
    device = torch.device("cuda")
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


def losses_of(step, batches):
    return [step(batch, 1e-3 / t).item() for t, batch in enumerate(batches, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("average", [0.0, 0.1])
@pytest.mark.parametrize("compile", [False, True])
def test_graphed_steps_have_the_losses_of_others(compile, average, capsys):
    results = []
    for graph_bound in (0, BATCH):
        config = trial_config("cuda", compile, graph_bound=graph_bound)
        schedule = config.science.schedule.model_copy(update={"average": average})
        science = config.science.model_copy(update={"schedule": schedule})
        step = TrainingStep(config.model_copy(update={"science": science}), torch.device("cuda"))
        batches = [step.workload.build_batch(BATCH * t, BATCH) for t in range(STEPS)]
        losses = losses_of(step, batches)
        measured = step.workload.meter.state()  # sums over all steps
        losses.append(step.evaluate(batches[0]).item())  # of averaged weights, if there are any
        results.append((losses, [total for total, _ in measured.values()]))
    assert [*step.graphs] == [BATCH] and NO_GRAPHS not in capsys.readouterr().out
    for values, expected in zip(*results, strict=True):
        assert values == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_continues_without_a_graph(capsys):
    results = []
    for graph_bound in (0, BATCH):
        device = torch.device("cuda")
        step = TrainingStep(trial_config("cuda", graph_bound=graph_bound), device)
        backward = step.parallel.backward

        def read_loss(loss, backward=backward):
            backward(loss)
            loss.item()  # waits for the device

        step.parallel.backward = read_loss
        batches = [step.workload.build_batch(BATCH * t, BATCH) for t in range(20)]
        results.append(losses_of(step, batches))
        assert torch.cuda.get_rng_state(device).numel() and torch.rand(1, device=device) >= 0
    assert capsys.readouterr().out.count(NO_GRAPHS) == 1
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def use_and_allocate(name, should_stop):
    device = use_device(name)
    tensor = torch.empty(1, device=device.type)
    return device, tensor.device


@devices
def test_a_numbered_gpu_is_the_current_one_of_its_process(device):
    name = f"cuda:{torch.cuda.device_count() - 1}" if device == "cuda" else device
    assert FreshProcess(use_and_allocate, name).result() == (torch.device(name),) * 2


def test_a_numbered_gpu_is_one_of_those_that_are_visible(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"] and visible_name("cuda:1") == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,5,-1,3")  # CUDA ends the list at -1
    assert visible_gpus() == ["GPU-a", "5"] and visible_name("cuda:1") == "5"
    with pytest.raises(SweepError, match="cuda:2"):
        visible_name("cuda:2")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),  # tests/test_end_to_end.py has more
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_the_whole_sweep_quick_runs(tmp_path, device):
    pytest.importorskip("mlflow")
    words = [sys.executable, "-m", "sweep", "run", "quick", "--device", device, "--yes"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "quick")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = SweepFolder(tmp_path / "quick")
    results = [trial.read_result() for trial in folder.trials()]
    assert [result.state for result in results] == ["COMPLETE"] * 5
    assert all(result.execution["device"] == device for result in results)
    assert (folder.path / "report.md").exists()


@pytest.mark.slow
def test_with_a_cuda_build_of_torch_a_forked_attempt_asks_for_a_driver(tmp_path):
    """CUDA_PYTHON is a Python with such a build, without a GPU: `make test-cuda-build`."""
    python = os.environ.get("CUDA_PYTHON")
    if not python:
        pytest.skip("CUDA_PYTHON must name a Python with a CUDA build of torch")
    for device in ("cuda", "cpu"):
        trial = prepared(tmp_path / device, trial_config(device))
        process = start_worker(trial, python, CUDA_VISIBLE_DEVICES="")
        output, _ = process.communicate()
        if device == "cpu":
            assert trial.read_result().state == "COMPLETE", output
        else:
            assert process.returncode == 1
            assert re.search("Found no NVIDIA driver|No CUDA GPUs are available", output), output
