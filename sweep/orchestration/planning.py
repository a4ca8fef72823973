"""From an experiment and flags to this machine's plan, grown from the one on disk."""

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.config.execution import Execution, Services
from sweep.config.experiment import Experiment, load_experiment
from sweep.config.models import ObjectSettings
from sweep.config.objects import identify_code, load_object
from sweep.config.settings import Settings, merge_settings, parse_settings, settings_of
from sweep.config.trial import TrialConfig, tokenizer_of
from sweep.errors import SweepError
from sweep.orchestration.execution import (
    bound_by_memory,
    choose_by_preset,
    decide_compile,
    decide_execution,
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
    """A parsed command."""

    experiment: Experiment
    execution: Execution  # the user's choices, in `model_fields_set`
    services: Services
    folder: SweepFolder
    command: tuple[str, ...]  # words that make the same request on the command line

    def plan(self, is_elsewhere: bool = False) -> "Planned":
        """Make the plan; `is_elsewhere` if trials run on other machines, with other devices."""
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
    """Parse a command: an experiment and values of settings by name, None if left out."""
    settings = {name: value for name, value in values.items() if value is not None}

    def settings_in(table: type[Settings]) -> dict[str, Any]:
        return {s.name: settings[s.name] for s in settings_of(table) if s.name in settings}

    of_execution, of_services = settings_in(Execution), settings_in(Services)
    execution = parse_settings(Execution, merge_settings(Execution, {}, of_execution), "settings")
    services = parse_settings(Services, merge_settings(Services, {}, of_services), "settings")
    kept = {name: value for name, value in settings.items() if name not in of_services}
    science = {name: value for name, value in kept.items() if name not in of_execution}
    parsed = load_experiment(experiment, science)
    folder = SweepFolder(Path(out) if out else Path("results") / parsed.name)
    command = typed_command(experiment, {**kept, "out": out})
    return Request(parsed, execution, services, folder, command)


@dataclass(frozen=True)
class Planned:
    """A plan with everything that the folder already has, and the ids that a command names."""

    plan: Plan
    requested: tuple[str, ...]

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
) -> Planned:
    """Plan what a command names on top of what the folder holds.

    Args:
        chosen: with the user's choices in `model_fields_set`.
        command: words of the command line.
        is_elsewhere: whether the device may be on another machine.
    """
    inputs, old = identify_inputs(experiment, folder), load_plan(folder)
    if old is None:
        new = first_plan(experiment, chosen, inputs, command, is_elsewhere)
        parameters = inspect_plan(new, folder)
        if new.execution.preset:
            changes = choose_by_preset(new, chosen, experiment.precision == "auto")
        else:
            changes = bound_by_memory(new)
        precision = changes.pop("precision", new.settings.precision)
        settings = new.settings.model_copy(update={"precision": precision})
        execution = new.execution.model_copy(update=changes)
        new = build_plan(settings, execution, inputs, command=command)
        plan = new.model_copy(update={"model": {**new.model, "parameters": parameters}})
    else:
        refuse_other_execution(old, chosen, folder)
        if experiment.precision == "auto":
            experiment = experiment.model_copy(update={"precision": old.settings.precision})
        batches = tuple({row.batch_size for row in old.trials})
        build = functools.partial(
            build_plan, experiment, inputs=inputs, other_batches=batches, command=command
        )
        new = with_decided_rates(build(execution=old.execution), old)
        grown = grow_plan(old, new)
        if len(grown.trials) > len(old.trials):
            is_split = old.execution.microbatch or old.execution.accumulation
            if not is_split and new.largest_step.microbatch_size > old.largest_step.microbatch_size:
                execution = old.execution.model_copy(update=bound_by_memory(new))
                new = with_decided_rates(build(execution=execution), old)
                grown = grow_plan(old, new)
            inspect_plan(new, folder)
        rows = (*grown.trials, *(row for row in new.trials if row.id is None))
        plan = grown.model_copy(
            update={"trials": rows, "data_path": inputs.data_path, "init_path": inputs.init_path}
        )
    ids = {row.id for row in new.known_trials}
    tuning = {row.batch_size for row in new.trials if row.id is None}  # with all rates tried so far
    requested = [
        str(row.id)
        for row in plan.known_trials
        if row.id in ids or (row.stage == "tune" and row.batch_size in tuning)
    ]
    return Planned(plan, tuple(requested))


def refuse_other_execution(old: Plan, chosen: Execution, folder: SweepFolder) -> None:
    """Refuse settings that differ from those decided when the plan was first written."""
    for name in sorted(chosen.model_fields_set):
        decided, value = getattr(old.execution, name), getattr(chosen, name)
        if value != decided:
            raise SweepError(
                f"{name} was decided as {decided!r} when {folder.plan_path} was first written, "
                f"got {value!r}. Leave the flag out, or choose another --out."
            )


