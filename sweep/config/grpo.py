"""Group relative policy optimisation as settings (Shao et al. 2024), and its batch sizes."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from sweep.config.models import Positive, Settings

FINAL_PROMPTS = 256  # held out, of the final evaluation
SAMPLED_MICROBATCHES = 4  # at once: sampling keeps no activations (docs/grpo.md)
OF_REWARDS = ("mean", "std", "group_std")  # watched as reward/…, beside their components
Fraction = Annotated[float, Field(gt=0, le=1, strict=True)]


class GrpoSettings(Settings):
    """What is sampled, how it is rewarded, and what is minimised.

    `batch_size` counts completions: prompts a step times `group_size`.
    """

    task: Literal["words", "chess", "text"] = "words"  # where prompts come from, and their rewards
    reward: str | None = None  # module:function of yours, instead of the task's own
    init: str | None = None  # folder of a complete trial or pretrained model: weights to start from
    group_size: Annotated[int, Field(ge=2, le=1024, strict=True)] = 8  # completions of a prompt
    prompt_tokens: Positive = 32  # of every prompt: filled with separators from the left
    new_tokens: Positive = 64  # of a completion, at most
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Fraction = 1.0
    # mean over completions of means over their tokens (grpo), over all tokens of the batch (dapo),
    # or sums over batch_size · new_tokens, whatever their lengths (dr_grpo)
    loss: Literal["grpo", "dr_grpo", "dapo"] = "grpo"
    # what a group's rewards less their mean are divided by: their deviation, the batch's, nothing
    scale_rewards: Literal["group", "batch", "none"] = "group"
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2  # the ratio leaves 1 ∓ it without gradient
    clip_high: Annotated[float, Field(gt=0)] | None = None  # above 1; None: as below
    kl: Annotated[float, Field(ge=0)] = 0.02  # weight of the divergence from the start; 0: none
    num_iterations: Annotated[int, Field(ge=1, le=100, strict=True)] = 1  # updates on one sample

    @field_validator("reward")
    @classmethod
    def _is_named(cls, value: str | None) -> str | None:
        if value is not None and ":" not in value:
            raise ValueError("must be a module:function of yours")
        return value

    @property
    def tokens_per_sequence(self) -> int:
        """Prompt and completion, padding counted."""
        return self.prompt_tokens + self.new_tokens


def is_legal_microbatch(size: int, group_size: int) -> bool:
    """Tell whether a microbatch is whole groups, or an equal part of one."""
    return size % group_size == 0 or group_size % size == 0


def least_size(group_size: int, multiple: int) -> str:
    """Say what the least is that a search of multiples looks at."""
    if multiple == 1:
        return "one sequence"
    if multiple == group_size:
        return f"one group of {group_size}, in one microbatch,"
    return f"a microbatch of {multiple} sequences"
