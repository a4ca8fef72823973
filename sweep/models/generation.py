"""Sampling from a causal language model, completion by completion the same in any batch.

Each completion has random numbers of its own, so that how many are sampled at once decides nothing
but rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.models import HasCache, HasHidden

LOOKED_AFTER = 8  # tokens: looking whether all have ended waits for the device


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0  # 0: the likeliest
    top_p: float = 1.0  # of the smallest set of likeliest tokens that holds so much probability
    end: int | None = None  # id that ends a completion


def completion_uniforms(seed: int, numbers: NDArray[np.int64], tokens: int) -> Tensor:
    """Return what completions draw, uniform in [0, 1), (completions, tokens) in float64.

    Args:
        seed: ≥ 0.
        numbers: of the completions in their global stream, (completions,).
        tokens: of each.
    """
    drawn = np.empty((len(numbers), tokens))
    for row, number in zip(drawn, numbers, strict=True):
        row[:] = np.random.Generator(np.random.Philox(key=[seed, int(number)])).random(tokens)
    return torch.from_numpy(drawn)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Tensor,
    uniforms: Tensor,
    sampling: Sampling,
    *,
    is_cached: bool = True,
    looks_for_end: bool = True,
    copies: int = 1,
    on_logits: Callable[[Tensor], object] | None = None,
    is_rehearsal: bool = False,
) -> Tensor:
    """Sample one completion of each prompt, (B, N); behind its end a completion repeats the end.

    Args:
        model: from ids (B, T) to logits (B, T, V), with a cache where it has one.
        prompts: ids, (B, P), P ≥ 1.
        uniforms: what the completions draw, (B, N).
        sampling: how.
        is_cached: use the model's cache.
        looks_for_end: stop as soon as all have ended, which waits for the device.
        copies: so many prompts side by side are equal, and seen once, where there is a cache.
        on_logits: called with the logits (B, V) of each token.
        is_rehearsal: only the first two tokens and the last, where the model can pad its cache.
    """
    count, tokens = uniforms.shape
    cache = model if is_cached and isinstance(model, HasCache) else None
    chosen = prompts.new_full((count, tokens), 0 if sampling.end is None else sampling.end)
    has_ended = torch.zeros(count, dtype=torch.bool, device=prompts.device)
    past: Any = None
    new, seen, turned = prompts, prompts, None
    pad = getattr(cache, "pad_past", None) if is_rehearsal else None
    skipped = max(0, tokens - 3) if pad else 0
    for place in (*range(min(tokens, 2)), *range(2 + skipped, tokens)):
        if pad and skipped and place == tokens - 1:
            past = pad(past, skipped)
        if isinstance(model, HasHidden):
            if cache is None:
                hidden = model.hidden(seen)
            else:
                hidden, past = _extend(cache, new, past, copies)
            if turned is None:
                turned = model.output_weight().T.to(hidden.dtype)
            logits = hidden[:, -1] @ turned
        else:
            logits = model(seen)[:, -1]
        if on_logits is not None:
            on_logits(logits)
        ids = next_tokens(logits, uniforms[:, place], sampling)
        if sampling.end is not None:
            ids = torch.where(has_ended, sampling.end, ids)
            has_ended = has_ended | (ids == sampling.end)
        chosen[:, place], new = ids, ids[:, None]
        if cache is None:
            seen = torch.cat((seen, new), dim=1)
        is_look = looks_for_end and place % LOOKED_AFTER == LOOKED_AFTER - 1
        if is_look and sampling.end is not None and bool(has_ended.all()):
            break
    return chosen


def _extend(model: HasCache, new: Tensor, past: Any, copies: int) -> tuple[Tensor, Any]:
    return extend_equal(model, new, copies) if past is None else model.extend(new, past)


def extend_equal(model: HasCache, prompts: Tensor, copies: int) -> tuple[Tensor, Any]:
    """Return the last states (B, 1, D) of prompts, and their past, seeing equal ones once.

    Args:
        model: with a cache.
        prompts: ids, (B, P).
        copies: so many side by side are equal.
    """
    hidden, past = model.extend(prompts[::copies], None)
    hidden = hidden[:, -1:]
    if copies > 1:
        hidden, past = hidden.repeat_interleave(copies, dim=0), model.repeat(past, copies)
    return hidden, past


def next_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Choose a token from each row, (B) from logits (B, V) and uniforms (B), by inversion."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    shares = torch.softmax(wide / sampling.temperature, dim=-1)
    order = None
    if sampling.top_p < 1:
        shares, order = shares.sort(dim=-1, descending=True, stable=True)
        is_beyond = shares.cumsum(dim=-1) - shares >= sampling.top_p  # the first never is
        shares = shares.masked_fill(is_beyond, 0.0)
    heights = shares.cumsum(dim=-1)
    drawn = uniforms.to(heights)[:, None] * heights[:, -1:]
    found = torch.searchsorted(heights, drawn, right=True)
    # rounding may leave the last of them above what is drawn
    last = (shares > 0).to(torch.int64).cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    found = torch.minimum(found, last)
    return (found if order is None else order.gather(1, found)).squeeze(1)
