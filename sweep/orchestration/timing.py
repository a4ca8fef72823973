"""Measure the times of a sweep's steps: at the end of `sweep run`, and for `sweep time`.

With a budget of time, `sweep run` measures them at its start, which fixes the tokens of the trials.
"""

import contextlib
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sweep.config.arms import Arm
from sweep.config.execution import Execution, Services, run_alone
from sweep.config.trial import TrialConfig
from sweep.decision.times import rounds_needed
from sweep.errors import CorruptFile, FolderInUse, SweepError, WorkerDied, cut
from sweep.orchestration.execution import (
    Machine,
    bound_by_memory,
    compile_as_timed,
    decide_execution,
    decide_graphs,
    inspect_machine,
    reason_for_eager_steps,
)
from sweep.orchestration.executors.build import find_executor
from sweep.orchestration.holding import holding
from sweep.orchestration.inputs import get_inputs
from sweep.orchestration.planning import Planned
from sweep.plan.plan import Plan, load_plan
from sweep.plan.rounds import LEAST_STEPS, WARM_UP_STEPS, TimingRequest
from sweep.training.process import FreshProcess, run_job
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import is_locked
from sweep.trial.result import Result
from sweep.trial.status import TrialStatus, has_failed
from sweep.trial.timing import (
    TOO_SHORT,
    ArmTimes,
    Timing,
    read_timing,
    read_timing_file,
    timed_settings,
    write_timing,
)

LOG = logging.getLogger(__name__)
TRAINING_SHARE = 0.1  # largest ratio of timing to training time in `sweep run`
SECONDS_PER_ARM = 5.0  # in all rounds
ROUNDS_FACTOR = 3  # more rounds, and seconds, for times that fix tokens
START_SECONDS = 1.0  # to start a process and to build a model
POLL_SECONDS = 0.1
# Choices of the user that hold on any device.
KEPT = ("microbatch", "accumulation", "activation_checkpointing", "generation_batch_size")


def read_statuses(plan: Plan, folder: SweepFolder) -> dict[str, TrialStatus]:
    """Return the status of each trial, by id."""
    ids = [str(row.id) for row in plan.known_trials]
    return {trial_id: folder.trial(trial_id).read_status() for trial_id in ids}


def microbatch_sizes(plan: Plan, statuses: Mapping[str, TrialStatus]) -> dict[Arm, int]:
    """Return the microbatch of each arm with a final trial that has not failed.

    It is the smallest that these trials used, which memory may have made smaller than planned.
    Before there are final trials, those of tuning count.
    """
    finals = [row for row in plan.known_trials if row.stage == "final"]
    rows = finals or plan.known_trials
    sizes: dict[Arm, int] = {}
    for row in rows:
        status = statuses.get(str(row.id))
        if status is None or has_failed(status.state, status.cause):
            continue
        size = status.microbatch_size or row.microbatch_size
        sizes[row.arm] = min(size, sizes.get(row.arm, size))
    return sizes


@dataclass(frozen=True)
class DueTiming:
    """A sweep that has ended, and whose batch sizes were not timed."""

    plan: Plan
    folder: SweepFolder
    microbatch_sizes: dict[Arm, int]
    results: list[Result]

    @property
    def seconds(self) -> float:
        """How long a measurement may take."""
        seconds = sum(result.seconds_training for result in self.results)
        return TRAINING_SHARE * seconds / self.plan.execution.trials_at_once

    @property
    def is_affordable(self) -> bool:
        """Whether one round may fit, by the times of the trials."""
        times: dict[tuple[str | None, int], list[float]] = {}  # seconds per step of each arm
        for result in self.results:
            seconds = result.seconds_training / result.steps
            times.setdefault((result.optimizer, result.batch_size), []).append(seconds)
        round_of_steps = sum(map(statistics.median, times.values()))
        least = START_SECONDS + (WARM_UP_STEPS + LEAST_STEPS) * round_of_steps
        return least <= self.seconds

    @property
    def is_here(self) -> bool:
        """Whether the trials ran on the device that this machine has."""
        with contextlib.suppress(SweepError):  # the machine has no such device
            name = run_job(name_device, self.plan.execution.device)
            return name in {result.device for result in self.results}
        return False

    def without_rounds(self, reason: str) -> Timing:
        """Return the record that these batch sizes were not timed."""
        result = self.results[-1]
        arms = [
            ArmTimes(
                optimizer=arm.optimizer,
                batch_size=arm.batch_size,
                microbatch_size=size,
                steps_per_round=0,
                seconds_per_step=(),
                seconds_compile=None,
                cpu_share=None,
                is_loaded=None,
            )
            for arm, size in self.microbatch_sizes.items()
        ]
        return Timing(
            sweep_uid=self.plan.sweep_uid,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            device=result.device,
            execution=run_alone(result.execution),
            precision=self.plan.settings.precision,
            model=self.plan.model.name,
            parameters=self.plan.model.parameters,
            tokens_per_sequence=self.plan.tokens_per_sequence,
            workload=self.plan.settings.workload.name,
            optimizers=self.plan.settings.optimizer_names,
            torch_version=result.torch_version or "",
            has_real_batches=False,
            rounds=0,
            rounds_needed=rounds_needed(len(arms)),
            reason=reason,
            seconds_evaluation=None,
            arms=tuple(arms),
        )


