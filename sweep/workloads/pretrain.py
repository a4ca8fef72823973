"""Next-token prediction on a text."""

from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.data.tokens import SequenceStream, TokenizedText, document_of_targets, gather
from sweep.models import HasHidden, autocast
from sweep.models.loss import linear_cross_entropies, linear_cross_entropy
from sweep.workloads import ranks
from sweep.workloads.inputs import LanguageWorkload
from sweep.workloads.protocol import Batch, FinalEvaluation

FINAL_TRAIN_SETS = 4  # size of the final training set, in milestone evaluation sets


class Pretrain(LanguageWorkload):
    """Pretraining on tokenized text; a sequence has the length of the context."""

    @cached_property
    def text(self) -> TokenizedText:
        text = super().text
        assert text is not None
        text.check_window(self.tokens_per_sequence)
        return text

    @cached_property
    def stream(self) -> SequenceStream:
        seed = self.config.science.seed
        return SequenceStream(len(self.text.train), self.tokens_per_sequence, seed)

    def build_batch(self, first: int, count: int) -> Batch:
        return (self._windows(self.text.train, self.stream.window_indices(first, count)),)

    def random_batch(self, count: int) -> Batch:
        shape = (count, self.tokens_per_sequence + 1)
        return (torch.randint(self.vocabulary, shape, device=self.device),)

    def loss_tokens(self, batch: Batch) -> int:
        return batch[0].shape[0] * (batch[0].shape[1] - 1)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        windows, rows = batch[0], self.config.execution.loss_chunk_rows
        if not (rows and isinstance(model, HasHidden) and torch.is_grad_enabled()):
            return self.token_losses(model, windows).sum()
        states, targets = self.states(model, windows[:, :-1]), windows[:, 1:].flatten()
        return linear_cross_entropy(states, model.output_weight(), targets, rows)

    def token_losses(self, model: nn.Module, windows: Tensor) -> Tensor:
        """Return the cross-entropy of each target in nats, (B, T) from (B, T + 1)."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        rows = self.config.execution.loss_chunk_rows
        if rows and isinstance(model, HasHidden) and not torch.is_grad_enabled():
            states, weight = self.states(model, inputs), model.output_weight()
            losses = linear_cross_entropies(states, weight, targets.flatten(), rows)
            return losses.view(targets.shape)
        with autocast(self.device, self.config.science.precision):
            logits = model(inputs)  # (B, T, V)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean loss of evenly spaced validation windows, or of all for a target."""
        windows = (len(self.text.valid) - 1) // self.tokens_per_sequence
        is_whole = self.config.science.target is not None
        count = windows if is_whole else min(self.evaluation_sequences, windows)
        indices = np.linspace(0, windows, count, endpoint=False).astype(np.int64)
        return float(self._losses(model, self.text.valid, indices).mean())

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Evaluate the validation split by document, and a fixed set of training windows.

        The training windows are the first of the seed's stream, which every batch size has seen.
        """
        text, context = self.text, self.tokens_per_sequence
        trained = self.config.science.tokens // context
        count = min(FINAL_TRAIN_SETS * self.evaluation_sequences, trained, self.stream.windows)
        train = self._losses(model, text.train, self.stream.window_indices(0, count))
        windows = (len(text.valid) - 1) // context
        losses = [self._losses(model, text.valid, np.arange(windows)).ravel()]
        if windows * context + 1 < len(text.valid):  # the last window is shorter
            rest = torch.from_numpy(text.valid[windows * context :].astype(np.int64))[None]
            model.eval()
            with torch.no_grad():
                last = self.token_losses(model, rest.to(self.device))
            model.train()
            losses.append(last.double().cpu().numpy().ravel())
        documents = document_of_targets(text.valid, text.separator)
        sums = np.bincount(documents, np.concatenate(losses), minlength=text.valid_documents)
        counts = np.bincount(documents, minlength=text.valid_documents)
        valid_losses = np.stack([sums, counts], axis=1).astype(np.float64)
        return FinalEvaluation(valid_losses, float(train.mean()), text.valid_bytes)

    @torch.no_grad()
    def _losses(
        self, model: nn.Module, tokens: NDArray[np.integer], indices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the losses of windows, (windows, T); several devices share the work."""
        model.eval()
        size = self.config.execution.evaluation_batch_size
        parts = [indices[first : first + size] for first in range(0, len(indices), size)]
        losses = ranks.share_out(
            parts, lambda part: self.token_losses(model, self._windows(tokens, part))
        )
        model.train()
        return torch.cat(losses).double().cpu().numpy()

    def _windows(self, tokens: NDArray[np.integer], indices: NDArray[np.int64]) -> Tensor:
        windows = torch.from_numpy(gather(tokens, indices, self.tokens_per_sequence))
        if self.device.type == "cuda":  # pinned memory lets the copy overlap with the computation
            windows = windows.pin_memory()
        return windows.to(self.device, non_blocking=True)

    def epochs(self) -> float:
        return self.stream.epochs(self.config.science.tokens)
