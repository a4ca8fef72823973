"""Several optimizers in one sweep: each is tuned at each batch size, and their ranks are right."""

import json
import os
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
import pytest

from sweep.analysis.results import load_sweep
from sweep.analysis.table_answer import answer
from sweep.config.arms import Arm
from sweep.config.load import load_experiment
from sweep.errors import SweepError
from sweep.orchestration.looks import trials_after_look
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import Request
from sweep.orchestration.status import sweep_status
from sweep.plan.plan import load_plan
from sweep.report.report import write_report
from sweep.trial.folder import SweepFolder
from tests.orchestration.clusters import ON_CPU, run_in
from tests.orchestration.test_tuning import Interrupted

OPTIMIZERS = Path(__file__).parents[1] / "training"
NEWTON = "own_optimizers:Newton"
TOKENS, DIMENSIONS, NOISE = 2048, 100, 0.1
SWAP = {
    "batches": "16,128",
    "budget": TOKENS,
    "lr": "tuned",
    "seeds": 5,
    "optimizers": f"sgd,{NEWTON}",
    "model_option": {"dimensions": DIMENSIONS, "noise": NOISE, "noise_power": 0},
    "optimizer": {"weight_decay": 0.0, "clip": 0.0},
    "tuning": {"centres": {"sgd": 0.8, NEWTON: 0.05}, "prune": False},
}


def expected_loss(batch_size: int, rate: float, inverse: np.ndarray) -> float:
    """Return the expected ½ Σ h w² of steps that are multiplied by `inverse`, from w² = 1.

    A step multiplies E w² by (1 − ηph)² and adds (ηp)²c/B.
    """
    h = 1 / np.arange(1, DIMENSIONS + 1)
    kept = (1 - rate * inverse * h) ** 2
    added = (rate * inverse) ** 2 * NOISE / batch_size
    shrink = kept ** (TOKENS // batch_size)
    return float((h / 2 * (shrink + (1 - shrink) / (1 - kept) * added)).sum())


INVERSES = {"sgd": np.ones(DIMENSIONS), NEWTON: np.arange(1.0, DIMENSIONS + 1)}


@pytest.fixture(scope="module", autouse=True)
def own_optimizers():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(OPTIMIZERS))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(OPTIMIZERS), str(Path.cwd()))))
        yield


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """A sweep that nothing disturbed; not to be changed."""
    return run_in(tmp_path_factory.mktemp("swapped") / "sweep", Interrupted(0), **SWAP)


def test_ranks_swap_where_theory_says(swapped):
    assert swapped.exit_code == 0
    sweep = load_sweep(swapped.folder.path)
    made = sweep.answer()
    trials = sweep.trials
    theory = {}
    for name, size in product(INVERSES, (16, 128)):
        rows = trials[(trials["optimizer"] == name) & (trials["batch_size"] == size)]
        losses = {r: expected_loss(size, r, INVERSES[name]) for r in rows["learning_rate"].unique()}
        theory[name, size] = min(losses.values())
        finals = rows[rows["stage"] == "final"]
        used = losses[finals["learning_rate"].iloc[0]]
        assert finals["final_valid_loss"].mean() == pytest.approx(used, rel=0.15)
        assert used < 1.02 * theory[name, size]
    ranking = made.optimizers
    for size in (16, 128):
        assert ranking.best_first[size] == sorted(INVERSES, key=lambda name: theory[name, size])
    assert ranking.best_first[16][0] == "sgd" and ranking.best_first[128][0] == NEWTON
    assert ranking.is_same is False and all(gap.is_decided for gap in ranking.gaps)
    for gap in ranking.gaps:
        low, high = gap.gap
        gap_in_theory = theory[gap.worse, gap.batch_size] - theory[gap.better, gap.batch_size]
        assert 0 < low <= gap_in_theory and (high is None or gap_in_theory <= high)
    assert {gap.batch_size for gap in ranking.gaps} == {16, 128}
    assert ranking.candidates == [("sgd", 16)]
    assert made.policy == "sgd, tuned" and made.recommended == 16
    assert [other.policy for other in ranking.answers] == [f"{NEWTON}, tuned"]


def test_each_optimizer_is_tuned_at_each_batch_size(swapped):
    rows = load_plan(swapped.folder).trials
    tuned = Counter(row.arm for row in rows if row.stage == "tune")
    arms = {Arm(*pair) for pair in product(INVERSES, (16, 128))}
    assert tuned.keys() == arms and min(tuned.values()) >= 5
    rates = {(row.arm, row.learning_rate) for row in rows if row.stage == "final"}
    assert len(rates) == 4
    storage = f"sqlite:///{swapped.folder.path}/optuna.db"
    studies = optuna.get_all_study_names(storage)
    assert len(studies) == 4 and sum("sgd batch size" in name for name in studies) == 2
    rows = sweep_status(swapped.folder)["trials"]
    assert {row["optimizer"] for row in rows} == {*INVERSES}


def test_the_report_and_its_table_say_what_the_sweep_says(swapped, tmp_path):
    write_report(swapped.folder.path, tmp_path)
    document = json.loads((tmp_path / "answer.json").read_text())
    ranking = document["optimizers"]
    assert ranking["is_same"] is False and ranking["candidates"] == [["sgd", 16]]
    assert ranking["best_first"] == {"16": ["sgd", NEWTON], "128": [NEWTON, "sgd"]}
    assert [other["optimizers"] for other in ranking["answers"]] == [None]
    report = (tmp_path / "report.md").read_text()
    for sentence in load_sweep(swapped.folder.path).sentences():
        assert sentence in report
    assert "no rule is known for momentum" in report and "own_optimizers.py" in report
    again = answer(pd.read_csv(tmp_path / "trials.csv"), tolerance=0.01)
    assert again.optimizers.gaps == load_sweep(swapped.folder.path).answer().optimizers.gaps


@pytest.mark.parametrize(
    "stop_at", [pytest.param(count, marks=pytest.mark.slow) for count in (3, 27)]
)
def test_an_interrupted_sweep_of_optimizers_ends_as_if_it_had_not_been(tmp_path, swapped, stop_at):
    stopped = run_in(tmp_path / "sweep", Interrupted(stop_at), **SWAP)
    assert stopped.exit_code == 130
    summary = run_in(tmp_path / "sweep", Interrupted(0), **SWAP)
    assert summary.exit_code == 0
    ids, others = ({row.id for row in load_plan(s.folder).trials} for s in (summary, swapped))
    assert ids == others


def plan_of(path, **settings):
    experiment = load_experiment("quadratic", {**SWAP, **settings})
    return make_plan(Request(experiment, ON_CPU, SweepFolder(path)))


def test_seeds_are_added_for_the_answer_of_each_optimizer(swapped):
    planned = plan_of(swapped.folder.path, seeds="auto", max_seeds=8)
    added = trials_after_look(planned.plan, planned.experiment, swapped.folder)
    sweep = load_sweep(swapped.folder.path)
    answers = [sweep.answer(), *sweep.answer().optimizers.answers]
    is_open = {made.policy.split(",")[0]: not made.decided for made in answers}
    assert {row.optimizer for row in added} == {name for name in is_open if is_open[name]}


def test_a_sweep_cannot_change_its_optimizers(swapped):
    with pytest.raises(SweepError, match="optimizers would change"):
        plan_of(swapped.folder.path, optimizers=f"sgd,{NEWTON},adamw")
