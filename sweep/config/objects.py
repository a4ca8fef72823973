"""User code: objects named `module:object`, commands with placeholders, and their hashes."""

import ast
import importlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sweep.config import read_toml, sha256_of_file
from sweep.errors import SweepError, cut, describe_error, did_you_mean, user_code

OF_COMMANDS: dict[str, Any] = read_toml(__file__, "commands.toml")
PLACEHOLDER, PYTHON = re.compile(r"\{(\w+)\}"), re.compile(r"python[\d.]*")
RUNS_MODULE = re.compile(r"-\w*m")  # the option before a module that Python runs
SHIPPED_OBJECTS: dict[str, str] = read_toml(__file__, "shipped.toml")


def load_object(name: str) -> Any:
    """Import `module:object`. Modules in the current folder can be imported too."""
    module, _, attribute = SHIPPED_OBJECTS.get(name, name).partition(":")
    if not module or not attribute:
        raise SweepError(f"an object must be named as module:object, got {name!r}.")
    if not is_shipped(name) and (current := str(Path.cwd())) not in sys.path:
        sys.path.append(current)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        problem = f"{name!r} cannot be imported ({describe_error(error)})"
        raise SweepError(f"{problem}. Correct it, install it, or run from its folder.") from error


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
    """Return each object or command with its files and their hashes; imports nothing."""
    descriptions, current = [], os.getcwd()
    roots = [*(Path(path) for path in sys.path if path not in ("", current)), Path(current)]
    for name in names:
        module = name.partition(":")[0]
        paths = files_of_command(name) if "{" in name else _files_of_module(module, roots)[:1]
        files = [f"{path}, sha256 {sha256_of_file(path)[:12]}" for path in paths]
        descriptions.append(f"{name} ({'; '.join(files) or 'no file'})")
    return ", ".join(descriptions)


def check_command(command: str) -> str:
    """Refuse a command that a shell could not split, or that lacks a value that trials need."""
    try:
        program = next(iter(_named_words(command)), None)
    except ValueError as error:
        raise SweepError(f"a shell must be able to split {command!r} ({error}).") from None
    used = {*PLACEHOLDER.findall(command)}
    placeholders = OF_COMMANDS["placeholders"]
    if unknown := sorted(used - {*placeholders}):
        problem = f"command must only use {', '.join(placeholders)}, got {{{cut(unknown[0])}}}."
        raise SweepError(f"{problem} {did_you_mean(unknown[0], placeholders) or 'Correct it.'}")
    if {"microbatch_size", "accumulation"} <= used:
        used.add("batch_size")  # their product, for each device
    for names in OF_COMMANDS["needed"]:
        if program is None or used.isdisjoint(names):
            choice = " or ".join(f"{{{name}}}" for name in names)
            raise SweepError(f"command must contain {choice}, got {command!r}. Add it.")
    return command


def title_of_command(command: str) -> str:
    """Return the name of a command's experiment, that of its script; refuse one without program."""
    program, *words = _named_words(command)
    missing = [] if shutil.which(program) else [program]
    scripts = [word for word in words if re.fullmatch(r"[^{=-][^{=]*\.py", word)]
    if missing := [*missing, *itertools.filterfalse(os.path.isfile, scripts)]:
        problem = f"the program and scripts of a command must exist, got {missing[0]!r}"
        raise SweepError(f"{problem}. Correct it, or run from its folder. `env A=B …` sets A.")
    path = next(iter(files_of_command(command)), Path(program))
    return re.sub(r"\W", "-", path.stem, flags=re.ASCII).strip("-_") or "command"


def _words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", ""))  # which shlex does not join, as shells do


def _named_words(command: str) -> list[str]:
    """Return the words of a command; of `sh -c TEXT`, those of the text too, except outputs."""
    words, named, has_shell = _words(command), list[str](), False
    for flag, word in zip(["", *words], words, strict=False):
        parts = [word]
        if has_shell and re.fullmatch(r"-\w*c", flag):
            text = shlex.shlex(word, posix=True, punctuation_chars=True)
            text.whitespace_split, text.commenters = True, ""
            parts = [*text]
        pairs = zip(["", *parts], parts, strict=False)
        named += [part for before, part in pairs if ">" not in before]
        has_shell |= word.endswith("sh")
    return named


def fill_placeholders(command: str, values: Mapping[str, object]) -> list[str]:
    """Return the words of a command; values are not split and reach no shell."""
    return [PLACEHOLDER.sub(lambda match: str(values[match[1]]), word) for word in _words(command)]


def files_of_command(command: str, with_modules: bool = True) -> list[Path]:
    """Return the files that a command names, also by `--option=FILE`, except interpreters."""
    words = _named_words(command)
    names = [name for word in words for name in dict.fromkeys([word, word.split("=")[-1]])]
    paths = map(Path, filter(os.path.isfile, names))
    files = [path for path in paths if not PYTHON.fullmatch(path.name)]
    for option, module in itertools.pairwise(words):
        if with_modules and RUNS_MODULE.fullmatch(option):
            files += _files_of_module(module, _roots([], words))
    return files


def _files_of_module(module: str, roots: Iterable[Path]) -> list[Path]:
    """Return the files in some folders that a module, or a package that is run, begins with."""
    *packages, base = itertools.accumulate(module.split("."), "{}/{}".format)
    names = [f"{base}/__init__.py", f"{base}.py", f"{base}/__main__.py"]
    names += [f"{package}/__init__.py" for package in packages]
    return [path for root in roots for name in names if (path := root / name).is_file()]


