"""Settings of GRPO, and the capabilities of every workload, known without torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field

from sweep.config.models import ModelSettings, Positive
from sweep.config.settings import Count, Flag, Group, Settings

FINAL_PROMPTS = 256  # held-out prompts of the final evaluation
SAMPLED_MICROBATCHES = 4  # sampled at once: sampling keeps no activations (docs/grpo.md)
REWARD_STATISTICS = ("mean", "std", "group_std")  # logged as reward/<name>, with the components


class GrpoSettings(Settings, use_attribute_docstrings=True):
    """Sampling, reward and loss. `batch_size` counts completions: prompts times `group_size`."""

    task: Literal["words", "chess", "text"] = "words"  # source of prompts and rewards
    reward: Annotated[str, Field(pattern=":")] | None = None  # your module:function
    group_size: Annotated[Count, Field(ge=2, le=1024), Flag(Group.GRPO, metavar="N")] = 8
    """Completions per prompt."""
    prompt_tokens: Positive = 32  # length of every prompt, padded on the left
    new_tokens: Positive = 64  # longest completion
    temperature: Annotated[float, Field(gt=0, le=10, strict=True)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    # grpo: mean over completions of means over tokens; dapo: mean over all tokens of the batch;
    # dr_grpo: sum over tokens, divided by batch_size · new_tokens
    loss: Literal["grpo", "dr_grpo", "dapo"] = "grpo"
    # divisor of the advantages: standard deviation of the group or of the batch, or nothing
    scale_rewards: Literal["group", "batch", "none"] = "group"
    clip: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.2  # lower clip of the ratio
    clip_high: Annotated[float, Field(gt=0, strict=True)] | None = None  # above 1; None: clip
    kl: Annotated[float, Field(ge=0, strict=True)] = 0.02  # weight; 0: no reference model
    num_iterations: Annotated[int, Field(ge=1, le=100, strict=True)] = 1  # updates per batch

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens of prompt and completion, padding included."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class WorkloadTraits:
    """Properties of a workload that planning, memory search and reports read."""

    tokens_per_sequence: int  # training tokens that one sequence counts as
    group_size: int = 1  # sequences that must stay together in a batch
    samples: bool = False  # whether each step first generates its batch with the model
    loss_unit: str = "units"  # unit of differences between losses
    loss_label: str = ""  # on the axis of a figure
    starts_at_log_vocabulary: bool = False  # whether an untrained model's loss is close to ln V

    @classmethod
    def of(cls, workload: str, model: ModelSettings, grpo: GrpoSettings | None) -> Self:
        """Return the traits of a workload; a user's `module:object` has the defaults."""
        if grpo is not None:
            unit, label, size = "of reward", "minus mean reward", grpo.group_size
            tokens = grpo.tokens_per_sequence
            return cls(tokens, size, samples=True, loss_unit=unit, loss_label=label)
        if workload == "pretrain":
            unit, label = "nats", "nats per token"
            return cls(model.context, 1, False, unit, label, starts_at_log_vocabulary=True)
        return cls(tokens_per_sequence=model.context)
