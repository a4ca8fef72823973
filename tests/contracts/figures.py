"""Figures of the code, which the design reports: `python -m tests.contracts.figures`."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from sweep.config.models import ModelSettings
from sweep.config.workloads import WorkloadSettings
from sweep.orchestration.executors.build import EXECUTORS
from sweep.plan.policies import POLICIES
from sweep.trial.status import State
from tests.contracts.imports import import_cycles, loaders_by_name
from tests.contracts.sources import ROOT, Code

# The two private interfaces that the memory forecast needs, one file each.
PERMITTED = {
    ("sweep/training/storages.py", "torch.utils._python_dispatch"),
    ("sweep/memory/forecast.py", "torch._subclasses.fake_tensor"),
}
PRIVATE = re.compile(r"(^|\.)_[a-zA-Z]")
# Public, although they begin with an underscore: of the standard library's named tuples, of os.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}
COMMAND_MODULES = {"sweep.training"}  # started as `python -m sweep.training`
# A worker needs torch, numpy, pydantic, tokenizers and safetensors.
NOT_IN_A_WORKER = {
    *("click", "datasets", "huggingface_hub", "jinja2", "markdown_it", "matplotlib", "mlflow"),
    *("optuna", "pandas", "psutil", "ray", "rich", "scipy", "submitit"),
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def classes_of(union: Any) -> tuple[type, ...]:
    """Return the members of an annotated union."""
    classes: tuple[type, ...] = get_args(get_args(union)[0])
    return classes


def kind_of(settings: Any) -> str:
    return str(settings.model_fields["kind"].default)


@dataclass(frozen=True)
class Kinds:
    """Names and classes that only some files may tell apart; all others ask for a capability."""

    homes: tuple[str, ...]  # beginnings of the paths of these files
    names: set[str]
    classes: set[str]


TABLES = (*classes_of(ModelSettings), *classes_of(WorkloadSettings))
KINDS = [
    Kinds(
        homes=("sweep/config/", "sweep/models/", "sweep/workloads/"),
        names={kind_of(table) for table in TABLES},
        classes={table.__name__ for table in TABLES},
    ),
    Kinds(
        homes=("sweep/plan/policies.py",),
        names={policy.kind for policy in POLICIES},
        classes={policy.__name__ for policy in POLICIES},
    ),
    Kinds(
        homes=("sweep/orchestration/executors/",),
        names={executor.name for executor in EXECUTORS},
        classes={executor.__name__ for executor in EXECUTORS},
    ),
    Kinds(homes=("sweep/trial/status.py",), names={*State}, classes=set()),
]


def definitions(code: Code, file: str) -> Iterator[Definition]:
    return (node for node in code.nodes(file) if isinstance(node, Definition))


def function_lengths(code: Code) -> list[int]:
    return [
        (node.end_lineno or 0) - node.lineno + 1
        for file in code.files_of_sweep
        for node in definitions(code, file)
        if not isinstance(node, ast.ClassDef)
    ]


def private_interfaces(code: Code) -> set[tuple[str, str]]:
    """Return file and interface of every use of a private name of a dependency."""
    own = names_defined_in(code)
    uses = set()
    for file in code.texts:
        foreign = set()  # names that the file imports from outside of sweep
        for node in code.nodes(file):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                names = [module, *(alias.name for alias in node.names)]
                if not any(name.startswith("sweep") for name in names):
                    foreign |= {(a.asname or a.name).partition(".")[0] for a in node.names}
                    private = names[:1] if module else names[1:]
                    uses |= {(file, name) for name in private if PRIVATE.search(name)}
        for node in code.nodes(file):
            if isinstance(node, ast.keyword) and PRIVATE.search(node.arg or ""):
                uses.add((file, node.arg))
            if isinstance(node, ast.Attribute) and node.attr not in PUBLIC:
                text = ast.unparse(node)
                base, _, rest = text.partition(".")
                is_dotted = re.fullmatch(r"[\w.]+", text) is not None
                is_of_module = is_dotted and base in foreign and PRIVATE.search(rest)
                is_unknown = PRIVATE.match(node.attr) and node.attr not in own
                if is_of_module or is_unknown:
                    uses.add((file, text))
    return uses - PERMITTED


def names_defined_in(code: Code) -> set[str]:
    """Return the names of functions, classes, variables and attributes that the files define."""
    names = set()
    for file in code.texts:
        for node in code.nodes(file):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
    return names


def code_named_by_strings(code: Code) -> set[tuple[str, str]]:
    """Return file and text of every string that names a module that ships, also in tables."""
    uses = set()
    for file in code.files_of_sweep:
        for node in code.nodes(file):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                uses.add((file, node.value))
    for folder in ("sweep", "experiments"):
        for path in sorted((code.root / folder).rglob("*.toml")):
            table = tomllib.loads(path.read_text("utf-8"))
            file = path.relative_to(code.root).as_posix()
            uses |= {(file, text) for text in texts_in(table)}
    return {(file, text) for file, text in uses if names_module(code, text)}


def texts_in(value: object) -> Iterator[str]:
    """Yield the texts of a TOML value, also its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_in(inner)


