"""Plans of several budgets in one folder."""

import pytest

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.config.numbers import batches_in_sequences, parse_budget
from sweep.errors import SweepError
from sweep.plan.growth import add_budget, may_add_budget
from sweep.plan.plan import Inputs, build_plan, parse_plan

SETTINGS = {"batches": "4,8", "lr": "tuned", "precision": "fp32"}


def plan_of(budget, **changes):
    experiment = load_experiment("quick", {**SETTINGS, "budget": budget, **changes})
    return build_plan(experiment, Execution(device="cpu"), Inputs(), command=("sweep", "run"))


@pytest.fixture
def small():
    return plan_of(200_000)


@pytest.fixture
def large():
    return plan_of(800_000, batches="8,16")


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("1M", 1_000_000),
        ("4M,1M", (1_000_000, 4_000_000)),
        ([1000, "4k"], (1000, 4000)),
        ("10min", "10min"),
    ],
)
def test_budgets_are_read_in_ascending_order(text, budgets):
    assert parse_budget(text) == budgets


@pytest.mark.parametrize("text", ["1M,1M", "1M,1.2M", "1M,10min", "1M,", "0,1M", []])
def test_budgets_that_are_too_close_or_no_numbers_are_refused(text):
    with pytest.raises(SweepError):
        parse_budget(text)


def test_an_experiment_of_several_budgets_is_one_for_each():
    experiment = load_experiment("quick", {**SETTINGS, "budget": "200k,800k"})
    assert [single.token_budget for single in experiment.by_budget] == [200_000, 800_000]
    assert experiment.token_budget is None
    (alone,) = experiment.by_budget[0].by_budget
    assert alone.budget == 200_000


@pytest.mark.parametrize(
    "settings", [{"target": 3.0}, {"tuning": {"budget": 100_000}}], ids=["target", "tune-budget"]
)
def test_settings_of_one_budget_are_refused_with_several(settings):
    with pytest.raises(SweepError, match="budget"):
        load_experiment("quick", {**SETTINGS, "budget": "200k,800k", **settings})


def test_each_budget_keeps_its_own_plan_in_the_plan_of_the_folder(small, large):
    whole = small.with_budget(large)
    assert whole.by_budget == (small, large)
    assert whole.find_budget(200_000) == small and whole.find_budget(1) is None
    assert whole.token_budget == 800_000  # of the largest
    assert large.with_budget(small).by_budget == whole.by_budget
    assert {row.arm for row in whole.trials} == {
        *(Arm(None, size, 200_000) for size in (4, 8)),
        *(Arm(None, size, 800_000) for size in (8, 16)),
    }
    stored = parse_plan(whole.model_dump(mode="json"), "the plan")
    assert [len(plan.trials) for plan in stored.by_budget] == [len(small.trials), len(large.trials)]
    assert stored.by_budget[0].trials == small.trials


def test_a_trial_has_the_same_id_and_config_with_other_budgets_and_alone(small, large):
    whole = small.with_budget(large)
    ids = {row.id for row in whole.known_trials}
    assert ids == {row.id for plan in (small, large) for row in plan.known_trials}
    for plan in (small, large):
        sequences = plan.settings.evaluation.sequences
        for row in plan.known_trials:
            in_whole = next(other for other in whole.known_trials if other.id == row.id)
            config = whole.trial_config(in_whole)
            assert config == plan.trial_config(row)
            assert config.science.evaluation.sequences == sequences
    assert len({plan.settings.evaluation.sequences for plan in (small, large)}) == 2


def test_a_plan_of_one_budget_is_replaced(small):
    changed = small.model_copy(update={"has_looks": True})
    assert small.with_budget(changed) == changed


def test_a_folder_grows_by_a_budget_of_the_same_question(small, large):
    assert may_add_budget(small, large) and not may_add_budget(small, small)
    added = add_budget(small.model_copy(update={"sweep_uid": "1"}), large)
    assert added.sweep_uid == "1" and added.trials == large.trials
    with pytest.raises(SweepError, match="model"):
        add_budget(small, plan_of(800_000, model="small"))
    with pytest.raises(SweepError, match=r"at least 1\.5 times"):
        add_budget(small, plan_of(250_000))
    for other in (plan_of("10min"), plan_of(800_000, target=3.0)):
        assert not may_add_budget(small, other)


def test_budgets_that_are_still_to_come_are_known_until_they_are_planned(small, large):
    waiting = small.model_copy(update={"later_budgets": (800_000, 3_200_000)})
    following = large.model_copy(update={"later_budgets": (3_200_000,)})
    assert waiting.with_budget(following).later_budgets == (3_200_000,)
    assert waiting.with_budget(following).with_budget(small).later_budgets == ()  # another command


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64ktok", [250]),
        ("64Kitok,8", [256, "8"]),
        ("1.024ktok", [4]),
        ("64.5Kitok", [258]),
        ("64k", ["64k"]),
        ([4, "512tok"], [4, 2]),
    ],
)
def test_batch_sizes_in_tokens_are_sequences(text, sizes):
    assert batches_in_sequences(text, tokens_per_sequence=256) == sizes


def test_tokens_that_are_no_whole_sequences_are_refused_with_the_nearest_ones():
    with pytest.raises(SweepError, match=r"got 1000\. Write 768tok or 1024tok"):
        batches_in_sequences("1ktok", tokens_per_sequence=256)
    with pytest.raises(SweepError, match="examples"):
        batches_in_sequences("1ktok", tokens_per_sequence=1)
    assert load_experiment("quick", {"batches": "256tok,16"}).batches == (4, 16)
