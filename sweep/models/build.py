"""Models, built from settings and a seed: the same initial weights on every machine."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sweep.config.models import (
    HuggingFaceSettings,
    ModelSettings,
    ObjectSettings,
    TransformerSettings,
)
from sweep.errors import user_code
from sweep.models.hugging_face import HuggingFace
from sweep.models.transformer import Transformer
from sweep.usercode.objects import load_object

# Each class is called with the settings, the seed, and whether activations are recomputed.
MODELS: dict[type, Callable[[Any, int, bool], nn.Module]] = {
    TransformerSettings: Transformer,
    HuggingFaceSettings: HuggingFace,
}


@runtime_checkable
class HasHidden(Protocol):
    """A model whose loss can be computed without materializing all logits.

    Optional: `extend(ids, past)` returns the states of new tokens, (B, T, D), and the past that
    includes them, for the next call with one token per sequence; the first `past` is None.
    `pad_past(past, tokens)` returns a longer past, which makes forecasts faster.
    """

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the states before the output projection, (B, T, D), from ids (B, T)."""

    def output_weight(self) -> Tensor:
        """Return the output projection, (V, D)."""


# A weight that stacks several projections, such as query, key and value, with the sizes and the
# dimension by which `torch.split` separates them.
StackedWeight = tuple[Tensor, list[int], int]


@runtime_checkable
class HasStackedWeights(Protocol):
    """A model that names the weights that stack several projections."""

    def stacked_weights(self) -> list[StackedWeight]: ...


def build_model(settings: ModelSettings, seed: int, recomputes: bool = False) -> nn.Module:
    """Build a float32 model on the CPU. Equal settings and seeds give equal weights."""
    if not isinstance(settings, ObjectSettings):
        return MODELS[type(settings)](settings, seed, recomputes)
    build = load_object(settings.name)
    sizes = {"vocabulary": settings.vocabulary, "context": settings.context}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with user_code(
            f"model {settings.name!r} must be callable with vocabulary, context and its options, "
            "and return a torch.nn.Module with trainable weights"
        ):
            model: nn.Module = build(**sizes, **settings.options)
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise ValueError("it has none")
            if recomputes and not hasattr(model, "activation_checkpointing"):
                raise AttributeError("it has no attribute activation_checkpointing")
    if recomputes:
        model.activation_checkpointing = True  # type: ignore[assignment]
    return model


def build_without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device, or with weights if its code needs their values."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # a user's model may read values, which meta tensors do not have
        return build()


def outer_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of a model's embeddings, and its output projection if it names that."""
    weights: list[Tensor] = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    if isinstance(model, HasHidden):
        weights.append(model.output_weight())
    return list({id(weight): weight for weight in weights}.values())


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def weight_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights, gradients and optimizer states."""
    return torch.bfloat16 if precision == "bf16-pure" else torch.float32
