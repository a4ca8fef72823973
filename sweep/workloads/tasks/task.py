"""Tasks of GRPO: prompts, and rewards of their completions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Prompt:
    text: str
    ids: tuple[int, ...] | None = None  # None: the tokenizer encodes the text
    facts: dict[str, Any] = field(default_factory=dict)  # input of the reward


class Completion(NamedTuple):
    text: str  # up to its end
    has_ended: bool  # with an end id, before the maximum length


Reward = Callable[[Prompt, Completion], dict[str, float]]  # components, which are added


class Task(Protocol):
    prompts_in_epoch: int | None = None  # training prompts before they repeat; None: never

    @staticmethod
    def check_installed() -> None:
        """Raise SweepError if a package that the task needs is missing."""

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return a prompt; equal numbers give equal prompts."""

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return the components of a completion's reward, which is their sum."""
