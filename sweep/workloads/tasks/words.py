"""Tasks on a text: write a story with given words, or continue the opening of a story."""

import re
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweep.data.stream import SequenceStream
from sweep.data.tokens import TokenizedText
from sweep.errors import SweepError
from sweep.workloads.tasks.base import Completion, Prompt

WORDS = 3  # words in a prompt
SOURCE_TOKENS = 400  # the words come from the first tokens of a story
MINIMUM_LETTERS = 4
END_REWARD = 0.1
DRAWS = 30  # attempts to draw words that fit, before the prompt asks for one word fewer
WORD = re.compile(r"[a-z]+")


class Stories:
    """The documents of a text, in an order that the seed decides."""

    def __init__(self, text: TokenizedText, seed: int, prompt_tokens: int) -> None:
        self._text, self._seed, self._prompt_tokens = text, seed, prompt_tokens
        self.prompts_in_epoch: int | None = text.train_documents
        self._ends: dict[bool, NDArray[np.int64]] = {}  # separators of each split, once needed

    @cached_property
    def _order(self) -> SequenceStream:
        return SequenceStream(self._text.train_documents + 1, 1, self._seed)

    def story(self, number: int, is_held_out: bool, tokens: int) -> NDArray[np.integer]:
        """Return the first tokens of a document."""
        split = self._text.valid if is_held_out else self._text.train
        if is_held_out not in self._ends:
            self._ends[is_held_out] = np.flatnonzero(np.asarray(split) == self._text.separator)
        ends = self._ends[is_held_out]
        index = number % len(ends) if is_held_out else self._order.window_indices(number, 1)[0]
        start = int(ends[index - 1]) + 1 if index else 0
        return np.asarray(split[start : min(int(ends[index]), start + tokens)])


class Words(Stories):
    """Prompts such as `Words: dog, happy, little.`, for a story that contains the words and ends.

    The reward is the share of the words that the completion contains, plus END_REWARD times that
    share if it ended. An unconditional reward for the end would be learned first, and alone.
    """

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Ask for words of one story; draw other words, then fewer, until the prompt fits."""
        text = self._text.decode(self.story(number, is_held_out, SOURCE_TOKENS)).lower()
        words = sorted({word for word in WORD.findall(text) if len(word) >= MINIMUM_LETTERS})
        rng = np.random.Generator(np.random.Philox(key=[self._seed, number]))
        for draw in range(WORDS * DRAWS):
            count = WORDS - draw // DRAWS
            chosen = [words[i] for i in rng.permutation(len(words))[:count]] or ["story"]
            request = f"Words: {', '.join(chosen)}.\n"
            ids = tuple(self._text.encode(request))
            if len(ids) <= self._prompt_tokens:
                break
        return Prompt(request, ids, {"words": chosen})

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return the share of the words, and the reward for the end."""
        present = set(WORD.findall(completion.text.lower()))
        words = prompt.facts["words"]
        share = sum(word in present for word in words) / len(words)
        return {"words": share, "end": END_REWARD * share * completion.has_ended}


class Openings(Stories):
    """The first tokens of stories, for the user's reward."""

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return the opening of a story."""
        ids = self.story(number, is_held_out, self._prompt_tokens)
        return Prompt(self._text.decode(ids), tuple(int(i) for i in ids))

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Raise SweepError: this task has no reward."""
        raise SweepError("task 'text' must have a reward of your own. Set grpo.reward.")
