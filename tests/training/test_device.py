"""The predicate for out of memory, the machine's properties, and the kernel's memory limits."""

import sys
from pathlib import Path

import pytest
import torch

from sweep.config.execution import Execution
from sweep.errors import SweepError
from sweep.memory.limit import refuse_memory_limit, usable_memory
from sweep.training import device
from sweep.training.device import (
    is_out_of_memory,
    memory_limit,
    resolve_device,
    total_memory,
)
from sweep.training.process import available_in_cgroups, oom_kills, run_job

GIB = 2**30
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset a peak")
CAUSED = ValueError("the step failed")
CAUSED.__cause__ = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (MemoryError(), True),
        (CAUSED, True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 TB"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (ValueError("out of memory"), False),
        (OSError(28, "disk full"), False),
        (RuntimeError("shape mismatch"), False),
        (RuntimeError("integer out of range: elements do not fit 32-bit indices"), False),
    ],
)
def test_only_a_lack_of_memory_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_devices_are_resolved_or_refused():
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in ("cpu", "cuda", "mps")
    for asked in ("tpu", "cuda:99", "meta", "cpux"):
        with pytest.raises(SweepError, match="device must be"):
            resolve_device(asked)


NESTED = {
    "job/memory.max": 4 * GIB,
    "job/memory.current": 3 * GIB,
    "job/memory.stat": f"anon 5\ninactive_file {GIB}\n",  # page cache counts as free
    "job/step/memory.max": "max",
    "job/step/memory.current": GIB,
    "job/step/memory.events": "low 0\noom_kill 3\n",
    "memory.max": 64 * GIB,
    "memory.current": GIB,
}
VERSION_1 = {
    "memory/a/memory.limit_in_bytes": 2 * GIB,
    "memory/a/memory.usage_in_bytes": GIB,
    "memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
}
NO_LIMIT = {"memory.max": "max", "memory.current": 5}


@pytest.mark.parametrize(
    ("own", "files", "available", "kills"),
    [
        ("0::/job/step\n", NESTED, 2 * GIB, 3),
        ("5:cpu,cpuacct:/a\n4:memory:/a\n", VERSION_1, GIB, 1),
        ("0::/\n", NO_LIMIT, None, 0),
        (None, {}, None, 0),
    ],
    ids=["nested", "version 1", "no limit", "no cgroups"],
)
def test_the_tightest_limit_of_nested_groups_counts(tmp_path, own, files, available, kills):
    root, own_path = tmp_path / "fs", tmp_path / "own"
    if own is not None:
        own_path.write_text(own)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    assert available_in_cgroups(root, own_path) == available
    assert oom_kills(root, own_path) == kills


@pytest.mark.parametrize(("device", "share"), [("cpu", 1 / 1.02), ("cuda", 0.9), ("cuda:1", 0.9)])
def test_a_limit_that_is_given_decides_what_a_step_may_use(device, share):
    for limit in (1, 10 * GIB, 80 * GIB):
        execution = Execution(device=device, device_memory_bytes=limit)
        assert memory_limit(execution) == limit
        assert usable_memory(execution) == int(share * limit)


def test_without_a_limit_half_of_the_available_memory_bounds_a_step_on_a_cpu():
    execution, half = Execution(device="cpu"), total_memory(torch.device("cpu"))
    assert usable_memory(execution) == pytest.approx(half, rel=0.5)
    refuse_memory_limit(execution.model_copy(update={"device_memory_bytes": 1 << 60}))


@pytest.mark.gpu
def test_a_limit_above_the_memory_of_a_gpu_is_refused():
    total = total_memory(torch.device("cuda"))
    refuse_memory_limit(Execution(device="cuda", device_memory_bytes=total))
    with pytest.raises(SweepError, match="device-memory must be at most"):
        refuse_memory_limit(Execution(device="cuda", device_memory_bytes=total + 1))


def peaks_of_two_trials(can_reset):
    """Return the peaks of two trials of this process, on a machine that can reset it or not."""
    if not can_reset:
        device.CLEAR_REFS = Path("/nowhere/clear_refs")
    cpu = torch.device("cpu")
    peaks = []
    for _ in range(2):
        device.start_peak_memory(cpu)
        peaks.append(device.peak_memory_bytes(cpu))
    return peaks


@pytest.mark.parametrize("can_reset", [False, pytest.param(True, marks=ON_LINUX)])
def test_a_peak_that_may_be_of_an_earlier_trial_is_not_reported(can_reset):
    first, second = run_job(peaks_of_two_trials, can_reset)
    assert first > 0
    assert (second > 0) is can_reset
