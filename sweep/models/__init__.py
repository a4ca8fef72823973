"""Models: built from settings and a seed, the same weights on every machine."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sweep.config.models import ModelSettings
from sweep.config.objects import load_object
from sweep.errors import SweepError


def build_model(
    settings: ModelSettings, seed: int, activation_checkpointing: bool = False
) -> nn.Module:
    """Build a float32 model on the CPU; equal settings and seed give equal weights.

    Args:
        settings: of the model; `ObjectSettings` call the user's `module:object`.
        seed: of the initial weights.
        activation_checkpointing: recompute each block's activations in the backward pass.

    Raises:
        SweepError: if a user's model is no module with weights, or cannot checkpoint activations.
    """
    if settings.kind == "transformer":
        from sweep.models.transformer import Transformer

        return Transformer(settings, seed, activation_checkpointing)
    if settings.kind == "elman":
        from sweep.models.elman import Elman

        return Elman(settings, seed, activation_checkpointing)
    if settings.kind == "quadratic":
        from sweep.models.quadratic import Quadratic

        return Quadratic(settings, seed)
    if settings.kind == "hugging_face":
        from sweep.models.hugging_face import HuggingFace

        return HuggingFace(settings, seed, activation_checkpointing)
    build = load_object(settings.name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = build(
                vocabulary=settings.vocabulary, context=settings.context, **settings.options
            )
        except (Exception, SystemExit) as error:  # whatever the user's code does
            raise SweepError(
                f"model {settings.name!r} must be callable with vocabulary, context and its "
                f"options, but raised {type(error).__name__}: {error}. Correct it."
            ) from error
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise SweepError(
            f"model {settings.name!r} must return a torch.nn.Module with weights to train, got "
            f"an object of type {type(model).__name__}. Correct it."
        )
    if activation_checkpointing:
        if not hasattr(model, "activation_checkpointing"):
            raise SweepError(
                f"model {settings.name!r} must have an attribute activation_checkpointing to be "
                "run with --activation-checkpointing. Add it, or leave the flag out."
            )
        model.activation_checkpointing = True  # type: ignore[assignment]
    return model


@runtime_checkable
class HasHidden(Protocol):
    """A model whose loss can be formed without all logits."""

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the states before the output projection, (B, T, D), from ids (B, T)."""

    def output_weight(self) -> Tensor:
        """Return the output projection, (V, D)."""


@runtime_checkable
class HasCache(HasHidden, Protocol):
    """A model that need not see the tokens before again to go on."""

    def extend(self, ids: Tensor, past: Any) -> tuple[Tensor, Any]:
        """Return the states of tokens (B, T) behind those of `past`, and the past of the next.

        `past` is None for the first tokens, else what the call before returned, which is used up.
        """

    def repeat(self, past: Any, copies: int) -> Any:
        """Return a past in which each sequence stands so many times, side by side.

        A model that also has `pad_past(past, tokens)`, which returns a past as long as that of so
        many more tokens, is forecast faster; one whose `trains_with_past` is False shares states
        only where it samples.
        """


def count_parameters(settings: ModelSettings, activation_checkpointing: bool = False) -> int:
    """Return the number of parameters, in closed form or by building a user's model once."""
    if settings.parameters is not None:
        return settings.parameters
    model = build_without_weights(lambda: build_model(settings, 0, activation_checkpointing))
    return sum(parameter.numel() for parameter in model.parameters())


def build_without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the device `meta`; with weights where its code needs values."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # its own code's, which says no more than that it cannot be built so
        return build()
