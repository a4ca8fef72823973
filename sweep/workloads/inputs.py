"""The inputs of language models: a text, its tokenizer and the initial weights."""

from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.data.tokens import TextTokenizer, TokenizedText, prepare_data, pretrained_path
from sweep.errors import SweepError
from sweep.models import HasHidden, autocast, build_model
from sweep.models.hugging_face import HuggingFace
from sweep.trial.folder import TrialFolder, identify_start


class LanguageWorkload:
    """Base class of the workloads that train a language model."""

    def __init__(self, config: TrialConfig, device: torch.device) -> None:
        assert config.science.model.vocabulary and config.science.evaluation.sequences
        self.config, self.device = config, device
        self.vocabulary: int = config.science.model.vocabulary
        self.evaluation_sequences: int = config.science.evaluation.sequences
        self.tokens_per_sequence = config.science.traits.tokens_per_sequence

    @cached_property
    def text(self) -> TokenizedText | None:
        """The tokenized text, which is prepared first if necessary; None if there is none."""
        science, path, init = self.config.science, self.config.data_path, self.config.init_path
        if science.data is None or science.tokenizer is None:
            return None
        return prepare_data(science.data, path, science.tokenizer, pretrained=init)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the text; without a text a pretrained one, or bytes."""
        settings = self.config.science.tokenizer
        if self.text is not None:
            return self.text.tokenizer
        if settings is None:
            return TextTokenizer(None)
        return TextTokenizer(pretrained_path(self.config.init_path, settings), settings.end)

    def states(self, model: HasHidden, ids: Tensor, first: int = 0) -> Tensor:
        """Return the input of the output projection from position `first`, (B·T, D), of (B, T)."""
        precision = self.config.science.precision
        with autocast(self.device, precision):
            states = model.hidden(ids)[:, first:].flatten(0, 1)
        return states.to(torch.bfloat16) if precision == "bf16" else states

    def build_model(self) -> nn.Module:
        """Build the model with the weights of the seed or, except on meta, of `init_path`."""
        science, path = self.config.science, self.config.init_path
        recomputes = self.config.execution.activation_checkpointing
        model = build_model(science.model, science.seed, recomputes)
        if path is None or any(weight.is_meta for weight in model.parameters()):
            return model
        if science.start is None or identify_start(path)["weights"] != science.start["weights"]:
            raise SweepError(f"init must contain the weights of the plan, got others in {path}.")
        weights = TrialFolder(Path(path)).weights_path
        try:
            if isinstance(model, HuggingFace) and not weights.exists():  # a folder of transformers
                model.load(Path(path))
            else:
                load_model(model, weights)
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise SweepError(
                f"init must hold weights of the experiment's model, but those in {path} do not "
                f"load ({reason}). Use the model that they belong to."
            ) from error
        return model
