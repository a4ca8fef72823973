"""Settings that other settings leave without effect: they are refused, or the plan says so."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sweep.config.experiment import Experiment, TuningSettings
from sweep.config.optimizers import OPTIMIZER_FACTS, optimizer_facts
from sweep.config.settings import settings_of
from sweep.errors import SweepError
from sweep.plan.policies import parse_policy


@dataclass(frozen=True)
class UnmetNeed:
    """A setting of a table, and what it needs to have an effect but does not have."""

    key: str  # such as tuning.budget
    needs: str  # such as lr tuned
    got: str
    decided_by: str = ""  # flag that decides whether the need is met; "": none does
    remedy: str = ""  # an alternative to leaving the setting out

    def is_changed(self, experiment: Experiment) -> bool:
        """Return True if the setting has another value than its default."""
        table, name = self.key.split(".")
        values = getattr(experiment, table)
        return bool(getattr(values, name) != type(values).model_fields[name].default)

    def __str__(self) -> str:
        return f"{self.key} needs {self.needs}, got {self.got}"


def unmet_needs(experiment: Experiment) -> Iterator[UnmetNeed]:
    """Yield the settings that other settings leave without effect, whatever their values."""
    yield from _unmet_needs_of_tuning(experiment)
    yield from _unmet_needs_of_answer(experiment)
    if experiment.workload.is_program:
        yield from _unmet_needs_of_command(experiment)
    else:
        yield from _unmet_needs_of_training(experiment)


def _unmet_needs_of_tuning(experiment: Experiment) -> Iterator[UnmetNeed]:
    if not parse_policy(experiment.lr).is_tuned:
        for name in TuningSettings.model_fields:
            if name == "own_rate":  # the lr of the file, not a choice
                continue
            yield UnmetNeed(
                key=f"tuning.{name}",
                needs="lr tuned",
                got=experiment.lr,
                decided_by="lr",
                remedy="Add --lr tuned",
            )
    elif len(experiment.tuning.dimensions) == 1:
        yield UnmetNeed(
            key="tuning.trials",
            needs="several dimensions",
            got="lr",
            decided_by="tune",
            remedy="Add --tune lr,beta2",
        )


def _unmet_needs_of_answer(experiment: Experiment) -> Iterator[UnmetNeed]:
    if experiment.seeds != "auto":
        for name in ("max_seeds", "max_hours"):
            yield UnmetNeed(
                key=f"answer.{name}",
                needs="seeds auto",
                got=str(experiment.seeds or "the default"),
                decided_by="seeds",
                remedy="Add --seeds auto",
            )
    if experiment.target is None:
        yield UnmetNeed(
            key="evaluation.window", needs="a target", got="none", remedy="Add --target"
        )
    if not experiment.noise_scale.measure:
        for name in ("points", "share"):
            yield UnmetNeed(
                key=f"noise_scale.{name}",
                needs="measurements of the noise scale",
                got="none",
                decided_by="noise",
                remedy="Add --noise",
            )


def _unmet_needs_of_training(experiment: Experiment) -> Iterator[UnmetNeed]:
    """Yield the settings that the workload, the schedule or the optimizers do not use."""
    if not experiment.workload.can_measure_noise:
        yield UnmetNeed(
            key="noise_scale.measure",
            needs="a workload that does not sample",
            got=experiment.workload.name,
            decided_by="workload",
        )
    if experiment.schedule.name != "cosine":
        yield UnmetNeed(
            key="schedule.final_fraction",
            needs="the schedule cosine",
            got=experiment.schedule.name,
            decided_by="target",
        )

    names = experiment.optimizer_names
    used = set[str]()
    for name in names:
        used.update(optimizer_facts(name)["settings"])
    is_tuned = parse_policy(experiment.lr).is_tuned
    for setting in ("beta1", "beta2", "eps"):
        if setting in used:
            continue
        keys = [f"optimizer.{setting}"]
        if is_tuned and setting in experiment.tuning.dimensions:
            keys.append("tuning.dimensions")
        users = [user for user, facts in OPTIMIZER_FACTS.items() if setting in facts["settings"]]
        for key in keys:
            yield UnmetNeed(
                key=key,
                needs=f"the optimizer {' or '.join(users)}",
                got=", ".join(names),
                decided_by="optimizers",
            )


def _unmet_needs_of_command(experiment: Experiment) -> Iterator[UnmetNeed]:
    """Yield the settings that a command does not receive."""
    placeholders = {
        "optimizer.beta2": "beta2",
        "optimizer.weight_decay": "weight_decay",
        "schedule.warmup_fraction": "warmup_steps",
        "schedule.warmup_min_steps": "warmup_steps",
    }
    for key, name in placeholders.items():
        if not experiment.workload.receives(name):
            yield UnmetNeed(
                key=key, needs=f"{{{name}}} in the command", got="none", remedy="Add it"
            )

    of_trainings = [f"optimizer.{name}" for name in ("beta1", "eps", "clip", "options")]
    of_trainings += [f"schedule.{name}" for name in ("name", "final_fraction", "average")]
    for key in of_trainings:
        yield UnmetNeed(key=key, needs="a training of this package", got="a command")


def settings_without_effect(experiment: Experiment) -> list[UnmetNeed]:
    """Return those that differ from their defaults: a file's that flags leave without effect."""
    return [need for need in unmet_needs(experiment) if need.is_changed(experiment)]


def refuse_without_effect(experiment: Experiment, flags: Mapping[str, Any]) -> None:
    """Refuse a setting that another one leaves without effect.

    A file's setting that a flag leaves without effect is kept, and the plan says so: its user
    chose so for one command, and should not have to edit the file.
    """
    names = {".".join(setting.path): setting.name for setting in settings_of(Experiment)}
    for need in unmet_needs(experiment):
        flag = names.get(need.key)
        is_flag = flag in flags
        if not (is_flag or need.is_changed(experiment)):
            continue

        table = need.key.partition(".")[0]
        is_of_file = not is_flag and table not in flags
        if is_of_file and need.decided_by in flags:
            continue
        subject = str(flag) if is_flag else need.key
        remedy = f"{need.remedy}, or leave it out" if need.remedy else "Leave it out"
        raise SweepError(f"{subject} needs {need.needs}, got {need.got}. {remedy}.")
