"""A trial on several devices is the trial that it is on one: real processes, exchanging by gloo."""

import importlib.util
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, load_model

from sweep.cli import sweep
from sweep.config.experiment import load_experiment
from sweep.errors import WorkerDied
from sweep.memory.forecast import forecast_stages
from sweep.models import build_model
from sweep.orchestration.execution import Logistics
from sweep.orchestration.planning import make_plan, save_plan
from sweep.plan.retry import Outcome, begin_attempt
from sweep.training.process import ATTEMPT, FreshProcess
from sweep.trial.folder import State, SweepFolder, TrialFolder
from sweep.trial.metrics import read_metrics

STEPS, MIDDLE = 30, 17
# The norm of a gradient is above 0.6 in some steps and below in others.
SETTINGS = {
    "batches": "8",
    "budget": 8 * 64 * STEPS,
    "lr": "3e-3",
    "optimizer": {"clip": 0.6},
}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # sums in another order, in float32

# A workload that does something to one process of a trial, at a microbatch of two a step.
PROCESSES = """
import os, pathlib, signal
import torch
from sweep.workloads import ranks
from sweep.workloads.pretrain import Pretrain

class Meddling(Pretrain):
    calls, moment = 0, 7

    def loss_sum(self, model, batch):
        self.calls += torch.is_grad_enabled()
        if ranks.rank() == 1 and self.calls == self.moment:
            self.meddle(batch[0].shape[0])
        return super().loss_sum(model, batch)

class Killed(Meddling):
    moment = 41

    def meddle(self, sequences):
        mark = pathlib.Path({folder!r}) / "killed"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

class OutOfMemory(Meddling):
    def meddle(self, sequences):
        if sequences > 1:
            raise torch.OutOfMemoryError("out of memory: all of it was asked for")

class Raising(Meddling):
    def meddle(self, sequences):
        raise RuntimeError("one of two has had enough")
"""


def planned(
    path: Path,
    devices: int = 1,
    zero: int = 0,
    strategy: str | None = None,
    **settings: object,
) -> TrialFolder:
    logistics = Logistics(
        device="cpu", microbatch=2, devices=devices, zero=zero or None, strategy=strategy
    )
    folder = SweepFolder(path)
    plan = make_plan(load_experiment("quick", SETTINGS | settings), logistics, folder).plan
    execution = plan.execution.model_copy(update={"threads": 1})
    save_plan(plan.model_copy(update={"execution": execution}), folder)
    return folder.trials()[0]


def attempt(trial: TrialFolder, pause_step: int | None = None) -> Outcome:
    status = begin_attempt(trial.read_status())
    trial.write_status(status.changed(pause_step=pause_step))
    found: Outcome = FreshProcess(ATTEMPT, trial.path, ends_itself=True).result()
    return found


def on(trial: TrialFolder, devices: int, strategy: str = "torch") -> None:
    """Let a trial go on with another number of processes."""
    config = trial.read_config()
    update = {"devices": devices, "strategy": strategy}
    execution = config.execution.model_copy(update=update)
    trial.write_config(config.model_copy(update={"execution": execution}))


def curves(trial: TrialFolder) -> dict[str, torch.Tensor]:
    lines = read_metrics(trial.metrics_path)
    names = ("train/loss", "train/grad_norm", "train/clipped", "valid/loss")
    return {n: torch.tensor([line[n] for line in lines if n in line]) for n in names}


def assert_same_trial(trial: TrialFolder, other: TrialFolder) -> None:
    for name, curve in curves(trial).items():
        torch.testing.assert_close(curve, curves(other)[name], **CLOSE)
    ours, theirs = trial.read_result(), other.read_result()
    for name in ("final_valid_loss", "final_train_loss", "initial_valid_loss"):
        assert math.isclose(ours[name], theirs[name], rel_tol=1e-5)
    weights, others = load_file(trial.weights_path), load_file(other.weights_path)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrialFolder:
    trial = planned(tmp_path_factory.mktemp("alone"))
    assert attempt(trial).kind == "complete"
    assert 0 < trial.read_result()["clipped_step_fraction"] < 1
    return trial


STAGES = [
    (2, 0),
    (2, 3),
    *(pytest.param(devices, zero, marks=pytest.mark.slow) for devices, zero in
      [(2, 1), (2, 2), (4, 0), (4, 1), (4, 2), (4, 3)]),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "zero"), STAGES)