def find_due_timing(
    plan: Plan, folder: SweepFolder, repeats_short: bool = False
) -> DueTiming | None:
    """Return what is to be timed, once all trials have ended; None if there is nothing.

    Args:
        plan: with all trials of the folder.
        folder: the sweep's.
        repeats_short: whether to try again if there was no time for a round, because more trials
            have ended since.
    """
    statuses = read_statuses(plan, folder)
    sizes = microbatch_sizes(plan, statuses)
    has_ended = all(status.state.is_finished for status in statuses.values())
    has_ended &= not plan.waiting_searches
    if plan.why_untimed or len(sizes) < 2 or not has_ended:
        return None

    timing = find_timing(plan, folder)
    if timing is not None and timing.covers(sizes) and (timing.rounds or not repeats_short):
        return None
    results = [folder.trial(trial_id).find_result() for trial_id in statuses]
    present = [result for result in results if result is not None]
    if not present:
        return None
    if timing is not None and not timing.is_of(run_alone(present[-1].execution)):
        return None  # the user has timed another device, or other threads
    return DueTiming(plan, folder, sizes, present)


def find_timing(plan: Plan, folder: SweepFolder) -> Timing | None:
    """Read timing.json; None without one, or if it is damaged, because it is measured again."""
    with contextlib.suppress(CorruptFile):
        return read_timing(folder, plan.sweep_uid)
    return None


def _with_all_budgets(plan: Plan, folder: SweepFolder) -> Plan:
    """Return the plan of one budget with the trials of the folder's other budgets."""
    stored = load_plan(folder)
    if stored is None or not stored.budgets:
        return plan
    return stored.with_budget(plan).of_all_steps()


def lacks_times(plan: Plan, folder: SweepFolder, statuses: Mapping[str, TrialStatus]) -> bool:
    """Return True if `sweep run` still has to time batch sizes of these trials."""
    sizes = microbatch_sizes(plan, statuses)
    if plan.why_untimed or len(sizes) < 2:
        return False
    timing = find_timing(plan, folder)
    if timing is not None and timing.covers(sizes):
        return False
    due = find_due_timing(_with_all_budgets(plan, folder), folder)
    return due is not None and (not due.is_affordable or due.is_here)


def time_ended_sweep(
    plan: Plan,
    folder: SweepFolder,
    is_stopping: Callable[[], bool],
    silence: Callable[[], AbstractContextManager[None]],
) -> None:
    """Time the steps of a sweep whose trials have ended, for a tenth of their training time.

    A failure is a warning. In any case timing.json records it, so that the same batch sizes are not
    measured again.

    Args:
        plan: that of one budget, with all its trials.
        folder: the sweep's.
        is_stopping: whether the user asked to stop; then nothing is written.
        silence: encloses the measurement, to keep other work of this process from disturbing it.
    """
    plan = _with_all_budgets(plan, folder)
    due = find_due_timing(plan, folder, repeats_short=True)
    if due is None:
        return
    if not due.is_affordable:
        write_timing(folder, due.without_rounds(TOO_SHORT))
        return
    if not due.is_here:
        return

    LOG.info("Timing steps, for at most %.0f s", math.ceil(due.seconds))
    configs = configs_to_time(plan, folder, due.microbatch_sizes)
    try:
        with silence():
            deadline = time.monotonic() + due.seconds
            timing = _time_in_process(
                plan, configs, SECONDS_PER_ARM, deadline, is_stopping, evaluates=False
            )
    except SweepError as error:
        again = f"`sweep time {folder.path}` tries again"
        LOG.warning("The steps could not be timed: %s. %s.", str(error).rstrip("."), again)
        timing = due.without_rounds(cut(str(error)))
    if timing is not None:
        write_timing(folder, timing)


