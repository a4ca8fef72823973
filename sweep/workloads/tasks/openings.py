"""The task `text`: continue the documents of a text. The user's function is the reward."""

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
        self._ends: dict[bool, NDArray[np.int64]] = {}  # separators of each split, once needed

    def story(self, number: int, is_held_out: bool, tokens: int) -> list[int]:
        split = self.text.valid if is_held_out else self.text.train
        if is_held_out not in self._ends:
            self._ends[is_held_out] = np.flatnonzero(np.asarray(split) == self.text.end)
        ends = self._ends[is_held_out]
        index = number % len(ends) if is_held_out else self._order.indices(number, 1)[0]
        start = int(ends[index - 1]) + 1 if index else 0
        stop = min(int(ends[index]), start + tokens)
        return list(split[start:stop].tolist())

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        ids = self.story(number, is_held_out, self.prompt_tokens)
        return Prompt(self.text.tokenizer.decode(ids), tuple(ids))

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        raise AssertionError("the experiment requires workload.reward for this task")
