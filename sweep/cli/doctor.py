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
    versions = _installed_versions()
    packages = versions.pop("")
    problems = []
    for name, version in packages.items():
        if version is None:
            problems.append(f"{name} is not installed: `pip install {name}`")

    extras = {}
    notes = []
    for extra, versions_of_extra in versions.items():
        extras[extra] = None not in versions_of_extra.values()
        if not extras[extra]:
            notes.append(f"optional: `pip install 'batch-size-sweep[{extra}]'`")
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


def _installed_versions() -> dict[str, dict[str, str | None]]:
    """Return the versions of required packages by extra; None if a package is not installed."""
    lines = ["batch-size-sweep", "torch"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines += importlib.metadata.requires("batch-size-sweep") or ()

    versions: dict[str, dict[str, str | None]] = {"": {}}
    for line in lines:
        name = re.split(r"[^\w.-]", line)[0]
        extra = re.search(r"extra == ['\"](\w+)", line)
        versions_of_extra = versions.setdefault(extra[1] if extra else "", {})
        versions_of_extra[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions_of_extra[name] = importlib.metadata.version(name)
    return versions


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

    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for kind in kinds:
        if not has_compiler(kind):
            problems.append(f"no compiler for {kind}, so steps run eagerly: `apt install g++`")
    return devices


def print_machine(document: dict[str, Any]) -> None:
    """Print what works (✓), what to repair (✗), each with a command, and notes (–)."""
    versions = ", ".join(f"{name} {version}" for name, version in document["packages"].items())
    works = [f"Python {document['python']} on {document['platform']}", versions]
    for device in document["devices"]:
        facts = [f"{device['device']}: {device['name']}"]
        if "cores" in device:
            facts.append(f"{device['cores']} cores")
        if "memory_bytes" in device:
            facts.append(format_bytes(device["memory_bytes"]))
        works.append(", ".join(facts))
    cache = document["cache"]
    works.append(f"cache {cache['path']}, {format_bytes(cache['free_bytes'])} free")
    works += [f"extra {name}" for name, has_extra in document["extras"].items() if has_extra]

    lines = [f"✓ {line}" for line in works]
    lines += [f"✗ {line}" for line in document["problems"]]
    lines += [f"– {line}" for line in document["notes"]]
    say("\n".join(lines))
