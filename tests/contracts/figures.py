"""Figures of the code that the design bounds: `python -m tests.contracts.figures`."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "sweep").rglob("*.py"))
MODULES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for path in SOURCES
}
# The two private interfaces that the memory forecast needs, one file each.
PERMITTED = {
    ("sweep/training/storages.py", "torch.utils._python_dispatch"),
    ("sweep/memory/forecast.py", "torch._subclasses.fake_tensor"),
}
PRIVATE = re.compile(r"(^|\.)_[a-z]")
COMMAND_MODULES = {"sweep.training"}  # started as `python -m sweep.training`

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(path: Path) -> str:
    """Return a path relative to the project."""
    return path.relative_to(ROOT).as_posix()


def lines_of(folder: str) -> int:
    """Return the lines of all Python files in a folder."""
    return sum(len(p.read_text("utf-8").splitlines()) for p in (ROOT / folder).rglob("*.py"))


def definitions(path: Path) -> Iterator[Definition]:
    """Yield the functions and classes of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, Definition):
            yield node


def length(node: Definition) -> int:
    """Return the lines of a definition."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def foreign_names(tree: ast.Module) -> dict[str, str]:
    """Return the names that a file imports from outside of sweep, with what they stand for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not alias.name.startswith("sweep"):
                    names[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("sweep"):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` of an attribute access on a name, or an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def private_interfaces() -> set[tuple[str, str]]:
    """Return file and interface wherever sweep uses a private name of a dependency."""
    uses = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        names = foreign_names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and PRIVATE.search(node.module or ""):
                uses.add((name_of(path), str(node.module)))
            elif isinstance(node, ast.Import):
                uses |= {(name_of(path), a.name) for a in node.names if PRIVATE.search(a.name)}
            elif isinstance(node, ast.Attribute):
                base, _, rest = dotted(node).partition(".")
                if base in names and PRIVATE.search(rest) and dotted(node) != "os._exit":
                    uses.add((name_of(path), dotted(node)))
    return uses - PERMITTED


def code_named_by_strings() -> set[tuple[str, str]]:
    """Return file and text wherever a string names a module of sweep."""
    uses = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                module, colon, _ = node.value.partition(":")
                is_named = module in MODULES and (
                    module.count(".") > 1 or (colon and "." in module)
                )
                if is_named and module not in COMMAND_MODULES:
                    uses.add((name_of(path), node.value))
    return uses


def long_functions(limit: int) -> dict[str, int]:
    """Return the functions of more lines than a limit."""
    return {
        f"{name_of(path)}:{node.name}": length(node)
        for path in SOURCES
        for node in definitions(path)
        if not isinstance(node, ast.ClassDef) and length(node) > limit
    }


def main() -> None:
    """Print the figures."""
    sizes = sorted(len(p.read_text("utf-8").splitlines()) for p in SOURCES)
    functions = sorted(
        length(n) for p in SOURCES for n in definitions(p) if not isinstance(n, ast.ClassDef)
    )
    rows = {
        "sweep/: lines": lines_of("sweep"),
        "sweep/: files": len(SOURCES),
        "sweep/: longest file": sizes[-1],
        "functions: median, 90 %, longest": (
            f"{functions[len(functions) // 2]}, {functions[int(len(functions) * 0.9)]}, "
            f"{functions[-1]}"
        ),
        "tests/: lines": lines_of("tests"),
        "private interfaces of dependencies": len(private_interfaces()),
        "permitted private interfaces": len(PERMITTED),
        "internal code named by strings": len(code_named_by_strings()),
    }
    for label, value in rows.items():
        sys.stdout.write(f"{label:40} {value}\n")


if __name__ == "__main__":
    main()
