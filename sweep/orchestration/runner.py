"""Run a plan to its end: prepare, hold the folder, run the trials, mirror, stop, resume."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sweep.config.execution import Services
from sweep.config.numbers import nearest_multiples
from sweep.config.optimizers import optimizer_facts
from sweep.decision.next import asks_for_soonest
from sweep.errors import SweepError
from sweep.orchestration.estimates import refuse_small_disk
from sweep.orchestration.executors.base import Executor
from sweep.orchestration.executors.build import (
    build_executor,
    find_executor,
    refuse_unusable_services,
)
from sweep.orchestration.holding import holding
from sweep.orchestration.inputs import get_inputs
from sweep.orchestration.looks import trials_after_look
from sweep.orchestration.planning import Planned, refuse_unwritable, save_plan
from sweep.orchestration.schedule import Scheduler
from sweep.orchestration.timing import lacks_times, time_ended_sweep
from sweep.plan.plan import Plan, PlannedTrial
from sweep.plan.policies import parse_policy
from sweep.plan.retry import is_to_run
from sweep.signals import handle_unless_ignored
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import check_answers, is_mirrored, read_record, recorded_uri
from sweep.trial.folder import SweepFolder
from sweep.trial.status import Cause, State, TrialStatus, overall_state

LOG = logging.getLogger(__name__)
LOCAL = Services()
MIRROR_SECONDS = 30.0  # limit on the mirror's last pass


@dataclass
class Summary:
    folder: SweepFolder
    states: dict[str, TrialStatus]  # by id of the trials that the command named
    is_interrupted: bool = False  # the user stopped it, or its machines are gone
    problem: str = ""  # one sentence about a failure of the storage that stopped it
    untracked: str = ""  # one sentence about the part that the tracking server lacks

    @property
    def exit_code(self) -> int:
        """0 complete, pruned or diverged; 1 any other failure; 130 interrupted."""
        if self.problem:
            return 1
        if self.is_interrupted:
            return 130
        ends = [(status.state, status.cause) for status in self.states.values()]
        return 0 if overall_state(ends) is State.COMPLETE else 1


def rows_to_run(
    plan: Plan, folder: SweepFolder, retried_causes: frozenset[Cause] = frozenset()
) -> tuple[PlannedTrial, ...]:
    """Return the rows of a plan to train: those without a rate yet, and unfinished trials."""
    to_run = []
    for row in plan.trials:
        if row.id is None or is_to_run(folder.trial(row.id).read_status(), retried_causes):
            to_run.append(row)
    return tuple(to_run)


def finished_summary(
    planned: Planned,
    folder: SweepFolder,
    services: Services = LOCAL,
    retried_causes: frozenset[Cause] = frozenset(),
) -> Summary | None:
    """Return the summary of a sweep with nothing left to do, from files alone; else None."""
    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in planned.requested}
    to_run = rows_to_run(planned.command_rows(), folder, retried_causes)
    if to_run or planned.changes_answer or not is_mirrored(folder, services.tracking_uri):
        return None
    if planned.adds_seeds and trials_after_look(planned.plan, planned.experiment, folder):
        return None
    is_elsewhere = find_executor(services.executor).is_elsewhere
    if not is_elsewhere and lacks_times(planned.plan, folder, states):
        return None
    return Summary(folder, states)


def refuse_unusable_request(plan: Plan, folder: SweepFolder, services: Services) -> None:
    """Refuse an experiment that trains nothing, and a folder or services that cannot be used."""
    refuse_unwritable(folder.path)
    if not optimizer_facts(plan.settings.optimizer.name)["trains"]:
        problem = "has no optimizer and trains nothing. Give it one, or use `sweep forecast`"
        raise SweepError(f"experiment {plan.experiment!r} {problem}.")
    refuse_unusable_services(services)
    nodes = find_executor(services.executor).nodes_per_trial(services)
    if nodes > 1:
        _refuse_several_nodes(plan, nodes)
    if services.tracking_uri:
        check_answers(services.tracking_uri)
    if services.storage and plan.awaits_rates:
        from sweep.orchestration.tuning import open_storage  # imports optuna

        open_storage(services.storage)


def _refuse_several_nodes(plan: Plan, nodes: int) -> None:
    if not plan.settings.workload.is_program:
        raise SweepError(
            f"a trial must run on one node, got {nodes}. Only a --command can start processes on "
            "several, for example by torchrun."
        )
    devices = plan.execution.devices
    if devices % nodes:
        raise SweepError(
            f"devices-per-trial must be a multiple of the nodes of a trial ({nodes}), got "
            f"{devices}. Use {nearest_multiples(devices, nodes)}."
        )


def prepare(plan: Plan, folder: SweepFolder, services: Services) -> None:
    """Refuse a store that only the folder names, and prepare text that needs no download.

    Estimates count its tokens.
    """
    if services.tracking_uri is None:
        recorded_uri(folder, read_record(folder))
    if (plan.data or {}).get("name") in ("path", "synthetic"):
        with holding(folder):
            get_inputs(plan, folder)


def run_plan(
    planned: Planned,
    folder: SweepFolder,
    services: Services = LOCAL,
    *,
    executor: Executor | None = None,
    retried_causes: frozenset[Cause] = frozenset(),  # causes of failure to retry
    on_change: Callable[[], None] = lambda: None,  # called a few times per second
    on_finished: Callable[[], object] = lambda: None,  # after the trials, while tracking is open
) -> Summary:
    """Prepare the data, write the plan, run the requested trials and all later rounds.

    If all trials of the folder have then ended on this machine, time their steps.
    """
    requested = dict.fromkeys(planned.requested)
    with contextlib.ExitStack() as stack:
        stack.enter_context(holding(folder))
        executor = executor or build_executor(services, planned.plan.execution, folder)
        stack.callback(executor.close)
        refuse_small_disk(planned.plan, folder, len(executor.slots))
        get_inputs(planned.plan, folder)
        plan = save_plan(planned.plan, folder, planned.timing)
        schedule = Scheduler(
            plan, folder, executor, retried_causes, on_change, services.stall_minutes
        )
        mirror = Mirror(folder, plan, services.tracking_uri)
        mirror.start()
        try:
            with _stopping_on_signals(schedule):

                @contextlib.contextmanager
                def silence() -> Iterator[None]:
                    executor.release()
                    with mirror.paused():
                        yield

                def time_steps() -> None:
                    if not (schedule.is_ending or executor.is_elsewhere):
                        time_ended_sweep(schedule.plan, folder, schedule.is_asked_to_stop, silence)

                for pauses in _rounds(planned, schedule, services.storage, time_steps):
                    requested |= dict.fromkeys(pauses)
                    schedule.run(pauses)
                    if schedule.is_ending:
                        break
                time_steps()
            on_finished()
        except BaseException:
            executor.stop()
            raise
        finally:
            untracked = mirror.close(10.0 if schedule.is_stopping else MIRROR_SECONDS)
    states = {trial_id: folder.trial(trial_id).read_status() for trial_id in requested}
    return Summary(folder, states, schedule.is_ending, schedule.problem, untracked)


def _rounds(
    planned: Planned, schedule: Scheduler, storage: str | None, time_steps: Callable[[], None]
) -> Iterator[dict[str, int | None]]:
    """Yield the trials with known rates, then rounds of tuning and of seeds, each when it starts.

    Steps are timed before further seeds if the answer is about times.

    A round maps ids of trials to the step that they pause after; None: the last.
    """
    known = planned.plan.known_trials if planned.plan.awaits_rates else ()
    tried = {row.id for row in known if row.stage == "tune"}
    yield dict.fromkeys(i for i in planned.requested if i not in tried)
    if planned.plan.awaits_rates:
        from sweep.orchestration.tuning import Tuning

        policy = parse_policy(planned.experiment.lr)
        tuning = Tuning(planned.plan, policy, schedule, storage)
        while pauses := tuning.next_round():
            yield pauses
    if not planned.adds_seeds:
        return

    experiment = planned.experiment
    while True:
        if asks_for_soonest(experiment):
            time_steps()
        rows = trials_after_look(schedule.plan, experiment, schedule.folder)
        if not rows or time.monotonic() >= planned.deadline:
            break
        yield schedule.add(rows)


@contextlib.contextmanager
def _stopping_on_signals(schedule: Scheduler) -> Iterator[None]:
    """Stop the schedule on Ctrl-C and SIGTERM; a second signal kills the attempts."""

    def stop(*_: object) -> None:
        is_second = schedule.is_stopping
        schedule.stop()
        LOG.warning("Aborting." if is_second else "Saving. Press Ctrl-C again to abort.")

    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            before = handle_unless_ignored(number, stop)
            stack.callback(signal.signal, number, before)
        yield
