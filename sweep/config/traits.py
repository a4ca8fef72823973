"""Capabilities of a workload that the rest of the code may ask about, known without torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sweep.config.grpo import GrpoSettings
    from sweep.config.models import ModelSettings


@dataclass(frozen=True)
class WorkloadTraits:
    """What planning, memory search and reports need to know about a workload.

    Attributes:
        tokens_per_sequence: training tokens that one sequence counts as.
        group_size: sequences that must stay together in a batch; 1 if any split is legal.
        samples: whether each step first generates its batch with the model (several phases, a
            reward per completion, one device per trial).
        loss_unit: unit of differences between losses.
        loss_label: unit of a loss on the axis of a figure.
        loss_description: one sentence for the report.
        starts_at_log_vocabulary: whether an untrained model's loss is close to ln V.
        supports_target: whether training to a target loss makes sense.
    """

    tokens_per_sequence: int
    group_size: int = 1
    samples: bool = False
    loss_unit: str = "units"
    loss_label: str = ""
    loss_description: str = "Losses are in the units of the workload."
    starts_at_log_vocabulary: bool = False
    supports_target: bool = True


def workload_traits(
    workload: str, model: "ModelSettings", grpo: "GrpoSettings | None"
) -> WorkloadTraits:
    """Return the traits of a built-in workload, or the defaults for a user's `module:object`."""
    if grpo is not None:
        return WorkloadTraits(
            tokens_per_sequence=grpo.tokens_per_sequence,
            group_size=grpo.group_size,
            samples=True,
            loss_unit="of reward",
            loss_label="minus mean reward",
            loss_description="A loss is minus the mean reward of one completion of each held-out "
            "prompt.",
            supports_target=False,
        )
    if workload == "pretrain":
        return WorkloadTraits(
            tokens_per_sequence=model.context,
            loss_unit="nats",
            loss_label="nats per token",
            loss_description="Losses are nats per token.",
            starts_at_log_vocabulary=True,
        )
    return WorkloadTraits(tokens_per_sequence=model.context)
