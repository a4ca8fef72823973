"""Build a trial's workload: pretrain, grpo, quadratic or the user's."""

from collections.abc import Callable
from typing import Any

import torch

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


def check_workload(config: TrialConfig, text: TokenizedText | None) -> int:
    """Check that a trial's workload can start; return the number of its model's parameters."""
    workload = build_workload(config, torch.device("cpu"))
    workload.check(text)
    return sum(part.numel() for part in build_without_weights(workload.build_model).parameters())
