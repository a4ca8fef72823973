"""Objects of user code, named `module:object`: the only place that imports code by name."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from sweep.errors import SweepError, describe_error


def load_object(name: str) -> Any:
    """Import `module:object`. Modules in the current folder can be imported too."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SweepError(f"an object must be named as module:object, got {name!r}.")
    add_code_folder(Path.cwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        problem = f"{name!r} cannot be imported ({describe_error(error)})"
        raise SweepError(f"{problem}. Correct it, install it, or run from its folder.") from error


def add_code_folder(folder: Path) -> None:
    """Let this process, and the workers that it starts, import modules in a folder.

    It is searched after all other folders, so that its files hide no library.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def object_name(value: Any) -> str:
    """Return `module:object` of a function or class, so that workers can import it too."""
    name = f"{value.__module__}:{value.__qualname__}"
    if re.fullmatch(r"(?!__main__)[\w.]+:\w+", name):
        return name
    problem = f"functions and classes must be importable by name, got {name}"
    raise SweepError(f"{problem}. Put it at the top level of a module.")


def require_extra(package: str, extra: str, subject: str) -> None:
    """Raise SweepError with the command that installs the extra unless the package is there."""
    if importlib.util.find_spec(package) is None:
        command = f"pip install 'batch-size-sweep[{extra}]'"
        raise SweepError(f"{subject} needs the extra {extra}. Run `{command}`.")