def configs_to_time(
    plan: Plan, folder: SweepFolder, sizes: Mapping[Arm, int]
) -> dict[Arm, TrialConfig]:
    """Return a trial of each arm, with this microbatch, and with all cores for itself."""
    plan = plan.with_execution(**dict(plan.execution.alone()))
    rows = {row.arm: row for row in plan.trials}
    located = folder.located(plan)
    configs: dict[Arm, TrialConfig] = {}
    for arm, size in sizes.items():
        config = located.trial_config(rows[arm], folder.name)
        if size != config.microbatch_size:
            config = config.for_attempt(size)
        configs[arm] = config
    return configs


def time_folder(
    folder: SweepFolder,
    plan: Plan,
    device: str | None = None,
    threads: int | None = None,
    seconds_per_arm: float = SECONDS_PER_ARM,
) -> Timing:
    """Time the steps of a sweep on this machine, in as many rounds as intervals need.

    Args:
        folder: with a plan.json; it needs no trials and no data.
        plan: the sweep's.
        device: None or the plan's own: steps run as in the trials. Another one: as a plan for it
            would run them.
        threads: None: those of a trial alone or, on another device, of this machine.
        seconds_per_arm: for each batch size, unless its least steps take longer.
    """
    if is_locked(folder.lock_path):
        problem = "is in use by a command, which would disturb the times"
        raise FolderInUse(f"{folder.path} {problem}. Wait for it, or call `sweep stop`.")
    plan = plan.of_all_steps()
    _refuse_untimed(plan)
    sizes = microbatch_sizes(plan, read_statuses(plan, folder))
    if not sizes:
        raise SweepError(f"{folder.path} must have a trial that has not failed. Run it first.")

    machine = inspect_machine(Execution(device=device or plan.execution.device), False)
    if machine.device != plan.execution.device:
        plan = _plan_on(plan, folder, machine)
        sizes = {row.arm: row.microbatch_size for row in plan.trials if row.arm in sizes}
    if threads is not None:
        execution = plan.execution.alone().model_copy(update={"threads": threads})
        plan = plan.model_copy(update={"execution": execution})

    configs = configs_to_time(plan, folder, sizes)
    timing = _time_in_process(plan, configs, seconds_per_arm)
    assert timing is not None, "nothing has stopped it"
    write_timing(folder, timing)
    return timing


def fix_tokens(planned: Planned, folder: SweepFolder, services: Services) -> Planned:
    """Fix the tokens of a budget of time, unless all trials have theirs.

    The times are those of --timing, or else of steps that are timed here.
    """
    planned = fix_tokens_by_file(planned, services)
    if not planned.plan.awaits_times:
        return planned
    if find_executor(services.executor).is_elsewhere:
        raise SweepError(
            "the steps of a budget of time must be timed where they run, got the executor "
            f"{services.executor!r}. Call `sweep time` there, and give its file as --timing."
        )
    with holding(folder):
        get_inputs(planned.plan, folder)
        return planned.with_tokens_by(_time_plan(planned.plan, folder))


def fix_tokens_by_file(planned: Planned, services: Services) -> Planned:
    """Fix the tokens of a budget of time by the file of --timing, if there is one.

    Raises:
        SweepError: the file is about other steps, or another device than this machine's.
    """
    if services.timing is None:
        return planned
    if not planned.plan.awaits_times:
        LOG.info("%s is not read: the tokens of all trials are fixed already.", services.timing)
        return planned
    is_elsewhere = find_executor(services.executor).is_elsewhere
    plan, timing = load_timing(Path(services.timing), planned.plan, is_elsewhere)
    planned = replace(planned, plan=plan)
    if not is_elsewhere:
        device = run_job(name_device, planned.plan.execution.device)
        if timing.device != device:
            raise SweepError(
                f"{services.timing} must be measured on the device that trains, but that is "
                f"{device}, and the file has {timing.device}. Call `sweep time` here."
            )
    return planned.with_tokens_by(timing)


def _time_plan(plan: Plan, folder: SweepFolder) -> Timing:
    """Time the steps of all arms of a plan, before it is written.

    Raises:
        KeyboardInterrupt: the user called `sweep stop`.
    """
    _refuse_untimed(plan)
    what = f"the {plan.settings.token_unit} of {plan.settings.budget}"
    LOG.info(f"Timing steps, which fixes {what}")
    sizes = {row.arm: row.microbatch_size for row in plan.trials}
    sizes |= microbatch_sizes(plan, read_statuses(plan, folder))
    configs = configs_to_time(plan, folder, sizes)
    budget = plan.settings.time_budget_seconds
    assert budget is not None, "only a budget of time needs times"
    seconds = min(budget, ROUNDS_FACTOR * SECONDS_PER_ARM)
    timing = _time_in_process(
        plan,
        configs,
        seconds,
        is_stopping=folder.stop_path.exists,
        evaluates=False,
        rounds_factor=ROUNDS_FACTOR,
    )
    if timing is None:
        raise KeyboardInterrupt
    if any(times.is_loaded for times in timing.arms):
        LOG.warning(
            "Other programs slowed the steps, whose times fix the %s of all trials. To time them "
            "again on an idle machine, stop this command and choose another --out.",
            plan.settings.token_unit,
        )
    return timing


