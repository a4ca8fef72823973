"""The inputs of a trial: its text, its tokenizer and its initial weights."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from sweep.config.trial import TrialConfig
from sweep.data.tokens import TextTokenizer, TokenizedText, prepare_data, pretrained_path
from sweep.errors import SweepError
from sweep.models import build_model
from sweep.models.hugging_face import HuggingFace
from sweep.trial.folder import TrialFolder, identify_start


def open_text(config: TrialConfig) -> TokenizedText | None:
    """Return the tokenized text, which is prepared first if necessary; None if there is none."""
    science, init = config.science, config.init_path
    if science.data is None or science.tokenizer is None:
        return None
    return prepare_data(science.data, config.data_path, science.tokenizer, pretrained=init)


def open_tokenizer(config: TrialConfig) -> TextTokenizer:
    """Return the tokenizer of a trial without a text: a pretrained one, or bytes."""
    settings = config.science.tokenizer
    if settings is None:
        return TextTokenizer(None)
    return TextTokenizer(pretrained_path(config.init_path, settings), settings.end)


def build_initial_model(config: TrialConfig) -> nn.Module:
    """Build the float32 model on the CPU, with the weights of the seed or of `init_path`.

    On the meta device no weights are loaded.
    """
    science, path = config.science, config.init_path
    model = build_model(science.model, science.seed, config.execution.activation_checkpointing)
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
            f"init must hold weights of the experiment's model, but those in {path} do not load "
            f"({reason}). Use the model that they belong to."
        ) from error
    return model
