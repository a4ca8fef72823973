"""Rules for the files of executors, and for the files that use them."""

import ast
import inspect
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from sweep.config.settings import Group, settings_of
from sweep.orchestration.executors.build import EXECUTORS
from tests.contracts.figures import ROOT, SOURCES, name_of, nodes

PACKAGE = ROOT / "sweep" / "orchestration" / "executors"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NAMES = {executor.name for executor in EXECUTORS}
SETTINGS = {
    name
    for executor in EXECUTORS
    for setting in settings_of(executor.settings)
    for name in (setting.name, *setting.path)
}
WITH_LIBRARY = [executor for executor in EXECUTORS if executor.library is not None]


def libraries_of(statements: Iterable[ast.AST]) -> set[str]:
    """Return the top packages that statements import."""
    modules = set()
    for node in statements:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module))
    return {module.partition(".")[0] for module in modules}


def test_only_executors_know_the_name_or_the_settings_of_one() -> None:
    found = set()
    for path in SOURCES:
        if PACKAGE in path.parents:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Compare | ast.match_case):
                texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
                found |= {(name_of(path), part.value) for part in texts if part.value in NAMES}
            if isinstance(node, ast.Attribute) and node.attr in SETTINGS:
                found.add((name_of(path), node.attr))
            if isinstance(node, ast.Constant) and node.value in SETTINGS:
                found.add((name_of(path), str(node.value)))
    assert found == set()


@pytest.mark.parametrize("executor", WITH_LIBRARY, ids=lambda executor: executor.name)
def test_the_library_of_an_executor_is_imported_in_its_file_when_it_is_used(executor) -> None:
    own = Path(inspect.getfile(executor))
    assert own.parent == PACKAGE
    assert [path for path in SOURCES if executor.library in libraries_of(nodes(path))] == [own]
    assert executor.library not in libraries_of(ast.parse(own.read_text("utf-8")).body)
    assert executor.extra in PROJECT["optional-dependencies"]


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda executor: executor.name)
def test_the_flags_of_an_executor_are_about_machines_and_have_a_help(executor) -> None:
    for setting in settings_of(executor.settings):
        assert setting.flag.group is Group.DEVICES and setting.field.description
        assert setting.flag.commands == ("run", "plan")