def load_timing(path: Path, plan: Plan, is_elsewhere: bool = False) -> tuple[Plan, Timing]:
    """Read a timing.json that fixes the tokens of a plan, and refuse one of other steps.

    The plan is returned too: its steps are compiled if those of the file were.
    """
    timing = read_timing_file(path)
    if timing is None:
        raise SweepError(f"{path} must exist. Write it by `sweep time`.")
    plan = compile_as_timed(plan, bool(timing.execution.get("compile")), is_elsewhere)
    difference = _difference_of_steps(timing, plan)
    if difference:
        raise SweepError(
            f"{path} must time the steps of this sweep, but {difference}. Call `sweep time` for a "
            "sweep like this one."
        )
    return plan, timing


def _difference_of_steps(timing: Timing, plan: Plan) -> str:
    """Describe how the steps that were timed differ from those of a plan; "" if they do not."""
    if not timing.rounds:
        return f"it has no rounds: {timing.reason}"
    settings = timed_settings(plan.execution.model_dump(mode="json"))
    timed = timed_settings(timing.execution)
    if plan.execution.device_type != "cpu":
        timed["threads"] = settings["threads"]
    settings |= {
        "precision": plan.settings.precision,
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "tokens_per_sequence": plan.tokens_per_sequence,
        "workload": plan.settings.workload.name,
        "optimizers": plan.settings.optimizer_names,
    }
    for name, value in settings.items():
        other = timed[name] if name in timed else getattr(timing, name)
        if other != value:
            return f"{name} is {other} there and {value} here"
    for row in plan.trials:
        times = timing.times_of(row.arm)
        if times is None:
            return f"it lacks {row.arm.label}"
        if times.microbatch_size != row.microbatch_size:
            return (
                f"at {row.arm.label} the microbatch is {times.microbatch_size} there "
                f"and {row.microbatch_size} here"
            )
    return ""


def _refuse_untimed(plan: Plan) -> None:
    reason = plan.why_untimed
    if reason:
        raise SweepError(
            f"steps that are timed side by side must run in one process of sweep, got {reason}. "
            "The times of its trials count; add seeds for intervals."
        )


def _plan_on(plan: Plan, folder: SweepFolder, machine: Machine) -> Plan:
    """Return the plan as the device of this machine would run it."""
    kept = {name: getattr(plan.execution, name) for name in KEPT}
    chosen = Execution(device=machine.device, devices=1, **kept)
    execution = decide_execution(plan.settings, chosen, machine)
    plan = plan.with_execution(**dict(execution))
    reason = reason_for_eager_steps(plan, machine, shares_processes=True)
    plan = plan.with_execution(compile=not reason)
    plan = plan.with_execution(**decide_graphs(plan))
    return plan.with_execution(**bound_by_memory(plan, folder))


def _time_in_process(
    plan: Plan,
    configs: Mapping[Arm, TrialConfig],
    seconds_per_arm: float,
    deadline: float = math.inf,
    is_stopping: Callable[[], bool] = lambda: False,
    evaluates: bool = True,
    rounds_factor: int = 1,  # rounds over the least that intervals need
) -> Timing | None:
    """Time the steps of these arms in a fresh process, and an evaluation if it is asked for.

    None if it was stopped.
    """
    least_rounds = rounds_needed(len(configs))
    request = TimingRequest(
        configs=configs,
        sweep_uid=plan.sweep_uid,
        rounds=rounds_factor * least_rounds,
        rounds_needed=least_rounds,
        seconds_per_arm=seconds_per_arm,
        deadline=deadline,
        evaluates=evaluates,
    )
    process = FreshProcess(time_arms, request)
    has_stopped = False
    with ThreadPoolExecutor(1, "timing") as threads:
        future = threads.submit(process.result)
        try:
            while not wait([future], POLL_SECONDS).done:
                if is_stopping():
                    has_stopped = True
                    process.kill()  # it has nothing to save, and compiling takes long
        except BaseException:
            process.kill()
            raise
    try:
        timing: Timing = future.result()
        return timing
    except WorkerDied:
        if has_stopped:
            return None
        raise


def time_arms(request: TimingRequest, should_stop: object) -> Timing:
    from sweep.training.timing import measure_times  # imports torch

    return measure_times(request)


def name_device(device: str) -> str:
    import torch

    from sweep.training.device import device_name, resolve_device

    return device_name(torch.device(resolve_device(device)))
