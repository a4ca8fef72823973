"""Settings of group relative policy optimization (Shao et al. 2024)."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from sweep.config.models import Positive
from sweep.config.settings import GRPO, Count, Flag, Settings

FINAL_PROMPTS = 256  # held-out prompts of the final evaluation
SAMPLED_MICROBATCHES = 4  # sampled at once: sampling keeps no activations (docs/grpo.md)
REWARD_STATISTICS = ("mean", "std", "group_std")  # logged as reward/<name>, with the components


class GrpoSettings(Settings):
    """Sampling, reward and loss. `batch_size` counts completions: prompts times `group_size`."""

    task: Literal["words", "chess", "text"] = "words"  # source of prompts and rewards
    reward: str | None = None  # your module:function, instead of the task's own
    group_size: Annotated[
        Count, Field(ge=2, le=1024), Flag("Completions per prompt.", GRPO, metavar="N")
    ] = 8
    prompt_tokens: Positive = 32  # of every prompt, padded on the left
    new_tokens: Positive = 64  # of a completion, at most
    temperature: Annotated[float, Field(gt=0, le=10, strict=True)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    # grpo: mean over completions of means over tokens; dapo: mean over all tokens of the batch;
    # dr_grpo: sum over tokens, divided by batch_size · new_tokens
    loss: Literal["grpo", "dr_grpo", "dapo"] = "grpo"
    # divisor of the advantages: standard deviation of the group or of the batch, or nothing
    scale_rewards: Literal["group", "batch", "none"] = "group"
    clip: Annotated[float, Field(gt=0, lt=1, strict=True)] = 0.2  # of the ratio, below 1
    clip_high: Annotated[float, Field(gt=0, strict=True)] | None = (
        None  # of the ratio, above 1; None: as clip
    )
    kl: Annotated[float, Field(ge=0, strict=True)] = (
        0.02  # weight of the KL term; 0: no reference model
    )
    num_iterations: Annotated[int, Field(ge=1, le=100, strict=True)] = (
        1  # updates per sampled batch
    )

    @field_validator("reward")
    @classmethod
    def _has_a_colon(cls, value: str | None) -> str | None:
        if value is not None and ":" not in value:
            raise ValueError("must be your module:function")
        return value

    @property
    def tokens_per_sequence(self) -> int:
        """Tokens of prompt and completion, padding included."""
        return self.prompt_tokens + self.new_tokens
