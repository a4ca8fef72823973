"""The interface of a task: numbered prompts, and rewards that a program computes."""

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Prompt:
    """A prompt, with the facts that its reward needs."""

    text: str
    ids: tuple[int, ...] | None = None  # None: the tokenizer encodes the text
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A completion, up to its end."""

    text: str
    has_ended: bool  # with an end id, before the maximum length


class Task(Protocol):
    """Prompts by number, and the rewards of their completions."""

    prompts_in_epoch: int | None  # training prompts before they repeat; None: they never repeat

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return a prompt; equal numbers give equal prompts."""

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return the components of a completion's reward, which is their sum."""
