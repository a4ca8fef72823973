"""Check this machine: installed packages, devices, and what would not work."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
from typing import Any

from sweep.trial.files import cache_dir


def examine() -> dict[str, Any]:
    """Return versions, extras, devices and the cache, and a list of problems as sentences."""
    lines = ["batch-size-sweep", "torch"]
    required: dict[str, dict[str, str | None]] = {"": {}}  # versions by extra and package
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines += importlib.metadata.requires("batch-size-sweep") or ()
    for line in lines:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"](\w+)", line)
        assert name
        version = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name[0])
        required.setdefault(extra[1] if extra else "", {})[name[0]] = version
    packages = required.pop("")
    problems = [
        f"{name} is not installed: run `make install` in the project's folder"
        for name, version in packages.items()
        if version is None
    ]
    devices: list[dict[str, Any]] = []
    if packages["torch"]:
        devices, device_problems = _devices()
        problems += device_problems
    cache = cache_dir()
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        problems.append(f"the cache {cache} is not writable: set SWEEP_CACHE to another folder")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "extras": {extra: all(versions.values()) for extra, versions in required.items()},
        "devices": devices,
        "cache": {"path": str(cache), "free_bytes": shutil.disk_usage(parent).free},
        "problems": problems,
    }


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    import torch

    from sweep.training.device import available_cores, device_name, has_compiler

    name, problems = device_name(torch.device("cpu")), []
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": name, "cores": available_cores()}]
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) >= 1:
        problems.append(
            f"other processes used {load:.1f} cores in the last minute: trials on the CPU will be "
            "slow"
        )
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpu = {"device": f"cuda:{index}", "name": torch.cuda.get_device_name(index)}
        devices.append({**gpu, "memory_bytes": total, "free_bytes": free})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU"})
    elif len(devices) == 1:
        problems.append("no CUDA device is visible: trials run on the CPU")
    for kind in {entry["device"].partition(":")[0] for entry in devices} - {"mps"}:
        if not has_compiler(kind):
            problems.append(f"no compiler for {kind}: steps run eagerly; install a C++ compiler")
    return devices, problems