def first_plan(
    experiment: Experiment,
    chosen: Execution,
    inputs: Inputs,
    command: tuple[str, ...] = (),
    is_elsewhere: bool = False,
) -> Plan:
    """Plan a new sweep, without bounds by a forecast of memory."""
    execution = decide_execution(experiment, chosen, is_elsewhere)
    if experiment.precision == "auto":
        is_half = execution.device_type == "cuda" and experiment.model.supports_half_precision
        precision = "bf16" if is_half else "fp32"
        experiment = experiment.model_copy(update={"precision": precision})
    return decide_compile(build_plan(experiment, execution, inputs, command=command))


def inspect_plan(plan: Plan, folder: SweepFolder) -> int | None:
    """Check user code and prompts in a child process; return the number of parameters."""
    settings = plan.settings
    if settings.model.parameters is not None and not (plan.code or settings.traits.samples):
        return settings.model.parameters
    config = plan.located(folder).trial_config(plan.trials[0])
    parameters: int | None = run_job(inspect_trial, config)
    return parameters


def identify_inputs(experiment: Experiment, folder: SweepFolder) -> Inputs:
    """Identify the text, the initial weights and the user code; downloads nothing."""
    data, data_path, code, model = None, None, None, experiment.model
    if experiment.data is not None:
        from sweep.data.sources import identify_data, is_path
        from sweep.data.tokens import check_tokenizer

        check_tokenizer(tokenizer_of(experiment))
        data = identify_data(experiment.data)
        data_path = _relative_to(folder, experiment.data) if is_path(experiment.data) else None
    names = [
        experiment.workload if ":" in experiment.workload else None,
        model.name if isinstance(model, ObjectSettings) else None,
        experiment.grpo.reward if experiment.grpo else None,
    ]
    if objects := [name for name in names if name]:
        code = identify_code(objects)
        assert code is not None
        if identities := run_job(identities_of, objects):
            code["identity"] = identities
    if experiment.init is None:
        return Inputs(data=data, data_path=data_path, code=code)
    start = identify_start(experiment.init)
    has_tokenizer = data is not None or experiment.tokenizer == "pretrained"
    own = {
        "model": model.model_dump(mode="json"),
        "data": data,
        "tokenizer": tokenizer_of(experiment).model_dump(mode="json") if has_tokenizer else None,
    }
    for name, wanted in own.items():
        if name in start and start[name] != wanted:
            raise SweepError(
                f"init must be a trial with the experiment's {name} ({wanted!r}), got one with "
                f"{start[name]!r}. Give the {name} of that trial."
            )
    init_path = _relative_to(folder, experiment.init)
    return Inputs(
        data=data,
        data_path=data_path,
        start={"weights": start["weights"]},
        init_path=init_path,
        code=code,
    )


def _relative_to(folder: SweepFolder, source: str) -> str:
    """Keep an absolute path; write another one relative to the sweep folder."""
    path = Path(source).expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path, folder.path)


def save_plan(plan: Plan, folder: SweepFolder) -> None:
    """Write plan.json, and config.json of every trial that has none."""
    folder.path.mkdir(parents=True, exist_ok=True)
    plan = plan.model_copy(update={"trials": plan.known_trials})
    for row in plan.trials:
        trial = folder.trial(str(row.id))
        if not trial.config_path.exists():
            trial.write_config(plan.trial_config(row, folder.name))
    write_json(folder.plan_path, plan.model_dump(mode="json"))


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be written, before anything is prepared; writes nothing."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise SweepError(
            f"out must be a folder that can be written, got {str(out)!r}. Choose another --out."
        )


def identities_of(names: Iterable[str], should_stop: object) -> dict[str, Any]:
    """Return what `identity()` of each user object returns, for those that have one."""
    objects = {name: load_object(name) for name in names}
    return {name: value.identity() for name, value in objects.items() if hasattr(value, "identity")}


def inspect_trial(config: TrialConfig, should_stop: object) -> int | None:
    """Check that a trial's workload can be built and scored, and count the model's parameters."""
    from sweep.data.tokens import find_prepared
    from sweep.models import count_parameters
    from sweep.workloads import check_workload

    science, text = config.science, None
    if science.data is not None:
        assert science.tokenizer is not None
        text = find_prepared(science.data, science.tokenizer)
    check_workload(config, text)
    return count_parameters(science.model, config.execution.activation_checkpointing)
