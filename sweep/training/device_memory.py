"""The memory that this process uses on a device, and a limit that raises before anything spills."""

import contextlib
from collections.abc import Iterator

import torch

from sweep.training.device import forget_peak_memory, peak_memory_bytes
from sweep.training.storages import LiveStorages

MOST_CONTEXT_BYTES = 1 << 30  # of one process; more is in use by others


class CpuMemory:
    """Live tensor storages: a CPU has no allocator statistics."""

    context_bytes = others_bytes = 0

    def __init__(self, storages: LiveStorages) -> None:
        self._storages, self._peak_bytes = storages, 0

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors."""
        return self._storages.live_bytes

    def peak_bytes(self) -> int:
        """Return the most bytes of live tensors so far."""
        return max(self._peak_bytes, self._storages.peak_bytes)

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self._peak_bytes = self._storages.peak_bytes, self.peak_bytes()
        self._storages.forget_peak()
        return peak

    def reserved_bytes(self) -> int | None:
        """Return the most bytes that the allocator reserved; None if there is none."""
        return None

    def device_bytes(self) -> int | None:
        """Return the bytes in use on the whole device; for a CPU the peak resident set."""
        return peak_memory_bytes(torch.device("cpu"))

    def retries(self) -> int | None:
        """Return how often the allocator freed its cache and tried again."""
        return None


class CudaMemory:
    """Statistics of the caching allocator and of the driver, with the methods of CpuMemory."""

    def __init__(self, device: torch.device, context_bytes: int) -> None:
        self._device, self.context_bytes = device, context_bytes
        self._peak_bytes = self._reserved_bytes = 0
        self.others_bytes = self.device_bytes() - context_bytes

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return max(self._peak_bytes, torch.cuda.max_memory_allocated(self._device))

    def take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        self._peak_bytes, self._reserved_bytes = self.peak_bytes(), self.reserved_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def reserved_bytes(self) -> int:
        return max(self._reserved_bytes, torch.cuda.max_memory_reserved(self._device))

    def device_bytes(self) -> int:
        try:
            return int(torch.cuda.device_memory_used(self._device))  # by NVML
        except Exception:  # NVML's own classes, if it is missing or fails
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free

    def retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"])


DeviceMemory = CpuMemory | CudaMemory


@contextlib.contextmanager
def limited_memory(device: torch.device, limit_bytes: int | None) -> Iterator[DeviceMemory]:
    """Limit the memory of tensors: beyond it an operation raises `torch.OutOfMemoryError`.

    On CUDA the allocator gets the limit minus the context, and at most the free memory, so that the
    driver cannot spill into host memory. On a CPU every storage is counted, which works for eager
    steps only; None counts and limits nothing there.
    """
    if device.type != "cuda":
        forget_peak_memory(device)
        storages = LiveStorages(limit_bytes)
        with contextlib.nullcontext() if limit_bytes is None else storages:
            yield CpuMemory(storages)
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)  # the allocator asks for an index
    forget_peak_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    context = min(total - free, MOST_CONTEXT_BYTES)
    allowed = max(0, min((limit_bytes or total) - context, free))
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    try:
        yield CudaMemory(device, context)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
