"""What completions are asked for, and how they are rewarded; all of it checkable by a program."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sweep.config.grpo import REWARD_STATISTICS, GrpoSettings
from sweep.config.objects import load_object
from sweep.config.trial import TrialConfig
from sweep.data.tokenizer import SEPARATOR_ID, TextTokenizer, load_tokenizer
from sweep.data.tokens import TokenizedText, prepare_data, pretrained_path
from sweep.errors import SweepError

TRIED_PROMPTS = 32


@dataclass(frozen=True)
class Prompt:
    """One request."""

    text: str
    ids: tuple[int, ...] | None = None  # None: the text's own encoding
    facts: dict[str, Any] = field(default_factory=dict)  # what the reward needs


@dataclass(frozen=True)
class Completion:
    """One answer."""

    text: str
    has_ended: bool  # by itself, before the tokens ran out


def open_text(config: TrialConfig) -> TokenizedText | None:
    """Return the text that a trial's prompts are drawn from; None where it has none."""
    science = config.science
    if science.data is None or science.tokenizer is None:
        return None
    start = config.init_path
    return prepare_data(science.data, config.data_path, science.tokenizer, pretrained=start)


def open_tokenizer(config: TrialConfig) -> TextTokenizer:
    """Return a trial's tokenizer without its text: that of the start, or bytes."""
    settings = config.science.tokenizer
    if settings is None:
        return load_tokenizer(None)
    return load_tokenizer(pretrained_path(config.init_path, settings), settings.end)


def encode_prompt(prompt: Prompt, tokenizer: TextTokenizer, room: int) -> list[int]:
    """Return a prompt's `room` ids, filled with separators from the left.

    Args:
        prompt: the request.
        tokenizer: of the model.
        room: ids of every prompt.

    Raises:
        SweepError: if there is too little room.
    """
    ids = list(prompt.ids or (int(i) for i in tokenizer.encode_batch([prompt.text])[0]))
    if len(ids) > room:
        raise SweepError(
            f"prompt_tokens must hold the longest prompt, got {room} for {prompt.text!r} of "
            f"{len(ids)} tokens. Set grpo.prompt_tokens to {len(ids)} or more."
        )
    return [SEPARATOR_ID] * (room - len(ids)) + ids


def decode_completion(ids: NDArray[np.int64], tokenizer: TextTokenizer) -> Completion:
    """Return what stands before the first separator of ids (N)."""
    ends = np.flatnonzero(ids == SEPARATOR_ID)
    own = ids[: ends[0]] if len(ends) else ids
    return Completion(tokenizer.decode(own.tolist()), len(ends) > 0)


class Task(Protocol):
    """Prompts, numbered, and the rewards of their completions."""

    prompts_in_epoch: int | None  # of training, before they repeat; None: never

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return a prompt: equal numbers give equal prompts."""

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return the components of a completion's reward, which is their sum."""


def rewards_of(
    task: Task, prompts: list[Prompt], completions: NDArray[np.int64], tokenizer: TextTokenizer
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return each completion's reward (B), and its components, from ids (B, N)."""
    found = [
        task.reward(prompt, decode_completion(ids, tokenizer))
        for prompt, ids in zip(prompts, completions, strict=True)
    ]
    names = list(dict.fromkeys(name for parts in found for name in parts))
    columns = {name: np.array([parts.get(name, 0.0) for parts in found]) for name in names}
    return np.sum([*columns.values(), np.zeros(len(found))], axis=0), columns


def load_reward(name: str) -> Callable[[str, str], Any]:
    """Return the function that `module:function` names.

    Raises:
        SweepError: if it names none.
    """
    function = load_object(name)
    if not callable(function):
        raise SweepError(f"reward {name!r} must be a function, got {function!r}. Name another.")
    return function  # type: ignore[no-any-return]


class OwnReward:
    """A task's prompts with the user's reward: called with prompt text and completion text.

    Args:
        task: whose prompts.
        name: module:function; it returns a number, or a dict of numbers that are added.
    """

    def __init__(self, task: Task, name: str) -> None:
        self._task, self._name, self._function = task, name, load_reward(name)
        self.prompts_in_epoch, self.prompt = task.prompts_in_epoch, task.prompt

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return what the user's function says."""
        found = self._function(prompt.text, completion.text)
        parts = found if isinstance(found, dict) else {"own": found}
        try:
            values = {str(name): float(value) for name, value in parts.items()}
        except (TypeError, ValueError, OverflowError):
            values = {"": math.nan}
        if not all(map(math.isfinite, values.values())):
            raise SweepError(
                f"reward {self._name!r} must return a finite number or a dict of them, got "
                f"{found!r}. Correct it."
            )
        if taken := values.keys() & set(REWARD_STATISTICS):
            raise SweepError(
                f"reward {self._name!r} must not name a component "
                f"{' or '.join(REWARD_STATISTICS)}, got {min(taken)!r}. Rename it."
            )
        return values


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

        task = Words(text, seed, settings.prompt_tokens)
    else:
        from sweep.workloads.tasks.words import Openings

        task = Openings(text, seed, settings.prompt_tokens)
    return OwnReward(task, settings.reward) if settings.reward else task


def check_task(settings: GrpoSettings) -> None:
    """Refuse a task without its extra, or a reward that is none; needs no text.

    Raises:
        SweepError: naming what is missing.
    """
    if settings.task == "chess":
        build_task(settings.model_copy(update={"reward": None}), None, 0)
    if settings.reward:
        load_reward(settings.reward)


def try_prompts(config: TrialConfig, text: TokenizedText | None) -> None:
    """Refuse prompts that do not fit, by the first of those held out: all of a text is long.

    Args:
        config: of a trial of GRPO.
        text: that its prompts are drawn from, prepared; None where there is none.

    Raises:
        SweepError: if one does not.
    """
    settings = config.science.grpo
    assert settings is not None
    task = build_task(settings, text, config.science.seed)
    tokenizer = text.tokenizer if text else open_tokenizer(config)
    for number in range(TRIED_PROMPTS):
        encode_prompt(task.prompt(number, True), tokenizer, settings.prompt_tokens)
