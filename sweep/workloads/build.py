"""Build a trial's workload."""

from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sweep.config.trial import TrialConfig
from sweep.data.tokens import TokenizedText
from sweep.errors import user_code
from sweep.models.build import build_without_weights, outer_weights
from sweep.usercode.objects import load_object, use_code_folder
from sweep.workloads.grpo import Grpo
from sweep.workloads.language import LanguageWorkload
from sweep.workloads.pretrain import Pretrain
from sweep.workloads.quadratic import NoisyQuadratic
from sweep.workloads.workload import Workload

WORKLOADS: dict[str, type[Workload]] = {
    "pretrain": Pretrain,
    "grpo": Grpo,
    "quadratic": NoisyQuadratic,
}


def build_workload(config: TrialConfig, device: torch.device) -> Workload:
    """Build the workload that a trial names. Data is opened on first use, not here."""
    use_code_folder(config.code_path)
    settings = config.science.workload
    assert settings.has_known_model, "programs of users run only as trials"
    name = settings.name
    if settings.kind in WORKLOADS:
        build: Any = WORKLOADS[settings.kind]
    else:
        build = load_object(name)
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


def inspect_workload(
    config: TrialConfig, text: TokenizedText | None, with_weights: bool
) -> tuple[dict[str, Any], nn.Module]:
    """Build a trial's workload; return facts by the names of `PlannedModel`, and the model.

    A model with weights also computes a loss, unless it samples, and its FLOPs are counted.
    """
    science = config.science
    facts: dict[str, Any] = {}
    workload = build_workload(config, torch.device("cpu"))
    workload.check(text)

    names = ", ".join(science.user_code) if science.user_code else science.workload.name
    with user_code(f"{names} must build a model and compute a loss"):
        if with_weights:
            model = workload.build_model()
            if not science.workload.samples:
                facts["flops_per_token"] = count_flops(workload, model)
        else:
            model = build_without_weights(workload.build_model)

    builds_own_model = type(workload).build_model is not LanguageWorkload.build_model
    if workload.is_language and builds_own_model:
        facts["name"] = science.workload.name  # not the experiment's model
    weights = [*model.parameters()]
    facts["parameters"] = sum(weight.numel() for weight in weights)
    facts["embedding_parameters"] = sum(weight.numel() for weight in outer_weights(model))
    if not all(weight.requires_grad for weight in weights):
        facts["trained_parameters"] = sum(w.numel() for w in weights if w.requires_grad)
    return facts, model


def count_flops(workload: Workload, model: nn.Module) -> float:
    """Return the FLOPs per token of matrix products, convolutions and attention in a step.

    Sampling is not counted.
    """
    workload.is_rehearsal = True
    count = max(2, workload.config.sequences_per_group)
    batch = workload.roll_out(model, workload.random_batch(count), count)
    # Fused attention on a CPU is not counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = workload.loss_sum(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops()) / (count * workload.tokens_per_sequence)
