"""Parse a command: an experiment, an execution, services and a folder."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweep.config.execution import Execution, Services
from sweep.config.experiment import Experiment
from sweep.config.load import load_experiment
from sweep.config.settings import Table, merge_settings, parse_settings, settings_of
from sweep.errors import SweepError, printable, without_secrets
from sweep.orchestration.executors.build import executors_of, services_table
from sweep.plan.commands import typed_command
from sweep.plan.needs import refuse_without_effect
from sweep.plan.policies import parse_policy
from sweep.plan.shard import Shard, parse_shard
from sweep.trial.files import refuse_links
from sweep.trial.folder import SweepFolder
from sweep.usercode.identity import describe_objects, names_of_user
from sweep.usercode.objects import object_name, refuse_nested_sweep, script_of

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A parsed command."""

    experiment: Experiment
    execution: Execution  # the user's choices, in `model_fields_set`
    folder: SweepFolder
    services: Services = field(default_factory=Services)
    command: tuple[str, ...] = ()  # words of the command line; empty if only Python can ask for it
    unrecorded: tuple[str, ...] = ()  # settings that the words lack
    later_budgets: tuple[int, ...] = ()  # those of the command that are planned afterwards
    shard: Shard | None = None  # the part of the sweep that the command runs; None: all of it
    started: float = field(default_factory=time.monotonic)  # when the command began

    def by_budget(self) -> "list[Request]":
        """Return a request for each budget of the command, ascending."""
        budgets = self.experiment.budget
        if not isinstance(budgets, tuple):
            return [self]
        requests = []
        for index, experiment in enumerate(self.experiment.by_budget):
            later = budgets[index + 1 :]
            requests.append(replace(self, experiment=experiment, later_budgets=later))
        return requests

    @property
    def deadline(self) -> float:
        """When no further seeds start, by `time.monotonic`; one for all budgets of the command."""
        hours = self.experiment.answer.max_hours
        return math.inf if hours is None else self.started + 3600 * hours

    @property
    def chooses_microbatch(self) -> bool:
        """True if the user chose the microbatch."""
        return bool(self.execution.microbatch or self.execution.accumulation)


def read_request(
    experiment: str | None,
    values: Mapping[str, Any],
    out: str | Path | None = None,
    keeps_model_sizes: bool = False,
) -> Request:
    """Parse a command: an experiment and values of settings by name, None if left out.

    With `keeps_model_sizes` a model of transformers keeps its vocabulary and context.
    """
    refuse_nested_sweep()
    settings = {
        name: object_name(value) if callable(value) else value
        for name, value in values.items()
        if value is not None
    }
    folder = _folder_of_script(values)
    if folder is not None:
        settings.setdefault("code_folder", folder)

    def parse(table: type[Table]) -> Table:
        names = [setting.name for setting in settings_of(table) if setting.name in settings]
        values_of_table = {name: settings.pop(name) for name in names}
        return parse_settings(table, merge_settings(table, {}, values_of_table), "settings")

    command, unrecorded = record_command(experiment, settings, out)
    services = parse(services_table(executors_of(settings)))
    execution = parse(Execution)
    if execution.gpu is not None and execution.device_type == "cpu":
        raise SweepError("--gpu plans for a GPU, got --device cpu. Leave one of the two out.")
    if execution.gpu is not None and execution.device == "auto":
        execution = execution.model_copy(update={"device": "cuda"})
    parsed = load_experiment(experiment, settings, keeps_model_sizes)
    shard = parse_shard(services.shard)
    if shard is not None:
        shard.refuse_unsuited(parsed, services.timing is not None)
    if shard is not None and parse_policy(parsed.lr).is_tuned:
        by_rule = parsed.tuning.model_copy(update={"centred_by": "rule"})
        parsed = parsed.model_copy(update={"tuning": by_rule})
    refuse_without_effect(parsed, settings)
    if services.timing is not None and parsed.time_budget_seconds is None:
        raise SweepError("--timing needs a --budget of time, such as 10min. Leave it out.")

    path = Path(out) if out else Path("results") / parsed.name
    refuse_links(path)
    announce_code(parsed.user_code, parsed.code_folder, services.no_user_code)
    folder_of_sweep = SweepFolder(path)
    return Request(parsed, execution, folder_of_sweep, services, command, unrecorded, shard=shard)


def _folder_of_script(values: Mapping[str, Any]) -> str | None:
    """Return the folder of the script that runs if it defines a value; None for the current one."""
    scripts = [script_of(value) for value in values.values() if callable(value)]
    folders = {script.parent for script in scripts if script is not None} - {Path.cwd()}
    return str(folders.pop()) if folders else None


def announce_code(names: Sequence[str], code_folder: str | None, is_refused: bool) -> None:
    """Log which code of the user runs, with its files and hashes, or refuse it; imports nothing."""
    objects = names_of_user(names, code_folder)
    if objects and is_refused:
        raise SweepError(f"--no-user-code refuses {', '.join(objects)}. Read that code first.")
    if objects:
        described = describe_objects(objects, code_folder)
        LOG.warning("This runs your code: %s.", printable(described))


def record_command(
    experiment: str | None, settings: Mapping[str, Any], out: str | Path | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of a command, and the settings that they lack.

    There are no words if only Python can give a setting. An address with a password or a token is
    left out, because plan.json and the report show the words.
    """
    flags: set[str] = set()
    for table in (Experiment, Execution, services_table(executors_of(settings))):
        flags |= {field.name for field in settings_of(table)}
    python_only = [
        name for name, value in settings.items() if name not in flags or isinstance(value, dict)
    ]
    if python_only:
        return (), tuple(sorted(python_only))

    secret = []
    for name in ("storage", "tracking_uri"):
        if name in settings and without_secrets(settings[name]) != str(settings[name]):
            secret.append(name)
    left_out = {*secret, "gpu"}  # which is about another machine than the one that runs
    words = {name: value for name, value in settings.items() if name not in left_out}
    return typed_command(experiment, {**words, "out": out}), tuple(secret)
