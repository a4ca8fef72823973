"""A learning-rate policy of another package, in one file: the one that docs/tuning.md shows."""

import json
import re

import pandas as pd
import pytest

from sweep.trial.folder import SweepFolder
from tests.extension.packages import Installation, Package

PACKAGE = Package.of_page("tuning.md")
QUICK = ("quick", "--batches", "8,64", "--budget", "8192", "--device", "cpu")
OTHER = """
from my_policies import CubeRoot

class Linear(CubeRoot):
    kind = "linear"

class Same(CubeRoot):
    kind = "same"
"""


@pytest.fixture
def finished(installation):
    """Run a sweep with the policy."""
    PACKAGE.install(installation.packages)
    words = ("--lr", "cbrt:1e-3@8", "--seeds", "3", "--yes", "--out", "out")
    installation.run("run", *QUICK, *words)
    return installation


def trained(installation: Installation) -> pd.DataFrame:
    return pd.read_csv(installation.work / "out" / "trials.csv").drop_duplicates("batch_size")


def test_its_rates_are_trained_and_its_rules_are_in_plan_and_report(finished):
    rates = trained(finished).set_index("batch_size")["learning_rate"]
    assert rates.to_dict() == pytest.approx({8: 1e-3, 64: 2e-3})
    assert (trained(finished)["policy"] == "cbrt:0.001@8").all()

    rule = "rate ∝ ∛B (an example)"
    assert rule in finished.run("run", *QUICK, "--lr", "cbrt:1e-3@8", "--dry-run", "--out", "new")
    report = (finished.work / "out" / "report.md").read_text()
    assert rule in report and "cbrt:0.001@8" in report


def test_it_grows_by_another_policy_and_resumes(finished):
    words = ("--seeds", "3", "--yes", "--out", "out")
    finished.run("run", *QUICK, "--lr", "cbrt:1e-3@8,1e-3", *words)
    states = [trial.read_status().state for trial in SweepFolder(finished.work / "out").trials()]
    assert states == ["COMPLETE"] * 12
    labels = set(pd.read_csv(finished.work / "out" / "trials.csv")["policy"])
    assert labels == {"cbrt:0.001@8", "fixed"}


def test_where_its_package_is_missing_its_table_counts_as_untuned(finished, tmp_path):
    with_package = json.loads(finished.run("answer", "out", "--json"))
    for file in finished.packages.iterdir():
        if file.is_file():
            file.unlink()
    (finished.packages / "my_package-1.0.dist-info" / "entry_points.txt").unlink()
    for source in ("out", "out/trials.csv"):
        answer = json.loads(finished.run("answer", source, "--json"))
        assert answer["is_provisional"] and "fixed_learning_rate" in answer["failed_checks"]
        assert answer["failed_checks"] == with_package["failed_checks"]


def test_an_unknown_policy_is_refused_with_the_known_ones(installation):
    PACKAGE.install(installation.packages)
    message = installation.refusal("run", *QUICK, "--lr", "cbrt:1e-3", "--out", "out")
    assert "tuned or cbrt:RATE@BATCH, got 'cbrt:1e-3'" in message


@pytest.mark.parametrize(
    ("policies", "says"),
    [
        ({"gone": "no_such_module:Gone"}, "'gone' of the package my-package .* must be importable"),
        ({"path": "pathlib:Path"}, "'path' of the package my-package .* must be a class"),
        ({"other": "other:Same"}, "'other' of the package my-package .* must be a class"),
        ({"linear": "other:Linear"}, "each kind in sweep.policies must be unique, but 'linear' of"),
    ],
)
def test_a_package_with_a_mistake_is_refused_in_one_sentence(installation, policies, says):
    modules = {**PACKAGE.modules, "other.py": OTHER}
    Package(modules, {"sweep.policies": policies}).install(installation.packages)
    assert re.search(says, installation.refusal("run", *QUICK, "--lr", "1e-3", "--out", "out"))
