"""Several optimizers in one table: an answer for each, and their ranking across batch sizes."""

import json

import pandas as pd
import pytest

import sweep
from sweep.analysis.checks.table import prepare, rows_of_trials
from sweep.analysis.judge import judge_trials, scope_of
from sweep.analysis.sentences import describe
from sweep.analysis.tables import TRIAL_COLUMNS
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from tests.analysis.test_answer import table
from tests.plans import build_plan


def tables(noise=1e-4, **losses):
    """Trials of several optimizers, by name, each with losses by batch size."""
    parts = [table(own, noise=noise).assign(optimizer=name) for name, own in losses.items()]
    return pd.concat(parts, ignore_index=True)


BETTER = {2: 1.0, 4: 1.2, 8: 1.5}
WORSE = {2: 1.1, 4: 1.3, 8: 1.6}
STEEP = {2: 0.9, 4: 1.3, 8: 1.7}


def test_each_optimizer_has_its_answer_and_the_main_one_is_that_with_the_best_cell():
    made = sweep.answer(tables(adamw=BETTER, sgd=STEEP, muon=WORSE))
    assert (made.policy, made.recommended) == ("sgd, tuned", 2)
    others = {other.policy: other.recommended for other in made.optimizers.answers}
    assert others == {"adamw, tuned": 2, "muon, tuned": 2}
    assert made.optimizers.candidates == [("sgd", 2)]
    assert made.optimizers.best_first == {
        2: ["sgd", "adamw", "muon"],
        4: ["adamw", *made.optimizers.best_first[4][1:]],
        8: ["adamw", "muon", "sgd"],
    }
    assert json.loads(json.dumps(made.as_json()))["optimizers"]["gaps"][0]["better"] == "sgd"


@pytest.mark.parametrize(
    ("second", "is_same", "says"),
    [
        (WORSE, True, "is the same at all batch sizes"),
        (STEEP, False, "differs between batch sizes"),
        ({**WORSE, 4: 1.2}, None, "may differ between batch sizes"),
        ({2: 1.1, 4: 1.3}, None, "may differ between batch sizes"),
    ],
)
def test_the_ranking_is_the_same_another_or_undecided(second, is_same, says):
    made = sweep.answer(tables(adamw=BETTER, muon=second))
    assert made.optimizers.is_same is is_same
    text = " ".join(describe(made))
    verb = "is" if len(made.optimizers.candidates) == 1 else "may be"
    assert says in text and "batch size 2 with" in text and f"The best of all {verb} " in text
    for gap in made.optimizers.gaps:
        true = {"adamw": BETTER, "muon": second}
        difference = true[gap.worse][gap.batch_size] - true[gap.better][gap.batch_size]
        assert gap.gap[0] <= difference + 1e-3 and difference - 1e-3 <= gap.gap[1]
        assert gap.is_decided == (gap.gap[0] > 0)


def test_a_batch_size_at_which_an_optimizer_diverged_leaves_the_ranking_open():
    trials = tables(adamw=BETTER, muon=WORSE)
    is_lost = (trials["optimizer"] == "muon") & (trials["batch_size"] == 8)
    is_lost &= (trials["stage"] == "final") & (trials["seed"] == 0)
    trials.loc[is_lost, ["state", "cause"]] = "FAILED", "diverged"
    made = sweep.answer(trials)
    assert made.optimizers.is_same is None
    assert made.optimizers.best_first[8] == ["adamw"]
    assert {gap.batch_size for gap in made.optimizers.gaps} == {2, 4}
    text = describe(made)
    assert any(line.startswith("Provisionally, the ranking") for line in text)
    (other,) = made.optimizers.answers
    says = [line for line in text if "provisional with" in line or line.startswith("Also with")]
    assert [line.partition(": ")[2] for line in says] == [*made.reasons, *other.reasons]
    assert other.reasons and says[-1].partition(": ")[0].endswith("with muon")


