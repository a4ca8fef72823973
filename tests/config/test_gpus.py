"""GPUs by name: what a flag may say, and which one a driver's name means."""

import pytest

from sweep.config.execution import Execution
from sweep.config.gpus import GPUS, find_gpu, gpu_of_device
from sweep.config.settings import merge_settings, parse_settings
from sweep.errors import SweepError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "h100"),
        ("H100-PCIe", "h100-pcie"),
        ("NVIDIA L4", "l4"),
        ("RTX 4090", "4090"),
        ("geforce-rtx-3090", "3090"),
        ("rtx_a6000", "a6000"),
        ("RTX 6000 Ada", "6000-ada"),
        ("a100-80", "a100-80"),
        ("A100 80GB", "a100-80"),
    ],
)
def test_gpus_are_named_as_people_name_them(text, name):
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("a100", "a100-80, a100-40"), ("v100", "v100-32, v100-16"), ("h10", "Did you mean 'h100'")],
)
def test_a_name_of_none_or_of_several_is_refused_with_those_that_are_known(text, remedy):
    with pytest.raises(SweepError, match=remedy):
        find_gpu(text)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", None),  # without units for bfloat16
        ("NVIDIA T400", None),
    ],
)
def test_the_peak_rate_belongs_to_whole_words_of_a_device(device, peak):
    gpu = gpu_of_device(device)
    assert (gpu.peak_of("bf16") if gpu else None) == peak


def test_no_gpu_has_more_memory_than_its_title_says():
    for gpu in GPUS.values():
        nominal = int(gpu.title.split(", ")[1].removesuffix(" GB"))
        assert 0.9 * nominal * 10**9 < gpu.memory_bytes < nominal * 2**30


def test_the_less_of_a_limit_and_the_memory_of_a_gpu_counts():
    def known(**values):
        fields = merge_settings(Execution, {}, values)
        return parse_settings(Execution, fields, "flags").known_memory_bytes

    assert known() is None
    assert known(gpu="4090") == GPUS["4090"].memory_bytes
    assert known(gpu="4090", device_memory="10GB") == 10 * 10**9
    assert known(gpu="4090", device_memory="80GB") == GPUS["4090"].memory_bytes


@pytest.mark.parametrize(
    "device", ["NVIDIA A100-SXM4-80GB MIG 1g.10gb", "GRID A100D-10C", "NVIDIA L40S-48Q"]
)
def test_a_part_of_a_gpu_has_no_peak_rate_of_the_whole(device):
    assert gpu_of_device(device) is None
