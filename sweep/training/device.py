"""What a machine has: devices, cores, peak rates, memory, and when memory ran out."""

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import sys
from pathlib import Path

import torch

from sweep.config.trial import TrialConfig
from sweep.errors import SweepError

# Dense bfloat16 peak, FLOP/s, from the vendors' data sheets; matched in this order.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 6000 Ada": 364e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "L4": 121e12,
    "T4": 65e12,
}


def resolve_device(asked: str) -> str:
    """Return the device that `auto` means here, or the one asked for.

    Raises:
        SweepError: if this machine does not have it.
    """
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if asked == "auto":
        return "cuda" if has_cuda else "mps" if has_mps else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = torch.device("meta")
    found = {"cpu": True, "cuda": has_cuda, "mps": has_mps}
    if device.type not in found:
        raise SweepError(f"device must be auto, cpu, cuda, cuda:i or mps, got {asked!r}.")
    if not found[device.type] or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise SweepError(
            f"device must be one that this machine has, got {asked!r}. Use --device cpu, "
            "or ask `sweep doctor` why it is not seen."
        )
    return asked


def available_cores() -> int:
    """Return the cores that this process may use: affinity, and the cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        limit = max(1, int(quota) // int(period))
    except (OSError, ValueError):
        limit = sys.maxsize
    return max(1, min(cores or 1, limit))


def has_compiler(device: str) -> bool:
    """Tell whether torch.compile can work here: a C++ compiler, and Triton on CUDA."""
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            return False
        return shutil.which("cc") is not None or shutil.which("gcc") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def device_name(device: torch.device) -> str:
    """Return the model of the device, such as `NVIDIA H200` or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{device.type}: {name}"


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the device's dense peak in FLOP/s at this precision, or None where not known."""
    if device.type != "cuda" or not precision.startswith("bf16"):
        return None
    name = device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def flop_utilisation(
    config: TrialConfig, device: torch.device, tokens_per_second: float
) -> float | None:
    """Return model FLOPs per second over the device's peak; None where either is not known."""
    flops = config.science.model.flops_per_token
    peak = peak_flops(device, config.science.precision)
    return tokens_per_second * flops / peak if flops and peak else None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak since `forget_peak_memory`: allocated on CUDA, else the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak_memory(device: torch.device) -> None:
    """Begin a new peak; outside Linux and CUDA there is only the peak of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def memory_metrics(device: torch.device, rest_bytes: int) -> dict[str, int]:
    """Return the memory metrics of a log point.

    The CPU has no allocator statistics: `memory/allocated_bytes` is what weights, gradients and
    optimizer hold, and the peak resident set stands in result.json.
    """
    if device.type != "cuda":
        return {"memory/allocated_bytes": rest_bytes}
    return {
        "memory/allocated_bytes": torch.cuda.memory_allocated(device),
        "memory/reserved_bytes": torch.cuda.memory_reserved(device),
        "memory/peak_bytes": torch.cuda.max_memory_allocated(device),
    }


OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out: by type first, by text second."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(known in text for known in OUT_OF_MEMORY_TEXTS)
