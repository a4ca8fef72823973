"""Muon, with AdamW for the weights that it does not suit: the optimizer `muon`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


class MuonAndAdamW(Optimizer):
    """Muon for the matrices between embeddings and output, AdamW for the other weights."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        lr: float,
        adamw: Mapping[str, Any],
        outer: Collection[Tensor],  # weights of embeddings and of the output
        **muon: Any,
    ) -> None:
        hidden = [p for group in groups for p in group["params"] if p.ndim == 2 and p not in outer]
        if not hidden:
            raise ValueError("the model has no matrices between embeddings and output")
        chosen, decay = {*hidden}, groups[0]["weight_decay"]
        others = [g | {"params": [p for p in g["params"] if p not in chosen]} for g in groups]
        # So scaled, Muon's updates are as large as AdamW's, and one rate suits both.
        scaled = Muon(hidden, lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw", **muon)
        self.parts: list[Optimizer] = [scaled, AdamW(others, lr, **adamw)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
