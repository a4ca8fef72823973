"""The structure that CONTRIBUTING.md promises: imports, sizes, names."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

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
    "llms.txt",
    *("Makefile", "constraints.txt"),
    *(".ci", "sweep", "experiments", "tests", "notebooks", "results", "docs"),
}

# The name of a contract of lint-imports, a file of sweep/, and a statement there that breaks it.
VIOLATIONS = [
    ("A unit imports only from lower ones", "plan/retry.py", "import sweep.decision.decision"),
    ("A unit imports only from lower ones", "new_unit/__init__.py", "import sweep.errors"),
    (
        "No cycles between units, and none between files",
        "trial/status.py",
        "import sweep.trial.folder",
    ),
    ("Nothing in the package imports from experiments/", "errors.py", "import experiments"),
    ("The reading tower does not import training", "report/page.py", "import sweep.memory"),
    (
        "Only orchestration and the command line import tracking",
        "api.py",
        "import sweep.tracking",
    ),
    ("Only the reading tower imports analysis", "memory/search.py", "import sweep.analysis"),
    ("Reading and planning never import torch", "decision/curves.py", "import torch"),
    (
        "Training and below never import pandas, optuna, ray, mlflow or click",
        "usercode/commands.py",
        "import pandas",
    ),
    ("Only cli imports click", "api.py", "import click"),
    ("Only tracking imports mlflow", "report/page.py", "import mlflow"),
    ("Only orchestration imports optuna, ray and submitit", "memory/probe.py", "import optuna"),
    ("Only analysis and report import pandas and matplotlib", "api.py", "import pandas"),
]

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
for name in ("gpu", "memory", "throughput", "contenders"):
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
PLAN = """
import sys
import sweep.cli.show
assert sys.modules.keys().isdisjoint({"torch", "pandas", "matplotlib", "scipy", "mlflow"})
"""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git knows which files are tracked")
def test_the_top_level_has_exactly_the_entries_of_the_design() -> None:
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    settings_of_tools = {path for path in tracked if path.startswith(".") and "/" not in path}
    entries = {path.partition("/")[0] for path in tracked if path}
    assert entries - settings_of_tools == TOP_LEVEL


@pytest.mark.parametrize("program", [WORKER, HELP, PLAN], ids=["worker", "help", "plan"])
def test_a_worker_and_the_help_import_only_what_the_design_allows(program: str) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert program, "lint-imports is missing: make install"
    return subprocess.run([program, "--no-cache"], cwd=root, capture_output=True, text=True)


def test_imports_keep_the_contracts_of_the_design() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "pyproject.toml", root)
    for file, text in CODE.texts.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text, "utf-8")
    return root


@pytest.mark.parametrize(("contract", "file", "statement"), VIOLATIONS)
def test_an_import_against_a_contract_is_found(
    checkout: Path, contract: str, file: str, statement: str
) -> None:
    path = checkout / "sweep" / file
    text = path.read_text("utf-8") if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text or ''}\n{statement}\n", "utf-8")
    done = lint_imports(checkout)
    if text is None:
        shutil.rmtree(path.parent)
    else:
        path.write_text(text, "utf-8")
    assert f"{contract} BROKEN" in done.stdout


def test_every_contract_has_a_violation_that_is_found() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    names = {contract["name"] for contract in tools["importlinter"]["contracts"]}
    assert names == {contract for contract, _, _ in VIOLATIONS}


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


def test_optuna_is_imported_where_rates_are_searched_and_where_studies_of_others_are_read() -> None:
    files = {"sweep/orchestration/tuning.py", "sweep/orchestration/studies.py"}
    assert files_that_import(CODE, "optuna").keys() == files


def test_no_name_is_vague() -> None:
    names = {(file, part) for file in CODE.texts for part in file.removesuffix(".py").split("/")}
    names |= {(file, node.name) for file in CODE.texts for node in definitions(CODE, file)}
    assert {(file, name) for file, name in names if VAGUE.search(name)} == set()
