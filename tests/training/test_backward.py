"""Forward and backward as one graph give the gradients of autograd; large steps are left to it."""

import pytest
import torch
from torch._dynamo.utils import counters

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.data.synthetic import synthetic_identity
from sweep.training.backward import ByAutograd, InOneGraph, is_one_graph
from sweep.training.noise import GradientSums
from sweep.training.step import TrainingStep
from tests.plans import build_plan

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("default")  # torch's tracing meets warnings of its own


def trial_config(precision="fp32", model="quick", rows=100, **execution):
    settings = {"batches": "6", "precision": precision, "model": model, "budget": 6 * 256 * 100}
    usual = {"device": "cpu", "threads": 2, "compile": True, "loss_chunk_rows": rows}
    chosen = Execution(**(usual | execution))
    plan = build_plan(load_experiment("quick", settings), chosen, data=synthetic_identity())
    row = plan.trials[0].model_copy(update={"learning_rate": 1e-3, "id": "x"})
    return plan.trial_config(row, "sweep")


def take_steps(config, microbatch):
    """Take steps of six sequences; return losses, norms and weights."""
    torch._dynamo.reset()  # which compiles the same code so often, and then no more
    counters.clear()
    step = TrainingStep(config, CPU, microbatch)
    outputs = [step(step.workload.build_batch(6 * t, 6), 1e-2) for t in range(4)]
    measured = [value.item() for one in outputs for value in (one.loss, one.grad_norm)]
    return step, torch.tensor(measured), [p.detach() for p in step.parameters]


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without Inductor: the graph is traced, and its operations are called."""
    compile = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, options, **more: compile(
            function, backend="aot_eager", fullgraph=True, **more
        ),
    )


@pytest.mark.parametrize(
    ("precision", "microbatch", "rows"),
    [
        *(("fp32", 6, 100), ("fp32", 2, 100), ("fp32", 6, 0)),
        *(("bf16", 2, 100), ("bf16-pure", 2, 100)),
    ],
)
def test_one_graph_trains_as_autograd_does(traced, precision, microbatch, rows):
    step, measured, weights = take_steps(trial_config(precision, rows=rows), microbatch)
    assert isinstance(step._backward, InOneGraph)
    assert counters["stats"]["unique_graphs"] == 1  # a second microbatch adds to gradients
    eager = trial_config(precision, rows=rows, compile=False)
    other, expected, other_weights = take_steps(eager, microbatch)
    assert isinstance(other._backward, ByAutograd)
    bounds = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(measured, expected, **bounds)
    torch.testing.assert_close(weights, other_weights, **bounds)


def test_gradients_are_laid_out_as_weights_are_and_their_noise_is_that_of_autograd(traced):
    found = []
    for compiled in (True, False):
        config = trial_config(compile=compiled)
        torch._dynamo.reset()
        step, sums = TrainingStep(config, CPU, 2), GradientSums()
        step.backward(step.workload.build_batch(0, 6), sums)
        assert all(p.grad.stride() == p.stride() for p in step.parameters)
        found.append((sums.estimates(2), [p.grad for p in step.parameters]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_gradients_of_another_number_of_tokens_are_those_of_its_mean(traced):
    step, _, _ = take_steps(trial_config(), 6)
    batch = step.workload.build_batch(0, 6)
    gradients = []
    for tokens in (384, 768, 384):
        step._backward(batch, tokens)
        gradients.append([p.grad for p in step.parameters])
        step.model.zero_grad(set_to_none=True)
    torch.testing.assert_close(gradients[2], gradients[0])
    torch.testing.assert_close([2 * one for one in gradients[1]], gradients[0])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_as_one_graph_it_trains_as_autograd_does(precision):
    step, measured, _ = take_steps(trial_config(precision), 2)
    assert isinstance(step._backward, InOneGraph)
    _, expected, _ = take_steps(trial_config(precision, compile=False), 2)
    torch.testing.assert_close(
        measured, expected, rtol=1e-5 if precision == "fp32" else 2e-2, atol=0
    )


def test_small_microbatches_of_our_transformer_on_a_cpu_are_one_graph():
    config = trial_config()
    assert is_one_graph(config, 6)
    assert not is_one_graph(config, 600)
    assert is_one_graph(trial_config(model="small"), 1)
    for execution in ({"device": "cuda"}, {"activation_checkpointing": True}, {"devices": 2}):
        assert not is_one_graph(trial_config(**execution), 6)
    for science in ({"workload": "my_module:Workload"}, {"workload": "grpo"}):
        others = config.science.model_copy(update=science)
        assert not is_one_graph(config.model_copy(update={"science": others}), 6)
