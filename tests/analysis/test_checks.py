"""Each condition is judged once: a claim needs its checks, and the audit agrees with the report."""

import math
from typing import Any

import numpy as np
import pytest

from sweep.analysis.audit import audit
from sweep.analysis.checks import (
    CURVE_CHECKS,
    DEFINITIONS,
    FAIL,
    NOT_APPLICABLE,
    PASS,
    CheckDefinition,
    NotApplicable,
    Subject,
    Verdict,
    check,
)
from sweep.analysis.judge import judge_trials
from sweep.analysis.results import load_sweep
from sweep.analysis.sentences import describe
from sweep.analysis.tables import write_trials_csv
from sweep.config.objective import Objective
from sweep.errors import SweepError
from sweep.plan.rate_search import GRID
from tests.analysis.fake_sweeps import write_fake_sweep

LOSSES = {4: 1.50, 16: 1.45, 64: 1.60}


def failed(result):
    return {check.code for check in result.failed}


def blocking(result):
    return {check.code for check in result.blocking}


def find(result, code):
    return next(check for check in result.checks if check.code == code)


@pytest.fixture
def checked(tmp_path):
    """Check a made-up sweep; without `losses` it has those of the fake curves."""

    def build(losses=None, noise=0.001, change=lambda row: {}, **options: Any):
        rng = np.random.default_rng(0)
        shared = rng.normal(0, 0.02, 50)  # of a seed, at every batch size
        outcome = options.get("outcome", lambda row: "COMPLETE")

        def change_losses(row):
            if losses is None or outcome(row) != "COMPLETE":
                return change(row)
            ideal = 1e-3 * np.sqrt(row.batch_size / 16)  # as in the fake curves
            loss = losses[row.batch_size] + 0.05 * np.log2(row.learning_rate / ideal) ** 2
            if row.stage == "final":
                loss += shared[row.seed] + rng.normal(0, noise)
            return {"final_valid_loss": float(loss), "initial_train_loss": 6.3}

        if losses is not None:
            sizes = ",".join(map(str, losses))
            options = {"lrs": ("tuned",), "seeds": 3, "batches": sizes, **options}
        path = tmp_path / f"sweep-{len(list(tmp_path.iterdir()))}"
        write_fake_sweep(path, change=change_losses, **options)
        (result,) = load_sweep(path).policies
        return result

    return build


def test_every_check_says_what_must_hold_when_it_fails_and_what_to_do():
    for definition in DEFINITIONS.values():
        assert definition.condition.endswith("."), definition.code
        assert definition.failure.startswith("Fail if "), definition.code
        assert definition.failure.endswith("."), definition.code
        assert definition.remedy.endswith("."), definition.code


def test_another_module_cannot_take_the_code_of_a_check():
    shipped = DEFINITIONS["single_seed"]

    def single_seed(table, cells):
        return NotApplicable()

    with pytest.raises(SweepError, match="'single_seed'"):
        check(condition="It holds.", remedy="Wait.")(single_seed)
    assert DEFINITIONS["single_seed"] is shipped


def test_a_notebook_can_register_a_check_and_change_it(checked):
    def fourth(table, cells):
        return Verdict("It is 4.", batch_sizes=[4])

    try:
        for condition in ("It holds.", "It still holds."):
            check(condition=condition, remedy="Wait.", blocks_claims=True)(fourth)
        result = checked(LOSSES)
        made = find(result, "fourth")
    finally:
        del DEFINITIONS["fourth"]
    assert (made.status, made.condition, made.remedy) == (FAIL, "It still holds.", "Wait.")
    assert blocking(result) == {"fourth"} and result.answer.provisional


@pytest.mark.parametrize("returned", [None, ([4], "evidence"), Verdict("evidence", ["four"])])
def test_a_check_of_another_module_that_returns_no_verdict_is_named(returned):
    definition = CheckDefinition(
        code="fourth",
        subject=Subject.TRIALS,
        judge=lambda table, cells: returned,
        condition="It holds.",
        remedy="Wait.",
    )
    with pytest.raises(SweepError, match="the check fourth must return a verdict"):
        definition.evaluate(None, None)


def test_a_tuned_sweep_with_three_seeds_and_clear_differences_recommends_the_best(checked):
    result = checked(LOSSES)
    assert blocking(result) == set(), result.failed
    assert (result.answer.recommended, result.answer.provisional) == (16, False)
    assert result.answer.candidates == [16] and result.answer.decided
    assert not any(check.remedy for check in result.checks if check.status != FAIL)


