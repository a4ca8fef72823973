"""The list of executors, the flags that they bring, and the choice of one.

An executor of another package is an entry point of the group `sweep.executors`, whose name is that
of the executor. It is imported only if a command names it, has a setting that neither sweep nor a
shipped executor has, or has a setting of another executor, which the message names.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from sweep.config.execution import Execution, Services
from sweep.config.experiment import Experiment
from sweep.config.overrides import Overrides
from sweep.config.settings import Settings, settings_of
from sweep.errors import SweepError
from sweep.orchestration.executors.base import Executor
from sweep.orchestration.executors.local import LocalExecutor
from sweep.orchestration.executors.ray import RayExecutor, RayOverrides
from sweep.orchestration.executors.slurm import SlurmExecutor, SlurmOverrides
from sweep.trial.folder import SweepFolder
from sweep.usercode.extensions import all_classes
from sweep.usercode.objects import require_extra

ENTRY_POINTS = "sweep.executors"
EXECUTORS: tuple[type[Executor], ...] = (LocalExecutor, RayExecutor, SlurmExecutor)


class AllOverrides(Overrides, RayOverrides, SlurmOverrides):
    """Settings by the name of their flag, also those of the shipped executors."""


@cache
def installed_executors() -> tuple[type[Executor], ...]:
    """Return the shipped executors and, after importing them, those of other packages."""
    executors = all_classes(ENTRY_POINTS, Executor, EXECUTORS, "name")
    tables: list[type[Settings]] = [Experiment, Execution, Services, *_tables_of(executors)]
    flags = Counter(setting.name for table in tables for setting in settings_of(table))
    for name, count in flags.items():
        if count > 1:
            raise SweepError(
                f"each flag must have a name of its own, but {count} have the name {name!r}. "
                f"Uninstall a package with entry points of the group {ENTRY_POINTS}."
            )
    return executors


def _tables_of(executors: tuple[type[Executor], ...]) -> list[type[Settings]]:
    """Return the tables of the executors that have flags."""
    tables = dict.fromkeys(executor.settings for executor in executors)
    return [table for table in tables if table is not Settings]


@cache
def services_table(executors: tuple[type[Executor], ...] = EXECUTORS) -> type[Services]:
    """Return `Services` with the names of these executors as choices, and with their flags."""
    field = Services.model_fields["executor"]
    names = Literal.__getitem__(tuple(executor.name for executor in executors))
    chosen: Any = (
        Annotated[names, *field.metadata],
        Field(default=field.default, description=field.description),
    )
    # pydantic lists the fields of the last base first.
    bases: Any = (*reversed(_tables_of(executors)), Services)
    table: type[Services] = create_model("Services", __base__=bases, executor=chosen)
    return table


def executors_of(values: Mapping[str, Any]) -> tuple[type[Executor], ...]:
    """Return the executors that the values of a command may concern: the shipped ones, or all."""
    tables = (Experiment, Execution, services_table())
    known = {setting.name for table in tables for setting in settings_of(table)}
    known |= Experiment.model_fields.keys()
    names = [executor.name for executor in EXECUTORS]
    names_another = "executor" in values and values["executor"] not in names
    if names_another or not values.keys() <= known:
        return installed_executors()
    return EXECUTORS


def find_executor(name: str) -> type[Executor]:
    """Return the executor with a name that a table of `services_table` has accepted."""
    executors = {executor.name: executor for executor in EXECUTORS}
    if name not in executors:
        executors = {executor.name: executor for executor in installed_executors()}
    return executors[name]


def refuse_unusable_services(services: Services) -> None:
    """Refuse settings that do not go together, and an executor whose extra is missing."""
    chosen = find_executor(services.executor)
    used = {*Services.model_fields, *chosen.settings.model_fields}
    unused = services.model_fields_set - used
    if unused:
        _refuse_settings_of_another(services, unused)

    chosen.refuse_unsuited(services)
    if chosen.extra and chosen.library:
        require_extra(chosen.library, chosen.extra, f"executor {chosen.name}")


def _refuse_settings_of_another(services: Services, fields: set[str]) -> None:
    for executor in installed_executors():
        for setting in settings_of(executor.settings):
            if setting.path[0] in fields:
                raise SweepError(
                    f"{setting.name} needs the executor {executor.name}, got {services.executor}. "
                    f"Add --executor {executor.name}, or leave it out."
                )


def build_executor(services: Services, execution: Execution, folder: SweepFolder) -> Executor:
    """Return the executor that the services name, which `refuse_unusable_services` accepts."""
    chosen = find_executor(services.executor)
    if chosen.is_elsewhere and ":" in execution.device:
        raise SweepError(
            f"device must be cuda, cpu or auto with the executor {chosen.name}, got "
            f"{execution.device!r}. Leave the number out."
        )
    if chosen.is_elsewhere and execution.trials_at_once > 1:
        raise SweepError(
            f"at_once must be 1 with the executor {chosen.name}, but {folder.plan_path} has "
            f"{execution.at_once}. Leave --executor out, or choose another --out."
        )
    return chosen(services, execution, folder)
