"""The task `words` of GRPO: stories that contain given words."""

import re

import numpy as np

from sweep.workloads.tasks.openings import Openings
from sweep.workloads.tasks.task import Completion, Prompt

WORDS = 3  # words in a prompt
SOURCE_TOKENS = 400  # the words come from the first tokens of a story
DRAWS = 30  # attempts to draw words that fit, before the prompt asks for one word fewer
WORD = re.compile(r"[a-z]+")


class Words(Openings):
    """Prompts such as `Words: dog, happy, little.`, for a story that contains the words and ends.

    The reward is the share of the words that the completion contains, plus 0.1 times that
    share if it ended. An unconditional reward for the end would be learned first, and alone.
    """

    def prompt(self, number: int, is_held_out: bool) -> Prompt:
        story = self.story(number, is_held_out, SOURCE_TOKENS)
        text = self.text.tokenizer.decode(story).lower()
        words = sorted({word for word in WORD.findall(text) if len(word) >= 4})

        rng = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        for draw in range(WORDS * DRAWS):
            count = WORDS - draw // DRAWS
            chosen = [words[index] for index in rng.permutation(len(words))[:count]]
            if not chosen:
                chosen = ["story"]
            request = f"Words: {', '.join(chosen)}.\n"
            ids = tuple(self.text.tokenizer.encode_batch([request])[0].tolist())
            if len(ids) <= self.prompt_tokens:
                break
        return Prompt(request, ids, {"words": chosen})

    def reward(self, prompt: Prompt, completion: Completion) -> dict[str, float]:
        present = WORD.findall(completion.text.lower())
        words = prompt.facts["words"]
        share = sum(word in present for word in words) / len(words)
        reward = {"words": share, "end": 0.0}
        if completion.has_ended:
            reward["end"] = 0.1 * share
        return reward
