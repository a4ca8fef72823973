"""A learning-rate policy of another package, in one file: the one that docs/tuning.md shows."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from sweep.trial.folder import SweepFolder
from tests.extension.packages import ROOT, Installation, Package

PACKAGE = Package.of_page("tuning.md")
QUICK = ("quick", "--batches", "8,64", "--budget", "8192", "--device", "cpu")
OTHER = """
from my_policies import CubeRoot

class Linear(CubeRoot):
    kind = "linear"

class Same(CubeRoot):
    kind = "same"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep with the policy in the folder `out`; not to be changed."""
    installation = Installation(tmp_path_factory.mktemp("policy"))
    PACKAGE.install(installation.packages)
    words = ("--lr", "cbrt:1e-3@8", "--seeds", "3", "--yes", "--out", "out")
    installation.run("run", *QUICK, *words)
    return installation


def trained(folder: Path, policy: str) -> pd.Series:
    """Return the rates of the trials of a policy, by batch size."""
    trials = pd.read_csv(folder / "trials.csv")
    chosen = trials[trials["policy"] == policy].drop_duplicates("batch_size")
    return chosen.set_index("batch_size")["learning_rate"]


def test_its_rates_are_trained_and_the_report_gives_its_rules(finished):
    assert trained(finished.work / "out", "cbrt:0.001@8").to_dict() == pytest.approx(
        {8: 1e-3, 64: 2e-3}
    )
    report = (finished.work / "out" / "report.md").read_text()
    assert (
        "| policy cbrt:0.001@8 | rate ∝ ∛B (an example); the same weight decay; rate 0." in report
    )


@pytest.mark.slow
def test_its_sweep_grows_by_batch_sizes_and_by_another_policy(finished):
    out = finished.work / "grown"
    shutil.copytree(finished.work / "out", out)
    words = ("--yes", "--out", out, "--seeds", "3")
    finished.run("run", *QUICK, "--batches", "16", "--lr", "cbrt:1e-3@8", *words)
    finished.run("run", *QUICK, "--lr", "1e-3", *words)
    states = [trial.read_status().state for trial in SweepFolder(out).trials()]
    assert states == ["COMPLETE"] * 15
    rates = trained(out, "cbrt:0.001@8")
    assert rates[16] == pytest.approx(1e-3 * 2 ** (1 / 3))
    assert set(trained(out, "fixed")) == {1e-3}


def test_where_its_package_is_missing_its_trials_count_as_untuned(finished):
    with_package = finished.read_json("answer", "out")
    out = finished.work / "without"
    shutil.copytree(finished.work / "out", out)
    without_package = {"PYTHONPATH": str(ROOT)}
    for source in (out, out / "trials.csv"):
        answer = finished.read_json("answer", source, **without_package)
        assert answer["provisional"] and "only show that the rate suits" in answer["reasons"][0]
        assert answer["batch_sizes"] == with_package["batch_sizes"]
    finished.run("report", out, **without_package)
    report = (out / "report.md").read_text()
    assert "| fixed_learning_rate (makes the answer provisional) |" in report
    assert "| policy cbrt:0.001@8 | cbrt:0.001@8; rate 0." in report


def test_its_name_alone_is_refused_with_the_forms_of_all_policies(installation):
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
