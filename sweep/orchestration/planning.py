"""From an experiment and flags to this machine's plan, grown from the one on disk."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.config.execution import Execution, Services
from sweep.config.experiment import Experiment, load_experiment
from sweep.config.models import ObjectSettings
from sweep.config.objects import identify_code, load_object
from sweep.config.settings import merge_settings, parse_settings, settings_of
from sweep.config.trial import TrialConfig, tokenizer_of
from sweep.errors import SweepError
from sweep.orchestration.execution import (
    bound_by_memory,
    choose_by_preset,
    decide_compile,
    decide_execution,
    refuse_other_execution,
)
from sweep.plan.plan import (
    Inputs,
    Plan,
    build_plan,
    grow_plan,
    load_plan,
    typed_command,
    with_decided_rates,
)
from sweep.training.process import run_job
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder, identify_start


@dataclass(frozen=True)
class Request:
    """A parsed command.

    Attributes:
        experiment: what to measure.
        execution: the user's choices, in `model_fields_set`.
        services: executor and stores.
        folder: of the sweep.
        command: the words that make the same request on the command line.
    """

    experiment: Experiment
    execution: Execution
    services: Services
    folder: SweepFolder
    command: tuple[str, ...] = ()

    def plan(self, is_elsewhere: bool = False) -> "Planned":
        """Make the plan.

        Args:
            is_elsewhere: whether trials run on other machines, which may have devices that this
                one lacks; with an executor other than local they always do.
        """
        is_elsewhere = is_elsewhere or self.services.executor != "local"
        return make_plan(
            self.experiment,
            self.execution,
            self.folder,
            command=self.command,
            is_elsewhere=is_elsewhere and self.execution.device == "cuda",
        )


def read_request(
    experiment: str, values: Mapping[str, Any], out: str | Path | None = None
) -> Request:
    """Parse what a command asks for.

    Args:
        experiment: a shipped name or the path of a TOML file.
        values: settings by name; None if not given. Names that are neither of the execution nor
            of the services belong to the experiment.
        out: the sweep's folder; results/<experiment> by default.

    Raises:
        SweepError: naming the setting, the value and the remedy.
    """
    values = {name: value for name, value in values.items() if value is not None}
    tables = {table: {s.name for s in settings_of(table)} for table in (Execution, Services)}
    execution, services = (
        parse_settings(
            table,
            merge_settings(table, {}, {n: v for n, v in values.items() if n in names}),
            "settings",
        )
        for table, names in tables.items()
    )
    taken = set().union(*tables.values())
    settings = load_experiment(experiment, {n: v for n, v in values.items() if n not in taken})
    folder = SweepFolder(Path(out) if out else Path("results") / settings.name)
    refuse_file(folder.path)
    kept = {n: v for n, v in values.items() if n not in tables[Services]}
    command = typed_command(experiment, {**kept, "out": out})
    assert isinstance(execution, Execution) and isinstance(services, Services)
    return Request(settings, execution, services, folder, command)


def refuse_file(out: Path | None) -> None:
    """Refuse an --out that is a file."""
    if out is not None and out.exists() and not out.is_dir():
        raise SweepError(f"out must be a folder, got the file {str(out)!r}. Choose another --out.")


@dataclass(frozen=True)
class Planned:
    """A plan, and the part of it that this command names."""

    plan: Plan  # with everything that the folder already holds
    requested: tuple[str, ...]  # ids that this command names
    is_known: bool  # whether plan.json already has all of them, with their rates

    @property
    def is_tuned(self) -> bool:
        """Whether some reports still need their rate."""
        return any(row.id is None for row in self.plan.trials)

    def command_rows(self) -> Plan:
        """Return the plan with only the rows that this command names."""
        named = {None, *self.requested}
        rows = tuple(row for row in self.plan.trials if row.id in named)
        return self.plan.model_copy(update={"trials": rows})


def make_plan(
    experiment: Experiment,
    chosen: Execution,
    folder: SweepFolder,
    *,
    command: tuple[str, ...] = (),
    is_elsewhere: bool = False,
    asks_memory: bool = False,
) -> Planned:
    """Plan what a command names on top of what the folder holds.

    Args:
        experiment: what to measure.
        chosen: with the user's choices in `model_fields_set`.
        folder: of the sweep.
        command: words of the command line.
        is_elsewhere: whether the device may be on another machine.
        asks_memory: whether the plan is for a memory search, which takes sizes as they are.

    Raises:
        SweepError: if this cannot be planned.
    """
    inputs, old = identify_inputs(experiment, folder), load_plan(folder)
    if old is not None:
        refuse_other_execution(old, chosen, folder)
        default, execution = old.settings.precision, old.execution
    else:
        execution = decide_execution(experiment, chosen, is_elsewhere)
        is_half = execution.device_type == "cuda" and experiment.model.supports_half_precision
        default = "bf16" if is_half else "fp32"
    is_precision_open = experiment.precision == "auto"
    if is_precision_open:
        experiment = experiment.model_copy(update={"precision": default})
    batches = tuple({row.batch_size for row in old.trials}) if old else ()

    def build(changes: Mapping[str, Any]) -> Plan:
        changes = dict(changes)
        precision = changes.pop("precision", experiment.precision)
        return build_plan(
            experiment.model_copy(update={"precision": precision}),
            execution.model_copy(update=changes),
            inputs,
            other_batches=batches,
            command=command,
        )

    new = build({})
    if old is not None:
        return _grown(old, new, build, folder, inputs)
    parameters = _inspect(new, folder, asks_memory)
    if execution.preset:
        new = build(choose_by_preset(new, chosen, is_precision_open))
    elif not asks_memory:
        new = build(bound_by_memory(new))
    new = decide_compile(new, is_elsewhere)
    new = new.model_copy(update={"model": {**new.model, "parameters": parameters}})
    return Planned(new, _requested(new, None), False)


def _grown(
    old: Plan,
    new: Plan,
    build: Callable[[Mapping[str, Any]], Plan],
    folder: SweepFolder,
    inputs: Inputs,
) -> Planned:
    """Return the folder's plan with the command's trials added."""
    present = {row.id for row in old.known_trials}
    new = with_decided_rates(new, old)
    grown, requested = grow_plan(old, new), _requested(new, old)
    if not present.issuperset(requested):
        is_split = old.execution.microbatch or old.execution.accumulation
        if not is_split and new.largest_step.microbatch_size > old.largest_step.microbatch_size:
            new = with_decided_rates(build(bound_by_memory(new)), old)
            grown = grow_plan(old, new)
        _inspect(new, folder, False)
    rows = (*grown.trials, *(row for row in new.trials if row.id is None))
    paths = {"data_path": inputs.data_path, "init_path": inputs.init_path}
    plan = grown.model_copy(update={"trials": rows, **paths})
    return Planned(plan, requested, present.issuperset(row.id for row in new.trials))


def _requested(new: Plan, old: Plan | None) -> tuple[str, ...]:
    """Return the ids that a command names; while a rate is being tuned, all that were tried."""
    tuning = {row.batch_size for row in new.trials if row.id is None}
    tried = [
        row
        for row in (old.known_trials if old else ())
        if row.stage == "tune" and row.batch_size in tuning
    ]
    return tuple(dict.fromkeys(str(row.id) for row in (*tried, *new.known_trials)))


def _inspect(plan: Plan, folder: SweepFolder, asks_memory: bool) -> int | None:
    """Check user code and prompts in a child process; return the number of parameters."""
    settings = plan.settings
    is_checked = plan.code is not None or (settings.traits.samples and not asks_memory)
    if settings.model.parameters is not None and not is_checked:
        return settings.model.parameters
    config = plan.located(folder).trial_config(plan.trials[0])
    parameters: int | None = run_job(inspect_trial, config)
    return parameters


def check_prompts(plan: Plan, folder: SweepFolder) -> None:
    """Check that sampled prompts fit, once the text is prepared.

    Raises:
        SweepError: naming a prompt that does not fit.
    """
    if plan.settings.traits.samples:
        run_job(inspect_trial, plan.located(folder).trial_config(plan.trials[0]))


def user_objects(experiment: Experiment) -> list[str]:
    """Return every `module:object` that an experiment names."""
    model = experiment.model
    names = [
        experiment.workload if ":" in experiment.workload else None,
        model.name if isinstance(model, ObjectSettings) else None,
        experiment.grpo.reward if experiment.grpo else None,
    ]
    return [name for name in names if name]


def identify_inputs(experiment: Experiment, folder: SweepFolder) -> Inputs:
    """Identify the text, the initial weights and the user code; downloads nothing.

    Raises:
        SweepError: if one of them is missing, or not what the experiment needs.
    """
    inputs = Inputs()
    if experiment.data is not None:
        from sweep.data.sources import identify_data, is_path
        from sweep.data.tokenizer import check_tokenizer

        check_tokenizer(tokenizer_of(experiment))
        path = _relative_to(folder, experiment.data) if is_path(experiment.data) else None
        data = identify_data(experiment.data)
        inputs = inputs.model_copy(update={"data": data, "data_path": path})
    if names := user_objects(experiment):
        code = identify_code(names)
        assert code is not None
        if identities := run_job(identities_of, names):
            code["identity"] = identities
        inputs = inputs.model_copy(update={"code": code})
    if experiment.init is None:
        return inputs
    start = identify_start(experiment.init)
    has_tokenizer = inputs.data is not None or experiment.tokenizer == "pretrained"
    own = {
        "model": experiment.model.model_dump(mode="json"),
        "data": inputs.data,
        "tokenizer": tokenizer_of(experiment).model_dump(mode="json") if has_tokenizer else None,
    }
    for name, wanted in own.items():
        if name in start and start[name] != wanted:
            raise SweepError(
                f"init must be a trial with the experiment's {name} ({wanted!r}), got one with "
                f"{start[name]!r}. Give the {name} of that trial."
            )
    path = _relative_to(folder, experiment.init)
    return inputs.model_copy(update={"start": {"weights": start["weights"]}, "init_path": path})


def _relative_to(folder: SweepFolder, source: str) -> str:
    """Keep an absolute path; write another one relative to the sweep folder."""
    path = Path(source).expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path, folder.path)


def save_plan(plan: Plan, folder: SweepFolder) -> None:
    """Write plan.json, and config.json of every trial that has none.

    Raises:
        SweepError: if the folder cannot be written.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        plan = plan.model_copy(update={"trials": plan.known_trials})
        for row in plan.trials:
            trial = folder.trial(str(row.id))
            if not trial.config_path.exists():
                trial.write_config(plan.trial_config(row, folder.name))
        write_json(folder.plan_path, plan.model_dump(mode="json"))
    except OSError as error:
        raise SweepError(_not_writable(folder, f" ({error.strerror})")) from error


