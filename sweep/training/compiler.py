"""What torch.compile is told, and how later trials find its work again."""

import ctypes
import importlib.util
import os
import shutil
from typing import Any

import torch

from sweep.config.trial import Science

CACHE_TAG = "sweep: embeddings summed in one order"


def has_compiler(device: str) -> bool:
    """Tell whether torch.compile can work here: a C++ compiler, and Triton on CUDA."""
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            return False
        return shutil.which("cc") is not None or shutil.which("gcc") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def is_own_model(science: Science) -> bool:
    """Tell whether all that is compiled is ours, and so tried with what is set here."""
    return science.model.kind == "transformer" and science.workload in ("pretrain", "grpo")


def set_up_compiler(device: torch.device, science: Science) -> dict[str, Any]:
    """Set torch.compile up in this process, for trials on this device; return Inductor's options.

    On a CPU graphs of our transformer are called from C++: a small step with them takes up to 14 %
    less (docs/performance.md). Others' models and losses may hold what has no such call.
    """
    if device.type != "cpu":
        return {}
    _sum_in_one_order()
    _probe_in_process()
    if not is_own_model(science):
        return {}
    _cache_whole_graphs()
    return {"cpp_wrapper": True}


def _sum_in_one_order() -> None:
    """Let compiled steps on a CPU add an embedding's gradients in one order, whatever the threads.

    Inductor would let threads add them atomically: other bits each time, and much slower where few
    ids are most of the text (docs/performance.md).
    """
    from torch._inductor.decomposition import decompositions

    gradient = torch.ops.aten.embedding_dense_backward
    for one in (gradient.default, gradient.out):
        decompositions.pop(one, None)
    # Without it a graph that others compiled, adding atomically, would be found in the cache.
    torch.compiler.config.cache_key_tag = CACHE_TAG


def _probe_in_process() -> None:
    """Let Inductor ask which vector instructions work without a process for each, a second in all.

    A private method, as of torch 2.13; without it Inductor asks as ever.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    if hasattr(VecISA, "_probe_load"):
        VecISA._probe_load = _can_be_loaded  # type: ignore[method-assign, assignment]


def _can_be_loaded(isa: object, path: str) -> bool:
    try:
        ctypes.CDLL(path)
    except OSError:
        return False
    return True


def _cache_whole_graphs() -> None:
    """Let a compiled graph be found again before it is differentiated: two seconds a trial.

    torch does not where autograd functions, such as our loss, are in it, unless it is told to. What
    they compute is part of the key (tests/training/test_compiler.py).
    """
    config = torch._functorch.config
    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):
        config.autograd_cache_allow_custom_autograd_functions = True
