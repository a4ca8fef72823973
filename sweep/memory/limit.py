"""How much memory a step may use: the limit of the user, or what the device has."""

import torch

from sweep.config.execution import Execution
from sweep.config.numbers import format_bytes
from sweep.errors import SweepError
from sweep.training.device import memory_limit, total_memory

USABLE_SHARE = 0.9  # in the E1 measurements a step of 0.87 of the memory ran, one of 0.93 did not
FORECAST_MARGIN = 1.02  # CPU limits count the same tensors as the forecast, so 2 % is enough
# Bytes of a process without its tensors, which count if several share the memory.
PROCESS_BYTES = 512 << 20
GPU_PROCESS_BYTES = 1 << 30


def usable_memory(execution: Execution) -> int:
    """Return the bytes that a step of one trial may take by forecast.

    Trials that share a device have equal parts of its memory.
    """
    usable_bytes = memory_limit(execution)
    if execution.device_type != "cpu":
        usable_bytes = int(usable_bytes * USABLE_SHARE)
    elif execution.known_memory_bytes is not None:
        usable_bytes = int(usable_bytes / FORECAST_MARGIN)
    if execution.trials_at_once > 1:
        is_cpu = execution.device_type == "cpu"
        usable_bytes -= PROCESS_BYTES if is_cpu else GPU_PROCESS_BYTES
    return max(0, usable_bytes)


def refuse_memory_limit(execution: Execution) -> None:
    """Refuse a limit above the memory of the device, on which allocations would fail earlier."""
    limit_bytes = execution.device_memory_bytes
    device = torch.device(execution.device)
    if limit_bytes is None or device.type == "cpu":
        return
    total = total_memory(device)
    if limit_bytes > total:
        problem = f"must be at most the {format_bytes(total)} of {execution.device}"
        remedy = "Lower it, or leave it out"
        raise SweepError(f"device-memory {problem}, got {format_bytes(limit_bytes)}. {remedy}.")
