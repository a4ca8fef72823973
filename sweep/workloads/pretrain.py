"""Next-token prediction on a text."""

import math
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.data.stream import SequenceStream, document_of_targets, gather
from sweep.data.tokens import TokenizedText, prepare_data
from sweep.models import HasHidden, build_model
from sweep.models.loss import linear_cross_entropies, linear_cross_entropy
from sweep.models.precision import autocast
from sweep.workloads import ranks
from sweep.workloads.protocol import Batch, FinalEvaluation

TOKENS_SHARE = 0.02  # of a GPU's memory, for the training tokens
FINAL_TRAIN_SETS = 4  # the held-in set of the final evaluation, in milestone sets


class Pretrain:
    """Pretraining on tokenized text; the sequence is the context length."""

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        assert config.science.model.kind != "quadratic"
        assert config.science.evaluation.sequences
        self.config, self.device = config, device
        self.model_settings = config.science.model
        self.tokens_per_sequence = self.model_settings.context
        self.evaluation_sequences = config.science.evaluation.sequences

    @cached_property
    def text(self) -> TokenizedText:
        """The tokenized text; prepared now if no other process has."""
        science = self.config.science
        assert science.data is not None and science.tokenizer is not None
        text = prepare_data(science.data, self.config.data_path, science.tokenizer)
        text.check_window(self.tokens_per_sequence)
        return text

    @cached_property
    def stream(self) -> SequenceStream:
        """The global stream of training windows of the trial's seed."""
        science = self.config.science
        return SequenceStream(len(self.text.train), self.tokens_per_sequence, science.seed)

    def build_model(self) -> nn.Module:
        """Build the float32 model on the CPU, from the trial's seed."""
        science, execution = self.config.science, self.config.execution
        return build_model(science.model, science.seed, execution.activation_checkpointing)

    def build_batch(self, first: int, count: int) -> Batch:
        """Return windows of the stream, (count, T + 1)."""
        indices = self.sequence_indices(first, count)
        if self.is_on_device():
            return self.batch_at(torch.from_numpy(indices).to(self.device, non_blocking=True))
        return (self._windows(self.text.train, indices),)

    def is_on_device(self) -> bool:
        """Tell whether the training tokens are kept on the device: a GPU with room for them."""
        is_own = type(self).build_batch is Pretrain.build_batch  # not that of a user's subclass
        return self.device.type == "cuda" and is_own and self.device_tokens_fit

    @cached_property
    def device_tokens_fit(self) -> bool:
        """Whether the training tokens take a small part of the device's memory."""
        size = len(self.text.train) * self._device_dtype.itemsize
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return bool(size <= TOKENS_SHARE * memory)

    @property
    def _device_dtype(self) -> torch.dtype:
        return torch.int16 if self.model_settings.vocabulary <= 2**15 else torch.int32

    @cached_property
    def _device_windows(self) -> Tensor:
        """The training tokens on the device as windows that share their ends, (windows, T + 1)."""
        tokens = torch.from_numpy(self.text.train.astype(np.int32)).to(self._device_dtype)
        context = self.tokens_per_sequence
        return tokens.to(self.device).unfold(0, context + 1, context)

    def sequence_indices(self, first: int, count: int) -> NDArray[np.int64]:
        """Return windows of the stream, (count,)."""
        return self.stream.window_indices(first, count)

    def batch_at(self, indices: Tensor) -> Batch:
        """Return these windows, (count, T + 1), gathered on the device."""
        return (self._device_windows[indices].long(),)

    def random_batch(self, count: int) -> Batch:
        """Return random ids, (count, T + 1)."""
        shape = (count, self.tokens_per_sequence + 1)
        return (torch.randint(self.model_settings.vocabulary, shape, device=self.device),)

    def loss_tokens(self, batch: Batch) -> int:
        """Every input has a target."""
        return batch[0].shape[0] * (batch[0].shape[1] - 1)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed cross-entropy in nats."""
        windows, rows = batch[0], self.config.execution.loss_chunk_rows
        if not (rows and isinstance(model, HasHidden) and torch.is_grad_enabled()):
            return self.token_losses(model, windows).sum()
        return linear_cross_entropy(*self._before_logits(model, windows), rows)

    def token_losses(self, model: nn.Module, windows: Tensor) -> Tensor:
        """Return each target's cross-entropy in nats, (B, T) from (B, T + 1)."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        rows = self.config.execution.loss_chunk_rows
        if rows and isinstance(model, HasHidden) and not torch.is_grad_enabled():
            chunked = linear_cross_entropies(*self._before_logits(model, windows), rows)
            return chunked.view(targets.shape)
        with autocast(self.device, self.config.science.precision):
            logits = model(inputs)  # (B, T, V)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)

    def _before_logits(self, model: HasHidden, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return states (B·T, D), the output projection (V, D) and targets (B·T)."""
        precision = self.config.science.precision
        with autocast(self.device, precision):
            hidden = model.hidden(windows[:, :-1])
        dtype = torch.bfloat16 if precision == "bf16" else hidden.dtype
        return hidden.flatten(0, 1).to(dtype), model.output_weight(), windows[:, 1:].flatten()

    def evaluate(self, model: nn.Module) -> float:
        """Return the mean loss of evenly spaced validation windows; of all, towards a target."""
        windows = (len(self.text.valid) - 1) // self.tokens_per_sequence
        is_whole = self.config.science.target is not None
        count = windows if is_whole else min(self.evaluation_sequences, windows)
        chosen = np.linspace(0, windows, count, endpoint=False).astype(np.int64)
        return float(self._losses(model, self.text.valid, chosen).mean())

    def evaluate_finally(self, model: nn.Module) -> FinalEvaluation:
        """Measure the whole validation split by document, and windows trained on.

        The training set is the start of the seed's stream: every batch size has trained on it.
        """
        text, context = self.text, self.tokens_per_sequence
        trained = self.config.science.tokens // context
        held_in = min(FINAL_TRAIN_SETS * self.evaluation_sequences, trained, self.stream.windows)
        train = self._losses(model, text.train, self.stream.window_indices(0, held_in))
        windows = (len(text.valid) - 1) // context
        losses = [self._losses(model, text.valid, np.arange(windows)).ravel()]
        if windows * context + 1 < len(text.valid):  # the last window is shorter
            rest = text.valid[windows * context :].astype(np.int64)[None]
            model.eval()
            with torch.no_grad():
                last = self.token_losses(model, torch.from_numpy(rest).to(self.device))
            model.train()
            losses.append(last.double().cpu().numpy().ravel())
        documents = document_of_targets(text.valid, text.separator)
        summed = np.bincount(documents, np.concatenate(losses), minlength=text.valid_documents)
        counts = np.bincount(documents, minlength=text.valid_documents)
        return FinalEvaluation(
            np.stack([summed, counts], axis=1).astype(np.float64),
            float(train.mean()),
            text.valid_bytes,
        )

    def epochs(self) -> float:
        """Return tokens trained on over tokens in the stream's windows."""
        return self.stream.epochs(self.config.science.tokens)

    def _windows(self, tokens: NDArray[np.integer], indices: NDArray[np.int64]) -> Tensor:
        windows = gather(tokens, indices, self.tokens_per_sequence)
        return torch.from_numpy(windows).to(self.device, non_blocking=True)

    @torch.no_grad()
    def _losses(
        self, model: nn.Module, tokens: NDArray[np.integer], indices: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the losses of some windows, (windows, T), in batches sized for the device.

        Of a trial on several devices each computes some of them.
        """
        model.eval()
        size = self.config.execution.evaluation_batch_size
        parts = [indices[i * size : (i + 1) * size] for i in range(math.ceil(len(indices) / size))]
        losses = ranks.share_out(
            parts, lambda part: self.token_losses(model, self._windows(tokens, part))
        )
        model.train()
        return torch.cat(losses).double().cpu().numpy()
