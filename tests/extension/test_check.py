"""A check of another package, in one file: the one that docs/audit.md shows."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "audit.md").read_text("utf-8")
MODULE = re.search(r"`my_checks\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)[1]
PROJECT = re.search(r"```toml\n(\[project\.entry-points.*?)```", PAGE, re.DOTALL)[1]
TABLE = "batch_size,steps,loss\n8,800,1.5\n64,100,1.4\n512,12,1.6\n"


def install(code: str, folder: Path) -> Path:
    """Write a package as pip installs it: its module, and the metadata of its project."""
    folder.mkdir()
    (folder / "my_checks.py").write_text(code)
    metadata = folder / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    groups = tomllib.loads(PROJECT)["project"]["entry-points"]
    lines = []
    for group, entry_points in groups.items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder


def call(words: list[str], *packages: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, [ROOT, *packages]))
    return subprocess.run(
        [sys.executable, "-m", "sweep", *words],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    return path


def audit(table: Path, *packages: Path) -> dict[str, dict]:
    """Return the findings of `sweep audit` by code."""
    done = call(["audit", str(table), "--json"], *packages)
    assert done.returncode == 0, done.stderr
    return {finding["code"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_the_report_of_a_sweep_makes_the_check_and_its_answer_depends_on_it(tmp_path):
    package = install(MODULE, tmp_path / "site")
    out = tmp_path / "sweep"
    budget = ["--batches", "4,8", "--budget", "8192"]
    done = call(["run", "quick", *budget, "--out", str(out), "--yes"], package)
    assert done.returncode == 0, done.stderr

    evidence = "The least number of steps is 16."
    condition = "Every training has at least 100 steps."
    (row,) = [line for line in (out / "report.md").read_text().splitlines() if "few_steps" in line]
    assert condition in row and evidence in row and "Use a larger budget." in row
    reasons = json.loads((out / "answer.json").read_text())["reasons"]
    assert f"{evidence} Use a larger budget." in reasons
    assert audit(out, package)["few_steps"]["rows"] == [4, 8]


def test_the_audit_of_a_table_makes_the_check_where_its_package_is_installed(tmp_path, table):
    package = install(MODULE, tmp_path / "site")
    with_package = audit(table, package)
    assert with_package.pop("few_steps") == {
        "code": "few_steps",
        "rows": [512],
        "message": "The least number of steps is 12.",
        "remedy": "Use a larger budget.",
    }
    assert with_package == audit(table)


def test_a_package_that_cannot_be_imported_is_named_and_nothing_is_concluded(tmp_path, table):
    package = install("import a_library_that_is_missing", tmp_path / "site")
    done = call(["audit", str(table), "--json"], package)
    assert (done.returncode, done.stdout) == (2, "")
    assert "my_checks of my-package" in done.stderr and "Traceback" not in done.stderr
