"""Files of the package: its tables, and the shipped experiments."""

import hashlib
import tomllib
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent

# The experiments lie next to the package in a checkout, and inside an installed package.
EXPERIMENTS = PACKAGE.with_name("experiments")
if not (EXPERIMENTS / "tinystories.toml").is_file():
    EXPERIMENTS = PACKAGE / "experiments"

# Experiments that are loaded without a name, by kind of workload. Other kinds need none.
DEFAULT_EXPERIMENTS = {"pretrain": "tinystories", "grpo": "tinystories", "quadratic": "quadratic"}


def read_toml(module_file: str, name: str) -> dict[str, Any]:
    """Read a TOML file that lies next to a module, given by the module's `__file__`."""
    return tomllib.loads(Path(module_file).with_name(name).read_text(encoding="utf-8"))


def shipped_experiments() -> list[str]:
    """Return the names of the shipped experiments, sorted."""
    return sorted(file.stem for file in EXPERIMENTS.glob("*.toml"))


def is_shipped(path: Path) -> bool:
    """Return True for a file of the shipped experiments, such as the code of one."""
    return path.resolve().is_relative_to(EXPERIMENTS.resolve())


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
