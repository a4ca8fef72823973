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
from sweep.workloads.protocol import Rollouts, Workload
from sweep.workloads.quadratic import NoisyQuadratic

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
    members = [*Workload.__annotations__, *vars(Workload)]
    if config.science.traits.samples:
        members += [*Rollouts.__annotations__, *vars(Rollouts)]
    with user_code(
        f"workload {name!r} must build an object with the members of sweep.workloads.protocol."
        "Workload from a trial's config and a device"
    ):
        workload: Workload = build(config, device)
        missing = [m for m in members if not m.startswith("_") and not hasattr(workload, m)]
        if missing:
            raise TypeError(f"type {type(workload).__name__} without {', '.join(missing)}")
        tokens = workload.tokens_per_sequence
        expected = config.tokens_per_sequence
        if tokens != expected:
            raise ValueError(f"tokens_per_sequence {tokens} instead of the experiment's {expected}")
    return workload


def check_workload(config: TrialConfig, text: TokenizedText | None) -> int:
    """Check that a trial's workload can start; return the number of its model's parameters."""
    workload = build_workload(config, torch.device("cpu"))
    if isinstance(workload, Grpo):
        workload.check(text)
    elif text is not None:  # otherwise it is not prepared yet
        text.check_window(config.tokens_per_sequence)
    return sum(part.numel() for part in build_without_weights(workload.build_model).parameters())
