"""Tasks of GRPO: prompts, and rewards that a program computes."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sweep.config.grpo import REWARD_STATISTICS, GrpoSettings
from sweep.config.objects import load_object
from sweep.data.tokenizer import SEPARATOR_ID, TextTokenizer
from sweep.data.tokens import TokenizedText
from sweep.errors import SweepError
from sweep.workloads.tasks.base import Completion, Prompt, Task
from sweep.workloads.tasks.chess import Chess
from sweep.workloads.tasks.words import Openings, Words

CHECKED_PROMPTS = 32


def build_task(settings: GrpoSettings, text: TokenizedText | None, seed: int) -> Task:
    """Build the task of an experiment; `seed` decides the order of its prompts.

    Raises:
        SweepError: if the task lacks its text, its reward or its extra.
    """
    if settings.task == "chess":
        task: Task = Chess(seed)
    elif text is None:
        raise SweepError(f"task {settings.task!r} must have a text to draw prompts from. Set data.")
    else:
        story_task = Words if settings.task == "words" else Openings
        task = story_task(text, seed, settings.prompt_tokens)
    return UserReward(task, settings.reward) if settings.reward else task


def check_task(settings: GrpoSettings) -> None:
    """Check a task without its text: its extra is installed, and its reward can be imported.

    Raises:
        SweepError: naming what is missing.
    """
    if settings.task == "chess":
        Chess(0)
    if settings.reward:
        load_reward(settings.reward)


def check_prompts(task: Task, tokenizer: TextTokenizer, length: int) -> None:
    """Check that the first held-out prompts fit, and that a completion can be scored.

    Raises:
        SweepError: if a prompt has more than `length` tokens, or if the reward raises an error.
    """
    prompts = [task.prompt(number, True) for number in range(CHECKED_PROMPTS)]
    for prompt in prompts:
        encode_prompt(prompt, tokenizer, length)
    try:
        task.reward(prompts[0], Completion("", True))
    except SweepError:
        raise
    except Exception as error:  # from the user's code
        raise SweepError(
            "grpo.reward must accept any completion, but raised "
            f"{type(error).__name__}: {error} for an empty one. Correct it."
        ) from error


def encode_prompt(prompt: Prompt, tokenizer: TextTokenizer, length: int) -> list[int]:
    """Return the ids of a prompt, padded on the left with separators to `length`.

    Raises:
        SweepError: if the prompt is longer.
    """
    ids = list(prompt.ids or (int(i) for i in tokenizer.encode_batch([prompt.text])[0]))
    if len(ids) > length:
        raise SweepError(
            f"prompt_tokens must hold the longest prompt, got {length} for {prompt.text!r} with "
            f"{len(ids)} tokens. Set grpo.prompt_tokens to {len(ids)} or more."
        )
    return [SEPARATOR_ID] * (length - len(ids)) + ids


def score(
    task: Task, prompts: list[Prompt], completions: Tensor, tokenizer: TextTokenizer
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return rewards (B,) and their components, (B,) each, of completions (B, N)."""
    rows = []
    for prompt, ids in zip(prompts, completions.cpu().numpy(), strict=True):
        ends = np.flatnonzero(ids == SEPARATOR_ID)
        text = tokenizer.decode((ids[: ends[0]] if len(ends) else ids).tolist())
        rows.append(task.reward(prompt, Completion(text, len(ends) > 0)))
    names = list(dict.fromkeys(name for row in rows for name in row))
    components = {name: np.array([row.get(name, 0.0) for row in rows]) for name in names}
    return np.sum([*components.values(), np.zeros(len(rows))], axis=0), components


def load_reward(name: str) -> Callable[[str, str], Any]:
    """Import the function that `module:function` names.

    Raises:
        SweepError: if there is no such function.
    """
    function = load_object(name)
    if not callable(function):
        raise SweepError(f"reward {name!r} must be a function, got {function!r}. Name another.")
    return function  # type: ignore[no-any-return]


class UserReward:
    """The prompts of a task with the user's reward, a `module:function` of prompt and completion.

    The function returns a number, or a dict of numbers, which are added.
    """

    def __init__(self, task: Task, name: str) -> None:
        self._name, self._function = name, load_reward(name)
        self.prompts_in_epoch, self.prompt = task.prompts_in_epoch, task.prompt

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return the components of the user's reward."""
        result = self._function(prompt.text, completion.text)
        components = result if isinstance(result, dict) else {"own": result}
        try:
            values = {str(name): float(value) for name, value in components.items()}
        except (TypeError, ValueError, OverflowError):
            values = {"": math.nan}
        if not all(map(math.isfinite, values.values())) or values.keys() & set(REWARD_STATISTICS):
            raise SweepError(
                f"reward {self._name!r} must return a finite number, or a dict of them without the "
                f"names {', '.join(REWARD_STATISTICS)}, got {result!r}. Correct it."
            )
        return values
