"""The task `text`: continue the documents of a text. The user's function is the reward."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweep.data.tokens import SequenceStream, TokenizedText
from sweep.workloads.tasks.task import Completion, Prompt, Task


class Openings(Task):
    """The first tokens of the documents of a text, in an order that the seed decides."""

    def __init__(self, text: TokenizedText, seed: int, prompt_tokens: int) -> None:
        self.text = text
        self.seed = seed
        self.prompt_tokens = prompt_tokens
        self.prompts_in_epoch = text.train_documents
        self._order = SequenceStream(text.train_documents, seed)

    @cached_property
    def _train_ends(self) -> NDArray[np.int64]:
        return self._separators(self.text.train)

    @cached_property
    def _valid_ends(self) -> NDArray[np.int64]:
        return self._separators(self.text.valid)

    def _separators(self, split: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the positions at which the documents of a split end."""
        return np.flatnonzero(np.asarray(split) == self.text.end)

    def story(self, number: int, is_held_out: bool, tokens: int) -> list[int]:
        """Return the first tokens of a document; held-out ones come in the order of their split."""
        if is_held_out:
            split = self.text.valid
            ends = self._valid_ends
            index = number % len(ends)
        else:
            split = self.text.train
            ends = self._train_ends
            index = self._order.indices(number, 1)[0]

        start = 0
        if index > 0:
            start = int(ends[index - 1]) + 1
        stop = min(int(ends[index]), start + tokens)
        return list(split[start:stop].tolist())

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        ids = self.story(number, is_held_out, self.prompt_tokens)
        return Prompt(self.text.tokenizer.decode(ids), tuple(ids))

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        raise AssertionError("the experiment requires workload.reward for this task")
