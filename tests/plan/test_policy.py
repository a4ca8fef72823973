"""Learning-rate policies, by SCIENCE.md §2."""

import pytest

from sweep.config.experiment import OptimizerSettings
from sweep.errors import SweepError
from sweep.plan.rates import Policy, parse_policy

ADAMW = OptimizerSettings()


def test_a_number_keeps_everything_everywhere():
    policy = parse_policy("3e-4")
    assert policy.name == "fixed"
    assert [policy.rate_at(batch) for batch in (1, 256)] == [3e-4, 3e-4]
    assert policy.optimizer_at(256, 256, ADAMW) == ADAMW


def test_sqrt_is_short_for_its_default_and_holds_half_life_and_time_scale():
    assert parse_policy("sqrt") == parse_policy("sqrt:1e-3@32") == Policy("sqrt", 1e-3, 32)
    policy = parse_policy("sqrt")
    assert policy.rate_at(128) == pytest.approx(2e-3)
    for batch in (1, 32, 256):
        optimizer = policy.optimizer_at(batch, 256, ADAMW)
        assert optimizer.beta2 == pytest.approx(0.999 ** (batch / 32))
        time_scale = batch / (policy.rate_at(batch) * optimizer.weight_decay)
        assert time_scale == pytest.approx(32 / (1e-3 * 0.1))


def test_linear_scales_the_rate_and_leaves_weight_decay():
    policy = parse_policy("linear:1e-3@32")
    assert policy.rate_at(64) == pytest.approx(2e-3)
    assert policy.optimizer_at(64, 256, ADAMW).weight_decay == 0.1
    half_context, half_batch = (
        policy.optimizer_at(64, 128, ADAMW),
        policy.optimizer_at(32, 256, ADAMW),
    )
    assert half_context.beta2 == half_batch.beta2


def test_the_centre_of_tuning_grows_and_then_stays():
    policy = parse_policy("tuned")
    assert policy.rate_at(32) == 1e-3
    assert policy.rate_at(1) == pytest.approx(1e-3 * (1 / 32) ** 0.125)
    assert policy.rate_at(128) == pytest.approx(2e-3)
    assert policy.rate_at(256) == policy.rate_at(1024) == pytest.approx(1e-3 * 8**0.5)


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "0", "nan", "inf", "sqrt:1e-3", "1e-3@32", "linear", "linear:0@32", "sqrt:1@0"],
)
def test_nonsense_is_refused_in_one_sentence(text):
    with pytest.raises(SweepError, match="lr must be"):
        parse_policy(text)
