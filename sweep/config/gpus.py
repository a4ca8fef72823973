"""The GPUs that `--gpu` knows, from gpus.toml: their memory, and their peak rates."""

import re
from dataclasses import dataclass

from sweep.config.numbers import parse_bytes
from sweep.errors import SweepError, did_you_mean
from sweep.resources import read_toml

# A part of a GPU: a MIG instance, or a virtual GPU such as GRID A100D-10C.
PART = re.compile(r"\b(MIG|GRID|vGPU)\b|-\d+[ABCQ]\b")


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, as PyTorch sees it."""

    name: str  # value of --gpu
    title: str
    device: str  # a regular expression of whole words in the name of a device
    memory_bytes: int
    peak_flops: dict[str, float]  # dense, per second, by bf16 and fp32; absent if it has none

    def peak_of(self, precision: str) -> float | None:
        """Return the peak rate in FLOP/s of `fp32`, `bf16` or `bf16-pure`; None: not known."""
        return self.peak_flops.get(precision.partition("-")[0])


def _read_gpus() -> dict[str, Gpu]:
    gpus = {}
    for name, facts in read_toml(__file__, "gpus.toml").items():
        gpus[name] = Gpu(
            name=name,
            title=facts["title"],
            device=facts["device"],
            memory_bytes=parse_bytes(facts["memory"]),
            peak_flops={kind: facts[kind] for kind in ("bf16", "fp32") if kind in facts},
        )
    return gpus


GPUS = _read_gpus()


def find_gpu(name: str) -> Gpu:
    """Return the GPU that a flag names, such as h100, RTX 4090 or NVIDIA-L4.

    Raises:
        SweepError: if it is unknown, or if several have such a name, as a100.
    """
    words = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = re.sub(r"^(nvidia-)?(geforce-)?(rtx-)?", "", words).removesuffix("gb")
    if key in GPUS:
        return GPUS[key]
    several = [known for known in GPUS if known.startswith(f"{key}-")]
    remedy = f"Name one of {', '.join(several or GPUS)}, or give --device-memory."
    if not several:
        remedy = f"{did_you_mean(key, GPUS)} {remedy}".strip()
    raise SweepError(f"gpu must be one that is known, got {name!r}. {remedy}")


def gpu_of_device(name: str) -> Gpu | None:
    """Return the kind of a device by the name that its driver gives.

    None if it is not known, or a part of a GPU, which has less memory and a lower peak rate.
    """
    if PART.search(name):
        return None
    for gpu in GPUS.values():
        if re.search(rf"\b({gpu.device})\b", name):
            return gpu
    return None
