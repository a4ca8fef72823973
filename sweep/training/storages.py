"""Live tensor storage: how many bytes are held, for what, and whether they are too many.

A dispatch mode sees the results of every operation. A storage counts once, rounded up to the
allocator's 512 bytes, until it is freed. Of real tensors on a CPU that is what a device would have
to hold, of sharded ones this process's part; of fake tensors it is a forecast, and nothing is
allocated.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sweep.config.numbers import format_bytes
from sweep.training.optimizer import own_part

BLOCK_BYTES = 512
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages made while it is entered.

    Args:
        limit: bytes above which an operation raises `torch.OutOfMemoryError`; None: none.
        vocabulary: tensors of two or more dimensions that end in this size are logits.
    """

    def __init__(self, limit: int | None = None, vocabulary: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit, self.vocabulary = limit, vocabulary
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.live_bytes = 0
        self.forget_peak()
        self._known: dict[int, tuple[weakref.ref[Any], str, int]] = {}  # by address

    def forget_peak(self) -> None:
        """Begin a new peak at what is live now."""
        self.peak_bytes, self.peak = self.live_bytes, dict(self.live)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for result in (found,) if isinstance(found, Tensor) else tree_leaves(found):
            if isinstance(result, Tensor):
                self._see(result)
        return found

    def _see(self, tensor: Tensor) -> None:
        storage = own_part(tensor).untyped_storage()
        address, size = storage._cdata, _blocks(storage)
        reference, category, known = self._known.get(address, (None, "", 0))
        if size == known:
            return
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._free(address))
            category = self._category(tensor)
        self._known[address] = (reference, category, size)
        self._add(category, size - known)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak = self.live_bytes, dict(self.live)
        if self.limit is not None and self.live_bytes > self.limit:
            self._measure_again()
            if self.live_bytes > self.limit:
                raise torch.OutOfMemoryError(
                    f"out of memory: an operation needs {format_bytes(size - known)} more, and "
                    f"{format_bytes(self.live_bytes - size + known)} of "
                    f"{format_bytes(self.limit)} are in use"
                )

    def _measure_again(self) -> None:
        """Count anew what was emptied in place, as `fully_shard` frees what it gathered."""
        for address, (reference, category, known) in list(self._known.items()):
            if (storage := reference()) is not None and (size := _blocks(storage)) != known:
                self._known[address] = (reference, category, size)
                self._add(category, size - known)

    def _category(self, tensor: Tensor) -> str:
        if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            return "logits"
        is_backward = torch._C._current_graph_task_id() != -1
        return "activations" if torch.is_grad_enabled() and not is_backward else "workspace"

    def _free(self, address: int) -> None:
        _, category, size = self._known.pop(address)
        self._add(category, -size)

    def _add(self, category: str, size: int) -> None:
        self.live[category] += size
        self.live_bytes += size

    def label(self, tensor: Tensor, category: str) -> None:
        """Say what a tensor is for."""
        address = tensor.untyped_storage()._cdata
        if address in self._known:
            reference, old, size = self._known[address]
            self._known[address] = (reference, category, size)
            self._add(old, -size)
            self._add(category, size)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Tell weights, gradients and optimizer states from the rest, from now on."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.label(tensor, "weights")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._label_gradient)  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.register_step_post_hook(self._label_states)

    def _label_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.label(parameter.grad, "gradients")

    def _label_states(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.label(value, "optimizer")


def _blocks(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
