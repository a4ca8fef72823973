"""Code that is found by its name: the user's own, and the packages of extras."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from sweep.errors import SweepError


def load_object(name: str) -> Any:
    """Import `module:object`; modules in the current folder are found too.

    Raises:
        SweepError: if the name is malformed, or the module or the object is missing.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise SweepError(f"an object must be named as module:object, got {name!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the user's module does, sys.exit too
        raise SweepError(
            f"module {module_name!r} of {name!r} cannot be imported "
            f"({type(error).__name__}: {error}). Correct it, install it, or run from its folder."
        ) from error
    try:
        return getattr(module, attribute)
    except Exception as error:  # a module may have a __getattr__ of its own
        raise SweepError(
            f"module {module_name!r} has no {attribute!r}. Check the spelling of {name!r}."
        ) from error


def require_extra(package: str, extra: str, subject: str) -> None:
    """Refuse what needs an extra of this project that is not installed.

    Raises:
        SweepError: naming the subject, the extra and the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise SweepError(
            f"{subject} needs the extra {extra}, which is not installed. Install it with "
            f"`pip install -e '.[{extra}]'` in the project's folder."
        )
