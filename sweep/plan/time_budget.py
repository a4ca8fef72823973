"""Tokens of trials with a budget of time: as many as its steps train on, by measured times."""

import statistics

from sweep.config.arms import Arm
from sweep.errors import SweepError
from sweep.plan.course import steps_within
from sweep.plan.plan import Plan
from sweep.trial.timing import Timing


def tokens_in_time(plan: Plan, timing: Timing) -> dict[Arm, int]:
    """Return the tokens of the arms that have none yet, by the medians of their rounds.

    A part of a sweep (`--shard`) gets those of the whole one, on which its evaluations depend.
    Arms that have tokens keep them, however fast the machine is now: the others get the same time
    by the ratios to them.

    Args:
        plan: with a budget of time.
        timing: one of all arms of the sweep.

    Raises:
        SweepError: if the time is less than a step of some batch size, or an arm was not timed.
    """
    seconds = plan.settings.time_budget_seconds
    assert seconds is not None, "only a budget of time needs times"
    medians = {times.arm: statistics.median(times.seconds_per_step) for times in timing.arms}
    steps_of_fixed = {row.arm: row.steps for row in plan.trials if row.tokens}
    scales = [seconds / (steps * medians[arm]) for arm, steps in steps_of_fixed.items()]
    scale = statistics.median(scales) if scales else 1.0

    tokens = {}
    for arm in dict.fromkeys([*(row.arm for row in plan.trials), *plan.settings.arms]):
        if arm in steps_of_fixed:
            continue
        if arm not in medians:
            raise SweepError(
                f"the times must be those of all batch sizes, but {arm.batch_size} has none. Call "
                "`sweep time` for the whole sweep."
            )
        steps = steps_within(seconds, scale * medians[arm], arm.batch_size)
        tokens[arm] = steps * arm.batch_size * plan.tokens_per_sequence
    return tokens
