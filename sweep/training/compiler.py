"""What torch.compile is told, and how later trials find its work again."""

import ctypes
import importlib.util
import os
import shutil
from typing import Any

import torch

from sweep.config.trial import Science, TrialConfig


def has_compiler(device: str) -> bool:
    """Tell whether torch.compile can work here: a C++ compiler, and Triton on CUDA."""
    if device.startswith("cuda"):
        if importlib.util.find_spec("triton") is None:
            return False
        return shutil.which("cc") is not None or shutil.which("gcc") is not None
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


def is_own_transformer(science: Science) -> bool:
    """Tell whether all that is compiled is our transformer and its losses."""
    return science.model.kind == "transformer" and science.workload in ("pretrain", "grpo")


def set_up_compiler(config: TrialConfig) -> dict[str, Any]:
    """Set torch.compile up in this process, for such a trial; return Inductor's options.

    On a CPU graphs of our transformer are called from C++: a small step with them takes up to 14 %
    less (docs/performance.md). Others' models and losses may hold what has no such call, and so
    does attention that is computed again.
    """
    if torch.device(config.execution.device).type != "cpu":
        return {}
    _probe_in_process()
    _sum_in_one_order()
    if not is_own_transformer(config.science):
        return {}
    _cache_whole_graphs()
    return {} if config.execution.activation_checkpointing else {"cpp_wrapper": True}


def _sum_in_one_order() -> None:
    """Let compiled steps on a CPU add an embedding's gradients in one order, whatever the threads.

    Inductor would let threads add them atomically: other bits each time, and much slower where few
    ids are most of the text (docs/performance.md).
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.decomposition import decompositions

    gradient = torch.ops.aten.embedding_dense_backward
    whole = (gradient.default, gradient.out)
    for one in whole:
        decompositions.pop(one, None)
    # Neither this nor the instructions are in the key under which torch keeps what it compiled:
    # graphs of others, which add atomically or are for another processor, would be found.
    tag = f"whole: {', '.join(map(str, whole))}; for {pick_vec_isa()}"
    config = torch.compiler.config
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {tag}"


def _probe_in_process() -> None:
    """Let Inductor ask which vector instructions work without a process for each, a second in all.

    Each is a small library that is loaded, of those instructions alone that the processor has. A
    private method, as of torch 2.13; without it Inductor asks as ever.
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
