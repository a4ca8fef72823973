"""Import user code named `module:object`, and hash it for the trial id."""

import ast
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sweep.config import sha256_of_file
from sweep.errors import SweepError, describe_error

# Objects of the shipped experiments, by the names that experiments and trials use for them.
SHIPPED_OBJECTS = {
    "grpo": "sweep.experiments.grpo:Grpo",
    "quadratic": "sweep.experiments.noisy_quadratic:NoisyQuadratic",
    "words": "sweep.experiments.story_words:Words",
    "chess_moves:Chess": "sweep.experiments.chess_moves:Chess",
    "elman:Elman": "sweep.experiments.elman:Elman",
}


def load_object(name: str) -> Any:
    """Import `module:object`. Modules in the current folder can be imported too."""
    module, _, attribute = SHIPPED_OBJECTS.get(name, name).partition(":")
    if not module or not attribute:
        raise SweepError(f"an object must be named as module:object, got {name!r}.")
    if (current := str(Path.cwd())) not in sys.path:
        sys.path.append(current)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise SweepError(
            f"{name!r} cannot be imported ({describe_error(error)}). "
            "Correct it, install it, or run from its folder."
        ) from error


def is_shipped(name: str) -> bool:
    return SHIPPED_OBJECTS.get(name, name).startswith("sweep.experiments.")


def object_name(value: Any) -> str:
    """Return `module:object` of a function or class, so that workers can import it too."""
    name = f"{value.__module__}:{value.__qualname__}"
    if re.fullmatch(r"(?!__main__)[\w.]+:\w+", name):
        return name
    problem = f"functions and classes must be importable by name, got {name}"
    raise SweepError(f"{problem}. Put it at the top level of a module.")


def describe_objects(names: Iterable[str]) -> str:
    """Return each object's name with the file of its module and its hash; imports nothing."""
    descriptions = []
    for name in names:
        top, *rest = name.partition(":")[0].split(".")
        spec = importlib.machinery.PathFinder.find_spec(top, [*sys.path, os.getcwd()])
        path = Path((spec and spec.origin) or top)
        if spec and spec.origin is None:  # a package without __init__.py
            path = Path(next(iter(spec.submodule_search_locations or [top]))) / "__init__.py"
        if rest:
            path = path.parent.joinpath(*rest)
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        digest = sha256_of_file(path) if path.is_file() else "not found"
        descriptions.append(f"{name} ({path}, sha256 {digest[:12]})")
    return ", ".join(descriptions)


def require_extra(package: str, extra: str, subject: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SweepError(
            f"{subject} needs the extra {extra}. Install it with `pip install -e '.[{extra}]'` in "
            "the project's folder."
        )


def identify_code(names: Iterable[str], declarations: Iterable[str] = ()) -> tuple[Any, Any]:
    """Import objects in a fresh process; return what identifies their code, and declarations.

    Declarations are attributes of the first object that are texts or numbers, by name.
    Files are those that the objects load, and those that these import inside functions.
    """
    loaded_before = {*sys.modules}  # the worker's own
    objects = {name: load_object(name) for name in names}
    roots, files, imported = set[Path](), dict[str, str](), set[str]()
    for module in {name.partition(":")[0] for name in objects}:
        path = Path(getattr(sys.modules[module], "__file__", __file__))  # none: built into Python
        roots.add(path.parents[module.count(".") + (path.name == "__init__.py")])
        imported.add(module.partition(".")[0])
    loaded = (sys.modules[name] for name in sys.modules.keys() - loaded_before)
    pending = [Path(file) for module in loaded if (file := getattr(module, "__file__", None))]
    while pending:
        path = pending.pop()
        root = next((root for root in sorted(roots) if root in path.parents), None)
        is_library = "site-packages" in path.parts or Path(__file__).parents[1] in path.parents
        if root is None or is_library or (name := path.relative_to(root).as_posix()) in files:
            continue
        files[name] = sha256_of_file(path)
        for target in _imports(path, root):
            parts = [part for part in (target, *target.parents) if root in part.parents]
            sources = ((part / "__init__.py", part.with_suffix(".py")) for part in parts)
            pending += filter(Path.is_file, itertools.chain(*sources))
            imported.update(part.name for part in parts[-1:])
    distributions = importlib.metadata.packages_distributions()
    packages = sorted({distributions[top][0] for top in imported if top in distributions})
    code = {"files": files, "packages": {p: importlib.metadata.version(p) for p in packages}}
    results = {name: obj.identity() for name, obj in objects.items() if hasattr(obj, "identity")}
    values = ((name, getattr(next(iter(objects.values())), name, None)) for name in declarations)
    declared = {name: value for name, value in values if isinstance(value, str | int | float)}
    return ({**code, "identity": results} if results else code), declared


def _imports(path: Path, root: Path) -> Iterator[Path]:
    """Yield the modules, and names in modules, that a file imports, as paths without a suffix."""
    for node in ast.walk(ast.parse(path.read_bytes() if path.suffix == ".py" else b"")):
        if isinstance(node, ast.Import):
            yield from (root / alias.name.replace(".", "/") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else root
            module = folder / (node.module or "").replace(".", "/")
            yield from (module / alias.name for alias in node.names)
