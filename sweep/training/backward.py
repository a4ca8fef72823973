"""Forward and backward of one microbatch: by autograd, or compiled together as one graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.training.compiler import is_own_transformer, set_up_compiler
from sweep.training.parallel import LossSum, Parallel
from sweep.workloads.protocol import Batch

# Adds the gradient of a microbatch's summed loss over so many tokens; returns that mean.
Backward = Callable[[Batch, int | Tensor], Tensor]
SMALL_FLOPS = 4e9  # of the largest microbatch that is one graph; beyond it gives no time


class ByAutograd:
    """Forward, then backward, each compiled or not, on one device or several.

    Args:
        parallel: how gradients reach the other devices.
        loss_sum: of a model and a microbatch.
        model: whose parameters get gradients.
    """

    def __init__(self, parallel: Parallel, loss_sum: LossSum, model: nn.Module) -> None:
        self._parallel, self._loss_sum, self._model = parallel, loss_sum, model

    def __call__(self, batch: Batch, tokens: int | Tensor) -> Tensor:
        loss = self._parallel.call(self._loss_sum, self._model, batch) / tokens
        self._parallel.backward(loss)
        return loss.detach()


class InOneGraph:
    """Both in one call: a small step spends up to a fifth of its time between them.

    Args:
        loss_sum: of a model and a microbatch.
        model: whose parameters all have a part in the loss.
        options: Inductor's.
    """

    def __init__(self, loss_sum: LossSum, model: nn.Module, options: dict[str, Any]) -> None:
        torch._dynamo.config.trace_autograd_ops = True  # else autograd joins two graphs as ever
        self._parameters = parameters = [p for p in model.parameters() if p.requires_grad]
        self._tokens: int | Tensor = 1
        self._share = torch.ones(())  # of the summed loss in the mean

        def differentiated(batch: Batch, share: Tensor) -> tuple[Tensor, list[Tensor]]:
            loss = loss_sum(model, batch)
            gradients = torch.autograd.grad(loss, parameters, share)
            return loss.detach(), [gradient.contiguous() for gradient in gradients]

        self._graph = torch.compile(differentiated, dynamic=False, options=options)

    def __call__(self, batch: Batch, tokens: int | Tensor) -> Tensor:
        if self._tokens != tokens:
            self._tokens, self._share = tokens, torch.ones(()) / tokens
        loss, gradients = self._graph(batch, self._share)
        for parameter in self._parameters:
            gradient = gradients.pop(0)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        mean: Tensor = loss / tokens
        return mean


def build_backward(
    config: TrialConfig, parallel: Parallel, loss_sum: LossSum, model: nn.Module, size: int
) -> Backward:
    """Return what differentiates microbatches of so many sequences, as the trial says."""
    if not config.execution.compile:
        return ByAutograd(parallel, loss_sum, model)
    options = set_up_compiler(config)
    if is_one_graph(config, size):
        return InOneGraph(loss_sum, model, options)
    return ByAutograd(parallel, parallel.compiled(loss_sum, model, options), model)


def is_one_graph(config: TrialConfig, size: int) -> bool:
    """Tell whether microbatches of so many sequences are: small ones of our transformer on a CPU.

    Not where activations are computed again, whose second time one graph would leave out.
    """
    science, execution = config.science, config.execution
    is_ours = is_own_transformer(science) and science.workload == "pretrain"
    is_plain = execution.devices == 1 and not execution.activation_checkpointing
    if not (is_ours and is_plain and torch.device(execution.device).type == "cpu"):
        return False
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):  # private, since torch 2.11
        return False
    flops = science.model.flops_per_token
    return flops is not None and flops * config.tokens_per_sequence * size <= SMALL_FLOPS
