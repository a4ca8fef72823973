"""Rules for the files of executors, and for the files that use them."""

import inspect
import tomllib
from pathlib import Path

import pytest

from sweep.config.settings import Group, settings_of
from sweep.orchestration.executors.build import EXECUTORS
from tests.contracts.imports import files_that_import, uses_of
from tests.contracts.sources import ROOT, Code

CODE = Code()
PACKAGE = "sweep/orchestration/executors/"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SETTINGS = {
    name
    for executor in EXECUTORS
    for setting in settings_of(executor.settings)
    for name in (setting.name, *setting.path)
}
WITH_LIBRARY = [executor for executor in EXECUTORS if executor.library is not None]


def test_only_executors_know_the_settings_of_one() -> None:
    uses = uses_of(CODE, SETTINGS)
    assert {file: names for file, names in uses.items() if not file.startswith(PACKAGE)} == {}


@pytest.mark.parametrize("executor", WITH_LIBRARY, ids=lambda executor: executor.name)
def test_the_library_of_an_executor_is_imported_in_its_file_when_it_is_used(executor) -> None:
    own = Path(inspect.getfile(executor)).relative_to(ROOT).as_posix()
    assert own.startswith(PACKAGE)
    assert files_that_import(CODE, executor.library) == {own: True}
    assert executor.extra in PROJECT["optional-dependencies"]


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda executor: executor.name)
def test_the_flags_of_an_executor_are_about_machines_and_have_a_help(executor) -> None:
    for setting in settings_of(executor.settings):
        assert setting.flag.group is Group.DEVICES and setting.field.description
        assert setting.flag.commands == ("run", "plan")