def names_module(code: Code, text: str) -> bool:
    module, colon, _ = text.partition(":")
    is_dotted = module.count(".") > 1 or (colon and "." in module)
    return bool(is_dotted) and module in code.modules.keys() - COMMAND_MODULES


def kind_branches(code: Code) -> set[tuple[str, int, str]]:
    """Return file, line and text of each place that tells kinds apart outside of their registry.

    That is a comparison with a kind's name, a table with such keys from which a value is chosen at
    once, and a test of the class.
    """
    branches = set()
    for file in code.texts:
        foreign = [kinds for kinds in KINDS if not file.startswith(kinds.homes)]
        names = {name for kinds in foreign for name in kinds.names}
        classes = {name for kinds in foreign for name in kinds.classes}
        for node in code.nodes(file):
            for part in names_told_apart(node):
                if isinstance(part, ast.Constant) and part.value in names:
                    branches.add((file, part.lineno, str(part.value)))
            for part in classes_told_apart(node):
                if isinstance(part, ast.Name) and part.id in classes:
                    branches.add((file, part.lineno, part.id))
    return branches


def names_told_apart(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a comparison, a pattern, or a table from which a value is chosen."""
    match node:
        case ast.Compare():
            yield from ast.walk(node)
        case ast.match_case(pattern=pattern):
            yield from ast.walk(pattern)
        case ast.Call(func=ast.Attribute(attr="isin" | "startswith"), args=arguments):
            for argument in arguments:
                yield from ast.walk(argument)
        case ast.Subscript(value=ast.Dict(keys=keys)):
            yield from filter(None, keys)
        case ast.Call(func=ast.Attribute(value=ast.Dict(keys=keys), attr="get")):
            yield from filter(None, keys)


def classes_told_apart(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the names in a test of a class."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
            yield from ast.walk(classes)
        case ast.Compare(left=ast.Call(func=ast.Name(id="type"))):
            yield from ast.walk(node)
        case ast.MatchClass(cls=pattern):
            yield pattern


def lines_of(folder: str) -> int:
    return sum(len(p.read_text("utf-8").splitlines()) for p in (ROOT / folder).rglob("*.py"))


def main() -> None:
    code = Code()
    sizes = [len(code.texts[file].splitlines()) for file in code.files_of_sweep]
    lengths = sorted(function_lengths(code))
    median, most = lengths[len(lengths) // 2], lengths[int(len(lengths) * 0.9)]
    figures = {
        "sweep/: lines": sum(sizes),
        "sweep/: files": len(sizes),
        "sweep/: longest file": max(sizes),
        "functions: median, 90 %, longest": f"{median}, {most}, {lengths[-1]}",
        "tests/: lines": lines_of("tests"),
        "import cycles between files": len(import_cycles(code)),
        "files that import by name": len(loaders_by_name(code)),
        "places that tell kinds apart": len(kind_branches(code)),
        "private interfaces of dependencies": len(private_interfaces(code)),
        "permitted private interfaces": len(PERMITTED),
        "internal code named by strings": len(code_named_by_strings(code)),
    }
    for label, value in figures.items():
        sys.stdout.write(f"{label:40} {value}\n")


if __name__ == "__main__":
    main()
