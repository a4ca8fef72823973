"""Workloads: what a trial learns, with the protocol that the training loop uses."""

from collections.abc import Callable
from typing import Any

import torch

from sweep.config.objects import load_object
from sweep.config.trial import TrialConfig
from sweep.data.tokens import TokenizedText
from sweep.errors import SweepError
from sweep.workloads.grpo import Grpo
from sweep.workloads.pretrain import Pretrain
from sweep.workloads.protocol import Workload
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
    members = ["tokens_per_sequence", *(member for member in vars(Workload) if member[0] != "_")]
    try:
        workload: Workload = build(config, device)
        if missing := [member for member in members if not hasattr(workload, member)]:
            raise TypeError(f"type {type(workload).__name__} without {', '.join(missing)}")
    except Exception as error:  # from the user's code
        raise SweepError(
            f"workload {name!r} must build an object with the members of sweep.workloads.protocol."
            f"Workload from a trial's config and a device, but raised {type(error).__name__}: "
            f"{error}. Correct it."
        ) from error
    return workload


def check_workload(config: TrialConfig, text: TokenizedText | None) -> None:
    """Check that a trial's workload can start; `text` is None if it is not prepared yet."""
    workload = build_workload(config, torch.device("cpu"))
    if isinstance(workload, Grpo):
        workload.check(text)
    elif text is not None:
        text.check_window(config.tokens_per_sequence)
