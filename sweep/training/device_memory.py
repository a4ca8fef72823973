"""What a device holds for this process, and a limit on it that raises before anything spills."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from sweep.training.device import forget_peak_memory, peak_memory_bytes
from sweep.training.storages import LiveStorages

CONTEXT_AT_MOST = 1 << 30  # bytes; what is in use beyond before any tensor is made is others'


class DeviceMemory(Protocol):
    """Bytes on a device; None where it does not tell."""

    context_bytes: int  # of this process before it made any tensor
    others_bytes: int  # of other processes, and of the driver, then

    def allocated_bytes(self) -> int:
        """Held by tensors now."""

    def peak_bytes(self) -> int:
        """Held by tensors at most, since this was entered."""

    def take_peak(self) -> int:
        """Return the peak since this was last asked for."""

    def reserved_bytes(self) -> int | None:
        """Held by the allocator at most."""

    def device_bytes(self) -> int | None:
        """In use on the whole device, by everybody; on a CPU the peak resident set."""

    def retries(self) -> int | None:
        """How often the allocator had to give back and ask again."""


class CpuMemory:
    """Live tensor storages: a CPU has no allocator statistics."""

    context_bytes = others_bytes = 0

    def __init__(self, storages: LiveStorages) -> None:
        self._storages, self._peak_bytes = storages, 0

    def allocated_bytes(self) -> int:
        return self._storages.live_bytes

    def peak_bytes(self) -> int:
        return max(self._peak_bytes, self._storages.peak_bytes)

    def take_peak(self) -> int:
        found, self._peak_bytes = self._storages.peak_bytes, self.peak_bytes()
        self._storages.forget_peak()
        return found

    def reserved_bytes(self) -> None:
        return None

    def device_bytes(self) -> int:
        return peak_memory_bytes(torch.device("cpu"))

    def retries(self) -> None:
        return None


class CudaMemory:
    """The caching allocator's statistics, and the driver's."""

    def __init__(self, device: torch.device, context_bytes: int) -> None:
        self._device, self.context_bytes = device, context_bytes
        self._peak_bytes = self._reserved_bytes = 0
        self.others_bytes = self.device_bytes() - context_bytes

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return max(self._peak_bytes, torch.cuda.max_memory_allocated(self._device))

    def take_peak(self) -> int:
        found = torch.cuda.max_memory_allocated(self._device)
        self._peak_bytes, self._reserved_bytes = self.peak_bytes(), self.reserved_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        return found

    def reserved_bytes(self) -> int:
        return max(self._reserved_bytes, torch.cuda.max_memory_reserved(self._device))

    def device_bytes(self) -> int:
        try:
            return int(torch.cuda.device_memory_used(self._device))  # by NVML, where it is there
        except Exception:  # the library's own classes, by what is missing
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free

    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"])


@contextlib.contextmanager
def limited_memory(device: torch.device, limit_bytes: int | None) -> Iterator[DeviceMemory]:
    """Hold tensors within a limit: beyond it an operation raises `torch.OutOfMemoryError`.

    On CUDA the allocator gets what the limit leaves beside the context, at most what is free, so
    that a driver that could spill into host memory is never asked to. On a CPU every storage is
    counted, which only eager steps allow; None counts and limits nothing there.
    """
    if device.type == "cuda":  # the allocator asks for an index, and to be there
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
    forget_peak_memory(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        context = min(total - free, CONTEXT_AT_MOST)
        allowed = max(0, min((limit_bytes or total) - context, free))
        torch.cuda.set_per_process_memory_fraction(allowed / total, device)
        try:
            yield CudaMemory(device, context)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    else:
        storages = LiveStorages(limit_bytes)
        with contextlib.nullcontext() if limit_bytes is None else storages:
            yield CpuMemory(storages)
