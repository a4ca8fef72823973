"""A learning-rate policy of another package, in one file: the one that docs/tuning.md shows."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from sweep.analysis.results import load_sweep
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import read_request
from sweep.plan.rate_search import GRID
from sweep.trial.folder import SweepFolder
from sweep.usercode.extensions import load_extensions
from tests.analysis.made_up_sweeps import write_clear_sweep
from tests.extension.packages import ROOT, Installation, Package

PACKAGE = Package.of_page("tuning.md")
SMALL = ("quadratic", "--batches", "8,64", "--budget", "8192", "--device", "cpu")
OTHER = """
from my_policies import CubeRoot

class Linear(CubeRoot):
    kind = "linear"

class Same(CubeRoot):
    kind = "same"
"""

SEARCH = """
from sweep.plan.policies import Tuned

class Near(Tuned):
    kind = "near"
    forms = ("near",)

    def rate_at(self, batch_size, optimizer="adamw"):
        return 0.02
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep with the policy in the folder `out`; not to be changed."""
    installation = Installation(tmp_path_factory.mktemp("policy"))
    PACKAGE.install(installation.packages)
    words = ("--lr", "cbrt:1e-3@8", "--seeds", "3", "--yes", "--out", "out")
    installation.run("run", *SMALL, *words)
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
    finished.run("run", *SMALL, "--batches", "16", "--lr", "cbrt:1e-3@8", *words)
    finished.run("run", *SMALL, "--lr", "1e-3", *words)
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
    message = installation.refusal("run", *SMALL, "--lr", "cbrt:1e-3", "--out", "out")
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
    assert re.search(says, installation.refusal("run", *SMALL, "--lr", "1e-3", "--out", "out"))


@pytest.fixture
def search(installation, monkeypatch):
    """The package of a tuned policy, installed for this process."""
    package = Package({"my_search.py": SEARCH}, {"sweep.policies": {"near": "my_search:Near"}})
    package.install(installation.packages)
    monkeypatch.syspath_prepend(str(installation.packages))
    load_extensions.cache_clear()
    yield
    load_extensions.cache_clear()


def tried_rates(lr: str, folder: Path) -> list[float]:
    """Return the rates that `sweep plan` shows of the search of a policy at batch size 4."""
    settings = {"batches": "4,16", "budget": 6400, "precision": "fp32", "device": "cpu"}
    planned = make_plan(read_request("quadratic", {**settings, "lr": lr}, folder))
    tuning = [row for row in planned.command_rows().trials if row.stage == "tune"]
    return [row.learning_rate for row in tuning if (row.policy, row.batch_size) == (lr, 4)]


def test_a_tuned_one_searches_around_its_centre_and_is_proposed_again(search, tmp_path):
    around_centre = [0.02 * factor for factor in GRID]
    assert tried_rates("near", tmp_path / "new") == around_centre

    folder = tmp_path / "s"
    write_clear_sweep(folder, {4: 1.0, 16: 1.1}, lr="near", seeds=2)
    answer = load_sweep(folder).answer()
    assert answer.policy == "near" and "--lr near" in answer.settle

    # No winner of one policy is taken over by another one.
    rates = tried_rates("tuned", folder)
    assert len(rates) == len(GRID) and not set(rates) & set(around_centre)
