"""Optimizers, built from settings; weight decay on matrices only."""

import torch
from torch import Tensor, nn

from sweep.config.experiment import OptimizerSettings

CLIP_EPS = 1e-6  # as in torch's clipping


def build_optimizer(
    settings: OptimizerSettings, model: nn.Module, learning_rate: float
) -> torch.optim.Optimizer | None:
    """Build AdamW (fused) or SGD over the model's parameters; None for `none`."""
    if settings.name == "none":
        return None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate)
    device = parameters[0].device
    is_cuda = device.type == "cuda"  # where a graph may hold the step, and so its rate
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(learning_rate, device=device) if is_cuda else learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=device.type != "meta",
        capturable=is_cuda,
    )


def clip_in_step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], norm: Tensor, most: float
) -> None:
    """Let the next step see gradients of a global norm of at most so much.

    A fused optimizer divides them as it reads them, by the factor that it has for loss scaling:
    a pass over all gradients less than `clip_grads_with_norm_`, which the others get.

    Args:
        optimizer: of the parameters.
        parameters: with their gradients.
        norm: of all gradients together, a scalar.
        most: bound of the norm.
    """
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale = ((norm.float() + CLIP_EPS) / most).clamp(min=1.0)  # type: ignore[attr-defined]
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
    for state in optimizer.state.values() if optimizer else ():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
