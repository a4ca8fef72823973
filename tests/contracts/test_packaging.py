"""What is installed: the wheel, the shipped experiments, the pinned versions, the extras."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import sweep
from sweep.cli.commands.running import run
from sweep.config.load import load_experiment

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.toml"))
# Files that experiments and examples write when they run
WRITTEN = (
    "elman/__pycache__/elman.cpython-311.pyc",
    "examples/cnn/results/digits/plan.json",
    "examples/hugging_face/model/config.json",
)
NOT_SHIPPED = {"report", "__pycache__", "results", "model"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that a wheel is built from, as they are after the experiments ran."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in (".gitignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("sweep", "experiments"):
        ignored = shutil.ignore_patterns("node_modules")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in WRITTEN:
        file = folder / "experiments" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, checkout],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    assert wheel.name == f"batch_size_sweep-{sweep.__version__}-py3-none-any.whl"
    return wheel


def test_the_wheel_has_every_module_and_experiment_and_nothing_else(wheel: Path) -> None:
    wheel_files = zipfile.ZipFile(wheel).namelist()
    information = f"batch_size_sweep-{sweep.__version__}.dist-info"
    assert {name.partition("/")[0] for name in wheel_files} == {"sweep", information}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sweep").rglob("*.py")}
    assert {*modules, "sweep/py.typed", f"{information}/METADATA"} <= set(wheel_files)
    scripts = {f"sweep/report/scripts/{name}" for name in ("charts.min.js", "LICENSES.txt")}
    assert scripts <= set(wheel_files)


def test_experiments_ship_with_their_code_and_without_reports_results_and_caches(
    checkout: Path, wheel: Path
) -> None:
    experiments = checkout / "experiments"
    files = {path.relative_to(experiments) for path in experiments.rglob("*") if path.is_file()}
    with_report = {path.parts[1] for path in files if "report" in path.parts}
    assert with_report == {"cnn", "command", "hugging_face"}

    prefix = "sweep/experiments/"
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(prefix)]
    shipped = {Path(name.removeprefix(prefix)) for name in names}
    assert shipped == {path for path in files if NOT_SHIPPED.isdisjoint(path.parts)}
    assert {path.suffix for path in shipped} == {".toml", ".py", ".md", ".cfg", ".csv"}
    folders = {path.parts[0] for path in shipped if len(path.parts) > 1}
    assert folders == {"elman", "examples", "studies"}


def test_the_description_of_the_package_has_no_link_into_the_repository(wheel: Path) -> None:
    (name,) = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA")]
    description = zipfile.ZipFile(wheel).read(name).decode().partition("\n\n")[2]
    assert "Why not a loop" in description and len(description) > 3000
    assert not re.search(r"\]\((?!https?:)", description)


def test_the_wheel_alone_finds_the_experiments_and_their_own_code(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    words = ["forecast", "elman", "--batches", "1", "--context", "16", "--json"]
    command = [sys.executable, "-m", "sweep", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["points"][0]["peak_bytes"] > 0
    assert "This runs your code" not in done.stderr


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_shipped_experiment_loads_and_states_its_question(path: Path) -> None:
    experiment = load_experiment(path.stem)
    assert experiment.name == path.stem
    assert experiment.question.endswith("?")


def test_the_help_of_run_names_every_shipped_experiment() -> None:
    named = str(run.help).split("a shipped name (")[1].split(")")[0]
    assert set(" ".join(named.split()).split(", ")) == {path.stem for path in EXPERIMENTS}


def test_every_direct_dependency_is_pinned_within_its_bounds_without_a_build_label() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    written = (line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in written}
    needed = map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])
    for requirement in needed:
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier
    assert [name for name, version in pins.items() if "+" in version] == []
