"""Identify user code by hashes of its files and by versions of the packages that it imports."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.errors import SweepError, user_code
from sweep.resources import PACKAGE, is_shipped, sha256_of_file
from sweep.usercode.commands import (
    PYTHON,
    files_of_command,
    files_of_module,
    module_roots,
    modules_of_command,
    named_words,
)
from sweep.usercode.objects import load_object, search_path, use_code_folder

# Print the versions of the packages that contain modules, for the Python of a command, which may be
# older than ours: `packages_distributions` exists from Python 3.10 on.
PRINT_VERSIONS = """
import contextlib, json, sys
from importlib import metadata
packages, versions = getattr(metadata, "packages_distributions", dict)(), {}
for name in sorted({packages.get(module, [module])[0] for module in sys.argv[1:]}):
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions[name] = metadata.version(name)
print(json.dumps(versions))
"""


@dataclass
class Sources:
    """The Python files of objects or of a command, and the modules that they import."""

    files: list[Path] = field(default_factory=list)  # that the search begins with
    roots: list[Path] = field(default_factory=list)  # folders of modules, in order
    imported: set[str] = field(default_factory=set)  # top-level modules
    python: str = sys.executable  # the program that runs them


def is_command(name: str) -> bool:
    """Return True for a command: it has placeholders, several words or a path; no object has."""
    return re.search(r"[{/\s]", name) is not None


def describe_objects(names: Iterable[str], code_folder: str | None = None) -> str:
    """Return each object or command with its files and their hashes; imports nothing.

    Args:
        code_folder: the folder of the experiment's file, which may hold its modules.
    """
    descriptions = []
    for name in names:
        files = [
            f"{path}, sha256 {sha256_of_file(path)[:12]}" for path in _main_files(name, code_folder)
        ]
        text = "; ".join(files) if files else "no file"
        descriptions.append(f"{name} ({text})")
    return ", ".join(descriptions)


def names_of_user(names: Iterable[str], code_folder: str | None) -> list[str]:
    """Leave out the objects that shipped experiments bring with them; imports nothing."""
    kept = []
    for name in names:
        files = _main_files(name, code_folder)
        if is_command(name) or not files or not all(map(is_shipped, files)):
            kept.append(name)
    return kept


def _main_files(name: str, code_folder: str | None) -> list[Path]:
    """Return the files that a command names, or the file of an object's module."""
    if is_command(name):
        return files_of_command(name)
    roots = map(Path, search_path(code_folder))
    return files_of_module(name.partition(":")[0], roots)[:1]


def identify_code(
    names: Sequence[str], declarations: Iterable[str] = (), code_folder: str | None = None
) -> tuple[Any, Any]:
    """Import objects, in a fresh process, or read a command; return what identifies their code.

    Also return the declarations: attributes of the first object that are texts or numbers.
    """
    use_code_folder(code_folder)
    sources = _find_sources(names)
    code: dict[str, Any] = {"files": _hash_files(names, sources)}
    code["packages"] = _package_versions(sources)  # those that hashing has found

    objects = {name: load_object(name) for name in names if not is_command(name)}
    identities = {}
    for name, obj in objects.items():
        if hasattr(obj, "identity"):
            identities[name] = obj.identity()
    if identities:
        code["identity"] = identities

    first = next(iter(objects.values()), None)
    declared = {}
    for name in declarations:
        value = getattr(first, name, None)
        if isinstance(value, str | int | float):
            declared[name] = value
    return code, declared


def check_code(names: Sequence[str], code: Mapping[str, Any]) -> None:
    """Refuse objects or a command with a file that was not identified."""
    for name, digest in _hash_files(names, _find_sources(names)).items():
        if digest not in code.get("files", {}).values():  # names may differ on another machine
            raise SweepError(f"{name} has changed since the sweep was planned. Restore it.")


