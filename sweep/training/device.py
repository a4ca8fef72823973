"""Properties of this machine: devices, compiler, cores, peak rates, memory in use and its limit."""

import contextlib
import ctypes
import gc
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Self

import torch

from sweep.config.execution import Execution
from sweep.config.gpus import gpu_of_device
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, text_of
from sweep.training.process import available_in_cgroups
from sweep.training.storages import LiveStorages

# Variables that limit the instructions of torch, oneDNN and MKL, and so may change the last bits.
INSTRUCTION_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)
CLEAR_REFS = Path("/proc/self/clear_refs")
MOST_CONTEXT_BYTES = 1 << 30  # context of one process; more is in use by others
NO_MEMORY = (
    r"(?i)out of memory|memoryerror|n[o']t allocate memory|not enough memory|"
    "cublas_status_alloc_failed"
)

_has_run_trial = False  # in this process
_is_peak_known = True  # False: the peak of this process may be that of an earlier trial


def resolve_device(name: str) -> str:
    """Return the requested device, or the best of this machine for `auto`; refuse a missing one."""
    if name == "cpu":
        return name
    devices = ["cpu"]
    if torch.backends.mps.is_available():
        devices.insert(0, "mps")
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if gpus:
        devices = ["cuda", *gpus, *devices]
    if name != "auto" and name not in devices:
        has = f"one of this machine's ({', '.join(devices)})"
        raise SweepError(f"device must be auto or {has}, got {name!r}. Call `sweep doctor`.")
    return devices[0] if name == "auto" else name


def use_device(name: str) -> torch.device:
    """Return a device. A GPU with a number becomes the current one: some kernels run only there."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES lists them."""
    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed:
        names = listed.split(",")
        return names[:count] if count else names  # none here: a plan for another machine
    return [str(index) for index in range(count)]


def visible_name(device: str) -> str:
    """Return the name in CUDA_VISIBLE_DEVICES of a numbered GPU, such as cuda:1."""
    names = visible_gpus()
    index = int(device.partition(":")[2])
    if index >= len(names):
        raise SweepError(
            f"device must be one of this machine's {len(names)} GPUs, got {device!r}. Run the "
            "trial on the machine that it was planned on, or plan with another --device and --out."
        )
    return names[index]


def is_available(device: str) -> bool:
    """Return True if this machine has such a device; a plan may be for another machine."""
    return not device.startswith("cuda") or torch.cuda.is_available()


def has_compiler(device: str) -> bool:
    if device.startswith("cuda"):
        has_triton = importlib.util.find_spec("triton") is not None
        return has_triton and any(shutil.which(name) for name in ("cc", "gcc"))
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def available_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores or 1, int(quota) // int(period))
    return max(1, cores or 1)


def total_memory(device: torch.device) -> int:
    """Return the bytes of a device; for a CPU half of what it and its cgroups have available."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SweepError(
            "the memory of the GPU must be known. Name it by --gpu or --device-memory."
        )
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())

    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, IndexError, ValueError):  # Linux only
        words = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()
        available = int(words[0]) * 1024
    limit = available_in_cgroups()
    if limit is not None:
        available = min(available, limit)
    return available // 2


def memory_limit(execution: Execution) -> int:
    """Return the bytes that a trial may take, which is an equal part if trials share a device.

    The limit is the one that is set, or the memory of the GPU that is named, or of the device here.
    """
    limit_bytes = execution.known_memory_bytes
    if limit_bytes is None:
        limit_bytes = total_memory(torch.device(execution.device))
    return limit_bytes // execution.trials_at_once


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    return f"{device.type}: {name}"


def instruction_set() -> str:
    """Return the CPU instructions that torch uses, and the variables that limit its libraries."""
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTION_VARIABLES if name in os.environ]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *limits])


def flop_utilization(config: TrialConfig, device: torch.device, rate: float) -> float | None:
    """Return the share of the devices' peak FLOPs at a rate in tokens/s; None if not known."""
    flops = config.flops_per_token
    if not flops or device.type != "cuda" or not config.science.precision.startswith("bf16"):
        return None
    gpu = gpu_of_device(device_name(device))
    peak = gpu.peak_of(config.science.precision) if gpu else None
    return rate * flops / (peak * config.execution.devices) if peak else None


def peak_memory_bytes(device: torch.device, who: int = resource.RUSAGE_SELF) -> int:
    """Return the peak since `forget_peak_memory`: allocated on CUDA, else the resident set.

    It is 0 if it may be that of an earlier trial.
    """
    if not _is_peak_known:
        return 0
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(who).ru_maxrss * unit


def forget_peak_memory(device: torch.device) -> int:
    """Return the peak and start a new one, on Linux and CUDA only."""
    peak = peak_memory_bytes(device)
    _reset_peak(device)
    return peak


def start_peak_memory(device: torch.device) -> None:
    """Start the peak of a trial; it is not known if that of an earlier trial cannot be reset."""
    global _has_run_trial, _is_peak_known
    _is_peak_known = _reset_peak(device) or not _has_run_trial
    _has_run_trial = True


def _reset_peak(device: torch.device) -> bool:
    """Start a new peak of memory; return whether this machine can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def release_memory() -> None:
    """Free the garbage of a trial, and return unused memory to the system (glibc) and to CUDA."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing before CUDA is initialized
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an exception, or its cause, means that memory ran out."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and re.search(NO_MEMORY, text_of(error)):
        return True
    return is_out_of_memory(error.__cause__)


class LimitedMemory(contextlib.ExitStack):
    """Memory of tensors, with a limit beyond which an operation raises `torch.OutOfMemoryError`."""

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        super().__init__()
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._limit_bytes = limit_bytes
        self._storages = LiveStorages(limit_bytes)
        self._context_bytes = self.others_bytes = 0

    def __enter__(self) -> Self:
        if self._is_cuda:
            free, total = torch.cuda.mem_get_info(self._device)
            self._context_bytes = min(total - free, MOST_CONTEXT_BYTES)
            self.others_bytes = total - free - self._context_bytes
            # At most the free memory, so that the driver cannot spill.
            limit_bytes = self._limit_bytes or total
            allowed = max(0, min(limit_bytes - self._context_bytes, free))
            torch.cuda.set_per_process_memory_fraction(allowed / total, self._device.index)
            self.callback(torch.cuda.set_per_process_memory_fraction, 1.0, self._device.index)
        elif self._limit_bytes is not None:  # counts eager operations
            self.enter_context(self._storages)
        forget_peak_memory(self._device)
        return self

    def allocated_bytes(self) -> int:
        if self._is_cuda:
            return torch.cuda.memory_allocated(self._device)
        return self._storages.live_bytes

    def take_peak(self) -> int:
        if self._is_cuda:
            return forget_peak_memory(self._device)
        return self._storages.forget_peak()

    def statistics(self) -> dict[str, int]:
        if not self._is_cuda:
            return {"device_bytes": peak_memory_bytes(self._device)}
        free, total = torch.cuda.mem_get_info(self._device)
        statistics = torch.cuda.memory_stats(self._device)
        return {
            "reserved_bytes": statistics["reserved_bytes.all.current"],
            "context_bytes": self._context_bytes,
            "device_bytes": total - free,
            "free_bytes": free,
            "allocator_retries": statistics["num_alloc_retries"],
        }
