"""One predicate for out of memory, and what the machine is."""

import pytest
import torch

from sweep.errors import SweepError
from sweep.training.device import (
    available_cores,
    is_out_of_memory,
    peak_flops,
    resolve_device,
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("anything"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 TB"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ],
)
def test_memory_that_ran_out_is_recognised(error):
    assert is_out_of_memory(error)


def test_a_real_allocation_that_cannot_be_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [ValueError("out of memory"), RuntimeError("shape mismatch"), OSError(28, "disk full")]
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def test_devices_are_resolved_or_refused():
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in ("cpu", "cuda", "mps")
    for asked in ("tpu", "cuda:99", "meta", "cpux"):
        with pytest.raises(SweepError, match="device must be"):
            resolve_device(asked)


def test_there_is_at_least_one_core():
    assert available_cores() >= 1


def test_what_caused_an_error_counts_too():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as cause:
            raise ValueError("the step failed") from cause
    except ValueError as error:
        assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
        "integer out of range: 2684354560 elements do not fit 32-bit indices",
        "nll_loss_forward_no_reduce_cuda_kernel_index: expected index to fit int",
    ],
)
def test_an_overflow_or_a_failing_library_is_no_lack_of_memory(text):
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", 65e12),
        ("NVIDIA T400", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peak_rates_belong_to_whole_words_of_a_name(name, peak):
    assert peak_flops(name) == peak