def test_on_several_devices_a_trial_has_the_same_curve(tmp_path, alone, devices, zero):
    trial = planned(tmp_path, devices, zero)
    assert attempt(trial).kind == "complete"
    assert_same_trial(trial, alone)
    assert trial.read_result()["devices"] == devices
    lines = read_metrics(trial.metrics_path)
    held = next(line["memory/allocated_bytes"] for line in lines if "train/loss" in line)
    forecast = forecast_stages(trial.read_config().sized(8 // devices, 1), devices)[zero]
    assert held == pytest.approx(forecast.rest_bytes, rel=0.02 if zero != 1 else 0.05)
    noise = [line for line in read_metrics(trial.metrics_path) if "noise/train_trace" in line]
    assert bool(noise) == (devices < 4)  # of four microbatches each device of four has one
    assert all(math.isfinite(line["noise/train_trace"]) for line in noise)


def test_weights_of_several_devices_are_those_of_the_model(tmp_path, alone):
    trial = planned(tmp_path, 2, 3)
    assert attempt(trial).kind == "complete"
    model = build_model(trial.read_config().science.model, seed=5)
    load_model(model, str(trial.weights_path), strict=True)


@pytest.mark.parametrize(
    ("zero", "processes"),
    [
        (3, (2, 2)),
        (1, (2, 1)),
        *(pytest.param(zero, counts, marks=pytest.mark.slow) for zero, counts in
          [(0, (4, 2)), (1, (2, 4)), (2, (2, 2)), (2, (4, 2)), (3, (2, 4)), (3, (4, 1))]),
    ],
)  # fmt: skip
def test_a_trial_goes_on_with_any_number_of_processes(tmp_path, alone, zero, processes):
    before, after = processes
    trial = planned(tmp_path, before, zero)
    assert attempt(trial, pause_step=MIDDLE) == Outcome(
        "paused", f"checkpoint at step {MIDDLE} of {STEPS}"
    )
    checkpoint = trial.checkpoints()[0]
    assert checkpoint.path.is_dir() and checkpoint.step == MIDDLE
    assert {path.suffix for path in checkpoint.path.iterdir()} == {".safetensors", ".json"}
    on(trial, after)
    assert attempt(trial).kind == "complete"
    assert len(curves(trial)["train/loss"]) == len(curves(alone)["train/loss"])
    assert_same_trial(trial, alone)
    assert not trial.checkpoints()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_as_many_processes_it_goes_on_to_the_same_bits(tmp_path, zero):
    whole, trial = planned(tmp_path / "whole", 2, zero), planned(tmp_path / "paused", 2, zero)
    assert attempt(whole).kind == "complete"
    assert attempt(trial, pause_step=MIDDLE).kind == "paused"
    assert attempt(trial).kind == "complete"
    weights, others = load_file(trial.weights_path), load_file(whole.weights_path)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert trial.losses_path.read_bytes() == whole.losses_path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_averaged_weights_are_evaluated_and_kept(tmp_path, zero):
    averaging = {"schedule": {"name": "constant", "average": 0.1}}
    whole = planned(tmp_path / "alone", **averaging)
    trial = planned(tmp_path / "several", 2, zero, **averaging)
    assert attempt(whole).kind == "complete"
    assert attempt(trial, pause_step=MIDDLE).kind == "paused"
    assert attempt(trial).kind == "complete"
    assert_same_trial(trial, whole)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_compiled_trial_has_the_same_curve(tmp_path, alone, zero):
    trial = planned(tmp_path, 2, zero)
    config = trial.read_config()
    execution = config.execution.model_copy(update={"compile": True})
    trial.write_config(config.model_copy(update={"execution": execution}))
    assert attempt(trial).kind == "complete"
    assert_same_trial(trial, alone)


@pytest.mark.slow
def test_a_torn_checkpoint_falls_back_to_the_older_one(tmp_path, alone):
    trial = planned(tmp_path, 2, 3)
    assert attempt(trial, pause_step=9).kind == "paused"
    assert attempt(trial, pause_step=MIDDLE).kind == "paused"
    newest, older = trial.checkpoints()
    torn = next(newest.path.glob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-100])
    assert attempt(trial).kind == "complete"
    assert f"{newest.path.name} is damaged" in trial.log_path.read_text() and older.step == 9
    assert_same_trial(trial, alone)


def write_workloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meddling_processes.py").write_text(PROCESSES.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workload: str) -> tuple[int, TrialFolder]:
    """Run a sweep of one trial on two processes, of which one is meddled with."""
    write_workloads(monkeypatch, tmp_path)
    out = tmp_path / "out"
    arguments = [
        *("run", "quick", "--batches", "8", "--budget", str(8 * 64 * STEPS), "--microbatch", "2"),
        *("--workload", f"meddling_processes:{workload}", "--devices-per-trial", "2"),
        *("--zero", "2", "--out", str(out), "--yes", "--quiet"),
    ]
    result = CliRunner().invoke(sweep, arguments, standalone_mode=False)
    return result.return_value, SweepFolder(out).trials()[0]


@pytest.mark.slow
def test_a_killed_process_ends_the_attempt_and_the_trial_goes_on(monkeypatch, tmp_path):
    code, trial = run(monkeypatch, tmp_path, "Killed")
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (0, State.COMPLETE, 2)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_killed_process_costs_the_trial_only_what_follows_its_checkpoint(
    monkeypatch, tmp_path, alone, zero
):
    write_workloads(monkeypatch, tmp_path)
    trial = planned(tmp_path / "out", 2, zero, workload="meddling_processes:Killed")
    config = trial.read_config()
    execution = config.execution.model_copy(update={"checkpoint_seconds": 0.0})
    trial.write_config(config.model_copy(update={"execution": execution}))
    found = attempt(trial)
    assert found.kind == "lost" and "process 1 of the trial: " in found.message
    assert trial.checkpoints()[0].step == 20
    assert attempt(trial).kind == "complete"
    assert_same_trial(trial, alone)


@pytest.mark.slow
def test_memory_that_runs_out_in_one_process_halves_the_microbatch_of_all(monkeypatch, tmp_path):
    code, trial = run(monkeypatch, tmp_path, "OutOfMemory")
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (0, State.COMPLETE, 2)
    assert status.microbatch_size == 1


@pytest.mark.slow
def test_what_one_process_raises_is_what_the_trial_says(monkeypatch, tmp_path):
    code, trial = run(monkeypatch, tmp_path, "Raising")
    status = trial.read_status()
    assert (code, status.state, status.attempts) == (1, State.FAILED, 1)
    assert status.message == "RuntimeError: one of two has had enough"


needs_deepspeed = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (importlib.util.find_spec("deepspeed") and shutil.which("g++")),
        reason="needs the extra deepspeed, and a compiler",
    ),
]


