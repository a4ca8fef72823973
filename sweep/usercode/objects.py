"""Objects of user code, named `module:object`: the only place that imports code by name.

Modules are searched in the folders of `sys.path`, among them those of installed packages, then in
the folder of the experiment's file, then in the current folder, so that files of the user hide no
library. Only the processes of an experiment search its folder; the caller's `sys.path` stays.
"""

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from sweep.errors import SweepError, describe_error

_code_folder: str | None = None  # the folder that this process has added to sys.path
_is_importing = False  # whether a module of the user is being imported


def load_object(name: str) -> Any:
    """Import `module:object`, also of the experiment's folder and of the current one."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SweepError(f"an object must be named as module:object, got {name!r}.")
    global _is_importing
    current = os.getcwd()
    if current not in sys.path:
        sys.path.append(current)
    _is_importing = True
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        problem = f"{name!r} cannot be imported ({describe_error(error)})"
        remedy = "Correct it, install it, or run from the folder that contains its module"
        raise SweepError(f"{problem}. {remedy}.") from error
    finally:
        _is_importing = False


def refuse_nested_sweep() -> None:
    """Refuse to sweep while a module of the user is imported, which would never end."""
    if _is_importing:
        raise SweepError(
            "a module must not start a sweep when it is imported. Put it under "
            "`if __name__ == '__main__':`."
        )


def search_path(code_folder: str | None) -> list[str]:
    """Return the folders in which the processes of an experiment search modules, in order."""
    current = os.getcwd()
    folders = [path for path in sys.path if path not in ("", current, _code_folder)]
    last_folders = [current]
    if code_folder is not None:
        last_folders.insert(0, os.path.abspath(code_folder))
    for folder in last_folders:
        if folder not in folders:
            folders.append(folder)
    return folders


def use_code_folder(folder: str | None) -> None:
    """Make this process import modules of an experiment's folder, in place of the previous one.

    Raises:
        SweepError: if the process has loaded a module of the same name from another file.
    """
    global _code_folder
    if folder is not None:
        folder = os.path.abspath(folder)
    if folder != _code_folder or folder not in (None, *sys.path):
        sys.path[:] = search_path(folder)
        _code_folder = folder
    if folder is None:
        return

    for module in pkgutil.iter_modules([folder]):
        loaded_file = getattr(sys.modules.get(module.name), "__file__", None)
        if loaded_file is None or module.name == "__main__":
            continue
        spec = importlib.machinery.PathFinder.find_spec(module.name)
        file = None if spec is None else spec.origin
        if file is not None and os.path.realpath(file) != os.path.realpath(loaded_file):
            raise SweepError(
                f"module {module.name} must be {file}, but this process has already imported "
                f"{loaded_file}. Run each experiment in a process of its own."
            )


def object_name(value: Any) -> str:
    """Return `module:object` of a function or class, so that workers can import it too.

    Objects of the script that runs are named by its file.
    """
    module = getattr(value, "__module__", None)
    qualified = getattr(value, "__qualname__", None)
    if not module or not qualified:
        problem = f"functions and classes must have a name, got {value!r}"
        raise SweepError(f"{problem}. Write a function with `def` at the top level of a module.")
    defined = getattr(sys.modules.get(module), qualified, value)
    if defined is not value:
        raise SweepError(
            f"functions and classes must be importable by name, got one called {qualified}, which "
            f"is another object in {module}. Call the decorator where that is defined."
        )
    if module == "__main__":
        file = script_of(value)
        if file is None:
            raise SweepError(
                f"functions and classes must be importable, got {qualified} of this "
                "session. Put it into a file, in a notebook by %%writefile, and import it."
            )
        module = file.stem
    name = f"{module}:{qualified}"
    if re.fullmatch(r"[\w.]+:\w+", name):
        return name
    problem = f"functions and classes must be importable by name, got {name}"
    raise SweepError(f"{problem}. Put it at the top level of a module.")


def script_of(value: Any) -> Path | None:
    """Return the file of the script that runs and defines an object; None if there is none."""
    if getattr(value, "__module__", None) != "__main__":
        return None
    try:
        file = Path(inspect.getfile(value)).absolute()
    except (TypeError, OSError):  # a class of an interactive session
        return None
    return file if file.is_file() else None


def require_extra(package: str, extra: str, subject: str) -> None:
    """Raise SweepError with the command that installs the extra unless the package is there."""
    if importlib.util.find_spec(package) is None:
        command = f"pip install 'batch-size-sweep[{extra}]'"
        raise SweepError(f"{subject} needs the extra {extra}. Run `{command}`.")
