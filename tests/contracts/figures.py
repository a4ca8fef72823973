"""Figures of the code, which the design reports: `python -m tests.contracts.figures`."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "sweep").rglob("*.py"))
WITH_EXPERIMENTS = [*SOURCES, *sorted((ROOT / "experiments").rglob("*.py"))]
# The two private interfaces that the memory forecast needs, one file each.
PERMITTED = {
    ("sweep/training/storages.py", "torch.utils._python_dispatch"),
    ("sweep/memory/forecast.py", "torch._subclasses.fake_tensor"),
}
KINDS = {
    *("transformer", "own", "hugging_face", "object", "quadratic"),  # of models
    *("pretrain", "grpo"),  # of workloads
}
PRIVATE = re.compile(r"(^|\.)_[a-zA-Z]")
COMMAND_MODULES = {"sweep.training"}  # started as `python -m sweep.training`
# A worker needs torch, numpy, pydantic, tokenizers and safetensors.
NOT_IN_A_WORKER = {
    *("click", "datasets", "huggingface_hub", "jinja2", "markdown_it", "matplotlib", "mlflow"),
    *("optuna", "pandas", "psutil", "ray", "rich", "scipy", "submitit"),
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return name_of(path.with_suffix("")).replace("/", ".").removesuffix(".__init__")


MODULES = {module_of(path) for path in SOURCES}


def lines_of(folder: str) -> int:
    return sum(len(p.read_text("utf-8").splitlines()) for p in (ROOT / folder).rglob("*.py"))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text("utf-8")))


def definitions(path: Path) -> Iterator[Definition]:
    return (node for node in nodes(path) if isinstance(node, Definition))


def function_lengths() -> dict[str, int]:
    return {
        f"{name_of(path)}:{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in definitions(path)
        if not isinstance(node, ast.ClassDef)
    }


def private_interfaces() -> set[tuple[str, str]]:
    """Return file and interface of every use of a private name of a dependency."""
    uses = set()
    for path in WITH_EXPERIMENTS:
        foreign = set()  # names that the file imports from outside of sweep
        for node in nodes(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                names = [module, *(alias.name for alias in node.names)]
                if not any(name.startswith("sweep") for name in names):
                    foreign |= {(a.asname or a.name).partition(".")[0] for a in node.names}
                    private = names[:1] if module else names[1:]
                    uses |= {(name_of(path), name) for name in private if PRIVATE.search(name)}
        for node in nodes(path):
            if isinstance(node, ast.keyword) and PRIVATE.search(node.arg or ""):
                uses.add((name_of(path), node.arg))
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                base, _, rest = text.partition(".")
                is_name = re.fullmatch(r"[\w.]+", text) and text != "os._exit"
                if is_name and base in foreign and PRIVATE.search(rest):
                    uses.add((name_of(path), text))
    return uses - PERMITTED


def code_named_by_strings() -> set[tuple[str, str]]:
    """Return file and text of every string that names a module of sweep."""
    uses = set()
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                module, colon, _ = node.value.partition(":")
                is_dotted = module.count(".") > 1 or (colon and "." in module)
                if module in MODULES - COMMAND_MODULES and is_dotted:
                    uses.add((name_of(path), node.value))
    return uses


def import_cycles() -> list[set[str]]:
    """Return the groups of files that import each other, also inside functions."""
    imports: dict[str, set[str]] = {}
    for path in SOURCES:
        name = module_of(path)
        imports[name] = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
                imports[name] |= inner or {str(node.module)}
    reachable = {name: reach & MODULES for name, reach in imports.items()}
    for between in MODULES:  # Warshall's transitive closure
        for reach in reachable.values():
            if between in reach:
                reach |= reachable[between]
    groups = {name: {n for n in reach if name in reachable[n]} for name, reach in reachable.items()}
    return [group for name, group in groups.items() if group and name == min(group)]


def kind_branches() -> set[tuple[str, int, str]]:
    """Return file, line and name of each kind of model or workload outside of their units."""
    return {
        (name_of(path), node.lineno, node.value)
        for path in SOURCES
        if path.relative_to(ROOT / "sweep").parts[0] not in ("config", "models", "workloads")
        for compare in nodes(path)
        if isinstance(compare, ast.Compare | ast.match_case)
        for node in ast.walk(compare)
        if isinstance(node, ast.Constant) and node.value in KINDS
    }


def main() -> None:
    sizes = [len(path.read_text("utf-8").splitlines()) for path in SOURCES]
    lengths = sorted(function_lengths().values())
    median, most = lengths[len(lengths) // 2], lengths[int(len(lengths) * 0.9)]
    figures = {
        "sweep/: lines": sum(sizes),
        "sweep/: files": len(SOURCES),
        "sweep/: longest file": max(sizes),
        "functions: median, 90 %, longest": f"{median}, {most}, {lengths[-1]}",
        "tests/: lines": lines_of("tests"),
        "import cycles between files": len(import_cycles()),
        "branches on a kind of model or workload": len(kind_branches()),
        "private interfaces of dependencies": len(private_interfaces()),
        "permitted private interfaces": len(PERMITTED),
        "internal code named by strings": len(code_named_by_strings()),
    }
    for label, value in figures.items():
        sys.stdout.write(f"{label:40} {value}\n")


if __name__ == "__main__":
    main()