def test_a_best_batch_size_at_the_end_of_those_tried_is_named_and_recommended(checked):
    result = checked({4: 1.40, 16: 1.45, 64: 1.60})
    assert "batch_size_at_edge" in failed(result) and result.answer.recommended == 4
    assert "Smaller batch sizes were not tried" in " ".join(describe(result.answer))
    result = checked({1: 1.40, 16: 1.45, 64: 1.60})  # there is none below 1
    assert "batch_size_at_edge" not in failed(result) and result.answer.recommended == 1
    assert "not tried" not in " ".join(describe(result.answer))


def test_seeds_with_equal_results_fail_the_check_of_seeds(checked):
    result = checked(LOSSES, change=lambda row: {}, noise=0.0)
    assert "single_seed" not in failed(result)  # a seed still shifts all batch sizes
    result = checked(change=lambda row: {"final_valid_loss": 1.0 + row.batch_size}, seeds=3)
    assert find(result, "single_seed").batch_sizes == (4, 8, 16, 32, 64)
    assert "All seeds gave the same result" in find(result, "single_seed").evidence
    assert all(row.gap_to_best == (None, None) for row in result.answer.batch_sizes)


def fails_at_high_rates(cause, at_batch_size=None):
    def outcome(row):
        is_high = row.stage == "tune" and row.learning_rate > 1e-3
        return cause if is_high and at_batch_size in (None, row.batch_size) else "COMPLETE"

    return {"outcome": outcome}


BLOCKED = [
    ({"lrs": ("1e-3",)}, {"fixed_learning_rate"}, "--lr tuned"),
    ({"lrs": ("sqrt",)}, {"fixed_learning_rate"}, "--lr tuned"),
    ({"seeds": 2}, {"single_seed"}, "at least 3 seeds"),
    ({"seeds": 1}, {"single_seed"}, "at least 3 seeds"),
    (fails_at_high_rates("WAITING", 64), {"learning_rate_at_edge"}, "strictly inside"),
    (fails_at_high_rates("PRUNED"), {"learning_rate_at_edge"}, "strictly inside"),
    (
        fails_at_high_rates("error"),
        {"learning_rate_at_edge", "tuning_incomplete"},
        "strictly inside",
    ),
    (fails_at_high_rates("out_of_memory"), {"learning_rate_at_edge", "tuning_incomplete"}, ""),
    ({"tuning": {"budget": 98304}}, {"tuning_incomplete"}, "on all tokens"),
    ({"losses": {7: 1.5, 16: 1.45, 100: 1.6}}, {"tokens_differ"}, "multiple"),
]


@pytest.mark.parametrize(("change", "codes", "remedy"), BLOCKED)
def test_a_failed_check_makes_the_answer_provisional_and_names_its_remedy(
    checked, change, codes, remedy
):
    result = checked(**{"losses": LOSSES, **change})
    assert codes <= blocking(result) and result.answer.provisional
    assert any(remedy in find(result, code).remedy for code in codes)


def test_rates_that_are_all_too_low_are_tuned_again_around_the_highest(tmp_path):
    write_fake_sweep(tmp_path / "s", lrs=("tuned",), seeds=3, tune_centre=1e-5)
    answer = load_sweep(tmp_path / "s").answer()
    highest = 1e-5 * max(GRID)
    assert f"--tune-centre {highest:.3g} --out {tmp_path / 's'}-2" in answer.settle
    assert answer.settle_seconds > 0


def test_tokens_that_differ_by_less_than_one_percent_widen_the_intervals(checked, tmp_path):
    losses = {7: 1.5, 16: 1.45, 60: 1.6}
    checked(losses, seeds=5)
    (path,) = tmp_path.iterdir()
    trials = load_sweep(path).trials
    tokens = trials.groupby("batch_size")["tokens"].max()
    assert 1 < tokens.max() / tokens.min() < 1.01

    sloped = trials.assign(valid_slope=0.5)
    (result,) = judge_trials(sloped)
    codes = {check.code: check for check in result.checks}
    assert codes["tokens_differ"].status == PASS
    assert "intervals allow for the difference" in codes["tokens_differ"].evidence
    (flat,) = judge_trials(trials.assign(valid_slope=0.0))
    ratio = math.log(tokens[60] / tokens[16])  # fewer tokens at 60: it may gain by their loss
    low, high = result.decision.differences
    low_of_flat, high_of_flat = flat.decision.differences
    assert (low_of_flat - low)[2, 1] == pytest.approx(0.5 * -ratio)
    assert (high - high_of_flat)[2, 1] == pytest.approx(0.0)
    assert (high - high_of_flat)[1, 2] == pytest.approx(0.5 * -ratio)

    (unknown,) = judge_trials(trials.assign(valid_slope=math.nan))
    assert "tokens_differ" in {check.code for check in unknown.blocking}


