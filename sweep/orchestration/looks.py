"""`--seeds auto`: decide from the folder alone which trials the answer needs next."""

from sweep.config.experiment import Experiment
from sweep.config.objective import Objective
from sweep.decision.next import next_trials
from sweep.decision.trials import TrialRecord, compared_value
from sweep.plan.plan import Plan, PlannedTrial
from sweep.plan.policies import parse_policy
from sweep.trial.folder import SweepFolder


def trials_after_look(
    plan: Plan, experiment: Experiment, folder: SweepFolder
) -> list[PlannedTrial]:
    """Return the seeds and tuning seeds to add; none once the answer is as clear as it can get.

    Also return none while a final trial waits, or if one failed: the next command runs it again.
    """
    policy = parse_policy(experiment.lr).name
    rows = [row for row in plan.known_trials if row.policy == policy]
    records = [read_trial_record(folder, row, plan.settings.objective) for row in rows]
    return next_trials(plan, experiment, records)


def read_trial_record(folder: SweepFolder, row: PlannedTrial, objective: Objective) -> TrialRecord:
    """Read how a trial ended from its folder."""
    trial = folder.trial(str(row.id))
    status = trial.read_status()
    result = trial.find_result()
    metric = None if result is None else result.as_row().get(objective.name)
    value = compared_value(status.state, status.cause, metric, objective)
    return TrialRecord(row, status.state, status.cause, value)


def trial_value(folder: SweepFolder, row: PlannedTrial, objective: Objective) -> float | None:
    """Return a trial's `compared_value`."""
    return read_trial_record(folder, row, objective).value
