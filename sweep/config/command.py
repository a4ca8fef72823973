"""The command of a training script: its placeholders, and the files that identify it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from sweep.config.objects import PYTHON, files_of_command, hash_sources
from sweep.errors import SweepError, user_code

PLACEHOLDERS = (
    *("batch_size", "learning_rate", "steps", "warmup_steps", "tokens", "examples", "seed"),
    *("log", "folder", "resume", "microbatch_size", "accumulation", "beta2", "weight_decay"),
    "device",
)
NEEDED = ({"batch_size"}, {"learning_rate"}, {"seed"}, {"steps", "tokens", "examples"})
PLACEHOLDER = re.compile(r"\{(\w+)\}")
# Prints the versions of the packages that contain modules, in the environment of a Python.
VERSIONS = """
import json, sys
from importlib.metadata import packages_distributions, version
packages = packages_distributions()
names = sorted({packages[module][0] for module in sys.argv[1:] if module in packages})
print(json.dumps({name: version(name) for name in names}))
"""


def _check_placeholders(command: str) -> str:
    used = {*PLACEHOLDER.findall(command)}
    if unknown := sorted(used - {*PLACEHOLDERS}):
        raise ValueError(f"must use only {{{'}, {'.join(PLACEHOLDERS)}}}, not {{{unknown[0]}}}")
    for names in NEEDED:
        if not used & names:
            options = " or ".join(f"{{{name}}}" for name in PLACEHOLDERS if name in names)
            raise ValueError(f"must contain {options}, so that every trial has its own value")
    shlex.split(command)  # may raise
    return command


Command = Annotated[str, AfterValidator(_check_placeholders)]


def fill_placeholders(command: str, values: Mapping[str, object]) -> list[str]:
    """Return the words of a command; values are not split and reach no shell."""
    words = shlex.split(command)
    return [PLACEHOLDER.sub(lambda match: str(values[match[1]]), word) for word in words]


def title_of(command: str) -> str:
    """Return the name of a command's experiment, that of its script, unless it cannot start."""
    try:
        program = next(iter(shlex.split(command)), "")
    except ValueError as error:
        raise SweepError(
            f"command must be words for a shell, but {command!r} has: {error}."
        ) from None
    if shutil.which(program) is None:
        raise SweepError(
            f"the first word of the command must be a program, got {program!r}. Correct it, or "
            "run from the folder that contains it."
        )
    path = next(iter(files_of_command(command)), Path(program))
    stem = path.parent.name if path.name == "__main__.py" else path.stem
    return re.sub(r"\W", "-", stem, flags=re.ASCII).lstrip("-_") or "command"


def identify_command(command: str) -> dict[str, Any]:
    """Hash the files that a command names and the project's modules that these import.

    The versions of packages are those of the command's own Python, or else of this one.
    """
    paths = [path.absolute() for path in files_of_command(command)]
    with user_code(f"the Python files of the command {command!r} must be valid"):
        files, modules = hash_sources(paths, {Path.cwd(), *(path.parent for path in paths)})
    return {"files": files, "packages": _versions_of(modules, command)}


def _versions_of(modules: Collection[str], command: str) -> dict[str, str]:
    pythons = [word for word in shlex.split(command) if PYTHON.fullmatch(Path(word).name)]
    python = shutil.which(pythons[0]) if pythons else None
    program = [str(Path(python or sys.executable).absolute()), "-c", VERSIONS, *modules]
    # In another folder, because Python would import the user's files instead of its own modules.
    done = subprocess.run(program, cwd="/", capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}