def test_unequal_tokens_are_repeated_with_a_budget_that_all_batch_sizes_divide(checked):
    result = checked({7: 1.5, 16: 1.45, 100: 1.6})
    words = result.answer.settle.split()
    assert words[words.index("--out") + 1].endswith("-2")
    assert int(words[words.index("--budget") + 1]) % (math.lcm(7, 16, 100) * 64) == 0


@pytest.mark.parametrize(("max_seeds", "is_limit"), [(3, True), (5, False)])
def test_an_open_answer_says_if_its_seeds_are_the_limit(tmp_path, max_seeds, is_limit):
    settings = {"max_seeds": max_seeds, "tolerance": 0.03}
    write_fake_sweep(tmp_path / "s", lrs=("tuned",), seeds="auto", **settings)
    sweep = load_sweep(tmp_path / "s")
    assert not sweep.answer().decided
    assert sweep.answer().settle.endswith("--max-seeds 6" if is_limit else "--seeds auto")
    assert any("--max-seeds" in line for line in sweep.sentences()) == is_limit


def test_a_rate_that_diverged_bounds_its_grid(checked):
    assert blocking(checked(LOSSES, **fails_at_high_rates("diverged"))) == set()


def test_a_batch_size_whose_tuning_trials_all_diverged_fails_the_check_of_its_grid(checked):
    def outcome(row):
        return "diverged" if row.stage == "tune" and row.batch_size == 64 else "COMPLETE"

    check = find(checked(LOSSES, outcome=outcome), "learning_rate_at_edge")
    assert (check.status, check.batch_sizes) == (FAIL, (64,))
    assert "none of 5 trials completed" in check.evidence


def test_a_diverged_report_is_counted_and_stops_the_claim(checked):
    def outcome(row):
        is_it = (row.stage, row.batch_size, row.seed) == ("final", 64, 1)
        return "diverged" if is_it else "COMPLETE"

    result = checked(LOSSES, outcome=outcome)
    assert blocking(result) == {"diverged", "single_seed"}
    assert find(result, "diverged").evidence.startswith("1 of 9 final trials")
    assert result.answer[64].mean is None and result.answer.provisional
    assert result.answer[4].gap_to_best[0] is not None  # the others are still compared


def test_two_policies_are_checked_apart(tmp_path):
    write_fake_sweep(tmp_path / "s", lrs=("1e-3", "tuned"), seeds=3, batches="4,16")
    fixed, tuned = load_sweep(tmp_path / "s").policies
    assert [fixed.label, tuned.label] == ["fixed 1e-3", "tuned"]
    assert not fixed.rates and len(tuned.rates) == 2
    assert "fixed_learning_rate" in failed(fixed) - failed(tuned)


def test_one_seed_at_some_batch_sizes_is_named_with_them(tmp_path):
    write_fake_sweep(tmp_path / "s", batches="4,8", seeds=3)
    sweep = load_sweep(tmp_path / "s")
    kept = sweep.trials[(sweep.trials["batch_size"] == 4) | (sweep.trials["seed"] == 0)]
    (result,) = judge_trials(kept)
    check = find(result, "single_seed")
    assert check.status == FAIL and check.batch_sizes == (8,)


def test_missing_trials_are_named_with_their_state(checked):
    ends = {4: "diverged", 8: "lost", 16: "WAITING"}
    result = checked(outcome=lambda row: ends.get(row.batch_size, "COMPLETE"))
    check = find(result, "missing_batch_size")
    assert check.batch_sizes == (8, 16)  # the same command would not train 4 again
    assert "8 (FAILED lost), 16 (WAITING)" in check.evidence
    assert find(result, "diverged").batch_sizes == (4,)
    assert "tokens_differ" not in failed(result)  # the diverged trial stopped early


def test_many_epochs_and_a_strange_start_are_found(checked):
    result = checked(change=lambda row: {"epochs": 7.25, "initial_train_loss": 3.5})
    assert {"many_epochs", "initial_loss"} <= failed(result)
    assert "initial_loss" in blocking(result)
    assert "many_epochs" not in blocking(result)  # it limits the scope: small data are used often
    assert "7.25" in find(result, "many_epochs").evidence
    assert "6.238" in find(result, "initial_loss").evidence


def test_a_check_that_needs_values_names_the_column_of_the_objective(tmp_path):
    write_fake_sweep(tmp_path / "s", batches="4,8", outcome=lambda row: "WAITING")
    trials = load_sweep(tmp_path / "s").trials.assign(final_valid_accuracy=math.nan)
    (result,) = judge_trials(trials, Objective("final_valid_accuracy", "maximize"))
    assert find(result, "batch_size_at_edge").missing_columns == ("final_valid_accuracy",)


