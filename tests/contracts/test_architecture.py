"""The structure that CONTRIBUTING.md promises: imports, sizes, names."""

import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.contracts.figures import (
    NOT_IN_A_WORKER,
    ROOT,
    WITH_EXPERIMENTS,
    code_named_by_strings,
    definitions,
    import_cycles,
    kind_branches,
    name_of,
    private_interfaces,
)

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
    assert private_interfaces() == set()
    assert code_named_by_strings() == set()


def test_files_import_each_other_in_no_circle_and_kinds_decide_nothing() -> None:
    assert import_cycles() == []
    assert kind_branches() == set()


def test_no_name_is_vague() -> None:
    files = WITH_EXPERIMENTS
    names = {(name_of(path), part) for path in files for part in (path.stem, path.parent.name)}
    names |= {(name_of(path), node.name) for path in files for node in definitions(path)}
    assert {(path, name) for path, name in names if VAGUE.search(name)} == set()
