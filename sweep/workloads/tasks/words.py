"""Stories that must contain given words and end; and openings of stories, for rewards of yours."""

import re
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweep.data.stream import SequenceStream
from sweep.data.tokens import TokenizedText
from sweep.errors import SweepError
from sweep.workloads.tasks import Completion, Prompt

WORDS = 3  # asked for
LOOKED_AT = 400  # tokens of a story that its words are taken from
LEAST_LETTERS = 4
END_REWARD = 0.1
DRAWS = 30  # of as many words of one story, for a prompt that fits
WORD = re.compile(r"[a-z]+")


class Stories:
    """The documents of a text, drawn in an order that the seed says.

    Args:
        text: that they are of.
        seed: of their order.
        prompt_tokens: that a prompt has room for.
    """

    def __init__(self, text: TokenizedText, seed: int, prompt_tokens: int) -> None:
        self._text, self._seed, self._prompt_tokens = text, seed, prompt_tokens
        self.prompts_in_epoch: int | None = text.train_documents

    @cached_property
    def _order(self) -> SequenceStream:
        return SequenceStream(self._text.train_documents + 1, 1, self._seed)

    @cached_property
    def _train_ends(self) -> NDArray[np.int64]:
        return self._separators(self._text.train)

    @cached_property
    def _held_out_ends(self) -> NDArray[np.int64]:
        return self._separators(self._text.valid)

    def _separators(self, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
        return np.flatnonzero(np.asarray(tokens) == self._text.separator)

    def story(self, number: int, is_held_out: bool, tokens: int) -> NDArray[np.integer]:
        """Return the first tokens of a document."""
        ends = self._held_out_ends if is_held_out else self._train_ends
        split = self._text.valid if is_held_out else self._text.train
        index = number % len(ends) if is_held_out else self._order.window_indices(number, 1)[0]
        start = int(ends[index - 1]) + 1 if index else 0
        return np.asarray(split[start : min(int(ends[index]), start + tokens)])


class Words(Stories):
    """`Words: dog, happy, little.` and a story that contains them, and ends.

    The reward is the share of the words that the completion contains, and END_REWARD of that share
    more if it ended: paid for itself, the end would be learned alone, and at once.
    """

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Ask for words of a story; for others of them, or fewer, where those drawn do not fit."""
        text = self._text.decode(self.story(number, is_held_out, LOOKED_AT)).lower()
        found = sorted({word for word in WORD.findall(text) if len(word) >= LEAST_LETTERS})
        rng = np.random.Generator(np.random.Philox(key=[self._seed, number]))
        for turn in range(WORDS * DRAWS):
            count = WORDS - turn // DRAWS
            chosen = [found[i] for i in rng.permutation(len(found))[:count]] or ["story"]
            request = f"Words: {', '.join(chosen)}.\n"
            ids = tuple(self._text.encode(request))
            if len(ids) <= self._prompt_tokens:
                break
        return Prompt(request, ids, {"words": chosen})

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Return the share of the words, and what the end is worth."""
        present = set(WORD.findall(completion.text.lower()))
        asked = prompt.facts["words"]
        share = sum(word in present for word in asked) / len(asked)
        return {"words": share, "end": END_REWARD * share * completion.has_ended}


class Openings(Stories):
    """The first tokens of stories; a reward must be given."""

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        """Return the opening of a story."""
        ids = self.story(number, is_held_out, self._prompt_tokens)
        return Prompt(self._text.decode(ids), tuple(int(i) for i in ids))

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        """Refuse: there is none."""
        raise SweepError("task 'text' must have a reward of yours. Set grpo.reward.")
