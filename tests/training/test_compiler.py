"""What torch.compile is told, and that its cache gives back what was put in and nothing else."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch._inductor.cpu_vec_isa import VecISA

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.config.models import HuggingFaceSettings
from sweep.data.synthetic import synthetic_identity
from sweep.training.compiler import set_up_compiler
from tests.plans import build_plan

CPU = torch.device("cpu")
GPT2 = {"name": "gpt2", "architecture": "gpt2", "vocabulary": 512, "context": 64}


def trial_config(batch=4, precision="fp32", checkpointing=False):
    settings = {"batches": [batch], "budget": 200 * batch * 64, "precision": precision}
    execution = Execution(
        device="cpu", threads=2, compile=True, activation_checkpointing=checkpointing
    )
    plan = build_plan(load_experiment("quick", settings), execution, data=synthetic_identity())
    row = plan.trials[0].model_copy(update={"learning_rate": 1e-3, "id": "x"})
    return plan.trial_config(row, "sweep")


def printed(script, *arguments, cache):
    """Run a script in a process of its own; return what it printed as JSON in its last line."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_models_of_others_are_compiled_as_torch_does():
    ours = trial_config()
    assert set_up_compiler(ours)
    on_cuda = ours.execution.model_copy(update={"device": "cuda"})
    assert set_up_compiler(ours.model_copy(update={"execution": on_cuda})) == {}
    for others in ({"model": HuggingFaceSettings(**GPT2)}, {"workload": "my_module:Workload"}):
        science = ours.science.model_copy(update=others)
        assert set_up_compiler(ours.model_copy(update={"science": science})) == {}


@pytest.mark.skipif(not hasattr(VecISA, "_probe_load"), reason="this torch probes otherwise")
def test_vector_instructions_whose_probe_does_not_load_are_not_used(tmp_path):
    set_up_compiler(trial_config())
    broken = tmp_path / "probe.so"
    broken.write_bytes(b"no library")
    assert not VecISA._probe_load(None, str(broken))
    assert VecISA._probe_load(None, torch._C.__file__)


STEPS = """
import json, subprocess, sys, torch
from torch._dynamo.utils import counters
from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.training.steps import Steps, Sums
from tests.training.test_compiler import CPU, trial_config

real, commands = subprocess.run, []
subprocess.run = lambda command, *args, **kwargs: (
    commands.append(str(command)) or real(command, *args, **kwargs)
)
torch.set_num_threads(2)
torch.manual_seed(0)
config = trial_config(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "checkpointing")
step = TrainingStep(config, CPU, config.microbatch_size)
steps = Steps(config, step, Sums(Progress(), CPU))
losses = [steps.take(t, None).loss.item() for t in range(1, 6)]
probes = sum("LoadLibrary" in command for command in commands)
print(json.dumps([losses, counters["aot_autograd"].get("autograd_cache_hit", 0), probes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (("4", "fp32", "plain"), 1),  # in one graph
        (("256", "fp32", "plain"), 1),  # in two
        (("256", "bf16", "plain"), 0),  # torch does not keep autocast's, only what is below them
        (("4", "fp32", "checkpointing"), 1),
    ],
)
def test_the_next_trial_finds_the_compiled_step_and_computes_the_same_bits(
    tmp_path, settings, found
):
    losses, hits, probes = printed(STEPS, *settings, cache=tmp_path)
    assert hits == 0 and probes == 0 and losses[-1] < losses[0]
    assert printed(STEPS, *settings, cache=tmp_path) == [losses, found, 0]


GRADIENT = """
import json, sys, torch
from torch._dynamo.utils import counters
from sweep.training.compiler import set_up_compiler
from tests.training.test_compiler import trial_config

class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * FACTOR

if sys.argv[1] != "torch":
    config = trial_config()
    science = config.science.model_copy(update={"workload": sys.argv[1]})
    set_up_compiler(config.model_copy(update={"science": science}))
table, ids = torch.ones(8, 8, requires_grad=True), torch.zeros(5, dtype=torch.long)
function = Times.apply if sys.argv[2] == "times" else torch.relu
torch.compile(lambda: function(torch.nn.functional.embedding(ids, table)).sum())().backward()
print(json.dumps([table.grad[0, 0].item(), counters["aot_autograd"].get("autograd_cache_hit", 0)]))
"""


@pytest.mark.slow
def test_a_changed_gradient_and_a_graph_that_others_compiled_are_not_found(tmp_path):
    twice, thrice = (GRADIENT.replace("FACTOR", factor) for factor in ("2.0", "3.0"))
    assert printed(twice, "pretrain", "times", cache=tmp_path) == [10.0, 0]
    assert printed(twice, "pretrain", "times", cache=tmp_path) == [10.0, 1]
    assert printed(thrice, "pretrain", "times", cache=tmp_path) == [15.0, 0]
    assert printed(twice, "torch", "relu", cache=tmp_path) == [5.0, 0]
    assert printed(twice, "torch", "relu", cache=tmp_path) == [5.0, 1]
    assert printed(twice, "my_module:Workload", "relu", cache=tmp_path) == [5.0, 0]
