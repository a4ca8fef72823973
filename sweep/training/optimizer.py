"""Optimizers, built from settings; weight decay on matrices only."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sweep.config.experiment import OptimizerSettings

CLIP_EPS = 1e-6  # as in torch's clipping
LARGE = 65_536  # numbers of a matrix; the squares of fewer are added well in one
ROW = 32  # numbers of a row, at least


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW on a CPU, called directly: same states, same bits, less Python.

    torch gathers parameters and states anew at every step: 0.6 ms, a tenth of a small step.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, fused=True, **settings)
        self.grad_scale: Tensor | None = None  # gradients are divided by it
        self._forget()

    def _forget(self) -> None:
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        self._has_gradient: list[bool] = []  # each parameter, when lists were last gathered
        self._gathered: list[tuple[dict[str, Any], list[list[Tensor]]]] = []
        self._taken = torch.zeros(0)  # steps of each; the states hold views of it

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        has_gradient = [p.grad is not None for p in self._parameters]
        if has_gradient != self._has_gradient:
            self._gather()
            self._has_gradient = has_gradient
        self._taken += 1
        for group, (parameters, means, squares, taken) in self._gathered:
            torch._fused_adamw_(
                *(parameters, [p.grad for p in parameters], means, squares, [], taken),  # type: ignore[arg-type]
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=self.grad_scale,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of torch's AdamW."""
        super().load_state_dict(state_dict)
        self._forget()

    def _gather(self) -> None:
        """List the parameters that have gradients, and their states, new ones where none are."""
        present = [p for p in self._parameters if p.grad is not None]
        for p in present:
            if not self.state[p]:
                self.state[p] |= {"step": torch.zeros((), dtype=torch.float32)}
                self.state[p] |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        self._taken = torch.stack([self.state[p]["step"] for p in present] or [torch.zeros(())])
        for p, taken in zip(present, self._taken.unbind(), strict=False):
            self.state[p]["step"] = taken
        self._gathered = []
        for group in self.param_groups:
            if own := [p for p in group["params"] if p.grad is not None]:
                states = [self.state[p] for p in own]
                lists = [[s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step")]
                self._gathered.append((group, [own, *lists]))


class PlainSGD(torch.optim.SGD):
    """torch's SGD without momentum on a CPU, called directly: same bits, less Python."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in (p for p in group["params"] if p.grad is not None):
                gradient = weight.grad
                if group["weight_decay"]:
                    gradient = gradient.add(weight, alpha=group["weight_decay"])
                weight.add_(gradient, alpha=-group["lr"])


def build_optimizer(
    settings: OptimizerSettings,
    model: nn.Module,
    learning_rate: float,
    is_split: bool = False,
    is_plain: bool = False,
) -> torch.optim.Optimizer | None:
    """Build AdamW (fused) or SGD over the model's parameters; None for `none`.

    Args:
        settings: of the optimizer.
        model: whose parameters it updates; they may be parts, one on each device.
        learning_rate: of the first step.
        is_split: each process of the trial keeps the states of some parameters only.
        is_plain: torch's own class, for an engine that puts parameters of its own in.
    """
    if settings.name == "none":
        return None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    device = parameters[0].device
    are_plain = all(type(p) is nn.Parameter for p in parameters) and not is_plain
    adam: dict[str, Any] = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if is_split:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind = torch.optim.SGD if settings.name == "sgd" else torch.optim.AdamW
        more = {} if settings.name == "sgd" else {**adam, "fused": True}
        return ZeroRedundancyOptimizer(groups, kind, lr=learning_rate, **more)
    if settings.name == "sgd":
        kind = PlainSGD if device.type == "cpu" and are_plain else torch.optim.SGD
        return kind(groups, lr=learning_rate)
    if device.type == "cpu" and are_plain:
        return FusedAdamW(groups, lr=learning_rate, **adam)
    is_cuda = device.type == "cuda" and are_plain  # a graph may hold the step, and so its rate
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(learning_rate, device=device) if is_cuda else learning_rate,
        fused=device.type != "meta",
        capturable=is_cuda,
        **adam,
    )


def whole(value: Tensor) -> Tensor:
    """Return a tensor of which each process may hold a part."""
    return value.full_tensor() if is_part(value) else value  # type: ignore[attr-defined]


def own_part(value: Tensor) -> Tensor:
    """Return what this process holds of a tensor."""
    return value.to_local() if is_part(value) else value  # type: ignore[attr-defined]


def is_part(value: Tensor) -> bool:
    """Tell whether it is a DTensor; importing that type takes half a second."""
    return hasattr(value, "full_tensor")


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together, as torch's `get_total_norm`.

    Without its sorting by device, which takes as long as the norms of a small model.
    """
    if len({gradient.dtype for gradient in gradients}) != 1:
        return whole(nn.utils.get_total_norm(gradients))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms_of(gradients)))
    return whole(norm)


def norms_of(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each; on a CPU that of a large matrix from those of its rows.

    All of it at once, torch adds one square after another: for five million numbers in float32
    off by 6e-5, and slower by half and more. Parts of a tensor and bfloat16 are left to torch.

    Args:
        tensors: of one dtype.
        dtype: of the norms; theirs unless given.
    """
    return list(torch._foreach_norm([_rows_first(t, dtype or t.dtype) for t in tensors], 2, dtype))


def _rows_first(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms of the rows of a large matrix on a CPU, (n), and any other as it is."""
    is_wide = tensor.is_cpu and tensor.ndim > 1 and dtype != torch.bfloat16
    if not is_wide or tensor.numel() < max(LARGE, ROW * len(tensor)) or is_part(tensor):
        return tensor
    norms: Tensor = torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=dtype)
    return norms


def clip_in_step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], norm: Tensor, most: float
) -> None:
    """Let the next step see gradients of a global norm of at most so much.

    A fused optimizer divides them as it reads them, by the factor that it has for loss scaling:
    a pass over all gradients less than `clip_grads_with_norm_`, which the others get. On a CPU,
    where it may be looked at, a factor of 1 is left out: it would be divided by, and written back.

    Args:
        optimizer: of the parameters.
        parameters: with their gradients.
        norm: of all gradients together, a scalar.
        most: bound of the norm.
    """
    if optimizer.defaults.get("fused") and not is_part(parameters[0]):
        inner: Any = getattr(optimizer, "optim", optimizer)  # of one with a part of the states
        scale = ((norm.float() + CLIP_EPS) / most).clamp(min=1.0)
        is_seen = scale.is_cpu and type(scale) is Tensor  # not one of a forecast, without a value
        inner.grad_scale = None if is_seen and scale == 1.0 else scale
    else:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float | Tensor) -> None:
    """Set the rate of the next step; where the optimizer keeps it on the device, there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)  # of a tensor too, which the host need not know
        else:
            group["lr"] = learning_rate


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes that weights, gradients and optimizer hold."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for state in states_of(optimizer).values() if optimizer else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(own_part(tensor).nbytes for tensor in tensors)


def states_of(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, dict[str, Any]]:
    """Return the states that this process keeps, by parameter."""
    states: Mapping[Tensor, dict[str, Any]] = getattr(optimizer, "optim", optimizer).state
    return states
