"""What a user's own workload must be."""

import re

import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.errors import SweepError
from sweep.workloads.protocol import build_workload
from sweep.workloads.quadratic import NoisyQuadratic
from tests.plans import build_plan

MODULE = """
from sweep.workloads.quadratic import NoisyQuadratic

class Whole(NoisyQuadratic): pass

class Half:
    tokens_per_sequence = 1
    build_model = build_batch = loss_tokens = loss_sum = evaluate = evaluate_finally = None
    def __init__(self, config, device): pass

number = 5
"""


def build(name, tmp_path, monkeypatch):
    (tmp_path / "own_workload.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"workload": f"own_workload:{name}", "precision": "fp32", "batches": "4"}
    experiment = load_experiment("quadratic", settings)
    plan = build_plan(experiment, Execution(device="cpu", threads=1), data=None)
    config = plan.trial_config(plan.trials[0], "test")
    return build_workload(config, torch.device("cpu"))


def test_a_workload_of_the_users_is_built(tmp_path, monkeypatch):
    assert isinstance(build("Whole", tmp_path, monkeypatch), NoisyQuadratic)


@pytest.mark.parametrize(
    ("name", "says"),
    [("Half", "type Half without random_batch, epochs."), ("number", "object of type int. Name")],
)
def test_what_is_no_workload_is_refused(tmp_path, monkeypatch, name, says):
    with pytest.raises(SweepError, match=re.escape(says)):
        build(name, tmp_path, monkeypatch)
