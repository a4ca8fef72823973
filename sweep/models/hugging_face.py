"""Causal language models of the library transformers, with random weights from a seed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sweep.config.models import HuggingFaceSettings
from sweep.config.objects import require_extra
from sweep.errors import SweepError

SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class HuggingFace(nn.Module):
    """Token ids (B, T) to logits (B, T, V); without dropout, so that a seed says everything.

    Args:
        settings: architecture and sizes; what they leave open is the architecture's default.
        seed: of the initial weights.
        activation_checkpointing: recompute each block in the backward pass.

    Raises:
        SweepError: if transformers is not installed, or does not know the architecture.
    """

    def __init__(
        self, settings: HuggingFaceSettings, seed: int, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        require_extra("transformers", "hf", f"model {settings.name!r}")
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            sizes = {**settings.sizes, "vocab_size": settings.vocabulary}
            config = AutoConfig.for_model(settings.architecture, **sizes)
        except ValueError as error:
            raise SweepError(
                f"model {settings.name!r} must be of an architecture and sizes that transformers "
                f"knows, got {settings.architecture!r} ({' '.join(str(error).split())[:200]})."
            ) from error
        for name, value in list(vars(config).items()):  # each architecture has names of its own
            if "drop" in name and isinstance(value, int | float):
                setattr(config, name, type(value)(0))
        config.use_cache = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            build: Any = AutoModelForCausalLM.from_config
            self.model = build(config, attn_implementation="sdpa")
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.model.get_input_embeddings().padding_idx = None  # nothing is padding here
        output = self.model.get_output_embeddings()
        if output.bias is not None or any(getattr(config, name, None) for name in SCALED_LOGITS):
            raise SweepError(
                f"model {settings.name!r} must have plain logits, states times a matrix, and has a "
                "bias or a scale on them. Use it as a module:object of your own."
            )
        self._end = settings.end
        # transformers refuses its cache to a model that trains and checkpoints
        self.trains_with_past = not activation_checkpointing
        if activation_checkpointing:
            current, former = "activation_checkpointing_enable", "gradient_checkpointing_enable"
            enable = getattr(self.model, current, None) or getattr(self.model, former)
            enable({"use_reentrant": False})

    def load(self, folder: Path) -> None:
        """Load pretrained weights, the rows of id 0 and of the end of a text exchanged."""
        from transformers import AutoModelForCausalLM, logging

        be_quiet: Any = logging.disable_progress_bar
        be_quiet()
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.load_state_dict(found.state_dict())
        tables = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        with torch.no_grad():
            for weight in {id(table.weight): table.weight for table in tables}.values():
                weight[[0, self._end]] = weight[[self._end, 0]]

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the states before the output projection, (B, T, D)."""
        return self.model.base_model(ids).last_hidden_state  # type: ignore[no-any-return]

    def extend(self, ids: Tensor, past: Any) -> tuple[Tensor, Any]:
        """Return the states of tokens that follow others, (B, T, D), and transformers' cache."""
        found = self.model.base_model(ids, past_key_values=past, use_cache=True)
        return found.last_hidden_state, found.past_key_values

    def repeat(self, past: Any, copies: int) -> Any:
        """Return the cache with each sequence so many times, side by side."""
        past.batch_repeat_interleave(copies)
        return past

    def output_weight(self) -> Tensor:
        """Return the output projection, (V, D)."""
        return self.model.get_output_embeddings().weight  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, (B, T, V)."""
        return self.model(ids).logits  # type: ignore[no-any-return]


@contextmanager
def unpacked_rows() -> Iterator[None]:
    """Tell transformers, where it is in use, that no row holds several texts.

    It reads that from the positions' values; without data it cannot, and would make a causal mask
    that real steps do without.
    """
    masks, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    found = getattr(masks, name, None)
    if masks is None or found is None:
        yield
        return
    setattr(masks, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masks, name, found)
