"""Where an experiment's TOML lies, and what is written in it."""

import tomllib
from pathlib import Path
from typing import Any

from sweep.config.paths import experiments_dir
from sweep.errors import SweepError


def find_experiment(name: str) -> Path:
    """Return the file of a shipped name, or of a path.

    Raises:
        SweepError: if there is none.
    """
    shipped = experiments_dir()
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise SweepError(f"experiment file must exist, got {name!r}. Check the path.")
        return path
    if not (shipped / f"{name}.toml").is_file():
        known = ", ".join(sorted(file.stem for file in shipped.glob("*.toml")))
        raise SweepError(
            f"experiment must be a TOML file or one of {known}, got {name!r}. Choose one of them."
        )
    return shipped / f"{name}.toml"


def read_fields(path: Path) -> dict[str, Any]:
    """Return what a file says, unchecked.

    Raises:
        SweepError: if it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SweepError(f"experiment {path} must be TOML, but {error}. Correct it.") from error
    except OSError as error:
        raise SweepError(f"experiment {path} cannot be read: {error.strerror}.") from error
