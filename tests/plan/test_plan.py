"""The plan as a whole: ids, growing, and what does not belong to a trial's identity."""

import pytest

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.config.trial import FORMAT_VERSION
from sweep.errors import SweepError
from sweep.plan.plan import grow_plan
from sweep.trial.files import sha256_of
from tests.plans import build_plan

DATA = {"name": "synthetic", "grammar_version": 1, "seed": 0}
CPU = Execution(device="cpu", threads=2)


def make(execution=CPU, data=DATA, microbatch=None, also=(), **overrides):
    settings = {"precision": "fp32", "batches": "4,8", "budget": "65536", **overrides}
    experiment = load_experiment("quick", settings)
    return build_plan(experiment, execution, data=data, microbatch=microbatch, other_batches=also)


def ids(plan):
    return [row.id for row in plan.trials]


def test_id_is_the_hash_of_the_science_fields():
    plan = make()
    for row in plan.trials:
        science = plan.science(row, row.learning_rate).model_dump(mode="json")
        assert row.id == sha256_of(science)[:12]
        assert science["format_version"] == FORMAT_VERSION


def test_steps_times_batch_times_context_is_tokens():
    for row in make(batches="4,8,12").trials:
        assert row.steps * row.batch_size * 64 == row.tokens


@pytest.mark.parametrize(
    "other",
    [
        {"execution": Execution(device="cuda", threads=64, compile=True)},
        {"microbatch": 2},
        {"data": DATA, "question": "another wording"},
    ],
)
def test_where_and_how_fast_do_not_change_ids(other):
    assert ids(make(**other)) == ids(make())


@pytest.mark.parametrize(
    "other",
    [
        {"precision": "bf16"},
        {"lr": "2e-3"},
        {"lr": "sqrt"},
        {"model": "small"},
        {"context": 32},
        {"tokenizer": "bytes"},
        {"data": {**DATA, "seed": 1}},
        {"budget": 131_072},
        {"evaluation": {"points": 10}},
    ],
)
def test_what_changes_a_number_changes_ids(other):
    assert not set(ids(make(**other))) & set(ids(make()))


def test_the_minimum_of_warmup_belongs_to_the_reference_at_a_fixed_rate_only():
    def warmup(**overrides):
        experiment = load_experiment("tinystories", {"precision": "fp32", **overrides})
        return build_plan(experiment, CPU, data=DATA).trials[-1].warmup_steps

    assert warmup() == 100
    assert warmup(lr="sqrt", seeds=1) == 50
    assert warmup(model="small", batches="256") == 100  # 1 % of 10,000 steps


def test_seeds_default_to_one_at_a_fixed_rate_and_three_otherwise():
    assert {row.seed for row in make().trials} == {0}
    assert {row.seed for row in make(lr="sqrt").trials} == {0, 1, 2}
    assert {row.seed for row in make(seeds=2).trials} == {0, 1}


def test_tuned_lists_five_rates_and_reporting_trials_without_id():
    plan = make(lr="tuned")
    tuning = [row for row in plan.trials if row.stage == "tune"]
    reporting = [row for row in plan.trials if row.stage == "report"]
    assert len(tuning) == 2 * 5 and {row.seed for row in tuning} == {1000}
    assert all(row.id for row in tuning)
    assert [(row.id, row.learning_rate) for row in reporting] == [(None, None)] * 6
    centre = tuning[2].learning_rate
    assert [row.learning_rate / centre for row in tuning[:5]] == [0.25, 0.5, 1, 2, 4]


def test_growing_adds_batch_sizes_seeds_and_rates_and_keeps_what_was_there():
    old = make()
    for other in ({"batches": "16"}, {"seeds": 3}, {"lr": "sqrt"}):
        new = make(also=(4, 8), **other)
        grown = grow_plan(old, new)
        assert grown.trials[: len(old.trials)] == old.trials
        assert {*ids(grown)} == {*ids(old), *ids(new)}


def test_naming_fewer_removes_nothing():
    old = make()
    assert grow_plan(old, make(batches="4", also=(4, 8))).trials == old.trials


def test_growing_refuses_a_changed_science_field_and_names_it():
    with pytest.raises(SweepError, match=r"optimizer\.clip would change from 1\.0 to 0\.5"):
        grow_plan(make(), make(optimizer={"clip": 0.5}))
    with pytest.raises(SweepError, match=r"data\.seed would change"):
        grow_plan(make(), make(data={**DATA, "seed": 1}))


def test_growing_refuses_a_batch_size_that_changes_the_common_tokens():
    old = make(batches="4,8", budget="66000")
    new = make(batches="3", budget="66000", also=(4, 8))
    with pytest.raises(SweepError, match="common token count"):
        grow_plan(old, new)


def test_microbatch_stays_within_its_bound_and_divides():
    plan = make(batches="512", budget="1M")
    (row,) = plan.trials
    assert row.microbatch_size * 64 <= 8192
    assert row.microbatch_size * row.gradient_accumulation_steps == 512
