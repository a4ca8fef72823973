"""The structure that CONTRIBUTING.md promises: imports, sizes, names."""

import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.contracts.figures import (
    NOT_IN_A_WORKER,
    code_named_by_strings,
    definitions,
    kind_branches,
    private_interfaces,
)
from tests.contracts.imports import (
    files_that_import,
    import_cycles,
    loaders_by_name,
    reachable,
    uses_of,
)
from tests.contracts.sources import ROOT, Code

CODE = Code()
TOP_LEVEL = {
    *("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "SECURITY.md"),
    *("Makefile", "constraints.txt"),
    *(".ci", "sweep", "experiments", "tests", "notebooks", "results", "docs"),
}

# As a word of a name (IoUtils, http_handler), or as the whole name
VAGUE = re.compile(
    r"(^|_)(manager|helper|util|handler|iteration)s?(_|$)|^_*common$"
    r"|(Manager|Helper|Util|Handler|Iteration)s?([A-Z_]|$)"
)

WORKER = f"""
import importlib, pkgutil, runpy, sys
for name in {NOT_IN_A_WORKER}:
    sys.modules[name] = None  # an import of it fails
for unit in ("training", "workloads", "models", "data", "usercode"):
    folder = importlib.import_module("sweep." + unit).__path__
    for module in pkgutil.walk_packages(folder, "sweep." + unit + "."):
        importlib.import_module(module.name)
sys.path.insert(0, "tests/benchmarks")
for name in ("gpu", "cuda_graph", "memory", "throughput", "contenders"):
    runpy.run_path("tests/benchmarks/" + name + ".py", run_name="imported")
runpy.run_path("tests/training/test_gpu.py", run_name="imported")
"""
HELP = """
import sys
before = set(sys.modules)
sys.argv = ["sweep", "--help"]
from sweep.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert loaded - sys.stdlib_module_names == {"click", "sweep"}, loaded
"""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git knows which files are tracked")
def test_the_top_level_has_exactly_the_entries_of_the_design() -> None:
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    settings_of_tools = {path for path in tracked if path.startswith(".") and "/" not in path}
    entries = {path.partition("/")[0] for path in tracked if path}
    assert entries - settings_of_tools == TOP_LEVEL


@pytest.mark.parametrize("program", [WORKER, HELP], ids=["worker", "help"])
def test_a_worker_and_the_help_import_only_what_the_design_allows(program: str) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_keep_the_contracts_of_the_design() -> None:
    lint_imports = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert lint_imports, "lint-imports is missing: make install"
    command = [lint_imports, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_private_interface_is_used_and_no_internal_code_is_named_by_a_string() -> None:
    assert private_interfaces(CODE) == set()
    assert code_named_by_strings(CODE) == set()


def test_files_import_each_other_in_no_circle_and_kinds_decide_nothing() -> None:
    assert import_cycles(CODE) == []
    assert kind_branches(CODE) == set()


def test_code_is_imported_by_name_in_the_two_files_for_user_code() -> None:
    assert loaders_by_name(CODE) == {"sweep/usercode/objects.py": {"import_module"}}
    assert uses_of(CODE, {"entry_points"}).keys() == {"sweep/usercode/extensions.py"}


def test_every_file_is_reached_by_imports_and_training_reaches_the_units_below_it_only() -> None:
    modules = {module for module in CODE.modules if module.startswith("sweep")}
    entries = ("sweep", "sweep.__main__", "sweep.training.__main__", "sweep.report.publish")
    assert reachable(CODE, *entries) == modules
    of_training = {f"{module}.".split(".")[1] for module in reachable(CODE, entries[2])}
    assert of_training - {""} == {
        *("training", "workloads", "data", "models", "plan", "trial", "config", "usercode"),
        *("errors", "resources", "script", "signals", "version"),
    }


def test_optuna_is_imported_in_one_file() -> None:
    assert files_that_import(CODE, "optuna").keys() == {"sweep/orchestration/tuning.py"}


def test_no_name_is_vague() -> None:
    names = {(file, part) for file in CODE.texts for part in file.removesuffix(".py").split("/")}
    names |= {(file, node.name) for file in CODE.texts for node in definitions(CODE, file)}
    assert {(file, name) for file, name in names if VAGUE.search(name)} == set()
