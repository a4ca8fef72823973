"""Interleaved rounds of steps: how many fit in a time, their steps, and the order of the arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sweep.config.arms import Arm
from sweep.config.trial import TrialConfig

WARM_UP_STEPS = 2  # that each arm takes before the rounds
LEAST_STEPS = 3  # that each arm takes in a round


@dataclass(frozen=True)
class TimingRequest:
    """A request to time steps of these arms on one model, in one process."""

    configs: Mapping[Arm, TrialConfig]  # a trial each, with one execution but for the microbatch
    sweep_uid: str  # the sweep's, as in plan.json
    rounds: int  # the most; fewer if their least steps take longer than all seconds
    rounds_needed: int  # the least that gives intervals
    seconds_per_arm: float  # the most for an arm in all rounds, unless its least steps take longer
    deadline: float  # by `time.monotonic`; rounds that would end later are left out
    evaluates: bool  # whether to time an evaluation too


def rounds_within(seconds_per_step: Sequence[float], rounds: int, seconds: float) -> int:
    """Return how many rounds of the least steps, at most `rounds`, fit in these seconds.

    Args:
        seconds_per_step: those of each arm.
        rounds: the number wanted.
        seconds: for all rounds; may be infinite.
    """
    least = LEAST_STEPS * sum(seconds_per_step)
    return int(max(0.0, min(rounds, seconds / least)))


def choose_steps(
    seconds_per_step: Sequence[float], rounds: int, seconds_per_arm: float, seconds: float
) -> list[int]:
    """Choose the steps of each arm in a round.

    All arms get the same time, at most `seconds_per_arm` in all rounds together, but each takes at
    least `LEAST_STEPS` in a round. The others then have less, so that the total stays the same.

    Args:
        seconds_per_step: those of each arm.
        rounds: their number, which fits according to `rounds_within`.
        seconds_per_arm: the most for an arm, in all rounds.
        seconds: for all rounds of all arms; may be infinite.
    """
    share = 0.0
    least_of_arms = sorted((LEAST_STEPS * rounds * each for each in seconds_per_step), reverse=True)
    for index, least in enumerate(least_of_arms):
        share = seconds / (len(least_of_arms) - index)
        if least <= share:
            break
        seconds -= least
    share = min(share, seconds_per_arm)
    return [max(LEAST_STEPS, int(share / rounds / each)) for each in seconds_per_step]


def order_of_round(arms: int, number: int) -> list[int]:
    """Return the order of the arms: every other round is reversed, so that drift cancels."""
    order = list(range(arms))
    return order if number % 2 == 0 else order[::-1]
