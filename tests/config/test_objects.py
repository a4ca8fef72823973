"""User code: what identifies it, without running it."""

import sys

import pytest

from sweep.config.objects import identify_code
from sweep.errors import SweepError


@pytest.fixture
def project(tmp_path, monkeypatch):
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(
        "import numpy\nfrom my_project.layers import width\n"
        "raise RuntimeError('identifying must not run the module')\n"
    )
    (package / "layers.py").write_text("width = 8\n")
    (package / "unrelated.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return package


def test_code_is_its_module_the_projects_modules_that_it_imports_and_package_versions(project):
    code = identify_code(["my_project.model:build"])
    names = {"my_project/__init__.py", "my_project/model.py", "my_project/layers.py"}
    assert code["files"].keys() == names and code["packages"].keys() == {"numpy"}


@pytest.mark.parametrize(
    ("file", "is_changed"), [("model.py", True), ("layers.py", True), ("unrelated.py", False)]
)
def test_the_identity_changes_with_the_code_and_with_nothing_else(project, file, is_changed):
    before = identify_code(["my_project.model:build"])
    (project / file).write_text((project / file).read_text() + "# changed\n")
    assert (identify_code(["my_project.model:build"]) != before) is is_changed


@pytest.mark.parametrize("name", ["no_colon", "no_such_module:f", "sys:path", ":f", "os:"])
def test_names_without_a_python_file_are_refused(name, project):
    with pytest.raises(SweepError):
        identify_code([name])
