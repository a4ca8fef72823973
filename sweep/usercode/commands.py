"""Commands of the user with placeholders such as {batch_size}: their words and their files."""

import itertools
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from sweep.errors import SweepError, cut, did_you_mean
from sweep.script import Trial

PLACEHOLDER = re.compile(r"\{(\w+)\}")
PLACEHOLDERS = (*(field.name for field in fields(Trial)), "log")
# A command must receive one of each of these.
NEEDED = (("batch_size",), ("learning_rate",), ("seed",), ("steps", "tokens", "examples", "epochs"))
# Functions of sweep/script.py by which a script reads the values of its trial.
READS_TRIAL = re.compile(r"\b(settings|training_arguments)\(")
SET_BY_TRAINING_ARGUMENTS = {
    "microbatch_size",
    "accumulation",
    "steps",
    "learning_rate",
    "seed",
    "eval_steps",
    "resume",
}
PYTHON = re.compile(r"python[\d.]*")
RUNS_MODULE = re.compile(r"-\w*m")  # the option before a module that Python runs


def placeholders_of(command: str) -> set[str]:
    return {*PLACEHOLDER.findall(command)}


def refuse_unreadable_command(command: str) -> str:
    """Refuse a command that a shell could not split, or with an unknown placeholder."""
    try:
        named_words(command)
    except ValueError as error:
        raise SweepError(f"a shell must be able to split {command!r} ({error}).") from None

    unknown = sorted(placeholders_of(command) - {*PLACEHOLDERS})
    if unknown:
        problem = f"command must only use {', '.join(PLACEHOLDERS)}, got {{{cut(unknown[0])}}}."
        hint = did_you_mean(unknown[0], PLACEHOLDERS) or "Correct it."
        raise SweepError(f"{problem} {hint}")
    return command


def refuse_incomplete_command(command: str, read_by_script: Collection[str]) -> None:
    """Refuse a command without a program, or that lacks a value that trials need.

    Args:
        command: one that a shell can split.
        read_by_script: the values that its script reads by `sweep.settings` and so on.
    """
    used = placeholders_of(command) | {*read_by_script}
    if {"microbatch_size", "accumulation"} <= used:
        used.add("batch_size")  # their product, for each device
    program = next(iter(named_words(command)), None)
    for names in NEEDED:
        if program is None or used.isdisjoint(names):
            choice = " or ".join(f"{{{name}}}" for name in names)
            raise SweepError(
                f"command must contain {choice}, got {command!r}. Add it, or let the script call "
                "sweep.settings()."
            )


def values_read_by(files: Iterable[Path], is_function: bool = False) -> tuple[str, ...]:
    """Return the values of a trial that Python files read, as their text tells.

    A script that calls a function of sweep/script.py for them, and the file of a function that is
    called with a trial, read the values whose names they contain.
    """
    read: set[str] = set()
    for file in files:
        if file.suffix != ".py":
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        calls = {*READS_TRIAL.findall(text)} if "sweep" in text else set()
        if "training_arguments" in calls:
            read |= SET_BY_TRAINING_ARGUMENTS
        if calls or is_function:
            read |= {name for name in PLACEHOLDERS if re.search(rf"\b{name}\b", text)}
    return tuple(sorted(read))


def title_of_command(command: str) -> str:
    """Return the name of a command's experiment, that of its script; refuse one without program."""
    program, *words = named_words(command)
    scripts = [word for word in words if re.fullmatch(r"[^{=-][^{=]*\.py", word)]
    missing = [script for script in scripts if not os.path.isfile(script)]
    if shutil.which(program) is None:
        missing.insert(0, program)
    if missing:
        problem = f"the program and scripts of a command must exist, got {missing[0]!r}"
        raise SweepError(f"{problem}. Correct it, or run from its folder. `env A=B …` sets A.")

    files = files_of_command(command)
    path = files[0] if files else Path(program)
    title = re.sub(r"\W", "-", path.stem, flags=re.ASCII).strip("-_")
    return title if title else "command"


def fill_placeholders(command: str, values: Mapping[str, object]) -> list[str]:
    """Return the words of a command; values are not split and reach no shell."""
    return [PLACEHOLDER.sub(lambda match: str(values[match[1]]), word) for word in _words(command)]


def files_of_command(command: str, with_modules: bool = True) -> list[Path]:
    """Return the files that a command names, also by `--option=FILE`, except interpreters."""
    words = named_words(command)
    files = []
    for word in words:
        for name in dict.fromkeys([word, word.split("=")[-1]]):
            path = Path(name)
            if os.path.isfile(name) and not PYTHON.fullmatch(path.name):
                files.append(path)
    if with_modules:
        roots = module_roots([], words)
        for module in modules_of_command(words):
            files += files_of_module(module, roots)
    return files


def modules_of_command(words: Iterable[str]) -> list[str]:
    """Return the modules that a command runs by `python -m`."""
    return [name for option, name in itertools.pairwise(words) if RUNS_MODULE.fullmatch(option)]


def _words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", ""))  # which shlex does not join, as shells do


def named_words(command: str) -> list[str]:
    """Return the words of a command; of `sh -c TEXT`, those of the text too, except outputs."""
    words = _words(command)
    named: list[str] = []
    has_shell = False
    for flag, word in zip(["", *words], words, strict=False):
        parts = [word]
        if has_shell and re.fullmatch(r"-\w*c", flag):
            text = shlex.shlex(word, posix=True, punctuation_chars=True)
            text.whitespace_split = True
            text.commenters = ""
            parts = [*text]
        for before, part in zip(["", *parts], parts, strict=False):
            if ">" not in before:
                named.append(part)
        if word.endswith("sh"):
            has_shell = True
    return named


def module_roots(code_folders: Iterable[Path], words: Iterable[str] = ()) -> list[Path]:
    """Return the folders that Python finds modules in; the first that contains a file names it.

    Args:
        code_folders: Folders of the code itself, which come first.
        words: Words of a command, which may set PYTHONPATH.
    """
    set_paths = [word.partition("=")[2] for word in words if word.startswith("PYTHONPATH=")]
    joined = os.pathsep.join([*set_paths, os.environ.get("PYTHONPATH", "")])
    others = {Path(path).absolute() for path in joined.split(os.pathsep) if path}
    others.add(Path.cwd())

    roots = []
    for folder in [*sorted({*code_folders}, reverse=True), *sorted(others, reverse=True)]:
        roots += [folder / "src", folder]
    return roots


def files_of_module(module: str, roots: Iterable[Path]) -> list[Path]:
    """Return the files in some folders that a module, or a package that is run, begins with."""
    *packages, base = itertools.accumulate(module.split("."), "{}/{}".format)
    names = [f"{base}/__init__.py", f"{base}.py", f"{base}/__main__.py"]
    names += [f"{package}/__init__.py" for package in packages]
    files = []
    for root in roots:
        paths = [root / name for name in names]
        files += [path for path in paths if path.is_file()]
    return files
