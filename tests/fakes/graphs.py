"""A double of CUDA graphs on a CPU: operations are recorded, and repeated on the same tensors.

As on a GPU, a capture has no effect, numbers that are not tensors stay those of the capture, and
reading a value on the host fails.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OperationRecorder:
    """Implements `sweep.training.graph.Recorder`."""

    def __init__(self) -> None:
        self.runs = 0
        self.captures = 0

    def run(self, work):
        self.runs += 1
        work()

    def capture(self, work):
        self.captures += 1
        recording = Recording()
        try:
            with recording:
                work()
        finally:
            recording.undo()
        return recording.replay


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._storages: dict[int, tuple[Any, Any]] = {}  # by address, each with its first content

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        read = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._storages:
                self._storages[storage.data_ptr()] = (storage, storage.clone())
        result = func(*args, **kwargs)
        new = [t for t in tensors_in(result) if t.untyped_storage().data_ptr() not in read]
        self._operations.append((func, args, kwargs, new))
        return result

    def undo(self) -> None:
        for storage, content in self._storages.values():
            storage.copy_(content)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, new in self._operations:
            result = func(*args, **kwargs)
            if new:
                for tensor, value in zip(new, tensors_in(result), strict=True):
                    tensor.copy_(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
