"""Settings that other settings leave without effect: they are refused, or the plan says so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweep.config.experiment import Experiment, TuningSettings
from sweep.config.optimizers import OPTIMIZERS, optimizer_facts
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


def unmet_needs(experiment: Experiment) -> list[UnmetNeed]:
    """Return the settings that other settings leave without effect, whatever their values."""
    needs = []
    is_tuned = parse_policy(experiment.lr).is_tuned
    if not is_tuned:
        of_tuned = ("lr tuned", experiment.lr, "lr", "Add --lr tuned")
        needs += [UnmetNeed(f"tuning.{name}", *of_tuned) for name in TuningSettings.model_fields]
    elif len(experiment.tuning.dimensions) == 1:
        of_several = ("several dimensions", "lr", "tune", "Add --tune lr,beta2")
        needs.append(UnmetNeed("tuning.trials", *of_several))
    if experiment.seeds != "auto":
        of_auto = ("seeds auto", str(experiment.seeds or "the default"), "seeds")
        for name in ("max_seeds", "max_hours"):
            needs.append(UnmetNeed(f"answer.{name}", *of_auto, "Add --seeds auto"))
    if experiment.target is None:
        needs.append(UnmetNeed("evaluation.window", "a target", "none", "", "Add --target"))
    if not experiment.noise_scale.measure:
        of_noise = ("measurements of the noise scale", "none", "noise", "Add --noise")
        needs += [UnmetNeed(f"noise_scale.{name}", *of_noise) for name in ("points", "share")]
    if experiment.workload.is_program:
        return needs + _unmet_needs_of_command(experiment)
    if not experiment.workload.can_measure_noise:
        of_gradients = ("a workload that does not sample", experiment.workload.name, "workload")
        needs.append(UnmetNeed("noise_scale.measure", *of_gradients))

    if experiment.schedule.name != "cosine":
        of_cosine = ("the schedule cosine", experiment.schedule.name, "target")
        needs.append(UnmetNeed("schedule.final_fraction", *of_cosine))
    names = experiment.optimizer_names
    used: set[str] = set()
    for name in names:
        used |= {*optimizer_facts(name)["settings"]}
    for name in ("beta1", "beta2", "eps"):
        if name in used:
            continue
        users = [user for user, facts in OPTIMIZERS.items() if name in facts["settings"]]
        of_users = (f"the optimizer {' or '.join(users)}", ", ".join(names), "optimizers")
        needs.append(UnmetNeed(f"optimizer.{name}", *of_users))
        if name in experiment.tuning.dimensions and is_tuned:
            needs.append(UnmetNeed("tuning.dimensions", *of_users))
    return needs


def _unmet_needs_of_command(experiment: Experiment) -> list[UnmetNeed]:
    """Return the settings that a command does not receive."""
    needs = []
    placeholders = {
        "optimizer.beta2": "beta2",
        "optimizer.weight_decay": "weight_decay",
        "schedule.warmup_fraction": "warmup_steps",
        "schedule.warmup_min_steps": "warmup_steps",
    }
    for key, name in placeholders.items():
        if not experiment.workload.receives(name):
            needs.append(UnmetNeed(key, f"{{{name}}} in the command", "none", "", "Add it"))
    of_trainings = [f"optimizer.{name}" for name in ("beta1", "eps", "clip", "options")]
    of_trainings += [f"schedule.{name}" for name in ("name", "final_fraction", "average")]
    needs += [UnmetNeed(key, "a training of this package", "a command") for key in of_trainings]
    return needs


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