def _package_versions(sources: Sources) -> dict[str, str]:
    # In another folder, because Python would import the user's files instead of its own modules.
    program = [str(Path(sources.python).absolute()), "-c", PRINT_VERSIONS, *sources.imported]
    done = subprocess.run(program, cwd="/", capture_output=True, text=True, check=False)
    versions: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return versions


def _find_sources(names: Sequence[str]) -> Sources:
    """Import objects, or split a command, and return where their code lies."""
    sources = Sources()
    code_folders: list[Path] = []
    words: list[str] = []  # the words of a command
    loaded_before = {*sys.modules}  # the worker's own
    for name in names:
        if is_command(name):
            words = named_words(name)
            sources.files = [path.absolute() for path in files_of_command(name)]
            for file in files_of_command(name, with_modules=False):
                code_folders += [file.absolute().parent, file.resolve().parent]
            modules = modules_of_command(words)
            sources.python = _python_of(words)
        else:
            load_object(name)
            module = name.partition(":")[0]
            modules = [module]
            path = Path(getattr(sys.modules[module], "__file__", None) or __file__)
            sources.files.append(path)
            depth = module.count(".")
            if path.name == "__init__.py":
                depth += 1
            code_folders.append(path.parents[depth])
        sources.imported.update(module.partition(".")[0] for module in modules)

    for name in sys.modules.keys() - loaded_before:
        module_file = getattr(sys.modules[name], "__file__", None)
        if module_file:
            sources.files.append(Path(module_file))
    sources.roots = module_roots(code_folders, words)
    return sources


def _python_of(words: Sequence[str]) -> str:
    """Return the path of the Python that a command runs, as far as its words tell."""
    programs = [word for word in words if PYTHON.fullmatch(Path(word).name)]
    first = shutil.which(words[0]) or sys.executable
    programs += [str(Path(first).with_name("python")), "python"]
    for program in programs:
        path = shutil.which(program)
        if path:
            return path
    return sys.executable


def _hash_files(names: Sequence[str], sources: Sources) -> dict[str, str]:
    """Hash the files and those that they import, except libraries; complete `sources.imported`.

    The standard library's modulefinder fails at packages without an __init__.py.
    """
    names_of_files: dict[Path, str] = {}
    pending = [*sources.files]
    with user_code(f"the Python files of {', '.join(names)} must be valid"):
        while pending:
            path = pending.pop()
            root = next((root for root in sources.roots if root in path.parents), None)
            if root is None or path in names_of_files or _is_library(path):
                continue
            names_of_files[path] = path.relative_to(root).as_posix()

            for folder in {*sources.roots}:
                for target in _imports(path, folder):
                    parts = [part for part in (target, *target.parents) if folder in part.parents]
                    sources.imported.update(part.name for part in parts[-1:])
                    for part in parts:
                        files = (part / "__init__.py", part.with_suffix(".py"))
                        pending += filter(Path.is_file, files)

    counts = Counter(names_of_files.values())
    hashes = {}
    for path, name in names_of_files.items():
        key = name if counts[name] == 1 else str(path)
        hashes[key] = sha256_of_file(path)
    return hashes


def _is_library(path: Path) -> bool:
    """Return True for a file of Python, of an installed package, or of this one."""
    if is_shipped(path):
        return False
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return True
    standard_library = Path(os.__file__).parent
    return PACKAGE in path.parents or standard_library in path.parents


def _imports(path: Path, root: Path) -> Iterator[Path]:
    """Yield the modules, and names in modules, that a file imports, as paths without a suffix."""
    with path.open("rb") as file:
        is_python = path.suffix == ".py" or re.match(rb"#!.*python", file.read(200))
    if not is_python:
        return

    for node in ast.walk(ast.parse(path.read_bytes(), path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield root / alias.name.replace(".", "/")
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else root
            if node.module is not None:
                folder /= node.module.replace(".", "/")
            for alias in node.names:
                yield folder / alias.name
