"""Live tensor storage: how many bytes are held, for which purpose, and a limit on them.

A storage counts once, rounded up to the allocator's 512 bytes, until it is freed. For a sharded
tensor, count only this process's shard. With fake tensors this is a forecast. `TorchDispatchMode`
is not a stable interface; tests/training/test_storages.py names the versions that were tried.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sweep.config.numbers import format_bytes
from sweep.training.parallel import own_part

BLOCK_BYTES = 512
CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages allocated while it is entered; above `limit_bytes` it raises."""

    def __init__(self, limit_bytes: int | None = None, vocabulary: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.vocabulary = vocabulary
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.live_bytes = 0
        self._record_peak()
        self._storages: dict[int, tuple[weakref.ref[Any], str, int]] = {}  # by object id

    def forget_peak(self) -> int:
        peak = self.peak_bytes
        self._record_peak()
        return peak

    def _record_peak(self) -> None:
        self.peak_bytes = self.live_bytes
        self.peak = dict(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args) if kwargs is None else func(*args, **kwargs)
        for value in result if isinstance(result, list | tuple) else (result,):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = own_part(tensor).untyped_storage()  # the same object as long as it lives
        key = id(storage)
        size = _rounded_bytes(storage)
        reference, category, counted = self._storages.get(key, (None, "", 0))
        if size == counted:
            return

        if reference is None:
            reference = weakref.ref(storage, lambda _: self._free(key))
            category = "activations" if torch.is_grad_enabled() else "workspace"
            # Logits are recognized by their width.
            if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
                category = "logits"
        self._set(key, reference, category, size)
        if self.live_bytes > self.peak_bytes:
            self._record_peak()
        if self.limit_bytes is None or self.live_bytes <= self.limit_bytes:
            return

        for key, (reference, category, _) in list(self._storages.items()):
            other = reference()
            if other is not None:  # `fully_shard` resizes storages in place
                self._set(key, reference, category, _rounded_bytes(other))
        if self.live_bytes > self.limit_bytes:
            needed = size - counted
            used = format_bytes(self.live_bytes - needed)
            raise torch.OutOfMemoryError(
                f"out of memory: {format_bytes(needed)} needed, "
                f"{used} of {format_bytes(self.limit_bytes)} are in use"
            )

    def _set(self, key: int, reference: weakref.ref[Any], category: str, size: int) -> None:
        _, old_category, old_size = self._storages.get(key, (None, category, 0))
        self._storages[key] = (reference, category, size)
        self.live[old_category] -= old_size
        self.live[category] += size
        self.live_bytes += size - old_size

    def _free(self, key: int) -> None:
        _, category, size = self._storages.pop(key)
        self.live[category] -= size
        self.live_bytes -= size

    def _label(self, tensor: Tensor, category: str) -> None:
        key = id(tensor.untyped_storage())
        if key in self._storages:
            reference, _, size = self._storages[key]
            self._set(key, reference, category, size)

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Label the weights now, and gradients and optimizer states when they are written."""

        def label_gradient(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._label(parameter.grad, "gradients")

        def label_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for state in optimizer.state.values():
                for value in filter(torch.is_tensor, state.values()):
                    self._label(value, "optimizer")

        for tensor in (*model.parameters(), *model.buffers()):
            self._label(tensor, "weights")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(label_gradient)  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.register_step_post_hook(label_states)


def _rounded_bytes(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
