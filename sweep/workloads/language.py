"""Workloads that train a language model on a text."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

from sweep.config.hub import weights_folder
from sweep.config.trial import TrialConfig
from sweep.data.sources import is_table
from sweep.data.tokens import (
    TextTokenizer,
    TokenizedText,
    find_prepared,
    prepare_data,
    pretrained_path,
)
from sweep.errors import SweepError
from sweep.models.build import HasHidden, autocast, build_model
from sweep.trial.folder import TrialFolder
from sweep.trial.start import identify_start
from sweep.workloads import ranks
from sweep.workloads.workload import Workload


@runtime_checkable
class Pretrained(Protocol):
    """A model that reads a folder of transformers, and that LoRA can be applied to."""

    def load(self, folder: Path) -> None:
        """Load the weights of a folder."""

    def add_adapters(self, rank: int, seed: int) -> None:
        """Freeze the weights and add adapters, which alone belong to the state dict."""


def share_out(parts: list[Any], compute: Callable[[Any], Tensor]) -> list[Tensor]:
    """Return `compute(part)` for every part in all processes; each process computes some."""
    if not ranks.is_distributed():
        return [compute(part) for part in parts]
    results: list[Tensor] = []
    for first in range(0, len(parts), ranks.count()):
        index = first + ranks.rank()
        has_part = index < len(parts)
        result = compute(parts[index if has_part else -1])  # equally often, for sharded weights
        every = ranks.all_gather(result.cpu() if has_part else None)
        results += [other.to(result.device) for other in every if other is not None]
    return results


class LanguageWorkload(Workload):
    is_language = True

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        assert config.science.model.vocabulary and config.science.evaluation.sequences
        super().__init__(config, device)
        self.vocabulary: int = config.science.model.vocabulary
        self.evaluation_sequences: int = config.science.evaluation.sequences

    @cached_property
    def text(self) -> TokenizedText | None:
        config = self.config
        data = config.science.data
        tokenizer = config.science.tokenizer
        if data is None or tokenizer is None:
            return None
        text = find_prepared(data, tokenizer, verify=True)
        if text:
            return text
        if is_table(data):
            problem = "the data is not tokenized here, or its tokens are damaged"
            raise SweepError(f"{problem}. Run `sweep data prepare` first.")
        return prepare_data(data, config.data_path, tokenizer, print, config.init_path)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        if self.text is not None:
            return self.text.tokenizer
        settings = self.config.science.tokenizer
        if settings is None:
            return TextTokenizer(None)
        path = pretrained_path(self.config.init_path, settings)
        return TextTokenizer(path, settings.end, settings.vocabulary)

    def head(self, model: HasHidden, ids: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return the states from position `first`, (B·T, D), and the output projection, (V, D)."""
        with autocast(self.device, self.config.science.precision):
            states = model.hidden(ids)[:, first:].flatten(0, 1)
        if self.config.science.precision == "bf16":
            states = states.to(torch.bfloat16)
        return states, model.output_weight()

    def build_model(self) -> nn.Module:
        """Build the model with the weights of the seed or, except on meta, of `init_path`.

        LoRA's adapters are added after the weights are loaded, because they change names.
        """
        science = self.config.science
        recomputes = self.config.execution.activation_checkpointing
        model = build_model(science.model, science.seed, recomputes)
        path = self.config.init_path
        has_weights = not any(weight.is_meta for weight in model.parameters())
        if path is not None and science.start is not None and has_weights:
            if identify_start(path)["weights"] != science.start["weights"]:
                problem = f"the weights in {path} have changed since the sweep was planned"
                raise SweepError(f"{problem}. Restore them, or choose another --out.")
            load_weights(model, path)
        rank = science.model.adapter_rank
        if rank and isinstance(model, Pretrained):
            model.add_adapters(rank, science.seed)
        return model


def load_weights(model: nn.Module, source: str) -> None:
    """Load the weights of a trial's folder, of a folder of transformers, or of the hub."""
    folder = weights_folder(source)
    weights = TrialFolder(folder).weights_path
    try:
        if isinstance(model, Pretrained) and not weights.exists():  # a folder of transformers
            model.load(folder)
        else:
            load_model(model, weights)
    except (OSError, SafetensorError, RuntimeError, ImportError, ValueError) as error:
        raise SweepError(
            f"init must hold weights of the experiment's model, but those in {source} do not "
            f"load ({' '.join(str(error).split())[:200]}). Use the model that they belong to."
        ) from error
