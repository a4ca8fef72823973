"""What completions are asked for, and how they are rewarded; all of it checkable by a program."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from sweep.config.grpo import GrpoSettings
from sweep.config.objects import load_object
from sweep.data.tokens import TokenizedText
from sweep.errors import SweepError


@dataclass(frozen=True)
class Prompt:
    """One request."""

    text: str
    ids: tuple[int, ...] | None = None  # where it is not the text's own encoding
    facts: dict[str, Any] = field(default_factory=dict)  # what the reward needs


@dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    has_ended: bool  # by itself, before the tokens ran out


class Task(Protocol):
    """Prompts, numbered, and the rewards of their completions."""

    prompts_in_epoch: int | None  # of training, before they repeat; None: never

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return a prompt: equal numbers give equal prompts."""

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return the components of a completion's reward, which is their sum."""


class OwnReward:
    """A task's prompts with the user's reward: called with prompt text and completion text.

    Args:
        task: whose prompts.
        name: module:function; it returns a number, or a dict of numbers that are added.
    """

    def __init__(self, task: Task, name: str) -> None:
        self._task, self._name = task, name
        self._function = load_object(name)
        self.prompts_in_epoch, self.prompt = task.prompts_in_epoch, task.prompt
        if not callable(self._function):
            raise SweepError(f"reward {name!r} must be a function, got {self._function!r}.")

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return what the user's function says."""
        found = self._function(prompt.text, completion.text)
        parts = found if isinstance(found, dict) else {"own": found}
        try:
            return {str(name): float(value) for name, value in parts.items()}
        except (TypeError, ValueError):
            raise SweepError(
                f"reward {self._name!r} must return a number or a dict of numbers, got {found!r}."
            ) from None


def build_task(settings: GrpoSettings, text: TokenizedText | None, seed: int) -> Task:
    """Build the task that the settings name.

    Args:
        settings: of the experiment.
        text: that prompts are drawn from; None for chess, which needs none.
        seed: of the order of the prompts.

    Raises:
        SweepError: if the task lacks its text, its reward or its extra.
    """
    if settings.task == "chess":
        from sweep.workloads.tasks.chess import Chess

        task: Task = Chess(seed)
    elif text is None:
        raise SweepError(f"task {settings.task!r} must have a text to draw prompts from. Set data.")
    elif settings.task == "words":
        from sweep.workloads.tasks.words import Words

        task = Words(text, seed)
    else:
        from sweep.workloads.tasks.words import Openings

        task = Openings(text, seed, settings.prompt_tokens)
    return OwnReward(task, settings.reward) if settings.reward else task
