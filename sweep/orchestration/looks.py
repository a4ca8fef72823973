"""`--seeds auto`: decide from the folder alone which trials the answer needs next."""

import contextlib
from dataclasses import replace

from sweep.config.experiment import Experiment
from sweep.config.objective import Objective
from sweep.decision.equal_amounts import steepest_slope
from sweep.decision.next import asks_for_soonest, next_trials
from sweep.decision.trials import TrialRecord, TrialTime, compared_value
from sweep.errors import CorruptFile
from sweep.plan.plan import Plan, PlannedTrial
from sweep.plan.policies import parse_policy
from sweep.trial.folder import SweepFolder
from sweep.trial.timing import read_timing, timed_settings


def trials_after_look(
    plan: Plan, experiment: Experiment, folder: SweepFolder
) -> list[PlannedTrial]:
    """Return the seeds and tuning seeds to add; none once the answer is as clear as it can get.

    Also return none while a final trial waits, or if one failed: the next command runs it again.
    """
    policy = parse_policy(experiment.lr).name
    rows = [row for row in plan.known_trials if row.policy == policy]
    objective = plan.settings.objective
    records = [read_trial_record(folder, row, objective) for row in rows]
    timing = None
    if plan.has_unequal_amounts:
        records = [_with_slope(record, folder, objective) for record in records]
    if plan.has_unequal_amounts or asks_for_soonest(experiment):
        with contextlib.suppress(CorruptFile):  # the times of the trials are left
            timing = read_timing(folder, plan.sweep_uid)
    return next_trials(plan, experiment, records, timing)


def _with_slope(record: TrialRecord, folder: SweepFolder, objective: Objective) -> TrialRecord:
    """Return the record of a final trial with the slope of its curve."""
    if record.row.stage != "final":
        return record
    lines = folder.trial(str(record.row.id)).find_metrics()
    points = [line for line in lines if line.get(objective.curve) is not None]
    tokens = [line["tokens"] for line in points]
    values = [objective.sign * line[objective.curve] for line in points]
    return replace(record, slope=steepest_slope(tokens, values))


def read_trial_record(folder: SweepFolder, row: PlannedTrial, objective: Objective) -> TrialRecord:
    """Read how a trial ended from its folder."""
    trial = folder.trial(str(row.id))
    status = trial.read_status()
    result = trial.find_result()
    metric = None if result is None else result.as_row().get(objective.name)
    value = compared_value(status.state, status.cause, metric, objective)
    time = None
    if result is not None and result.seconds_training:
        time = TrialTime(
            seconds=result.seconds_training,
            steps=float(result.steps),
            device=result.device,
            settings=timed_settings(result.execution),
            microbatch_size=result.microbatch_size,
        )
    return TrialRecord(row, status.state, status.cause, value, time)


def trial_value(folder: SweepFolder, row: PlannedTrial, objective: Objective) -> float | None:
    """Return a trial's `compared_value`."""
    return read_trial_record(folder, row, objective).value
