"""A check of another package, in one file: the one that docs/audit.md shows."""

import json
from pathlib import Path

import pytest

from tests.extension.packages import Installation, Package

PACKAGE = Package.of_page("audit.md")
TABLE = "batch_size,steps,loss\n8,800,1.5\n64,100,1.4\n512,12,1.6\n"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    return path


def audit(installation: Installation, table: Path) -> dict[str, dict]:
    """Return the findings of `sweep audit` by code."""
    findings = installation.read_json("audit", table)["findings"]
    return {finding["code"]: finding for finding in findings}


def test_the_report_of_a_sweep_makes_the_check_and_its_answer_depends_on_it(installation):
    PACKAGE.install(installation.packages)
    budget = ("--batches", "4,8", "--budget", "128")
    installation.run("run", "quadratic", *budget, "--out", "sweep", "--yes")

    out = installation.work / "sweep"
    evidence = "The least number of steps is 16."
    condition = "Every training has at least 100 steps."
    (row,) = [line for line in (out / "report.md").read_text().splitlines() if "few_steps" in line]
    assert condition in row and evidence in row and "Use a larger budget." in row
    reasons = json.loads((out / "answer.json").read_text())["reasons"]
    assert f"{evidence} Use a larger budget." in reasons
    assert audit(installation, out)["few_steps"]["rows"] == [4, 8]


def test_the_audit_of_a_table_makes_the_check_where_its_package_is_installed(installation, table):
    without = audit(installation, table)
    PACKAGE.install(installation.packages)
    with_package = audit(installation, table)
    assert with_package.pop("few_steps") == {
        "code": "few_steps",
        "rows": [512],
        "message": "The least number of steps is 12.",
        "remedy": "Use a larger budget.",
    }
    assert with_package == without


def test_a_package_that_cannot_be_imported_is_named_and_nothing_is_concluded(installation, table):
    modules = {"my_checks.py": "import a_library_that_is_missing"}
    Package(modules, PACKAGE.entry_points).install(installation.packages)
    refusal = installation.refusal("audit", table, "--json")
    assert "'my_checks' of the package my-package" in refusal