def test_the_scope_names_all_optimizers():
    experiment = load_experiment("quick", {"optimizers": "adamw,muon", "precision": "fp32"})
    trials = tables(adamw=BETTER, muon=WORSE).reindex(columns=list(TRIAL_COLUMNS))
    plan = build_plan(experiment, Execution(device="cpu"))
    assert "optimizer adamw and muon" in scope_of(trials, "adamw, tuned", plan)


def test_an_optimizer_with_too_few_results_is_named_and_makes_the_answer_provisional():
    trials = tables(adamw=BETTER, muon=WORSE)
    is_lost = (trials["optimizer"] == "muon") & (trials["batch_size"] > 2)
    trials = trials[~(is_lost & (trials["stage"] == "final"))]
    made = sweep.answer(trials)
    assert made.provisional and made.optimizers.answers == []
    assert "Fewer than two batch sizes have results with muon." in " ".join(describe(made))


def test_the_ranking_at_rates_that_were_not_tuned_is_one_at_these_rates():
    trials = tables(adamw=BETTER, muon=WORSE)
    finals = trials[trials["stage"] == "final"].assign(policy="fixed", learning_rate=1e-3)
    text = " ".join(describe(sweep.answer(finals)))
    assert "At batch size 4 and these rates, adamw is better than muon" in text
    assert "these rates" not in " ".join(describe(sweep.answer(trials)))


def test_more_is_better_if_the_direction_says_so():
    trials = tables(adamw=BETTER, muon=WORSE)
    trials["accuracy"] = 2 - trials["final_valid_loss"]
    made = sweep.answer(trials, "accuracy", "maximize")
    assert made.policy == "adamw, tuned" and made.optimizers.is_same is True
    assert all(0.09 < gap.gap[0] < 0.1 < gap.gap[1] < 0.11 for gap in made.optimizers.gaps)


def test_intervals_hold_for_the_cells_of_all_optimizers_together():
    trials = tables(noise=0.01, adamw=BETTER, muon=WORSE)
    together = sweep.answer(trials)
    alone = sweep.answer(trials[trials["optimizer"] == "adamw"])
    assert alone.optimizers is None and alone.policy == "tuned"
    for row in alone.batch_sizes:
        low, high = together[row.batch_size].gap_to_best
        assert low < row.gap_to_best[0] and row.gap_to_best[1] < high
        assert together[row.batch_size].mean == row.mean


def test_policies_of_one_optimizer_are_not_ranked_as_optimizers():
    fixed = tables(adamw=BETTER).query("stage == 'final'").assign(policy="sqrt:0.001@32")
    made = sweep.answer(pd.concat([tables(adamw=BETTER), fixed]))
    assert made.policy == "tuned" and made.optimizers is None


def test_time_scales_are_checked_only_where_an_optimizer_has_them():
    def codes(name):
        trials = tables(**{name: BETTER}).assign(weight_decay=0.1, beta2=0.999, tokens=65536)
        trials = trials.reindex(columns=list(TRIAL_COLUMNS)).assign(tokens_per_sequence=64)
        trials["steps"] = trials["tokens"] // (64 * trials["batch_size"])
        (result,) = judge_trials(trials)
        checks = {check.code: check.status for check in result.checks}
        return checks["adamw_time_scale"], checks["beta2_half_life"]

    assert codes("adamw") == codes("muon") == ("PASS", "FAIL")
    assert codes("adafactor") == ("PASS", "NOT APPLICABLE")
    assert codes("mine:Own") == codes("sgd") == ("NOT APPLICABLE", "NOT APPLICABLE")


def test_labels_name_the_optimizer_only_if_there_are_several():
    trials = tables(adamw=BETTER, muon=WORSE).reindex(columns=list(TRIAL_COLUMNS))
    assert {*rows_of_trials(trials)["label"]} == {"adamw, tuned", "muon, tuned"}
    alone = rows_of_trials(trials[trials["optimizer"] == "muon"])
    assert {*alone["label"]} == {"tuned"} and prepare(alone).rates
