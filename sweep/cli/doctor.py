"""Check this machine: installed packages, devices and the cache."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sweep.cli.options import say
from sweep.config.numbers import format_bytes
from sweep.trial.files import cache_dir


def examine_machine() -> dict[str, Any]:
    """Return the document that `sweep doctor --json` prints."""
    lines = ["batch-size-sweep", "torch"]
    required: dict[str, dict[str, str | None]] = {"": {}}  # versions by extra and package
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines += importlib.metadata.requires("batch-size-sweep") or ()
    for line in lines:
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"](\w+)", line)
        versions = required.setdefault(extra[1] if extra else "", {})
        versions[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    packages = required.pop("")
    problems = [f"{n} is not installed: `pip install {n}`" for n in packages if not packages[n]]
    extras = {extra: all(versions.values()) for extra, versions in required.items()}
    notes = [f"optional: `pip install 'batch-size-sweep[{n}]'`" for n in extras if not extras[n]]
    devices = _devices(problems, notes) if packages["torch"] else []
    cache = cache_dir()
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    if not _is_writable(parent):
        problems.append(f"the cache {cache} is not writable: `export SWEEP_CACHE=FOLDER`")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "extras": extras,
        "devices": devices,
        "cache": {"path": str(cache), "free_bytes": shutil.disk_usage(parent).free},
        "problems": problems,  # to be repaired
        "notes": notes,
    }


def _is_writable(folder: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=folder).close()  # permissions alone do not decide, for root
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _devices(problems: list[str], notes: list[str]) -> list[dict[str, Any]]:
    """List the devices of this machine; add to its problems and notes."""
    import torch

    from sweep.training.device import available_cores, device_name, has_compiler

    name = device_name(torch.device("cpu")).removeprefix("cpu: ")
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": name, "cores": available_cores()}]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpu = {"device": f"cuda:{index}", "name": torch.cuda.get_device_name(index)}
        devices.append({**gpu, "memory_bytes": total, "free_bytes": free})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU"})
    elif len(devices) == 1:
        notes.append("no CUDA device is visible: trials run on the CPU")
    for kind in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        if not has_compiler(kind):
            problems.append(f"no compiler for {kind}, so steps run eagerly: `apt install g++`")
    return devices


def print_machine(document: dict[str, Any]) -> None:
    """Print what works (✓), what to repair (✗), each with a command, and notes (–)."""
    versions = ", ".join(f"{name} {version}" for name, version in document["packages"].items())
    cache = document["cache"]
    works = [f"Python {document['python']} on {document['platform']}", versions]
    for device in document["devices"]:
        cores = f"{device['cores']} cores" if "cores" in device else None
        memory = format_bytes(device["memory_bytes"]) if "memory_bytes" in device else None
        facts = f"{device['device']}: {device['name']}", cores, memory
        works.append(", ".join(filter(None, facts)))
    works.append(f"cache {cache['path']}, {format_bytes(cache['free_bytes'])} free")
    works += [f"extra {name}" for name, has_extra in document["extras"].items() if has_extra]
    marked = {"✓": works, "✗": document["problems"], "–": document["notes"]}
    say("\n".join(f"{mark} {line}" for mark, lines in marked.items() for line in lines))
