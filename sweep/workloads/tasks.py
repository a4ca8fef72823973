"""Tasks of GRPO: prompts, and rewards that a program computes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sweep.config.experiment import REWARD_STATISTICS, GrpoSettings
from sweep.config.objects import load_object
from sweep.data.tokens import SequenceStream, TextTokenizer, TokenizedText
from sweep.errors import user_code


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

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return a prompt; equal numbers give equal prompts."""

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return the components of a completion's reward, which is their sum."""


def build_task(settings: GrpoSettings, text: TokenizedText | None, seed: int) -> Task:
    kind: Any = Openings if settings.task == "text" else load_object(settings.task)
    with user_code(f"task {settings.task!r} must accept a text, a seed and prompt_tokens"):
        return kind(text, seed, settings.prompt_tokens)  # type: ignore[no-any-return]


def build_reward(settings: GrpoSettings, task: Task) -> Reward:
    name = settings.reward
    if name is None:
        return task.reward
    function = load_object(name)

    def reward(prompt: Prompt, completion: Completion) -> dict[str, float]:
        with user_code(
            f"reward {name!r} must return a finite number, or a dict of them without the names "
            f"{', '.join(REWARD_STATISTICS)}, for any completion"
        ):
            result = function(prompt.text, completion.text)  # a number, or a dict of numbers to add
            components = result if isinstance(result, dict) else {"own": result}
            values = {str(key): float(value) for key, value in components.items()}
            is_finite = all(map(math.isfinite, values.values()))
            if not is_finite or values.keys() & set(REWARD_STATISTICS):
                raise ValueError(f"got {result!r}")
        return values

    return reward


def score(
    reward: Reward, prompts: list[Prompt], completions: Tensor, tokenizer: TextTokenizer
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return rewards (B,) and their components, (B,) each, of completions (B, N)."""
    rows = []
    for prompt, ids in zip(prompts, completions.cpu().numpy(), strict=True):
        ends = np.flatnonzero(ids == tokenizer.end)
        text = tokenizer.decode((ids[: ends[0]] if len(ends) else ids).tolist())
        rows.append(reward(prompt, Completion(text, len(ends) > 0)))
    names = list(dict.fromkeys(name for row in rows for name in row))
    components = {name: np.array([row.get(name, 0.0) for row in rows]) for name in names}
    return np.sum([*components.values(), np.zeros(len(rows))], axis=0), components


class Openings(Task):
    """The first tokens of the documents of a text, in an order that the seed decides."""

    def __init__(self, text: TokenizedText, seed: int, prompt_tokens: int) -> None:
        self.text, self.seed, self.prompt_tokens = text, seed, prompt_tokens
        self.prompts_in_epoch = text.train_documents
        self._order = SequenceStream(text.train_documents, seed)
        self._ends: dict[bool, NDArray[np.int64]] = {}  # separators of each split, once needed

    def story(self, number: int, is_held_out: bool, tokens: int) -> list[int]:
        split = self.text.valid if is_held_out else self.text.train
        if is_held_out not in self._ends:
            self._ends[is_held_out] = np.flatnonzero(np.asarray(split) == self.text.end)
        ends = self._ends[is_held_out]
        index = number % len(ends) if is_held_out else self._order.indices(number, 1)[0]
        start = int(ends[index - 1]) + 1 if index else 0
        return list(split[start : min(int(ends[index]), start + tokens)].tolist())

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        ids = self.story(number, is_held_out, self.prompt_tokens)
        return Prompt(self.text.tokenizer.decode(ids), tuple(ids))

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        raise AssertionError("the experiment requires grpo.reward for this task")
