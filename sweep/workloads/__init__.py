"""Build a trial's workload: pretrain, grpo, quadratic or the user's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sweep.config.objects import load_object
from sweep.config.trial import TrialConfig
from sweep.data.tokens import TokenizedText
from sweep.errors import user_code
from sweep.models import build_without_weights
from sweep.workloads.grpo import Grpo
from sweep.workloads.pretrain import Pretrain
from sweep.workloads.quadratic import NoisyQuadratic
from sweep.workloads.workload import Workload

_BUILT_IN: dict[str, Callable[[TrialConfig, torch.device], Workload]] = {
    "pretrain": Pretrain,
    "grpo": Grpo,
    "quadratic": NoisyQuadratic,
}


def build_workload(config: TrialConfig, device: torch.device) -> Workload:
    """Build the workload that a trial names. Data is opened on first use, not here."""
    name = config.science.workload
    if name in _BUILT_IN:
        return _BUILT_IN[name](config, device)
    build: Any = load_object(name)
    with user_code(
        f"workload {name!r} must build a sweep.workloads.workload.Workload from a trial's config "
        "and a device"
    ):
        workload: Workload = build(config, device)
        if not isinstance(workload, Workload):
            raise TypeError(f"it builds a {type(workload).__name__}")
        tokens = workload.tokens_per_sequence
        expected = config.tokens_per_sequence
        if tokens != expected:
            raise ValueError(f"tokens_per_sequence {tokens} instead of the experiment's {expected}")
    return workload


def inspect_workload(config: TrialConfig, text: TokenizedText | None) -> dict[str, Any]:
    """Build a trial's workload and model; return counts by the names of `PlannedModel`.

    The user's code also computes a loss, and its FLOPs are counted.
    """
    science = config.science
    workload = build_workload(config, torch.device("cpu"))
    workload.check(text)
    flops: float | None = science.model.flops_per_token
    names = ", ".join(science.user_objects or [science.workload])
    with user_code(f"{names} must build a model and compute a loss"):
        if science.code is None:
            model = build_without_weights(workload.build_model)
        else:
            model = workload.build_model()
            if not science.traits.samples:
                flops = count_flops(workload, model)
    weights = [*model.parameters()]
    total = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    counts = {"parameters": total, "trained_parameters": trained if trained < total else None}
    return {**counts, "flops_per_token": flops}


def count_flops(workload: Workload, model: nn.Module) -> float:
    """Return the FLOPs per token of matrix products, convolutions and attention in a step."""
    with FlopCounterMode(display=False) as counter:
        loss = workload.loss_sum(model, workload.random_batch(2))
        loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops()) / (2 * workload.tokens_per_sequence)
