"""Steps one by one and steps fed in blocks, as a graph takes them."""

from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.config.models import HuggingFaceSettings
from sweep.data.synthetic import synthetic_identity
from sweep.models.loss import LIGER_ABOVE
from sweep.training import backward
from sweep.training import steps as steps_module
from sweep.training.compiler import set_up_compiler
from sweep.training.noise import GradientSums
from sweep.training.process import FreshProcess
from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.training.steps import GraphedSteps, Steps, Sums, build_steps, can_be_graphed
from sweep.training.worker import run_attempt
from sweep.trial.folder import State, TrialFolder, TrialStatus
from sweep.trial.metrics import read_metrics
from tests.plans import build_plan

CPU = torch.device("cpu")
BATCH, COUNT = 4, 14
GPT2 = {"name": "gpt2", "architecture": "gpt2", "vocabulary": 512, "context": 64}


class GpuTokens:
    """A workload whose tokens are on a GPU."""

    def is_on_device(self):
        return True

    def sequence_indices(self, first, count):
        return None

    def batch_at(self, indices):
        return ()


def trial_config(device="cpu", batch=BATCH, precision="fp32", compile=False, rows=100):
    """A trial whose loss is computed for so many rows at a time; 0: for all, with the logits."""
    fields = {"batches": [batch], "precision": precision, "budget": 200 * batch * 64}
    execution = Execution(device=device, threads=2, compile=compile, loss_chunk_rows=rows)
    plan = build_plan(load_experiment("quick", fields), execution, data=synthetic_identity())
    row = plan.trials[0].model_copy(update={"learning_rate": 1e-3, "id": "x"})
    return plan.trial_config(row, "sweep")


def losses_of(kind, config, device, count=COUNT, noise_at=()):
    """Take steps; return their losses, the weights and the sums."""
    torch._dynamo.reset()  # which compiles the same code so often, and then no more
    step, progress = TrainingStep(config, device, config.microbatch_size), Progress()
    sums = Sums(progress, device)
    steps, losses = kind(config, step, sums), []
    for t in range(1, count + 1):
        output = steps.take(t, GradientSums() if t in noise_at else None)
        losses.append(float(output.loss))
    sums.store(progress)
    return losses, [p.detach().cpu() for p in step.parameters], progress


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_that_are_called_from_cpp_compute_the_same_bits(precision, monkeypatch):
    found, told, compile = [], [], torch.compile

    def noting(function, options, **more):
        told.append(options)
        return compile(function, options=options, **more)

    monkeypatch.setattr(torch, "compile", noting)
    for options in (set_up_compiler(trial_config()), {}):
        monkeypatch.setattr(backward, "set_up_compiler", lambda *_, options=options: options)
        found.append(losses_of(Steps, trial_config(compile=True, precision=precision), CPU))
    assert told == [{"cpp_wrapper": True}, {}]
    (losses, weights, sums), (others, other_weights, other_sums) = found
    assert losses == others and sums == other_sums
    assert all(torch.equal(*pair) for pair in zip(weights, other_weights, strict=True))


@pytest.mark.parametrize("noise_at", [(), (6, 11)])
def test_steps_fed_in_blocks_are_those_taken_one_by_one(noise_at, monkeypatch):
    """The same operations on the same sequences at the same rates, over several blocks."""
    monkeypatch.setattr(steps_module, "FED_STEPS", 4)
    rate = Steps.rate
    monkeypatch.setattr(Steps, "rate", lambda *of: float(torch.tensor(rate(*of))))  # as it is sent
    config = trial_config()
    one_by_one, weights, progress = losses_of(Steps, config, CPU, noise_at=noise_at)
    fed, same, summed = losses_of(GraphedSteps, config, CPU, noise_at=noise_at)
    assert fed == one_by_one
    assert all(map(torch.equal, weights, same))
    assert (summed.loss_sum, summed.norm_sum) == (progress.loss_sum, progress.norm_sum)


def test_feeding_ends_with_the_last_step():
    config = trial_config()
    step = TrainingStep(config, CPU, BATCH)
    steps = GraphedSteps(config, step, Sums(Progress(), CPU))
    asked = []
    take = step.workload.sequence_indices
    step.workload.sequence_indices = lambda *block: asked.append(block) or take(*block)
    for t in range(config.steps - 5, config.steps + 1):  # as after a resume
        steps.take(t, None)
    assert asked == [((config.steps - 6) * BATCH, 6 * BATCH)]


