"""How much memory a step may use: the limit of the user, or what the device has."""

import torch

from sweep.config.execution import Execution
from sweep.config.numbers import format_bytes
from sweep.errors import SweepError
from sweep.training.device import total_memory

USABLE_SHARE = 0.9  # in the E1 measurements a step of 0.87 of the memory ran, one of 0.93 did not
FORECAST_MARGIN = 1.02  # CPU limits count the same tensors as the forecast, so 2 % is enough


def memory_limit(execution: Execution) -> int:
    """Return the bytes that a measured step may take: the limit that is set, or the device's."""
    limit_bytes = execution.device_memory_bytes
    return total_memory(torch.device(execution.device)) if limit_bytes is None else limit_bytes


def usable_memory(execution: Execution) -> int:
    """Return the bytes that a step may take by forecast; for plans and for `sweep forecast`."""
    limit_bytes = memory_limit(execution)
    if execution.device_type != "cpu":
        return int(limit_bytes * USABLE_SHARE)
    if execution.device_memory_bytes is None:
        return limit_bytes  # half of the available memory is left free
    return int(limit_bytes / FORECAST_MARGIN)


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
