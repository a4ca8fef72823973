"""Folders that belong to no sweep: the cache and the shipped experiments."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return `SWEEP_CACHE`, or `sweep` in the XDG cache folder. Does not create it."""
    if chosen := os.environ.get("SWEEP_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "sweep"


def experiments_dir() -> Path:
    """Return the folder of shipped experiments, in the wheel or in the repository."""
    package = Path(__file__).parent.parent
    shipped = package / "_experiments"
    return shipped if shipped.is_dir() else package.parent / "experiments"
