"""Trials with captured updates, on a CPU with a double of CUDA graphs; test_gpu.py has more."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from sweep.models.loss import LIGER_ABOVE
from sweep.orchestration.execution import GRAPH_TOKENS
from sweep.training import graph
from sweep.training.attempt import build_step
from sweep.training.checkpoint import CheckpointStore
from sweep.training.graph import WARM_UP, GraphedUpdate
from sweep.training.loop import train
from sweep.trial.folder import TrialFolder
from sweep.trial.status import TrialStatus
from tests.fakes.graphs import OperationRecorder
from tests.workloads.trials import CPU, trial_config

STEPS = 30
EXACT_RATE = 2.0**-9  # also in float32, in which a graph reads the rate
CONSTANT = {"name": "constant"}


@pytest.fixture(autouse=True)
def fit_process(monkeypatch):
    monkeypatch.setattr(graph, "has_failed_capture", False)


def config_of(batch=4, microbatch=None, steps=STEPS, bound=8, **fields):
    execution = {"graph_bound": bound, "keep": "weights"}
    fields = {"budget": steps * batch * 64, "evaluation": {"points": 4}, **fields}
    config = trial_config("quick", batch, microbatch, execution, **fields)
    return config.model_copy(
        update={"science": config.science.model_copy(update={"learning_rate": EXACT_RATE})}
    )


def run_trial(path, config, recorder=None, pauses=()):
    """Train to the end; return the curves without times, and the weights."""
    folder = TrialFolder(path)
    folder.write_config(config)
    folder.write_status(TrialStatus(attempts=1, fencing=1))
    for pause in (*pauses, None):
        step = build_step(config, CPU)
        step.recorder = recorder
        store = CheckpointStore(folder, 1)
        ending, _, _ = train(config, step, store, lambda: None, 0.0, pause)
        assert ending == ("trained" if pause is None else "paused")
    store.save_weights(step)
    lines = []
    for text in folder.metrics_path.read_text().splitlines():
        line = json.loads(text)
        lines.append({k: v for k, v in line.items() if not k.startswith(("perf", "mem", "time"))})
    return lines, load_file(folder.weights_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": CONSTANT},
        {"schedule": CONSTANT, "noise": True},
        {"schedule": CONSTANT | {"average": 0.1}},
        {"schedule": CONSTANT, "optimizer": {"clip": 0.5}},
    ],
    ids=["plain", "noise", "average", "clipped"],
)
def test_a_graphed_trial_has_the_bits_of_another_also_if_it_is_paused(tmp_path, fields):
    config = config_of(**fields)
    lines, weights = run_trial(tmp_path / "plain", config)
    for name, pauses in (("whole", ()), ("parts", (9, 20))):
        recorder = OperationRecorder()
        others, other_weights = run_trial(tmp_path / name, config, recorder, pauses)
        assert recorder.captures == 1 + len(pauses)
        assert recorder.runs == WARM_UP * recorder.captures
        assert others == lines
        assert all(torch.equal(weights[key], other_weights[key]) for key in weights)


def test_a_graph_follows_the_schedule_of_the_rate(tmp_path):
    config = config_of()
    lines, _ = run_trial(tmp_path / "plain", config)
    others, _ = run_trial(tmp_path / "graph", config, OperationRecorder())
    for line, other in zip(lines, others, strict=True):
        assert other == pytest.approx(line, rel=1e-5)


@pytest.mark.parametrize(
    ("batch", "microbatch", "bound"), [(8, 4, 8), (8, None, 7)], ids=["accumulates", "large"]
)
def test_steps_that_are_split_or_large_are_not_captured(batch, microbatch, bound):
    step = build_step(config_of(batch, microbatch, bound=bound), CPU)
    step.recorder = recorder = OperationRecorder()
    for _ in range(WARM_UP + 2):
        step(step.workload.random_batch(batch), 1e-3)
    assert not recorder.runs and not recorder.captures


def test_each_batch_size_has_its_own_graph():
    losses = []
    for recorder in (None, OperationRecorder()):
        step = build_step(config_of(8), CPU)
        step.recorder = recorder
        losses.append(
            [
                step(step.workload.build_batch(8 * t, size), EXACT_RATE).item()
                for t in range(8)
                for size in (8, 3)
            ]
        )
    assert losses[0] == losses[1]
    assert recorder.captures == 2


def test_an_update_that_cannot_be_captured_runs_without_a_graph(capsys, monkeypatch):
    losses = []
    for recorder in (None, OperationRecorder()):
        step = build_step(config_of(), CPU)
        step.recorder = recorder
        backward = step.parallel.backward

        def read_loss(loss, backward=backward):
            backward(loss)
            loss.item()  # waits for the device

        step.parallel.backward = read_loss
        batches = [step.workload.build_batch(4 * t, 4) for t in range(8)]
        losses.append([step(batch, EXACT_RATE).item() for batch in batches])
    assert losses[0] == losses[1]
    assert recorder.captures == 1
    assert capsys.readouterr().out.count("steps are not CUDA graphs") == 1
    assert graph.has_failed_capture


def test_a_step_with_a_graph_is_too_small_for_the_loss_that_waits_for_the_host():
    assert GRAPH_TOKENS <= LIGER_ABOVE


class FullRecorder(OperationRecorder):
    """Runs out of memory in a capture, whose end may raise another error, as on a GPU."""

    def __init__(self, second_error):
        super().__init__()
        self.second_error = second_error

    def capture(self, work):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            if self.second_error:
                raise self.second_error


@pytest.mark.parametrize("second_error", [None, RuntimeError("capture was invalidated")])
def test_memory_that_runs_out_in_a_capture_is_no_reason_to_go_on(second_error):
    step = build_step(config_of(), CPU)
    step.recorder = FullRecorder(second_error)
    with pytest.raises(torch.OutOfMemoryError):
        for _ in range(WARM_UP + 1):
            step(step.workload.random_batch(4), 1e-3)


def test_an_update_reads_the_newest_batch_and_scalars():
    state = torch.zeros(())

    def update(batch, rate):
        return state.add_(rate * batch[0].sum()).clone()

    first = torch.tensor([1.0, 2.0])
    graphed = GraphedUpdate(update, (first,), OperationRecorder())
    totals = [graphed((first * t,), 10.0**t).item() for t in range(6)]
    assert totals == pytest.approx([3 * sum(t * 10**t for t in range(n + 1)) for n in range(6)])


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_the_metrics_of_a_step_are_added_by_one_operation():
    step = build_step(config_of(), CPU)
    for _ in range(2):
        metrics = step.update(step.workload.random_batch(4), 1e-3)
        step.workload.meter.add_vector(metrics)
    with Counted() as counted:
        step.workload.meter.add_vector(metrics)
    assert counted.names == ["aten::add_.Tensor", "aten::unbind.int"]  # the latter: views
