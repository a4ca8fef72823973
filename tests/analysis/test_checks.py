"""Each condition is judged once: a claim needs its checks, and the audit agrees with the report."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sweep.analysis.audit import audit
from sweep.analysis.checks import FAIL, NOT_APPLICABLE, PASS, TABLE, headline, run_checks
from sweep.analysis.comparison import compare_batch_sizes
from sweep.analysis.frames import load_sweep, write_trials_csv
from sweep.analysis.rules import RULES

LOSSES = {4: 1.50, 16: 1.45, 64: 1.60}


def check_sweep(path):
    """Return the results of a sweep folder by policy."""
    sweep = load_sweep(path)
    return run_checks(sweep, compare_batch_sizes(sweep.trials))


def statuses(result):
    return {check.code: check.status for check in result.checks}


def failed(result):
    return {check.code for check in result.failed}


def blocking(result):
    return {check.code for check in result.failed if check.blocks_claims}


def remedy(result, code):
    return next(check.remedy for check in result.checks if check.code == code)


def evidence(result, code):
    return next(check.evidence for check in result.checks if check.code == code)


@pytest.fixture
def checked(tmp_path, write_fake_sweep):
    """Check a made-up sweep whose final losses are given by batch size, seed and stage."""

    def build(
        noise=0.001, lr="tuned", seeds=3, losses=LOSSES, outcome=lambda row: "COMPLETE", **settings
    ):
        rng = np.random.default_rng(0)
        shared = rng.normal(0, 0.02, 50)  # of a seed, at every batch size

        def change(row):
            if outcome(row) != "COMPLETE":
                return {}
            loss = losses[row.batch_size]
            if row.stage == "report":
                loss += shared[row.seed] + rng.normal(0, noise)
            else:
                loss += 0.05 * np.log2(row.learning_rate / 1e-3) ** 2
            return {"final_valid_loss": float(loss), "initial_train_loss": 6.3}

        path = tmp_path / f"sweep-{len(list(tmp_path.iterdir()))}"
        batches = ",".join(map(str, losses))
        options = {"lrs": (lr,), "change": change, "outcome": outcome, "seeds": seeds}
        write_fake_sweep(path, batches=batches, **options, **settings)
        (result,) = check_sweep(path).values()
        return result

    return build


@pytest.fixture
def checked_plain(tmp_path, write_fake_sweep):
    """Check a made-up sweep with the losses of the fake curves."""

    def build(**options: Any):
        path = tmp_path / f"plain-{len(list(tmp_path.iterdir()))}"
        write_fake_sweep(path, **options)
        return next(iter(check_sweep(path).values()))

    return build


def test_every_rule_has_a_row_with_a_condition_and_a_remedy():
    assert set(RULES) == {code for code, row in TABLE.items() if "needs" in row}
    assert all(row["condition"].endswith(".") for row in TABLE.values())
    assert all("remedy" in TABLE[code] for code in RULES)


def test_a_tuned_sweep_with_three_seeds_and_clear_differences_makes_its_claim(checked):
    result = checked()
    assert result.passes and blocking(result) == set(), result.failed
    assert "batch size 16 has the lowest" in headline(result)
    assert statuses(result)["undecided_differences"] == PASS
    assert not any(check.remedy for check in result.checks if check.status != FAIL)


def test_batch_sizes_within_the_margin_are_called_equivalent(checked):
    result = checked(losses={4: 1.45, 16: 1.45, 64: 1.60}, noise=0.0005)
    assert result.passes and "equivalent" in headline(result)


def test_a_fixed_rate_makes_no_claim_however_clear_the_differences(checked):
    result = checked(lr="1e-3")
    assert blocking(result) == {"fixed_learning_rate"}
    assert headline(result) == ""
    assert "--lr tuned" in remedy(result, "fixed_learning_rate")


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_make_no_claim(checked, seeds):
    result = checked(seeds=seeds)
    assert "single_seed" in blocking(result) and headline(result) == ""
    assert (statuses(result)["undecided_differences"] == NOT_APPLICABLE) is (seeds == 1)
    assert "--seeds 3" in remedy(result, "single_seed")


def test_differences_within_the_noise_name_the_seeds_that_would_settle_them(checked):
    result = checked(losses={4: 1.450, 16: 1.455, 64: 1.46}, noise=0.03)
    assert blocking(result) == {"undecided_differences"} and headline(result) == ""
    assert "--seeds" in remedy(result, "undecided_differences")
    assert "0.01 nats would need" in evidence(result, "undecided_differences")


def test_a_best_rate_at_the_edge_stops_the_claim(checked):
    def outcome(row):
        is_high = row.stage == "tune" and row.batch_size == 64 and row.learning_rate > 1e-3
        return "WAITING" if is_high else "COMPLETE"

    result = checked(outcome=outcome)
    assert "learning_rate_at_edge" in blocking(result) and headline(result) == ""
    assert "centre" in remedy(result, "learning_rate_at_edge")


def test_a_diverged_report_is_counted_and_stops_the_claim(checked):
    def outcome(row):
        is_it = (row.stage, row.batch_size, row.seed) == ("report", 64, 1)
        return "diverged" if is_it else "COMPLETE"

    result = checked(outcome=outcome)
    assert {"diverged", "missing_batch_size", "single_seed"} <= blocking(result)
    assert evidence(result, "diverged").startswith("1 of 9 reporting trials")
    assert statuses(result)["undecided_differences"] == NOT_APPLICABLE
    assert "warmup" in remedy(result, "diverged")


def test_rates_tuned_at_fewer_tokens_pass_only_when_confirmed(checked):
    result = checked(tuning={"budget": 98304})
    assert blocking(result) == {"tuning_incomplete"}


def test_failed_tuning_trials_stop_the_claim(checked):
    def outcome(row):
        return "lost" if row.stage == "tune" and row.learning_rate > 3e-3 else "COMPLETE"

    assert "tuning_incomplete" in blocking(checked(outcome=outcome))


def test_tokens_that_differ_stop_the_claim(checked):
    assert "tokens_differ" in blocking(checked(losses={7: 1.5, 16: 1.45, 60: 1.6}))


def test_a_best_batch_size_at_the_end_of_those_tried_is_named_and_claimed(checked):
    result = checked(losses={4: 1.40, 16: 1.45, 64: 1.60})
    assert "batch_size_at_edge" in failed(result) and "batch size 4 has" in headline(result)


def test_two_policies_are_checked_apart(tmp_path, write_fake_sweep):
    write_fake_sweep(tmp_path / "s", lrs=("1e-3", "tuned"), seeds=3, batches="4,16")
    results = check_sweep(tmp_path / "s")
    assert list(results) == ["fixed 1e-3", "tuned"]
    assert not results["fixed 1e-3"].rates and len(results["tuned"].rates) == 2
    assert "fixed_learning_rate" in failed(results["fixed 1e-3"])
    assert "fixed_learning_rate" not in failed(results["tuned"])


def test_one_seed_at_some_batch_sizes_is_named_with_them(tmp_path, write_fake_sweep):
    write_fake_sweep(tmp_path / "s", batches="4,8", seeds=3)
    sweep = load_sweep(tmp_path / "s")
    kept = sweep.trials[(sweep.trials["batch_size"] == 4) | (sweep.trials["seed"] == 0)]
    less = SimpleNamespace(trials=kept, plan=sweep.plan)
    (result,) = run_checks(less, compare_batch_sizes(kept)).values()
    (check,) = (check for check in result.checks if check.code == "single_seed")
    assert check.status == FAIL and check.batch_sizes == (8,)


def test_missing_trials_are_named_with_their_state(checked_plain):
    ends = {4: "diverged", 8: "lost", 16: "WAITING"}
    result = checked_plain(outcome=lambda row: ends.get(row.batch_size, "COMPLETE"))
    (check,) = (check for check in result.checks if check.code == "missing_batch_size")
    assert check.batch_sizes == (4, 8, 16)
    assert "4 (FAILED diverged), 8 (FAILED lost), 16 (WAITING)" in check.evidence


def test_a_diverged_trial_that_stopped_early_is_no_difference_of_tokens(checked_plain):
    result = checked_plain(outcome=lambda row: "diverged" if row.batch_size == 4 else "COMPLETE")
    assert "tokens_differ" not in failed(result)


def test_many_epochs_and_a_strange_start_are_found(checked_plain):
    result = checked_plain(change=lambda row: {"epochs": 7.25, "initial_train_loss": 3.5})
    assert {"many_epochs", "initial_loss"} <= blocking(result)
    assert "7.25" in evidence(result, "many_epochs")
    assert "6.238" in evidence(result, "initial_loss")


def test_a_workload_without_vocabulary_has_no_expected_start(checked_plain):
    result = checked_plain(experiment="quadratic", change=lambda row: {"initial_train_loss": 3.7})
    assert "initial_loss" not in statuses(result)


@pytest.mark.parametrize("options", [{"batches": "8"}, {"outcome": lambda row: "WAITING"}])
def test_fewer_than_two_batch_sizes_are_nothing_to_compare(checked_plain, options):
    result = checked_plain(**options)
    assert "nothing_to_compare" in blocking(result) and headline(result) == ""


def test_wrong_counts_of_tokens_are_found(checked_plain):
    result = checked_plain(change=lambda row: {"steps": row.steps + (row.batch_size == 8)})
    (check,) = (check for check in result.checks if check.code == "tokens_mismatch")
    assert check.status == FAIL and check.batch_sizes == (8,)


def test_equal_trials_of_unequal_times_are_found(checked_plain):
    assert "uneven_times" not in failed(checked_plain(seeds=3))
    result = checked_plain(seeds=3, change=lambda row: {"seconds_total": 10.0 * (1 + row.seed)})
    assert "uneven_times" in failed(result) and "3.00" in evidence(result, "uneven_times")


def test_mixed_execution_is_found_with_its_values(checked_plain):
    def change(row: Any) -> dict[str, Any]:
        if row.batch_size != 8 or row.seed:
            return {}
        execution = {"device": "cpu", "threads": 4, "compile": True}
        return {"execution": execution, "torch_version": "2.12.0", "microbatch_size": 2}

    result = checked_plain(seeds=2, change=change)
    assert "mixed_execution" in failed(result) - blocking(result)
    text = evidence(result, "mixed_execution")
    assert "torch_version: 2.12.0, 2.13.0+cpu" in text and "execution.threads: 2, 4" in text
    assert "execution.compile: false, true" in text
    assert "microbatch_size at batch size 8: 2, 8" in text and "at batch size 16" not in text
    assert "mixed_execution" not in failed(checked_plain())


ENDS = {4: "diverged", 8: "lost", 16: "out_of_memory", 32: "WAITING"}
SWEEPS: dict[str, dict[str, Any]] = {
    "one seed": {"seeds": 1},
    "fixed rate": {"seeds": 3},
    "scaled": {"lrs": ("sqrt",), "seeds": 3},
    "tuned": {"lrs": ("tuned",), "seeds": 3, "batches": "4,16,64"},
    "two policies": {"lrs": ("1e-3", "3e-4", "tuned"), "seeds": 2, "batches": "4,16,64"},
    "unequal tokens": {"batches": "4,7,9", "budget": 50_000},
    "incomplete": {"seeds": 2, "outcome": lambda row: ENDS.get(row.batch_size, "COMPLETE")},
    "nothing ended": {"outcome": lambda row: "WAITING"},
    "one lost seed": {
        "seeds": 3,
        "outcome": lambda row: "error" if (row.batch_size, row.seed) == (8, 2) else "COMPLETE",
    },
    "high rates diverge": {
        "lrs": ("tuned",),
        "seeds": 3,
        "batches": "4,16,64",
        "outcome": lambda row: "diverged" if (row.learning_rate or 0) > 1e-3 else "COMPLETE",
    },
    "wrong steps": {"change": lambda row: {"steps": 2 * row.steps}},
    "uneven": {
        "seeds": 3,
        "change": lambda row: {"epochs": 9.0, "seconds_total": 9.0 * (row.seed + 1)},
    },
    "mixed": {"seeds": 2, "change": lambda row: {"torch_version": f"2.{row.seed}"}},
    "quadratic": {"experiment": "quadratic", "seeds": 2},
}
NEEDS_THE_PLAN = {"initial_loss", "tokens_mismatch"}  # vocabulary, tokens per sequence


@pytest.mark.parametrize("name", SWEEPS)
def test_the_audit_of_our_own_table_agrees_with_the_report(name, tmp_path, write_fake_sweep):
    write_fake_sweep(tmp_path / "s", **SWEEPS[name])
    write_trials_csv(load_sweep(tmp_path / "s"), tmp_path / "s" / "trials.csv")
    results = check_sweep(tmp_path / "s")
    expected = [
        (check.code, list(check.batch_sizes))
        for result in results.values()
        for check in result.checks
        if check.code in set(RULES) - NEEDS_THE_PLAN and check.status == FAIL
    ]
    findings = [
        (finding["code"], finding["rows"])
        for finding in audit(tmp_path / "s")["findings"]
        if finding["code"] not in NEEDS_THE_PLAN
    ]
    assert sorted(findings) == sorted(expected)