def test_a_workload_without_vocabulary_has_no_expected_start(checked):
    result = checked(experiment="quadratic", change=lambda row: {"initial_train_loss": 3.7})
    assert find(result, "initial_loss").status == NOT_APPLICABLE


@pytest.mark.parametrize("options", [{"batches": "8"}, {"outcome": lambda row: "WAITING"}])
def test_fewer_than_two_batch_sizes_are_nothing_to_compare(checked, options):
    assert checked(**options).answer is None


def test_wrong_counts_of_tokens_are_found(checked):
    result = checked(change=lambda row: {"steps": row.steps + (row.batch_size == 8)})
    check = find(result, "tokens_mismatch")
    assert check.status == FAIL and check.batch_sizes == (8,)


def test_mixed_execution_is_found_with_its_values(checked):
    def change(row: Any) -> dict[str, Any]:
        if row.batch_size != 8 or row.seed:
            return {}
        execution = {"device": "cpu", "threads": 4, "compile": True}
        return {"execution": execution, "torch_version": "2.12.0", "microbatch_size": 2}

    result = checked(seeds=2, change=change)
    assert "mixed_execution" in failed(result) - blocking(result)
    text = find(result, "mixed_execution").evidence
    assert "torch_version: 2.12.0, 2.13.0+cpu" in text and "execution.threads: 2, 4" in text
    assert "execution.compile: false, true" in text
    assert "microbatch_size at batch size 8: 2, 8" in text and "at batch size 16" not in text
    assert "mixed_execution" not in failed(checked())


@pytest.mark.parametrize(
    ("sets_of_seed_0", "is_mixed"),
    [
        (["AVX2"], False),
        (["AVX512"], True),
        (["AVX2", "AVX512"], True),  # of one trial that was resumed elsewhere
        ([], True),  # unknown
        (None, True),
    ],
)
def test_different_or_unknown_instruction_sets_are_mixed_execution(
    checked, sets_of_seed_0, is_mixed
):
    def change(row: Any) -> dict[str, Any]:
        execution: dict[str, Any] = {"device": "cpu"}
        if row.seed:
            execution["instruction_sets"] = ["AVX2"]
        elif sets_of_seed_0 is not None:
            execution["instruction_sets"] = sets_of_seed_0
        return {"execution": execution}

    assert ("mixed_execution" in failed(checked(seeds=2, change=change))) == is_mixed
    alone = failed(checked(seeds=1, change=change))  # only seed 0
    assert ("mixed_execution" in alone) == (sets_of_seed_0 == ["AVX2", "AVX512"])


ENDS = {4: "diverged", 8: "lost", 16: "out_of_memory", 32: "WAITING"}
TUNED = {"lrs": ("tuned",), "seeds": 3, "batches": "4,16,64"}
SWEEPS: dict[str, dict[str, Any]] = {
    "one seed": {"seeds": 1},
    "scaled": {"lrs": ("sqrt",), "seeds": 3},
    "tuned": TUNED,
    "two policies": {"lrs": ("1e-3", "3e-4", "tuned"), "seeds": 2, "batches": "4,16,64"},
    "unequal tokens": {"batches": "4,7,9", "budget": 50_000},
    "incomplete": {"seeds": 2, "outcome": lambda row: ENDS.get(row.batch_size, "COMPLETE")},
    "nothing ended": {"outcome": lambda row: "WAITING"},
    "high rates diverge": TUNED | fails_at_high_rates("diverged"),
    "wrong steps": {"change": lambda row: {"steps": 2 * row.steps}},
    "many epochs": {"seeds": 3, "change": lambda row: {"epochs": 9.0}},
    "mixed": {"seeds": 2, "change": lambda row: {"torch_version": f"2.{row.seed}"}},
    "quadratic": {"experiment": "quadratic", "seeds": 2},
    "to a target": TUNED | {"target": 2.5},
}


@pytest.mark.parametrize("name", SWEEPS)
def test_the_audit_of_our_own_table_agrees_with_the_report(name, tmp_path):
    write_fake_sweep(tmp_path / "s", **SWEEPS[name])
    sweep = load_sweep(tmp_path / "s")
    write_trials_csv(sweep, tmp_path / "s" / "trials.csv")
    curve_checks = set(CURVE_CHECKS if "target" in SWEEPS[name] else ())
    checks = [c for result in sweep.policies for c in result.checks if c.code not in curve_checks]
    document = audit(tmp_path / "s")
    findings = [(item["code"], item["rows"]) for item in document["findings"]]
    assert findings == [(c.code, list(c.batch_sizes)) for c in checks if c.status == FAIL]
    not_checked = {item["code"] for item in document["not_checked"]}
    assert not_checked == curve_checks | {c.code for c in checks if c.missing_columns}
