"""Commands that a plan or a report proposes. Each is planned here before it is proposed."""

import contextlib
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweep.config.execution import Execution, Services
from sweep.config.experiment import AnswerSettings, Experiment
from sweep.config.load import complete_schedule_of_target
from sweep.config.numbers import parse_budget
from sweep.config.settings import merge_settings, parse_settings, settings_of
from sweep.decision.next import next_trials
from sweep.decision.trials import TrialRecord
from sweep.errors import SweepError
from sweep.plan.commands import parse_command, typed_command
from sweep.plan.course import common_budget, tokens_per_trial
from sweep.plan.growth import grow_plan
from sweep.plan.plan import Inputs, Plan, PlannedTrial, build_plan, requested_ids
from sweep.plan.policies import LEAST_SEEDS, Tuned
from sweep.trial.timing import Timing

MOST_BUDGET_FACTOR = 10  # largest common budget that is proposed, over the sweep's own
SERVICES = {setting.name for setting in settings_of(Services)}
OF_SEEDS = {"seeds", "max_seeds", "max_hours"}
# Flags that hold until a later command changes them. The others are the services, the settings of
# an executor and the folder: those of the newest command count, also if it leaves them out.
LASTING = {setting.name for setting in [*settings_of(Experiment), *settings_of(Execution)]}
LASTING -= {"lr", "batches", "tolerance", "answer", "for", *OF_SEEDS}


@dataclass(frozen=True)
class Proposal:
    """A command, and what it plans."""

    command: str
    experiment: Experiment
    plan: Plan  # includes all trials of the folder
    requested: frozenset[str]  # ids of the trials that it names
    is_elsewhere: bool  # whether it has a new folder, without trials

    def trials_to_run(
        self, records: Sequence[TrialRecord], timing: Timing | None = None
    ) -> list[PlannedTrial]:
        """Return the trials that the command certainly trains; others may follow from them."""
        ended = set[str | None]()
        if not self.is_elsewhere:
            ended = {record.row.id for record in records if not record.is_open}
        to_run = self.requested - ended
        rows = [row for row in self.plan.trials if row.id is None or row.id in to_run]

        if not rows and self.experiment.seeds == "auto":
            rows = next_trials(self.plan, self.experiment, records, timing)
        return rows


def propose(plan: Plan, changes: Mapping[str, Any], *, is_elsewhere: bool = False) -> Proposal:
    """Plan the sweep's command with other values of some settings.

    Args:
        plan: the sweep as it is.
        changes: values by the name of a flag; None removes the flag.
        is_elsewhere: whether the command has another --out, and therefore a new plan.

    Raises:
        SweepError: if the command would be refused, if its steps do not fit by forecast, or if the
            words of the sweep's commands are not known. The message says why.
    """
    _refuse_misfit(plan.execution)

    values = {name: value for name, value in changes.items() if value is not None}
    values.pop("out", None)
    present = plan.settings.model_dump()
    if "target" in values and plan.settings.target is None:  # which has a schedule of its own
        del present["schedule"]["name"], present["schedule"]["average"]
        complete_schedule_of_target(present)
    fields = merge_settings(Experiment, present, values)
    experiment = parse_settings(Experiment, fields, "the next command")
    inputs = Inputs(**{name: getattr(plan, name) for name in Inputs.model_fields})

    old = None if is_elsewhere else plan
    new = build_plan(experiment, plan.execution, inputs, old=old)
    grown = new if old is None else grow_plan(old, new)
    waiting = [row for row in new.trials if row.id is None]
    grown = grown.model_copy(update={"trials": (*grown.known_trials, *waiting)})

    return Proposal(
        command=command_with(plan, **changes),
        experiment=experiment,
        plan=grown,
        requested=frozenset(requested_ids(grown, new, experiment)),
        is_elsewhere=is_elsewhere,
    )


def _refuse_misfit(execution: Execution) -> None:
    """Refuse to repeat steps that do not fit by forecast, and say what would fit."""
    if not execution.misfit:
        return
    if execution.microbatch or execution.accumulation:
        flag = "microbatch" if execution.microbatch else "accumulation"
        remedy = f"Leave --{flag} out"
    elif execution.device_memory_bytes:
        remedy = "Raise --device-memory, or train a smaller model"
    else:
        remedy = "Use a device with more memory, or train a smaller model"
    raise SweepError(f"{execution.misfit} {remedy}, in another --out.")