def require_extra(package: str, extra: str, subject: str) -> None:
    if importlib.util.find_spec(package) is None:
        command = f"pip install 'batch-size-sweep[{extra}]'"
        raise SweepError(f"{subject} needs the extra {extra}. Run `{command}`.")


def identify_code(names: Sequence[str], declarations: Iterable[str] = ()) -> tuple[Any, Any]:
    """Import objects, in a fresh process, or read a command; return what identifies their code.

    Also return the declarations: attributes of the first object that are texts or numbers.
    """
    files, imported, python = _hash_code(names)
    # In another folder, because Python would import the user's files instead of its own modules.
    program = [str(Path(python).absolute()), "-c", OF_COMMANDS["versions"], *imported]
    done = subprocess.run(program, cwd="/", capture_output=True, text=True, check=False)
    code = {"files": files, "packages": json.loads(done.stdout) if not done.returncode else {}}
    objects = {name: load_object(name) for name in names if "{" not in name}
    results = {name: obj.identity() for name, obj in objects.items() if hasattr(obj, "identity")}
    first = next(iter(objects.values()), None)
    values = ((name, getattr(first, name, None)) for name in declarations)
    declared = {name: value for name, value in values if isinstance(value, str | int | float)}
    return ({**code, "identity": results} if results else code), declared


def check_code(names: Sequence[str], code: Mapping[str, Any]) -> None:
    """Refuse objects or a command with a file that was not identified."""
    for name, digest in _hash_code(names)[0].items():
        if digest not in code.get("files", {}).values():  # names may differ on another machine
            raise SweepError(f"{name} has changed since the sweep was planned. Restore it.")


def _hash_code(names: Sequence[str]) -> tuple[dict[str, str], set[str], str]:
    """Hash the files of objects or of a command, and those that they import, except libraries.

    Also return the top-level modules that are imported, and the Python that runs them.
    """
    paths, own, imported, python = list[Path](), list[Path](), set[str](), sys.executable
    loaded_before, words = {*sys.modules}, list[str]()  # the worker's own
    for name in names:
        if "{" in name:
            paths, words = [path.absolute() for path in files_of_command(name)], _named_words(name)
            named = files_of_command(name, with_modules=False)
            own = [file.parent for path in named for file in (path.absolute(), path.resolve())]
            modules = [m for flag, m in itertools.pairwise(words) if RUNS_MODULE.fullmatch(flag)]
            pythons = [word for word in words if PYTHON.fullmatch(Path(word).name)]
            pythons += [str(Path(shutil.which(words[0]) or python).with_name("python")), "python"]
            python = next(filter(None, map(shutil.which, pythons)), python)
        else:
            load_object(name)
            modules = [name.partition(":")[0]]
            path = Path(getattr(sys.modules[modules[0]], "__file__", None) or __file__)
            paths.append(path)
            own.append(path.parents[modules[0].count(".") + (path.name == "__init__.py")])
        imported.update(module.partition(".")[0] for module in modules)
    loaded = (sys.modules[name] for name in sys.modules.keys() - loaded_before)
    paths += [Path(file) for module in loaded if (file := getattr(module, "__file__", None))]
    with user_code(f"the Python files of {', '.join(names)} must be valid"):
        return _hash_files(paths, _roots(own, words), imported), imported, python


def _roots(own: Iterable[Path], words: Iterable[str]) -> list[Path]:
    """Return the folders that Python finds modules in; the first that contains a file names it."""
    paths = [word.partition("=")[2] for word in words if word.startswith("PYTHONPATH=")]
    paths = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).split(os.pathsep)
    others = {Path.cwd(), *(Path(path).absolute() for path in paths if path)}
    folders = [*sorted({*own}, reverse=True), *sorted(others, reverse=True)]
    return [path for folder in folders for path in (folder / "src", folder)]


def _hash_files(pending: list[Path], roots: Sequence[Path], imported: set[str]) -> dict[str, str]:
    """Hash files in some folders, and those that they import; add the modules to `imported`."""
    names, python, sweep = dict[Path, str](), Path(os.__file__).parent, Path(__file__).parents[1]
    libraries = {python, sweep, "site-packages", "dist-packages"}
    while pending:
        path = pending.pop()
        root = next((root for root in roots if root in path.parents), None)
        is_library = not libraries.isdisjoint([*path.parents, *path.parts])
        if root is None or is_library or path in names:
            continue
        names[path] = path.relative_to(root).as_posix()
        for folder in {*roots}:
            for target in _imports(path, folder):
                parts = [part for part in (target, *target.parents) if folder in part.parents]
                sources = ((part / "__init__.py", part.with_suffix(".py")) for part in parts)
                pending += filter(Path.is_file, itertools.chain(*sources))
                imported.update(part.name for part in parts[-1:])
    texts = [*names.values()]
    return {n if texts.count(n) == 1 else str(p): sha256_of_file(p) for p, n in names.items()}


def _imports(path: Path, root: Path) -> Iterator[Path]:
    """Yield the modules, and names in modules, that a file imports, as paths without a suffix."""
    with path.open("rb") as file:
        is_python = path.suffix == ".py" or re.match(rb"#!.*python", file.read(200))
    for node in ast.walk(ast.parse(path.read_bytes() if is_python else b"", path)):
        if isinstance(node, ast.Import):
            yield from (root / alias.name.replace(".", "/") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else root
            module = folder / (node.module or "").replace(".", "/")
            yield from (module / alias.name for alias in node.names)
