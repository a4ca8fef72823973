"""Sweeps of several budgets in one folder."""

import json

import pytest
from click.testing import CliRunner

import sweep
from sweep.analysis.results import load_sweep
from sweep.analysis.table_answer import answer_of
from sweep.cli import sweep as command_line
from sweep.config.objective import LOSS
from sweep.errors import SweepError
from sweep.orchestration.budgets import make_plans
from sweep.orchestration.request import read_request
from sweep.orchestration.status import sweep_status
from sweep.plan.plan import load_plan
from sweep.trial.folder import SweepFolder

FIXED = {"batches": "4,16", "lr": "0.1", "seeds": 2, "show_progress": False}
PLANNED = {"batches": "4,16", "lr": "0.1", "seeds": 2}
TUNED = {"lr": "tuned", "seeds": 1, "show_progress": False}


def run(path, budget, **settings):
    return sweep.run_sweep("quadratic", budget=budget, out=path, **settings)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    path = tmp_path_factory.mktemp("budgets") / "s"
    run(path, "2k,8k", **FIXED)
    return path


def test_budgets_of_one_command_have_the_trials_of_single_ones(swept, tmp_path):
    for budget in ("8k", "2k"):  # in any order
        run(tmp_path / "s", budget, **FIXED)
    one, other = (SweepFolder(path) for path in (swept, tmp_path / "s"))
    budgets = [
        [[row.id for row in plan.trials] for plan in load_plan(folder).by_budget]
        for folder in (one, other)
    ]
    assert budgets[0] == budgets[1]
    for trial in one.trials():
        copy = other.trial(trial.id).read_result()
        assert trial.read_result().final_valid_loss == copy.final_valid_loss


def test_each_budget_has_its_answer_and_the_largest_counts(swept):
    loaded = load_sweep(swept)
    assert loaded.plan.token_budget == 8000 and len(loaded.trials) == 4
    assert [of_budget.plan.token_budget for of_budget in loaded.by_budget] == [2000, 8000]
    document = json.loads((swept / "answer.json").read_text())
    assert [budget["tokens"] for budget in document["budgets"]] == [2000, 8000]
    assert document["budgets"][1]["recommended"] == document["recommended"]
    rows = document["budgets"][1]["batch_sizes"]
    assert [row["worth_in_tokens"] is None for row in rows] == [False, False]
    assert len((swept / "trials.csv").read_text().splitlines()) == 9  # of both budgets
    assert "## Budgets" in (swept / "report.md").read_text()


def test_a_folder_grows_by_budgets_and_repeats_nothing(swept):
    before = {trial.id: trial.read_status().attempts for trial in SweepFolder(swept).trials()}
    run(swept, "2k,8k", **FIXED)
    after = {trial.id: trial.read_status().attempts for trial in SweepFolder(swept).trials()}
    assert before == after
    with pytest.raises(SweepError, match=r"at least 1\.5 times"):
        run(swept, "9k", **FIXED)
    with pytest.raises(SweepError, match="schedule"):
        run(swept, "32k", **FIXED, schedule={"name": "constant"})
    assert {trial.id for trial in SweepFolder(swept).trials()} == {*before}


def test_a_larger_budget_begins_where_the_smaller_ones_predict(tmp_path):
    path = tmp_path / "s"
    run(path, "2k,8k", batches="auto", **TUNED)
    small, large = load_plan(SweepFolder(path)).by_budget
    own = small.settings.tuning.own_rate
    predicted = large.settings.tuning.own_rate
    assert predicted != own and predicted.lr.startswith("sqrt:")
    sizes = large.settings.batches
    assert len(sizes) == 5 and all(size.bit_count() == 1 for size in sizes)
    assert small.settings.batches == load_sweep(path).smaller[0].plan.settings.batches
    run(path, "2k,8k", batches="auto", **TUNED)  # resumes with the same batch sizes
    assert load_plan(SweepFolder(path)).by_budget[1].settings.batches == sizes


def test_auto_adds_batch_sizes_until_the_best_one_lies_inside_or_is_one(tmp_path):
    path = tmp_path / "s"
    settings = {"batches": "auto", "lr": "0.1", "seeds": 1, "show_progress": False}
    run(path, "2k", **settings)
    sizes = load_sweep(path).batch_sizes
    losses = load_sweep(path).trials.set_index("batch_size")["final_valid_loss"]
    assert {16, 64} < {*sizes} and sizes[0] < 16 and len(sizes) <= 9
    assert 256 not in sizes  # with which tokens would differ
    assert sizes[0] == 1 or losses.idxmin() > sizes[0] or len(sizes) == 9
    run(path, "2k", **settings)
    assert load_sweep(path).batch_sizes == sizes


def test_every_command_prints_the_answers_of_all_budgets(swept):
    document = load_sweep(swept).answer_document()
    assert [budget["tokens"] for budget in document["budgets"]] == [2000, 8000]
    assert answer_of(swept, LOSS.name, LOSS.direction, None).document() == document
    planned = sweep.plan_sweep("quadratic", budget="2k,8k", out=swept, **PLANNED)
    assert [plan.token_budget for plan in planned.by_budget] == [2000, 8000]
    assert sweep.recommend([swept], 16_000).law["exponent"] is None  # two budgets
    assert sweep.suggest(350e6, 7_000_000_000).published


def test_the_table_of_several_budgets_is_not_pooled(swept):
    table = str(swept / "trials.csv")
    result = CliRunner().invoke(command_line, ["answer", table])
    assert isinstance(result.exception, SweepError)
    assert "budget must be the same in all rows, got 2k, 8k" in str(result.exception)
    result = CliRunner().invoke(command_line, ["audit", table, "--json"])
    assert result.exit_code == 0
    codes = [finding["code"] for finding in json.loads(result.stdout)["findings"]]
    assert "tokens_differ" not in codes and "fixed_learning_rate" in codes


def test_the_status_has_budgets_and_the_best_trial_of_the_largest(swept):
    status = sweep_status(SweepFolder(swept))
    assert {row["budget"] for row in status["trials"]} == {2000, 8000}
    best = next(row for row in status["trials"] if row["id"] == status["best"])
    assert best["budget"] == 8000


def test_answers_of_several_budgets_name_the_recommendation_and_the_soonest(swept):
    loaded = load_sweep(swept)
    answer = loaded.answer()
    assert answer.settle_longer.startswith("sweep recommend ")
    assert answer.settle_longer.endswith(" --tokens 80000")
    assert {budget.answer.settle_longer for budget in loaded.budgets} == {answer.settle_longer}
    soonest = answer.soonest
    assert soonest.batch_size is not None or "soonest" in soonest.reason
    assert any("published exponents" in line for line in loaded.sentences())


def test_the_limit_of_hours_is_one_for_all_budgets(tmp_path):
    settings = {"budget": "2k,8k", "seeds": "auto", "max_hours": 1.0}
    request = read_request("quadratic", settings, tmp_path / "s")
    deadlines = {planned.deadline for planned in make_plans(request)}
    assert deadlines == {request.deadline} and request.deadline == request.started + 3600
