"""User code named as `module:object`: importing it, and what identifies it."""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from sweep.errors import SweepError


def load_object(name: str) -> Any:
    """Import `module:object`. Modules in the current folder can be imported too."""
    module, attribute = _split(name)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise SweepError(
            f"{name!r} cannot be imported ({type(error).__name__}: {error}). "
            "Correct it, install it, or run from its folder."
        ) from error


def require_extra(package: str, extra: str, subject: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SweepError(
            f"{subject} needs the extra {extra}. Install it with `pip install -e '.[{extra}]'` in "
            "the project's folder."
        )


def identify_code(names: Iterable[str]) -> dict[str, Any]:
    """Return the sha256 of files and the versions of packages that objects need; import none."""
    files: dict[str, str] = {}
    imported: set[str] = set()
    for name in names:
        module, _ = _split(name)
        path = _source_of(module, name)
        root, sources = path.parents[module.count(".") + (path.name == "__init__.py")], {path}
        if "site-packages" in root.parts:  # an installed package: its version identifies it
            imported.add(module.partition(".")[0])
        else:
            finder = ModuleFinder([str(root)])
            try:
                finder.run_script(str(path))
            except SyntaxError as error:
                raise SweepError(f"{name!r} is not valid (SyntaxError: {error}).") from error
            imported |= {missing.partition(".")[0] for missing in finder.badmodules}
            paths = [getattr(loaded, "__file__", None) for loaded in finder.modules.values()]
            sources |= {Path(path) for path in paths if path}
        for source in sources:
            relative = source.relative_to(root).as_posix()
            files[relative] = hashlib.sha256(source.read_bytes()).hexdigest()
    distributions = importlib.metadata.packages_distributions()
    packages = sorted({distributions[top][0] for top in imported if top in distributions})
    return {"files": files, "packages": {p: importlib.metadata.version(p) for p in packages}}


def _split(name: str) -> tuple[str, str]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise SweepError(f"an object must be named as module:object, got {name!r}.")
    if (current := str(Path.cwd())) not in sys.path:
        sys.path.append(current)
    return module, attribute


def _source_of(module: str, name: str) -> Path:
    for folder in sys.path:
        path = Path(folder, *module.split("."))
        for source in (path / "__init__.py", path.with_suffix(".py")):
            if source.is_file():
                return source.resolve()
    raise SweepError(f"module {module!r} of {name!r} must be a Python file found from here.")