def command_with(plan: Plan, **changes: Any) -> str:
    """Return the sweep's command with other values of some flags; None removes a flag.

    Raises:
        SweepError: if no command line can have the settings of the sweep.
    """
    python_only = [name for name in plan.unrecorded if name not in SERVICES]
    if python_only:
        arguments = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        raise SweepError(
            f"The sweep has settings that only Python can give ({', '.join(python_only)}). Call "
            f"run_sweep with the same arguments, except {arguments}."
        )
    if not plan.commands:
        raise SweepError("plan.json records no command. Run the sweep with `sweep run`.")

    flags = dict[str, Any]()
    experiment = None
    for words in plan.commands:
        experiment, newer = parse_command(words)
        lasting = {name: value for name, value in flags.items() if name in LASTING}
        flags = lasting | newer
    flags.pop("shard", None)  # the answer is about all parts

    if changes.get("seeds", "auto") != "auto":
        flags = {name: value for name, value in flags.items() if name not in OF_SEEDS}
    flags |= _flags_of_answer(plan, flags)
    budget = flags.get("budget")
    is_of_other = budget is not None and parse_budget(budget) != plan.settings.budget
    if is_of_other and plan.token_budget is not None:  # the sweep has several
        flags["budget"] = plan.token_budget
    if (is_of_other and "batches" in flags) or flags.get("batches") == "auto":
        flags["batches"] = sorted({row.batch_size for row in plan.trials})
    is_tuned = any(row.stage == "tune" for row in plan.trials)
    if plan.settings.tuning.centred_by == "rule" and is_tuned:
        flags["centre"] = "rule"  # a part has it without the flag
    kept = {name: value for name, value in flags.items() if name not in changes}
    return shlex.join(typed_command(experiment, kept | changes))


def _flags_of_answer(plan: Plan, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the question and the side of the plan's answer, if it needs them."""
    usual = AnswerSettings()
    asked = plan.settings.answer
    chosen: dict[str, Any] = {}
    if "answer" in flags or asked.question != usual.question:
        chosen["answer"] = asked.question
    if "for" in flags or asked.pursues != usual.pursues:
        chosen["for"] = asked.pursues
    return chosen


def check_of_command(plan: Plan, **changes: Any) -> str | None:
    """Return the `sweep check` of a sweep's command; None if its words are not known."""
    with contextlib.suppress(SweepError):
        return command_with(plan, **changes).replace("sweep run", "sweep check", 1)
    return None


def recorded_out(plan: Plan) -> str:
    """Return the folder that the sweep's command names."""
    default = f"results/{plan.settings.name}"
    if not plan.commands:
        return default
    _, flags = parse_command(plan.commands[-1])
    return str(flags.get("out", default))


def common_tokens(plan: Plan, batches: Collection[int]) -> dict[str, Any]:
    """Return the changes of settings that give all these batch sizes the same tokens.

    None are needed with a budget of time.

    Raises:
        SweepError: if only a much larger budget does.
    """
    if plan.token_budget is None:
        return {}
    budget = common_budget(plan.token_budget, batches, plan.tokens_per_sequence)
    if budget > MOST_BUDGET_FACTOR * plan.token_budget:
        raise SweepError(
            f"Batch sizes {', '.join(map(str, sorted(batches)))} have equal tokens only at a "
            f"budget of {budget} or a multiple of it. Choose batch sizes with a smaller least "
            "common multiple, in another --out."
        )

    changes: dict[str, Any] = {"budget": budget}
    limit = plan.settings.tuning.budget
    if limit is not None and limit > budget:
        changes["tune_budget"] = budget
    return changes


def tuned_lr(plan: Plan) -> str:
    """Return the `--lr` that tunes rates: the tuned policy of the sweep, `tuned` without one."""
    policy = plan.tuned_policy
    return Tuned().name if policy is None else policy


def propose_tuning(
    plan: Plan, batches: Collection[int], other_out: str, **changes: Any
) -> Proposal:
    """Propose to tune the rate at these batch sizes and to add seeds until all is decided.

    If their tokens differ, which allows no claim, it is a new sweep in `other_out`.
    """
    sizes = sorted(batches)
    changes = {"batches": sizes, "lr": tuned_lr(plan), "seeds": "auto", **changes}
    if plan.settings.target is not None or plan.token_budget is None:
        return propose(plan, changes)  # tokens may differ

    present = {row.batch_size for row in plan.known_trials}
    tokens, _ = tokens_per_trial(plan.token_budget, {*sizes, *present}, plan.tokens_per_sequence)
    tokens_of_sizes = {tokens[size] for size in sizes}
    if plan.can_compare(tokens_of_sizes):
        return propose(plan, changes)
    changes = {**changes, **common_tokens(plan, sizes), "out": other_out}
    return propose(plan, changes, is_elsewhere=True)


def propose_answer(plan: Plan) -> Proposal | None:
    """Propose the command that can tell which batch size is best.

    None if the plan does so, or has one batch size, which is a question of its own.

    Raises:
        SweepError: if no command can; the message says what would.
    """
    finals = [row for row in plan.trials if row.stage == "final"]
    arms = {row.arm for row in plan.trials}
    batches = {arm.batch_size for arm in arms}
    if len(batches) < 2:
        return None

    tuned = [row for row in finals if row.policy == tuned_lr(plan)]
    has_seeds = {row.arm for row in tuned if row.seed == LEAST_SEEDS - 1} == arms
    tokens = {row.tokens for row in tuned}
    if has_seeds and plan.can_compare(tokens):
        return None

    known = plan.model_copy(update={"trials": plan.known_trials})
    return propose_tuning(known, batches, f"{recorded_out(plan)}-2")


def answering_command(plan: Plan) -> str | None:
    """Return the command of `propose_answer`; None also if no command can."""
    try:
        proposal = propose_answer(plan)
    except SweepError:
        return None
    return None if proposal is None else proposal.command
