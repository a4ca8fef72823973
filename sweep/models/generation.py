"""Sample from a causal language model, with independent random numbers for each completion."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sweep.models.build import HasHidden
from sweep.models.loss import widened

END_CHECK_INTERVAL = 8  # tokens; a check whether all completions have ended waits for the device


def completion_uniforms(seed: int, numbers: NDArray[np.int64], tokens: int) -> Tensor:
    """Return random numbers, (B, tokens), of the completions (B,) of a seed's stream."""
    uniforms = np.empty((len(numbers), tokens))
    for row, number in zip(uniforms, numbers, strict=True):
        row[:] = np.random.Generator(np.random.Philox(key=[seed, int(number)])).random(tokens)
    return torch.from_numpy(uniforms)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Tensor,
    uniforms: Tensor,
    temperature: float = 1.0,
    top_p: float = 1.0,
    end: int | None = None,
    is_rehearsal: bool = False,
) -> Tensor:
    """Sample completions (B, N) of prompts (B, P) with random numbers (B, N); an `end` is repeated.

    A rehearsal computes only the first two tokens and the last, which decide the peak memory.
    """
    count, tokens = uniforms.shape
    completions = prompts.new_full((count, tokens), 0 if end is None else end)
    has_ended = torch.zeros(count, dtype=torch.bool, device=prompts.device)
    extend = getattr(model, "extend", None)
    pad = None
    positions: Sequence[int] = range(tokens)
    if is_rehearsal and tokens > 3:
        pad = getattr(model, "pad_past", None)
    if pad is not None:
        positions = (0, 1, tokens - 1)

    ids = prompts
    past = None
    projection = None
    for position in positions:
        if pad is not None and position == tokens - 1:
            past = pad(past, tokens - 3)
        if isinstance(model, HasHidden):
            states, past = extend(ids, past) if extend else (model.hidden(ids), None)
            if projection is None:
                projection = model.output_weight().T.to(states.dtype)
            logits = states[:, -1] @ projection
        else:
            logits = model(ids)[:, -1]

        chosen = next_tokens(logits, uniforms[:, position], temperature, top_p)
        if end is not None:
            chosen = torch.where(has_ended, end, chosen)
            has_ended = has_ended | (chosen == end)
        completions[:, position] = chosen

        ids = chosen[:, None] if past is not None else torch.cat((ids, chosen[:, None]), dim=1)
        if end is not None and (position + 1) % END_CHECK_INTERVAL == 0 and bool(has_ended.all()):
            break
    return completions


def next_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_p: float = 1.0
) -> Tensor:
    """Choose a token per row by inverse transform sampling, (B,) from (B, V) and (B,)."""
    shares = torch.softmax(widened(logits) / temperature, dim=-1)
    order = None
    if top_p < 1:
        shares, order = shares.sort(dim=-1, descending=True, stable=True)
        is_beyond = shares.cumsum(dim=-1) - shares >= top_p  # never the first
        shares = shares.masked_fill(is_beyond, 0.0)

    cumulative = shares.cumsum(dim=-1)
    thresholds = uniforms.to(cumulative)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, thresholds, right=True)

    # Rounding can put the threshold at the end of the cumulative sum; take the last possible token.
    last = (shares > 0).to(torch.int64).cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    chosen = torch.minimum(chosen, last)
    if order is not None:
        chosen = order.gather(1, chosen)
    return chosen.squeeze(1)
