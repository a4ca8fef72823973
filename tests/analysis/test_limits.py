"""What a sweep cannot show is found in its data."""

from pathlib import Path
from typing import Any

import pytest

from sweep.analysis.comparison import compare_batch_sizes
from sweep.analysis.frames import load_sweep
from sweep.analysis.limits import find_limits, mixed_execution

ALWAYS = {"no_cause", "fixed_horizon", "scope"}


@pytest.fixture
def limits_of(tmp_path: Path, write_fake_sweep: Any) -> Any:
    def build(**options: Any) -> dict[str, str]:
        path = tmp_path / f"sweep-{len(list(tmp_path.iterdir()))}"
        write_fake_sweep(path, **options)
        found = load_sweep(path)
        limits = find_limits(found, compare_batch_sizes(found.trials))
        return {limit.code: limit.text for limit in limits}

    return build


def test_one_seed_and_a_fixed_rate_are_named_with_what_they_forbid(limits_of: Any) -> None:
    limits = limits_of(batches="4,8", seeds=1)
    assert set(limits) == {"single_seed", "fixed_learning_rate", *ALWAYS}
    assert "cannot be estimated from one trial" in limits["single_seed"]
    assert "`--lr tuned --seeds 3`" in limits["fixed_learning_rate"]
    assert "must not be concluded" in limits["fixed_learning_rate"]


def test_enough_seeds_lift_that_limit(limits_of: Any) -> None:
    assert "few_seeds" in limits_of(batches="4,8", seeds=2)
    assert not {"few_seeds", "single_seed"} & set(limits_of(batches="4,8", seeds=3))


def test_one_seed_at_some_batch_sizes_is_said_so(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "grown", batches="4,8", seeds=3)
    found = load_sweep(tmp_path / "grown")
    kept = found.trials[(found.trials["batch_size"] == 8) | (found.trials["seed"] == 0)]
    limits = find_limits(found, compare_batch_sizes(kept))
    assert limits[0].code == "single_seed"
    assert limits[0].text.startswith("One seed at some batch sizes.")


def test_a_scaling_rule_is_not_called_fixed(limits_of: Any) -> None:
    limits = limits_of(lrs=("sqrt",), batches="4,8", seeds=3)
    assert set(limits) == {"scaled_learning_rate", *ALWAYS}


def test_diverged_and_missing_trials_are_named(limits_of: Any) -> None:
    ends = {4: "diverged", 8: "lost", 16: "WAITING"}
    limits = limits_of(outcome=lambda row: ends.get(row.batch_size, "COMPLETE"))
    assert limits["diverged"].startswith("1 of 5 reporting trials diverged")
    assert "batch size 4 (fixed 1e-3): 1 diverged of 1 planned" in limits["cells_missing"]
    assert "batch size 16 (fixed 1e-3): 1 unfinished" in limits["cells_missing"]


def test_token_counts_that_differ_are_named(limits_of: Any) -> None:
    limits = limits_of(batches="4,7,9", budget=50_000)
    assert "49,920" in limits["tokens_differ"]


def test_a_diverged_trial_that_stopped_early_is_no_difference_of_tokens(limits_of: Any) -> None:
    limits = limits_of(outcome=lambda row: "diverged" if row.batch_size == 4 else "COMPLETE")
    assert "tokens_differ" not in limits


def test_many_epochs_and_a_strange_start_are_named(limits_of: Any) -> None:
    limits = limits_of(change=lambda row: {"epochs": 7.25, "initial_train_loss": 3.5})
    assert "7.25 times" in limits["many_epochs"]
    assert "ln V = 6.238" in limits["initial_loss"] and "3.500" in limits["initial_loss"]


def test_a_workload_without_vocabulary_has_no_expected_start(limits_of: Any) -> None:
    limits = limits_of(experiment="quadratic", change=lambda row: {"initial_train_loss": 3.7})
    assert "initial_loss" not in limits


def test_a_single_batch_size_is_nothing_to_compare(limits_of: Any) -> None:
    assert limits_of(batches="8")["nothing_to_compare"].startswith("One batch size is complete")
    nothing = limits_of(outcome=lambda row: "WAITING")
    assert nothing["nothing_to_compare"].startswith("No batch size is complete")


def test_mixed_execution_is_found_with_its_values(tmp_path: Path, write_fake_sweep: Any) -> None:
    def change(row: Any) -> dict[str, Any]:
        if row.batch_size != 8 or row.seed:
            return {}
        execution = {"device": "cpu", "threads": 4, "compile": True}
        return {"execution": execution, "torch_version": "2.12.0", "microbatch_size": 2}

    write_fake_sweep(tmp_path / "mixed", seeds=2, change=change)
    trials = load_sweep(tmp_path / "mixed").trials
    mixed = mixed_execution(trials)
    assert mixed["torch_version"] == ["2.12.0", "2.13.0+cpu"]
    assert mixed["execution.threads"] == ["2", "4"]
    assert mixed["execution.compile"] == ["false", "true"]
    assert mixed["microbatch_size at batch size 8"] == ["2", "8"]
    assert not any("at batch size 16" in name for name in mixed)


def test_equal_trials_of_unequal_times_are_named(limits_of: Any) -> None:
    assert "uneven_times" not in limits_of(seeds=3)
    limits = limits_of(seeds=3, change=lambda row: {"seconds_total": 10.0 * (1 + row.seed)})
    assert "up to 3.00 times" in limits["uneven_times"]


def test_different_microbatches_of_different_batch_sizes_are_not_mixed(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "plain")
    assert mixed_execution(load_sweep(tmp_path / "plain").trials) == {}
