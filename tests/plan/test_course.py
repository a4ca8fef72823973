"""Steps, warmup, schedule, milestones, accumulation and the numbers of the reference."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.config.load import load_experiment
from sweep.config.schedule import ScheduleSettings
from sweep.errors import SweepError
from sweep.plan.accumulation import choose_microbatch, common_microbatch, largest_divisor
from sweep.plan.course import Course, tokens_per_trial
from sweep.plan.learning_rate import learning_rate_at, warmup_steps

QUICK = load_experiment("quick")
REFERENCE = ScheduleSettings(warmup_min_steps=100)


def test_reference_steps_and_warmup_are_those_of_the_design():
    batches = (1, 8, 32, 64, 128, 256)
    tokens, are_common = tokens_per_trial(327_680_000, batches, 256)
    assert are_common and set(tokens.values()) == {327_680_000}
    steps = [tokens[batch] // (batch * 256) for batch in batches]
    assert steps == [1_280_000, 160_000, 40_000, 20_000, 10_000, 5_000]
    assert [warmup_steps(s, REFERENCE) for s in steps] == [12_800, 1_600, 400, 200, 100, 100]


def test_token_counts_are_equal_if_that_loses_at_most_one_per_cent():
    common = {1: 326_893_568, 512: 326_893_568}
    assert tokens_per_trial(327_000_000, (1, 512), 256) == (common, True)
    own = {1: 999_936, 512: 983_040}  # a common count would lose 1.7 %
    assert tokens_per_trial(1_000_000, (1, 512), 128) == (own, False)


batch_lists = st.lists(st.integers(1, 600), min_size=1, max_size=6, unique=True)


@given(st.integers(1, 10**9), batch_lists, st.integers(1, 1024))
def test_tokens_are_whole_steps_within_the_budget(budget, batches, context):
    if budget < max(batches) * context:
        with pytest.raises(SweepError, match="at least one step"):
            tokens_per_trial(budget, batches, context)
        return
    tokens, are_common = tokens_per_trial(budget, batches, context)
    for batch, count in tokens.items():
        assert 0 < count <= budget and count % (batch * context) == 0
    assert are_common == (len(set(tokens.values())) == 1)
    if not are_common:
        common = math.lcm(*batches) * context
        assert budget - budget // common * common > 0.01 * budget
        assert all(budget - count < batch * context for batch, count in tokens.items())


WARMUPS = [  # steps, fraction, minimum, expected
    *((1, 0.01, 0, 1), (9, 0.1, 0, 1), (50, 0.01, 0, 1), (149, 0.01, 0, 1), (150, 0.01, 0, 2)),
    *((5000, 0.01, 100, 100), (500, 0.01, 100, 50), (1000, 0.1, 0, 100)),
]


@pytest.mark.parametrize(("steps", "fraction", "minimum", "expected"), WARMUPS)
def test_warmup_follows_the_formula(steps, fraction, minimum, expected):
    schedule = ScheduleSettings(warmup_fraction=fraction, warmup_min_steps=minimum)
    assert warmup_steps(steps, schedule) == expected


@given(st.integers(1, 5000))
def test_schedule_warms_up_to_the_peak_and_ends_at_exactly_a_tenth(steps):
    schedule = ScheduleSettings()
    warmup = warmup_steps(steps, schedule)
    rates = [learning_rate_at(t, 3e-4, steps, warmup, schedule) for t in range(1, steps + 1)]
    assert rates[warmup - 1] == 3e-4 == max(rates)
    assert rates == sorted(rates[:warmup]) + sorted(rates[warmup:], reverse=True)
    assert rates[-1] == (3e-4 if steps == 1 else 3e-4 * 0.1)


def test_the_decay_is_a_cosine_and_a_constant_schedule_stays_at_the_peak():
    assert learning_rate_at(60, 1.0, 110, 10, ScheduleSettings()) == pytest.approx(0.55)
    constant = ScheduleSettings(name="constant", warmup_fraction=0)
    assert [learning_rate_at(t, 0.1, 5, 1, constant) for t in range(1, 6)] == [0.1] * 5


@given(st.integers(1, 3000), st.integers(1, 200))
def test_a_milestone_is_the_first_step_at_or_past_its_share(steps, points):
    milestones = Course(4, 16, steps).milestones(points)
    assert list(milestones) == sorted(set(milestones)) and milestones[-1] == steps
    for share in (k * steps for k in range(1, points + 1)):
        assert any(step * points >= share > (step - 1) * points for step in milestones)


SETTINGS = st.sampled_from(["microbatch", "accumulation"])


@given(st.integers(1, 300), st.integers(1, 400), st.sampled_from([1, 2, 8]), SETTINGS)
def test_a_size_divides_or_its_nearest_legal_values_are_named(batch_size, value, group, setting):
    def choose(value):
        return choose_microbatch(batch_size, 1, sequences_per_group=group, **{setting: value})

    def is_legal(size):
        return batch_size % size == 0 and (size % group == 0 or group % size == 0)

    size = min(value, batch_size) if setting == "microbatch" else batch_size // value
    if size and is_legal(size) and (setting == "microbatch" or batch_size % value == 0):
        assert choose(value) == size
        return
    with pytest.raises(SweepError, match="must divide") as error:
        choose(value)
    for near in str(error.value).split("Use ")[1].strip(".").split(" or "):
        assert int(near) != value and is_legal(choose(int(near)))


def test_the_bound_holds_only_if_nothing_was_chosen():
    assert choose_microbatch(48, 20) == 16
    assert choose_microbatch(48, 20, sequences_per_group=8) == 16
    assert choose_microbatch(48, 20, devices=4) == 12
    assert choose_microbatch(48, 20, microbatch=100) == 48
    assert choose_microbatch(48, 20, microbatch=12, accumulation=4) == 12
    assert choose_microbatch(48, 0) == 1


def test_half_of_a_microbatch_is_rounded_down_to_whole_groups_or_equal_parts_of_one():
    sizes = [48]
    while sizes[-1] > 1:
        sizes.append(largest_divisor(48, sizes[-1] // 2, sequences_per_group=8))
    assert sizes == [48, 24, 8, 4, 2, 1]


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 2000), st.data())
def test_steps_sequences_and_tokens_of_a_course_belong_together(batch, sequence, steps, data):
    model = QUICK.model.model_copy(update={"context": sequence})
    settings = QUICK.model_copy(update={"model": model})
    course = Course.of_settings(settings, batch, batch * sequence * steps + batch * sequence - 1)
    assert course == Course(batch, sequence, steps)
    step = data.draw(st.integers(1, steps))
    assert course.first_sequence(step) + course.batch_at(step) == course.sequences_at(step)
    assert course.first_sequence(1) == 0
    assert course.tokens_at(step) == sequence * course.sequences_at(step)
    assert course.step_at(course.tokens_at(step)) == step
    assert step - 1 < course.step_at(course.tokens_at(step) - 0.5) < step


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    at_most=st.integers(1, 50),
    group=st.sampled_from([1, 4]),
)
def test_a_common_microbatch_is_one_that_every_batch_size_accepts(sizes, at_most, group):
    sizes = [group * size for size in sizes]
    common = common_microbatch(sizes, at_most, group)
    assert 1 <= common <= at_most

    def is_accepted(size):
        try:
            for number in sizes:
                choose_microbatch(number, 1, sequences_per_group=group, microbatch=size)
        except SweepError:
            return False
        return True

    assert is_accepted(common)
    larger = range(common + 1, min(at_most, max(sizes)) + 1)
    assert not any(map(is_accepted, larger))
