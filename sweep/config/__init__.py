"""Settings of experiments and trials, how people write numbers, and files that these name."""

import hashlib
import tomllib
from pathlib import Path
from typing import Any


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_toml(module_file: str, name: str) -> dict[str, Any]:
    """Read a TOML file that lies next to a module, given by the module's `__file__`."""
    return tomllib.loads(Path(module_file).with_name(name).read_text(encoding="utf-8"))
