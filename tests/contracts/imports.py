"""Who imports whom: cycles, what an entry reaches, and imports by name."""

import ast
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache

from tests.contracts.sources import Code, module_of

# By these names Python loads code that a string names.
LOADERS = {
    *("__import__", "import_module", "resolve_name", "runpy", "run_module", "run_path"),
    *("spec_from_file_location", "spec_from_loader", "module_from_spec", "exec_module"),
    *("load_module", "SourceFileLoader", "zipimport"),
}
BUILTIN_LOADERS = {"exec", "eval"}  # also methods of objects, such as model.eval()


@dataclass(frozen=True)
class Import:
    """A name that a statement imports: a module, or an object in a module."""

    name: str  # dotted
    is_lazy: bool  # in a function, so that importing the file does not execute it
    is_for_types: bool  # under `if TYPE_CHECKING`, so that nothing executes it


@cache
def imports_of(code: Code, file: str) -> tuple[Import, ...]:
    return tuple(_imports_below(code.trees[file], file, is_lazy=False, is_for_types=False))


def _imports_below(node: ast.AST, file: str, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for name in _names(child, file):
                yield Import(name, is_lazy, is_for_types)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            names_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports_below(
                child, file, is_lazy or is_function, is_for_types or names_types
            )


def _names(statement: ast.Import | ast.ImportFrom, file: str) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    base = statement.module or ""
    if statement.level:
        folder = file.split("/")[: -statement.level]
        base = ".".join([*folder, *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in statement.names]


def module_that_ships(code: Code, file: str, name: str) -> str | None:
    """Return the module that a name in a file is, or whose object it is; None if it does not ship.

    Scripts also import the modules that lie next to them.
    """
    folder = module_of(file).rpartition(".")[0]
    next_to_it = [f"{folder}.{name}"] if file.startswith("experiments/") else []
    for candidate in (name, *next_to_it):
        for module in (candidate, candidate.rpartition(".")[0]):
            if module in code.modules:
                return module
    return None


def import_cycles(code: Code) -> list[set[str]]:
    """Return the groups of modules that import each other, also in functions and for types."""
    reached: dict[str, set[str]] = {}
    for module, file in code.modules.items():
        targets = [module_that_ships(code, file, found.name) for found in imports_of(code, file)]
        reached[module] = {target for target in targets if target is not None}
    for between in code.modules:  # Warshall's transitive closure
        for modules in reached.values():
            if between in modules:
                modules |= reached[between]
    groups = []
    for module, modules in reached.items():
        group = {other for other in modules if module in reached[other]}
        if group and module == min(group):
            groups.append(group)
    return groups


def reachable(code: Code, *entries: str) -> set[str]:
    """Return the modules that running these modules can execute, found by their statements.

    A package that is executed only because something in it is imported contributes no imports of
    its functions: nobody calls them.
    """
    called: set[str] = set()
    executed: set[str] = set()
    pending = [(entry, True) for entry in entries]
    while pending:
        module, is_called = pending.pop()
        if module not in code.modules or module in called or (module in executed and not is_called):
            continue
        executed.add(module)
        if is_called:
            called.add(module)
        file = code.modules[module]
        for statement in imports_of(code, file):
            target = module_that_ships(code, file, statement.name)
            is_executed = not statement.is_for_types and (is_called or not statement.is_lazy)
            if target is not None and is_executed:
                pending.append((target, True))
        package = module.rpartition(".")[0]
        if package:
            pending.append((package, False))
    return executed


def loaders_by_name(code: Code) -> dict[str, set[str]]:
    """Return, by file, the names that load code which a string names."""
    return uses_of(code, LOADERS, BUILTIN_LOADERS)


def uses_of(
    code: Code, names: AbstractSet[str], builtins: AbstractSet[str] = frozenset()
) -> dict[str, set[str]]:
    """Return, by file, which of these names and builtins its Python has, also as a text."""
    uses: dict[str, set[str]] = {}
    for file in code.texts:
        used: set[str] = set()
        for node in code.nodes(file):
            match node:
                case ast.Name(id=name):
                    used |= {name} & (names | builtins)
                case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                    used |= {name} & names
                case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
                    used |= {*name.split(".")} & names
        if used:
            uses[file] = used
    return uses


def files_that_import(code: Code, package: str) -> dict[str, bool]:
    """Return the files of sweep that import a package, and whether only when it is used."""
    files: dict[str, bool] = {}
    for file in code.files_of_sweep:
        for statement in imports_of(code, file):
            if statement.name.partition(".")[0] == package and not statement.is_for_types:
                files[file] = files.get(file, True) and statement.is_lazy
    return files