def test_on_a_cpu_steps_are_taken_one_by_one():
    config = trial_config()
    step = TrainingStep(config, CPU, BATCH)
    assert type(build_steps(config, step, Sums(Progress(), CPU))) is Steps


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "batch"), [(0, BATCH), (100, BATCH), (8192, 64)])
def test_a_graph_takes_the_steps_that_are_taken_one_by_one(
    compile, precision, rows, batch, monkeypatch
):
    device = torch.device("cuda")
    config = trial_config("cuda", batch, precision, compile, rows)
    fed, weights, progress = losses_of(build_steps, config, device, 60, noise_at=(20, 41))
    monkeypatch.setenv(steps_module.SWITCH, "0")
    one_by_one, same, summed = losses_of(build_steps, config, device, 60, noise_at=(20, 41))
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert fed == pytest.approx(one_by_one, rel=tolerance)
    assert progress.loss_sum == pytest.approx(summed.loss_sum, rel=tolerance)
    start = TrainingStep(config, CPU, batch).parameters
    apart = sum(float((a - b).square().sum()) for a, b in zip(weights, same, strict=True))
    moved = sum(float((a - b.detach()).square().sum()) for a, b in zip(same, start, strict=True))
    assert apart < (1e-4 if precision == "fp32" else 1e-2) * moved  # 1 % and 10 % of the way


@pytest.mark.gpu
def test_a_small_step_on_a_gpu_is_replayed(monkeypatch):
    config, device = trial_config("cuda"), torch.device("cuda")
    step, calls = TrainingStep(config, device, BATCH), []
    taken = TrainingStep.__call__
    monkeypatch.setattr(
        TrainingStep, "__call__", lambda *arguments: calls.append(1) or taken(*arguments)
    )
    steps = build_steps(config, step, Sums(Progress(), device))
    assert isinstance(steps, GraphedSteps)
    for t in range(1, 10):
        steps.take(t, None)
    assert len(calls) == steps_module.WARM_UP + 1  # and the capture
    assert steps.peak_memory_bytes() > sum(p.nbytes for p in step.parameters)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("switch", ["0", "1"])
def test_between_log_points_no_step_waits_for_a_gpu(switch, monkeypatch):
    monkeypatch.setenv(steps_module.SWITCH, switch)
    monkeypatch.setattr(steps_module, "FED_STEPS", 8)  # more is sent meanwhile
    config, device = trial_config("cuda"), torch.device("cuda")
    step = TrainingStep(config, device, BATCH)
    steps = build_steps(config, step, Sums(Progress(), device))
    for t in range(1, 10):
        steps.take(t, None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(10, 40):
            steps.take(t, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture_without_memory(should_stop):
    """Say how a capture ends for which the memory is lacking."""
    config, device = trial_config("cuda"), torch.device("cuda")
    step = TrainingStep(config, device, BATCH)
    steps = build_steps(config, step, Sums(Progress(), device))
    for t in range(1, steps_module.WARM_UP + 1):
        steps.take(t, None)
    backward, hog = step.backward, []
    step.backward = lambda *batch: (
        hog.append(torch.empty(1 << 45, dtype=torch.uint8, device=device)) or backward(*batch)
    )
    try:
        steps.take(steps_module.WARM_UP + 1, None)
    except torch.OutOfMemoryError:
        return "out of memory"
    return "captured"


@pytest.mark.gpu
def test_a_capture_without_memory_says_so():
    """In a process of its own, as every attempt: a failed capture may leave things behind."""
    process = FreshProcess("tests.training.test_steps:capture_without_memory")
    assert process.result(timeout=120) == "out of memory"


@pytest.mark.gpu
def test_a_trial_on_a_gpu_goes_on_from_its_checkpoint_between_replays(tmp_path):
    """With evaluations, log points, probes of noise and checkpoints between the replays."""
    config = trial_config("cuda")
    config = config.model_copy(
        update={"execution": config.execution.model_copy(update={"checkpoint_seconds": 0.0})}
    )
    found = []
    for name, stops in (("whole", ()), ("parts", (61, 130))):
        trial = TrialFolder(tmp_path / name)
        trial.path.mkdir()
        trial.write_config(config)
        for fencing, stop in enumerate((*stops, None), 1):
            trial.write_status(
                TrialStatus(state=State.RUNNING, attempts=fencing, fencing=fencing, pause_step=stop)
            )
            kind = run_attempt(trial.path, lambda: None).kind
            assert kind == ("complete" if stop is None else "paused")
        found.append(trial)
    whole, parts = (one.read_result() for one in found)
    assert parts["final_valid_loss"] == pytest.approx(whole["final_valid_loss"], rel=1e-3)
    for metric in ("step", "train/loss", "train/lr", "train/grad_norm"):
        of_whole, of_parts = (
            [line[metric] for line in read_metrics(one.metrics_path)] for one in found
        )
        assert of_parts == pytest.approx(of_whole, rel=2e-2)


def test_what_is_replayed_never_waits_for_the_host():
    """Liger's loss does, in every call; and a model of somebody's may."""
    assert steps_module.GRAPH_TOKENS <= LIGER_ABOVE
    science = trial_config().science
    step = SimpleNamespace(
        workload=GpuTokens(), optimizer=SimpleNamespace(defaults={"fused": True}), average=None
    )
    assert can_be_graphed(step, science)
    own = science.model_copy(update={"workload": "mine:Workload"})
    theirs = science.model_copy(update={"model": HuggingFaceSettings(**GPT2)})
    assert not can_be_graphed(step, own) and not can_be_graphed(step, theirs)
