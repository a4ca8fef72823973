"""Next-token prediction on a text."""

from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.data.tokens import TokenizedText, count_windows
from sweep.models.build import HasHidden, autocast
from sweep.models.loss import linear_cross_entropies, linear_cross_entropy, load_fused_kernel
from sweep.trial import watchdog
from sweep.workloads.language import LanguageWorkload, share_out
from sweep.workloads.workload import Batch, FinalEvaluation

FINAL_TRAIN_SETS = 4  # size of the final training set, in milestone evaluation sets


def gather(
    tokens: NDArray[np.integer], indices: NDArray[np.int64], context: int
) -> NDArray[np.int64]:
    """Return the tokens of windows, (n, T + 1): inputs are [:, :-1], targets [:, 1:].

    Window i is tokens[iT … iT+T], with T = `context`.
    """
    positions = indices[:, None] * context + np.arange(context + 1)
    return np.asarray(tokens[positions], dtype=np.int64)


def document_of_targets(tokens: NDArray[np.integer], end: int) -> NDArray[np.int64]:
    """Return the document of each target, (N − 1,), by number; a separator ends its own."""
    return np.cumsum(tokens[:-1] == end, dtype=np.int64)


class Pretrain(LanguageWorkload):
    unit = "nats"
    divergence_margin = 1.0

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.fused_kernel = load_fused_kernel() if device.type == "cuda" else None

    def check(self, text: TokenizedText | None) -> None:
        if text is not None:
            text.refuse_short_splits(self.config.tokens_per_sequence)

    @cached_property
    def text(self) -> TokenizedText:
        text = super().text
        assert text is not None
        text.refuse_short_splits(self.tokens_per_sequence)
        return text

    @cached_property
    def train_sequences(self) -> int:
        return count_windows(len(self.text.train), self.tokens_per_sequence)

    def build_batch(self, first: int, count: int) -> Batch:
        return (self._windows(self.text.train, self.stream.indices(first, count)),)

    def random_batch(self, count: int) -> Batch:
        shape = (count, self.tokens_per_sequence + 1)
        return (torch.randint(self.vocabulary, shape, device=self.device),)

    def loss_tokens(self, batch: Batch) -> int:
        return batch[0].shape[0] * (batch[0].shape[1] - 1)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        windows = batch[0]
        rows = self.config.execution.loss_chunk_rows
        if rows and isinstance(model, HasHidden) and torch.is_grad_enabled():
            states, weight = self.head(model, windows[:, :-1])
            targets = windows[:, 1:].flatten()
            return linear_cross_entropy(states, weight, targets, rows, self.fused_kernel)
        return self.token_losses(model, windows).sum()

    def token_losses(self, model: nn.Module, windows: Tensor) -> Tensor:
        """Return the cross-entropy of each target in nats, (B, T) from (B, T + 1)."""
        inputs = windows[:, :-1]
        targets = windows[:, 1:]
        rows = self.config.execution.loss_chunk_rows
        if rows and isinstance(model, HasHidden) and not torch.is_grad_enabled():
            states, weight = self.head(model, inputs)
            losses = linear_cross_entropies(states, weight, targets.flatten(), rows)
            return losses.view(targets.shape)
        with autocast(self.device, self.config.science.precision):
            logits = model(inputs)  # (B, T, V)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean loss of evenly spaced validation windows, or of all for a target."""
        windows = count_windows(len(self.text.valid), self.tokens_per_sequence)
        count = windows
        if self.config.science.target is None:
            count = min(self.evaluation_sequences, windows)
        indices = np.linspace(0, windows, count, endpoint=False).astype(np.int64)
        return float(self._losses(model, self.text.valid, indices).mean())

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Evaluate validation by document, and training windows that every batch size has seen."""
        text = self.text
        trained = self.config.science.tokens // self.tokens_per_sequence
        count = min(FINAL_TRAIN_SETS * self.evaluation_sequences, trained, self.train_sequences)
        train_losses = self._losses(model, text.train, self.stream.indices(0, count))

        documents = document_of_targets(text.valid, text.end)
        losses = self._losses_of_all_targets(model, text.valid)
        sums = np.bincount(documents, losses, minlength=text.valid_documents)
        counts = np.bincount(documents, minlength=text.valid_documents)
        return FinalEvaluation(
            valid_losses=np.stack([sums, counts], axis=1).astype(np.float64),
            train_loss=float(train_losses.mean()),
            valid_bytes=text.valid_bytes,
        )

    def _losses_of_all_targets(
        self, model: nn.Module, tokens: NDArray[np.integer]
    ) -> NDArray[np.float64]:
        """Return the loss of each token after the first, (N − 1,)."""
        context = self.tokens_per_sequence
        windows = count_windows(len(tokens), context)
        losses = [self._losses(model, tokens, np.arange(windows)).ravel()]
        start = windows * context
        if start + 1 < len(tokens):  # the last window is shorter
            rest = torch.from_numpy(tokens[start:].astype(np.int64))[None]
            last = self.token_losses(model, rest.to(self.device))
            losses.append(last.cpu().double().numpy().ravel())
        return np.concatenate(losses)

    def _losses(
        self, model: nn.Module, tokens: NDArray[np.integer], indices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the losses of windows, (windows, T)."""
        size = self.config.execution.evaluation_batch_size

        def losses(part: NDArray[np.int64]) -> Tensor:
            watchdog.progress()
            return self.token_losses(model, self._windows(tokens, part))

        parts = [indices[first : first + size] for first in range(0, len(indices), size)]
        return torch.cat(share_out(parts, losses)).cpu().double().numpy()

    def _windows(self, tokens: NDArray[np.integer], indices: NDArray[np.int64]) -> Tensor:
        windows = torch.from_numpy(gather(tokens, indices, self.tokens_per_sequence))
        if self.device.type == "cuda":  # pinned memory lets the copy overlap with the computation
            windows = windows.pin_memory()
        return windows.to(self.device, non_blocking=True)