def check_writable(folder: SweepFolder) -> None:
    """Refuse a folder that cannot be written, before anything is prepared; writes nothing."""
    existing = next(p for p in (folder.path, *folder.path.absolute().parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise SweepError(_not_writable(folder))


def _not_writable(folder: SweepFolder, reason: str = "") -> str:
    return (
        f"out must be a folder that can be written, got {str(folder.path)!r}{reason}. "
        "Choose another --out."
    )


def identities_of(names: Iterable[str], should_stop: object) -> dict[str, Any]:
    """Return what `identity()` of each user object returns, for those that have one."""
    objects = {name: load_object(name) for name in names}
    return {name: value.identity() for name, value in objects.items() if hasattr(value, "identity")}


def inspect_trial(config: TrialConfig, should_stop: object) -> int | None:
    """Check that a trial's workload can be built and scored, and count the model's parameters.

    Raises:
        SweepError: if user code, a reward or the prompts cannot work.
    """
    from sweep.data.tokens import find_prepared
    from sweep.models import count_parameters
    from sweep.workloads import check_workload

    science, text = config.science, None
    if science.data is not None:
        assert science.tokenizer is not None
        text = find_prepared(science.data, science.tokenizer)
    check_workload(config, text)
    return count_parameters(science.model, config.execution.activation_checkpointing)
