"""What is installed, which devices there are, and what would not work and why."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from typing import Any

from sweep.config.paths import cache_dir, experiments_dir

PACKAGES = (
    *("torch", "numpy", "pydantic", "tokenizers", "safetensors"),  # what a worker needs
    *("optuna", "pandas", "matplotlib", "mlflow", "click", "rich", "scipy", "psutil"),
    *("huggingface_hub", "markdown-it-py"),
)
EXTRAS = {
    "ray": "ray",
    "slurm": "submitit",
    "hf": "transformers",
    "deepspeed": "deepspeed",
    "cuda": "pynvml",
    "postgres": "psycopg",
    "chess": "chess",
}


def examine() -> dict[str, Any]:
    """Return what is here: versions, devices, tools, and a list of problems in sentences."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    problems = [
        f"{package} is not installed: run `make install` in the project's folder"
        for package, version in versions.items()
        if version is None
    ]
    devices: list[dict[str, Any]] = []
    if versions["torch"]:
        devices, device_problems = _devices()
        problems += device_problems
    cache = cache_dir()
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        problems.append(f"the cache {cache} cannot be written: set SWEEP_CACHE to another folder")
    if not experiments_dir().is_dir():
        problems.append("the shipped experiments are missing: install the package again")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "extras": {name: importlib.util.find_spec(m) is not None for name, m in EXTRAS.items()},
        "devices": devices,
        "cache": {"path": str(cache), "free_bytes": shutil.disk_usage(parent).free},
        "problems": problems,
    }


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    import torch

    from sweep.training.device import available_cores, device_name, has_compiler

    cpu = torch.device("cpu")
    devices: list[dict[str, Any]] = [
        {"device": "cpu", "name": device_name(cpu), "cores": available_cores()}
    ]
    problems = []
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) >= 1:
        problems.append(
            f"something took {load:.1f} cores in the last minute: beside it trials on the CPU are "
            "slow out of proportion, less so with GOMP_SPINCOUNT=3000 (docs/performance.md)"
        )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            devices.append(
                {"device": f"cuda:{index}", "name": name, "memory_bytes": total, "free_bytes": free}
            )
    elif torch.version.cuda is None and sys.platform != "darwin":
        problems.append("this torch was built without CUDA: trials run on the CPU")
    else:
        problems.append("no CUDA device is seen: trials run on the CPU")
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU"})
    for kind in {entry["device"].partition(":")[0] for entry in devices}:
        if kind != "mps" and not has_compiler(kind):
            problems.append(f"no compiler for {kind}: steps run eagerly; install a C++ compiler")
    return devices, problems
