"""GRPO as a probe takes its steps: on the task's own prompts, scored, at the largest lengths.

Training stops sampling when all completions have ended; a probe does not, so that what it measures
is the most that a step takes.
"""

import numpy as np
import torch
from torch import nn

from sweep.config.trial import TrialConfig
from sweep.data.tokens import find_prepared
from sweep.errors import SweepError
from sweep.workloads.grpo import Grpo
from sweep.workloads.protocol import Batch


class Scored(Grpo):
    """GRPO whose batches without data have the first prompts of the task, and rewards."""

    def random_batch(self, count: int) -> Batch:
        """Return what a step of the largest lengths takes."""
        self._asked = self._prompts(np.arange(count))
        return self._prompt_ids(self._asked), *super().random_batch(count)[1:]

    def roll_out(self, model: nn.Module, batch: Batch, microbatch_size: int) -> Batch:
        """Return what the loss needs; rewards are computed, and decide nothing."""
        found = super().roll_out(model, batch, microbatch_size)
        if len(batch) > 1:
            with self._phase("score"):
                completions = found[0][:, self.settings.prompt_tokens :]
                self.score(self._asked, completions.cpu().numpy())
        return found


def why_unscored(config: TrialConfig) -> str | None:
    """Say why a trial's completions cannot be scored here and now; None where they can.

    Downloads and tokenizes nothing.
    """
    science = config.science
    if science.data is not None:
        assert science.tokenizer is not None
        if find_prepared(science.data, science.tokenizer) is None:
            return "the text of the prompts is not prepared yet, which `sweep data prepare` does"
    try:
        _ = Grpo(config, torch.device("cpu")).task
    except SweepError as error:
        return str(error)
    return None
