"""Times of batch sizes: seconds of a training, and their ratios.

Ratios come from timing.json, whose rounds time all batch sizes side by side, or else from the
trials. Seconds come from trials that ran as the steps were timed, or else from timing.json.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.answer_data import join
from sweep.analysis.tables import mean_of, ran_alone, read_execution
from sweep.config.arms import Arm
from sweep.config.numbers import format_seconds
from sweep.decision.curves import Floats
from sweep.decision.equal_amounts import MOST_UNEQUAL, ratios_of_trials
from sweep.decision.times import (
    TimeEstimate,
    estimate_time,
    ratio_of_rounds,
    ratio_of_trials,
    trials_needed,
)
from sweep.decision.trials import TrialTime, ran_as_timed
from sweep.plan.policies import LEAST_SEEDS
from sweep.trial.timing import ArmTimes, Timing, timed_settings


@dataclass(frozen=True)
class Times:
    """The times of batch sizes, each for the tokens that it trains on."""

    sizes: tuple[int, ...]
    seconds: Mapping[int, TimeEstimate]  # a training's; a batch size without times is missing
    ratios: Mapping[tuple[int, int], TimeEstimate]  # seconds per token, the first over the other
    tokens: Mapping[int, float]  # that one training has; missing, or NaN, if they are not known
    device: str  # "" if it is not known
    is_elsewhere: bool  # whether the trials ran on another device, or with other settings
    reasons: tuple[str, ...]  # why statements about times are provisional, sentences

    @property
    def unknown(self) -> list[int]:
        """The batch sizes whose times cannot be compared."""
        with_ratios = {first for first, _ in self.ratios}
        return [size for size in self.sizes if size not in with_ratios & self.seconds.keys()]

    @property
    def has_intervals(self) -> bool:
        """Whether all ratios that are known have intervals, and not only ranges."""
        return all(ratio.is_interval for ratio in self.ratios.values())

    @property
    def log_ratios_of_trainings(self) -> tuple[Floats, Floats, Floats]:
        """Those of `log_ratios`, for the tokens that each batch size trains on."""
        tokens = np.log([self.tokens.get(size, math.nan) for size in self.sizes])
        more = tokens[:, None] - tokens[None, :]
        estimate, low, high = self.log_ratios
        np.fill_diagonal(more, 0.0)
        return estimate + more, low + more, high + more

    @property
    def log_ratios(self) -> tuple[Floats, Floats, Floats]:
        """Estimates and bounds of the log ratios of times per token, row over column, (k, k).

        Of a batch size without times the estimate is NaN, and the bounds are infinite.
        """
        is_same = np.eye(len(self.sizes), dtype=bool)
        estimate = np.where(is_same, 0.0, np.nan)
        low = np.where(is_same, 0.0, -np.inf)
        high = np.where(is_same, 0.0, np.inf)
        for (first, other), ratio in self.ratios.items():
            i = self.sizes.index(first)
            j = self.sizes.index(other)
            estimate[i, j] = math.log(ratio.median)
            low[i, j] = math.log(ratio.low)
            high[i, j] = math.log(ratio.high)
        return estimate, low, high


def known_times(
    finals: pd.DataFrame, sizes: Sequence[int], optimizer: str | None, timing: Timing | None
) -> Times:
    """Return the times of batch sizes under one policy.

    Args:
        finals: the final trials that ended: batch_size, value, device, execution,
            microbatch_size, steps, target, seconds_per_token, seconds_training and steps_taken
            (both up to a target, if there is one).
        sizes: the batch sizes, ascending.
        optimizer: as in timing.json, None if the sweep has only one.
        timing: measured steps, None without any. They count if all batch sizes with values have
            some.
    """
    trials = _timed(finals)
    if timing is not None:
        rounds = _rounds_of(timing, sizes, optimizer)
        if {*trials["batch_size"]} <= rounds.keys():
            return _times_of_rounds(timing, rounds, trials, sizes)
    return _times_of_trials(trials, sizes)


def time_ratios(
    finals: pd.DataFrame, arms: Mapping[tuple[str, int], Arm], timing: Timing | None
) -> tuple[Floats, Floats]:
    """Bound the log ratios of the times that trials with a budget of time took, (k, k).

    Args:
        finals: as in `known_times`, with their labels.
        arms: by label and batch size.
        timing: measured steps, None without any.
    """
    groups = _timed(finals).groupby(["label", "batch_size"])
    times: dict[Arm, list[TrialTime]] = {}
    for key, arm in arms.items():
        trials = groups.get_group(key) if key in groups.groups else finals.iloc[:0]
        times[arm] = _times_of(trials)
    return ratios_of_trials(times, timing)


def reasons_of_time_budget(
    finals: pd.DataFrame,
    arms: Mapping[tuple[str, int], Arm],
    ratios: tuple[Floats, Floats],
    budget: float,
) -> list[str]:
    """Return sentences about trainings that did not take the budget, or not equally long.

    Batch sizes without a value, which are not compared, do not count.

    Args:
        finals: as in `time_ratios`.
        arms: the same.
        ratios: those of `time_ratios`.
        budget: seconds that each training was to take.
    """
    valued = finals[np.isfinite(finals["value"])]
    compared = {*valued.groupby(["label", "batch_size"]).groups}
    reasons = [
        _describe_missed_budget(finals, arms, budget),
        _describe_unequal_times([key in compared for key in arms], [*arms.values()], ratios),
    ]
    without_slope = valued.loc[valued["valid_slope"].isna(), "batch_size"]
    if len(without_slope):
        sizes = join(sorted({*without_slope}))
        reasons.append(
            f"Curves at batch size {sizes} do not tell what a difference in time would change."
        )
    return [reason for reason in reasons if reason]


def misses_budget(seconds: float, budget: float) -> bool:
    """Return True if a training took over 5 % more or less than its budget of time."""
    return abs(math.log(seconds / budget)) > math.log1p(MOST_UNEQUAL)


def _describe_missed_budget(
    finals: pd.DataFrame, arms: Mapping[tuple[str, int], Arm], budget: float
) -> str:
    """Name the trainings whose median time is off the budget by more than 5 %; "" if none is."""
    medians = _timed(finals).groupby(["label", "batch_size"])["seconds_training"].median()
    missed = []
    for key, arm in arms.items():
        seconds = float(medians.get(key, math.nan))
        if misses_budget(seconds, budget):
            missed.append(f"{format_seconds(seconds)} at {arm.label}")
    if not missed:
        return ""
    return f"Trainings were to take {format_seconds(budget)}, but took {join(missed)}."


def _describe_unequal_times(
    is_compared: Sequence[bool], arms: Sequence[Arm], ratios: tuple[Floats, Floats]
) -> str:
    """Name the pair whose times may differ most, if that is more than 5 %; "" otherwise."""
    low, high = ratios
    is_pair = np.outer(is_compared, is_compared)
    largest = np.where(is_pair, np.maximum(-low, high), 0.0)
    i, j = sorted(divmod(int(largest.argmax()), len(arms)))
    apart = float(largest[i, j])
    if apart <= math.log1p(MOST_UNEQUAL):
        return ""
    extent = "is not known"
    if math.isfinite(apart):
        extent = f"is known only within {100 * math.expm1(apart):.2g} %"
    return (
        f"Whether trainings at {arms[i].label} and {arms[j].label} took equally long {extent}. "
        "Repeat the sweep on an idle machine, in another --out."
    )


def read_trial_time(trial: Mapping[Any, Any]) -> TrialTime | None:
    """Read the time of a trial from a row of the table of trials; None if it has none."""
    seconds = trial.get("seconds_training")
    if seconds is None or not seconds > 0:
        return None
    settings = read_execution(trial.get("execution"))
    microbatch = trial.get("microbatch_size")
    return TrialTime(
        seconds=float(seconds),
        steps=float(trial["steps"]),
        device=trial.get("device"),
        settings=timed_settings(settings) if settings else None,
        microbatch_size=None if pd.isna(microbatch) else int(microbatch),
    )


def _times_of(trials: pd.DataFrame) -> list[TrialTime]:
    times = map(read_trial_time, trials.to_dict("records"))
    return [time for time in times if time is not None]


def _timed(finals: pd.DataFrame) -> pd.DataFrame:
    """Return the trials that have a value and a time."""
    is_timed = np.isfinite(finals["value"]) & (finals["seconds_training"] > 0)
    timed: pd.DataFrame = finals[is_timed]
    return timed


def _rounds_of(timing: Timing, sizes: Sequence[int], optimizer: str | None) -> dict[int, ArmTimes]:
    rounds = {}
    for size in sizes:
        times = timing.times_of(Arm(optimizer, size))
        if times is not None and times.seconds_per_step:
            rounds[size] = times
    return rounds


def _times_of_rounds(
    timing: Timing, rounds: Mapping[int, ArmTimes], trials: pd.DataFrame, sizes: Sequence[int]
) -> Times:
    is_elsewhere = not all(
        ran_as_timed(_times_of(trials[trials["batch_size"] == size]), timing, times.arm)
        for size, times in rounds.items()
    )
    seconds: dict[int, TimeEstimate] = {}
    for size, times in rounds.items():
        of_size = trials[trials["batch_size"] == size]
        if of_size.empty:
            continue
        if is_elsewhere:
            seconds[size] = _seconds_of_steps(of_size, times.seconds_per_step)
        else:
            seconds[size] = estimate_time(of_size["seconds_training"].to_list())

    device = timing.device
    if not ran_alone(trials).all():
        device += f" with {timing.execution['threads']} threads, one trial at a time"
    ratios = {}
    for first, other in permutations(rounds, 2):
        ratios[first, other] = ratio_of_rounds(
            rounds[first].seconds_per_sequence, rounds[other].seconds_per_sequence, len(rounds)
        )
    return Times(
        sizes=tuple(sizes),
        seconds=seconds,
        ratios=ratios,
        tokens=_tokens_of(trials),
        device=device,
        is_elsewhere=is_elsewhere,
        reasons=tuple(_reasons_of_rounds(timing, rounds)),
    )


def _tokens_of(trials: pd.DataFrame) -> dict[int, float]:
    """Return the tokens of a training by batch size, in the unit of `seconds_per_token`."""
    tokens = trials["seconds_training"] / trials["seconds_per_token"]
    medians = tokens.groupby(trials["batch_size"]).median()
    return {int(size): float(count) for size, count in zip(medians.index, medians, strict=True)}


def _seconds_of_steps(trials: pd.DataFrame, seconds_per_step: Sequence[float]) -> TimeEstimate:
    """Estimate the time of the trainings of one batch size from the time of a step.

    The steps to a target have the t interval of their mean logarithm, from three seeds on. Its
    errors and those of a step's time are independent, and combined by their squares.
    """
    steps = trials["steps_taken"].astype(float)
    step = estimate_time(seconds_per_step)
    if trials["target"].isna().all():  # all trainings have these steps
        count = float(steps.median())
        return replace(
            step, median=count * step.median, low=count * step.low, high=count * step.high
        )

    log_steps = mean_of(np.log(steps.to_numpy()).tolist())
    median = math.exp(log_steps.value) * step.median
    if len(steps) < LEAST_SEEDS or not step.is_interval:
        low = float(steps.min()) * step.low
        high = float(steps.max()) * step.high
        return TimeEstimate(median, low, high, len(steps), is_interval=False)
    below = math.hypot(log_steps.value - log_steps.low, math.log(step.median / step.low))
    above = math.hypot(log_steps.high - log_steps.value, math.log(step.high / step.median))
    low = median * math.exp(-below)
    high = median * math.exp(above)
    return TimeEstimate(median, low, high, len(steps), is_interval=True)


def _reasons_of_rounds(timing: Timing, rounds: Mapping[int, ArmTimes]) -> list[str]:
    """Return why what follows from the rounds is provisional."""
    reasons = []
    if timing.rounds < timing.rounds_needed:
        reasons.append(
            f"Steps were timed in {timing.rounds} rounds, which give only the range of each ratio; "
            f"{timing.rounds_needed} give an interval (sweep time)."
        )
    loaded = [size for size, times in rounds.items() if times.is_loaded]
    if loaded:
        reasons.append(
            f"Other programs slowed the steps at batch size {join(loaded)} while they were timed. "
            "Time them again (sweep time) while the machine is idle."
        )
    unknown = [size for size, times in rounds.items() if times.is_loaded is None]
    if unknown:
        reasons.append(
            "It is not known whether other programs slowed the steps at batch size "
            f"{join(unknown)} while they were timed."
        )
    return reasons


def _times_of_trials(trials: pd.DataFrame, sizes: Sequence[int]) -> Times:
    """Return times of trials that ran one after the other, if they ran alike."""
    tokens = _tokens_of(trials)
    alone = ran_alone(trials)
    reasons = []
    if not alone.all():
        reasons.append(
            "Trials that shared a device have no times of their own. Time the steps (sweep time)."
        )
    trials = trials[alone]
    devices = sorted({*trials["device"].dropna()})
    settings = [time.settings for time in _times_of(trials) if time.settings is not None]
    is_one_machine = len(devices) <= 1 and all(other == settings[0] for other in settings)
    if len(devices) > 1:
        reasons.append(f"Times on different devices are not compared: {join(devices)}.")
    elif not is_one_machine:
        reasons.append("Times with different settings of the execution are not compared.")
    per_token: dict[int, list[float]] = {}
    seconds: dict[int, TimeEstimate] = {}
    for size in sizes:
        of_size = trials[trials["batch_size"] == size]
        has_one_microbatch = of_size["microbatch_size"].nunique() <= 1
        if of_size.empty or not is_one_machine or not has_one_microbatch:
            continue
        seconds[size] = estimate_time(of_size["seconds_training"].to_list())
        if of_size["seconds_per_token"].notna().all():
            per_token[size] = of_size["seconds_per_token"].to_list()

    ratios = {}
    for first, other in permutations(per_token, 2):
        ratios[first, other] = ratio_of_trials(per_token[first], per_token[other], len(sizes))

    fewest = min(map(len, per_token.values()), default=0)
    if not all(ratio.is_interval for ratio in ratios.values()):
        trial = "trial" if fewest == 1 else "trials"
        reasons.append(
            f"The times are those of {fewest} {trial} of a batch size, which give only the range "
            f"of each ratio; {trials_needed(len(sizes))} give an interval."
        )
    if trials["device"].isna().any():
        reasons.append("It is not known whether all trials ran on the same device.")
    return Times(
        sizes=tuple(sizes),
        seconds=seconds,
        ratios=ratios,
        tokens=tokens,
        device=devices[0] if len(devices) == 1 else "",
        is_elsewhere=False,
        reasons=tuple(reasons),
    )