class TestDeepSpeed:
    """The same trial on DeepSpeed's engine."""

    pytestmark = needs_deepspeed

    @pytest.mark.parametrize(("devices", "zero"), [(2, 1), (2, 2), (2, 3), (4, 2)])
    def test_it_has_the_same_curve(self, tmp_path, alone, devices, zero):
        trial = planned(tmp_path, devices, zero, "deepspeed")
        assert attempt(trial).kind == "complete"
        assert_same_trial(trial, alone)
        assert trial.read_result()["execution"]["strategy"] == "deepspeed"

    @pytest.mark.parametrize("zero", [1, 2, 3])
    @pytest.mark.parametrize("after", ["deepspeed", "torch"])
    def test_it_goes_on_with_either_strategy_and_any_number_of_processes(
        self, tmp_path, alone, zero, after
    ):
        trial = planned(tmp_path, 2, zero, "deepspeed")
        assert attempt(trial, pause_step=MIDDLE).kind == "paused"
        on(trial, 4 if after == "deepspeed" else 1, after)
        assert attempt(trial).kind == "complete"
        assert len(curves(trial)["train/loss"]) == len(curves(alone)["train/loss"])
        assert_same_trial(trial, alone)

    def test_it_goes_on_from_torchs_own_sharding(self, tmp_path, alone):
        trial = planned(tmp_path, 2, 3)
        assert attempt(trial, pause_step=MIDDLE).kind == "paused"
        on(trial, 2, "deepspeed")
        assert attempt(trial).kind == "complete"
        assert_same_trial(trial, alone)


class Running:
    """A trial in two processes that goes on for long, until it is stopped or killed."""

    def __init__(self, path: Path) -> None:
        long = {"budget": 8 * 64 * 100_000, "evaluation": {"sequences": 8, "noise_points": 0}}
        self.trial = planned(path, 2, 2, **long)
        self.trial.write_status(begin_attempt(self.trial.read_status()))
        self.process = FreshProcess(ATTEMPT, self.trial.path, ends_itself=True)
        wait_for(lambda: read_metrics(self.trial.metrics_path))
        launcher = psutil.Process(self.process.pid)
        self.ranks = [c for c in launcher.children() if "spawn_main" in " ".join(c.cmdline())]
        assert len(self.ranks) == 2


def wait_for(is_so: Callable[[], object]) -> None:
    while not is_so():  # the timeout is the test's
        time.sleep(0.05)


@pytest.mark.slow
def test_a_stop_lets_all_processes_checkpoint_and_end(tmp_path):
    running = Running(tmp_path)
    for rank in running.ranks:  # as a batch system may send it to a whole process group
        rank.terminate()
    running.process.stop()
    assert running.process.result().kind == "stopped"
    assert running.trial.checkpoints()
    wait_for(lambda: not any(rank.is_running() for rank in running.ranks))


@pytest.mark.slow
def test_processes_end_with_the_one_that_launched_them(tmp_path):
    running = Running(tmp_path)
    running.process.kill()
    with pytest.raises(WorkerDied):
        running.process.result()
    wait_for(lambda: not any(rank.is_running() for rank in running.ranks))
