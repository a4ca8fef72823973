"""Plan a command on this machine; the execution is decided when plan.json is first written."""

import contextlib
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweep.config.experiment import Experiment
from sweep.config.hub import PREFIX
from sweep.config.load import load_experiment
from sweep.config.optimizers import OptimizerSettings
from sweep.config.settings import Table, merge_settings, parse_settings, settings_of
from sweep.config.trial import Execution, Services, TrialConfig, tokenizer_of
from sweep.config.workloads import DECLARATIONS
from sweep.errors import SweepError, cut, printable, user_code, without_secrets
from sweep.orchestration.executors.build import executors_of, find_executor, services_table
from sweep.plan.commands import typed_command
from sweep.plan.course import Course
from sweep.plan.growth import grow_plan
from sweep.plan.needs import refuse_without_effect
from sweep.plan.plan import (
    Inputs,
    Plan,
    PlannedModel,
    build_plan,
    load_plan,
    requested_ids,
    tokens_at_once,
)
from sweep.plan.schedule import learning_rate_at
from sweep.tracking.store import read_record
from sweep.training.process import run_job
from sweep.trial.files import refuse_links, write_json
from sweep.trial.folder import SweepFolder, TrialFolder, identify_start, weights_of
from sweep.usercode.identity import describe_objects, identify_code
from sweep.usercode.objects import add_code_folder, object_name

LOG = logging.getLogger(__name__)
COMPILE_FLOPS = 10**13  # FLOPs of a plan, below which compiling on a CPU costs more than it saves
LOSS_CHUNK_ROWS = {"cuda": 8192, "cpu": 1024, "mps": 1024}  # docs/performance.md


@dataclass(frozen=True)
class Request:
    """A parsed command."""

    experiment: Experiment
    execution: Execution  # the user's choices, in `model_fields_set`
    folder: SweepFolder
    services: Services = field(default_factory=Services)
    command: tuple[str, ...] = ()  # words of the command line; empty if only Python can ask for it
    unrecorded: tuple[str, ...] = ()  # settings that the words lack

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
    settings = {
        name: object_name(value) if callable(value) else value
        for name, value in values.items()
        if value is not None
    }

    def parse(table: type[Table]) -> Table:
        names = [setting.name for setting in settings_of(table) if setting.name in settings]
        own = {name: settings.pop(name) for name in names}
        return parse_settings(table, merge_settings(table, {}, own), "settings")

    command, unrecorded = record_command(experiment, settings, out)
    services = parse(services_table(executors_of(settings)))
    execution = parse(Execution)
    parsed = load_experiment(experiment, settings, keeps_model_sizes)
    refuse_without_effect(parsed, settings)
    folder = SweepFolder(Path(out or Path("results") / parsed.name))
    refuse_links(folder.path)
    if parsed.code_folder:
        add_code_folder(Path(parsed.code_folder).absolute())
    if objects := parsed.user_code:
        if services.no_user_code:
            raise SweepError(f"--no-user-code refuses {', '.join(objects)}. Read that code first.")
        LOG.warning("This runs your code: %s.", printable(describe_objects(objects)))
    return Request(parsed, execution, folder, services, command, unrecorded)


def record_command(
    experiment: str | None, settings: Mapping[str, Any], out: str | Path | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words of a command, and the settings that they lack.

    There are no words if only Python can give a setting. An address with a password or a token is
    left out, because plan.json and the report show the words.
    """
    tables = (Experiment, Execution, services_table(executors_of(settings)))
    flags = {field.name for table in tables for field in settings_of(table)}
    python_only = sorted(
        name for name, value in settings.items() if name not in flags or isinstance(value, dict)
    )
    if python_only:
        return (), tuple(python_only)
    secret = [name for name in ("tracking_uri", "storage") if name in settings]
    secret = [name for name in secret if without_secrets(settings[name]) != str(settings[name])]
    words = {name: value for name, value in settings.items() if name not in secret}
    return typed_command(experiment, {**words, "out": out}), tuple(sorted(secret))


@dataclass(frozen=True)
class Planned:
    """A plan with everything that the folder already has, and the ids that a command names."""

    plan: Plan
    requested: tuple[str, ...]
    request: Request

    @property
    def adds_seeds(self) -> bool:
        """True if seeds are added until the answer is clear."""
        return self.request.experiment.seeds == "auto"

    @property
    def is_tuned(self) -> bool:
        """True if some reports still need their rate."""
        return any(row.id is None for row in self.plan.trials)

    def command_rows(self) -> Plan:
        """Return the plan with only the rows that this command names."""
        named = {None, *self.requested}
        rows = tuple(row for row in self.plan.trials if row.id in named)
        return self.plan.model_copy(update={"trials": rows})


def make_plan(request: Request, is_elsewhere: bool = False) -> Planned:
    """Plan a command, or extend its folder's plan.

    `is_elsewhere`: trials run on other machines, which the executor may imply.
    """
    request, inputs = identify_inputs(request)
    experiment, chosen, folder = request.experiment, request.execution, request.folder
    old = _find_plan(folder, inputs.code)
    recorded: Any = {"command": request.command, "unrecorded": request.unrecorded}
    if old is None:
        is_elsewhere = is_elsewhere or find_executor(request.services.executor).is_elsewhere
        new = first_plan(request, inputs, is_elsewhere and chosen.device == "cuda")
        plan = new = new.with_execution(**_bound_by_memory(new))
    else:
        for name in sorted(chosen.model_fields_set):
            decided, value = getattr(old.execution, name), getattr(chosen, name)
            if value not in (decided, "auto"):
                raise SweepError(
                    f"{name} was decided as {decided!r} when {folder.plan_path} was first written, "
                    f"got {value!r}. Leave the flag out, or choose another --out."
                )
        if experiment.precision == "auto":
            experiment = experiment.model_copy(update={"precision": old.settings.precision})
        new = build_plan(experiment, old.execution, inputs, **recorded, old=old)
        plan = grow_plan(old, new, folder.path)
        if len(plan.trials) > len(old.trials):
            if new.largest_step > old.largest_step:
                execution = old.execution.model_copy(update=_bound_by_memory(new))
                new = build_plan(experiment, execution, inputs, **recorded, old=old)
                plan = grow_plan(old, new, folder.path)
            if not new.settings.workload.is_program and (new.code or new.settings.workload.samples):
                inspect_plan(new, folder)
    waiting = [row for row in new.trials if row.id is None]
    plan = plan.model_copy(update={"trials": (*plan.known_trials, *waiting)})
    return Planned(plan, requested_ids(plan, new, experiment), request)


def first_plan(request: Request, inputs: Inputs, is_elsewhere: bool) -> Plan:
    """Plan a new sweep, without bounds by a forecast of memory."""
    experiment = request.experiment
    execution = _decide_execution(experiment, request.execution, is_elsewhere)
    if experiment.precision == "auto":
        is_half = execution.device_type == "cuda" and experiment.model.supports_half_precision
        precision = "bf16" if is_half else "fp32"
        experiment = experiment.model_copy(update={"precision": precision})
    plan = build_plan(experiment, execution, inputs, command=request.command)
    if experiment.workload.is_program:
        return plan
    plan = plan.model_copy(update={"model": inspect_plan(plan, request.folder)})
    reason = _reason_for_eager_steps(plan)
    text = f"eager: {reason}" if reason else "torch.compile"
    decided = {"compile": not reason, "compile_reason": text}
    return plan.model_copy(update={"execution": execution.model_copy(update=decided)})


def _decide_execution(experiment: Experiment, chosen: Execution, is_elsewhere: bool) -> Execution:
    from sweep.training.device import available_cores, check_memory_limit, resolve_device

    device = chosen.device if is_elsewhere else resolve_device(chosen.device)
    devices, size, parts = chosen.devices, chosen.microbatch, chosen.accumulation
    if "devices" not in chosen.model_fields_set and size and parts:
        devices = max(1, min(experiment.batches) // (size * parts))  # checked in the plan
    experiment.workload.check_execution(chosen.model_fields_set)
    samples = experiment.workload.samples
    names = experiment.optimizer_names
    if chosen.zero and not {*names} <= {"adamw", "sgd"}:
        problem = f"zero shards the optimizers adamw and sgd, got {' and '.join(names)}"
        raise SweepError(f"{problem}. Leave it out.")
    if chosen.generation_batch_size and not samples:
        raise SweepError("generation_batch_size applies only to the workload grpo. Leave it out.")
    if devices == 1 and chosen.zero:
        raise SweepError("zero needs several devices. Add --devices-per-trial, or leave it out.")
    if devices > 1 and (samples or device not in ("cpu", "cuda")):
        raise SweepError(
            f"{devices} devices per trial need the device cpu or cuda, got {device!r}, and a "
            f"workload other than grpo, got {experiment.workload.name!r}. Use one device per trial."
        )
    decided: dict[str, Any] = {"device": device, "devices": devices}
    if device.partition(":")[0] != "cpu" and chosen.device_memory_bytes and not is_elsewhere:
        # In a child process, because the question creates a context on the device.
        run_job(check_memory_limit, chosen.model_copy(update={"device": device}))
    decided["threads"] = max(1, available_cores() // devices)
    sequences = tokens_at_once(device) // experiment.tokens_per_sequence
    decided["evaluation_batch_size"] = 1 if experiment.workload.is_program else max(1, sequences)
    if chosen.loss_chunk_rows is None:
        decided["loss_chunk_rows"] = LOSS_CHUNK_ROWS[device.partition(":")[0]]
    return chosen.model_copy(update=decided)


def _reason_for_eager_steps(plan: Plan) -> str | None:
    from sweep.training.device import has_compiler, is_available

    execution = plan.execution
    flops = (plan.model.flops_per_token or 0) * sum(row.tokens for row in plan.trials)
    is_cpu, device = execution.device == "cpu", execution.device
    reasons = {
        "a memory limit on a CPU counts the tensors of every operation": is_cpu
        and execution.device_memory_bytes is not None,
        f"compiling is not supported on {device}": device == "mps",
        f"the plan has only {flops:.1e} training FLOPs": is_cpu and flops < COMPILE_FLOPS,
        "no compiler on this machine": is_available(device)
        and not has_compiler(execution.device_type),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _bound_by_memory(plan: Plan) -> dict[str, Any]:
    """Return changes of the execution so that steps fit the device by forecast."""
    if plan.settings.workload.is_program:
        return {}
    try:
        bounds: dict[str, Any] = run_job(bound_on_this_machine, plan.distinct_steps())
        return bounds
    except SweepError as error:
        return {"reason": f"The microbatch is not limited by a memory forecast ({error})."}


def bound_on_this_machine(configs: list[TrialConfig]) -> dict[str, Any]:
    """Return changes of the execution with which all planned steps fit here by forecast."""
    from sweep.memory.forecast import Forecasts
    from sweep.training.device import usable_memory

    execution = configs[0].execution
    forecasts = Forecasts(execution.devices, execution.zero)
    return forecasts.bound(configs, usable_memory(execution))


def inspect_plan(plan: Plan, folder: SweepFolder) -> PlannedModel:
    """Build the workload and its model once in a child process; return what was built."""
    config = folder.located(plan).trial_config(plan.trials[0])
    optimizers = [plan.settings.optimizer.of(name) for name in plan.settings.optimizer_names]
    return plan.model.model_copy(update=run_job(inspect_trial, config, optimizers))


def inspect_trial(config: TrialConfig, optimizers: Sequence[OptimizerSettings]) -> dict[str, Any]:
    """Check that a trial's workload, optimizers and schedule can be built and called.

    Return the numbers of parameters, and FLOPs per token.
    """
    from sweep.data.tokens import find_prepared
    from sweep.memory.forecast import forecast_flops
    from sweep.training.device import is_out_of_memory
    from sweep.training.optimizer import build_optimizer
    from sweep.workloads.build import inspect_workload

    data, tokenizer = config.science.data, config.science.tokenizer
    text = find_prepared(data, tokenizer) if data and tokenizer else None
    try:
        counted, model = inspect_workload(config, text)
    except SweepError as error:
        if not is_out_of_memory(error):  # the trials may have more
            raise
        return {}
    for settings in optimizers:
        optimizer = build_optimizer(settings, model, learning_rate=1e-3)
        if ":" in settings.name and optimizer:
            with user_code(f"optimizer {settings.name!r} must take a step"):
                optimizer.step()
    for step in Course.of_trial(config).milestones(100):
        learning_rate_at(step, 1.0, config.steps, config.warmup_steps, config.science.schedule)
    if "flops_per_token" not in counted and config.science.optimizer.name != "none":
        ignored = (Exception,) if config.science.code else ()  # tensors have no values
        with contextlib.suppress(*ignored):
            counted["flops_per_token"] = forecast_flops(config)
    return counted


def identify_inputs(request: Request) -> tuple[Request, Inputs]:
    """Identify the text, the initial weights and the user code; downloads none of them.

    Returns:
        The request with what the user's workload declares, and the identities.
    """
    experiment, folder = request.experiment, request.folder
    fields: dict[str, Any] = {}
    if objects := experiment.user_code:
        fields["code"], declared = run_job(identify_code, objects, DECLARATIONS)
        if experiment.code_folder:
            fields["code_path"] = _relative_to(folder, experiment.code_folder)
        workload = experiment.workload.with_declarations(declared, experiment.surroundings)
        experiment = experiment.model_copy(update={"workload": workload})
    tokenizer = tokenizer_of(experiment)
    if experiment.data is not None:
        from sweep.data.sources import identify_data, is_path
        from sweep.data.tokens import check_tokenizer

        if tokenizer:
            check_tokenizer(tokenizer)
        fields["data"] = identify_data(experiment.data, experiment.text_column)
        if is_path(experiment.data):
            fields["data_path"] = _relative_to(folder, experiment.data)
    if experiment.init is not None:
        start = identify_start(experiment.init)
        present = {"model": weights_of(experiment.model), "data": fields.get("data")}
        present["tokenizer"] = tokenizer and tokenizer.model_dump(mode="json")
        for name, expected in present.items():
            if name in start and start[name] != expected:
                raise SweepError(
                    f"init must be a trial with the experiment's {name} ({cut(repr(expected))}), "
                    f"got {cut(repr(start[name]))}. Give the {name} of that trial."
                )
        fields["start"] = {"weights": start["weights"]}
    if source := experiment.init or (
        experiment.tokenizer == "pretrained" and experiment.model_source
    ):
        fields["init_path"] = _relative_to(folder, source)
    return replace(request, experiment=experiment), Inputs(**fields)


def _relative_to(folder: SweepFolder, source: str) -> str:
    """Keep an absolute path or a name of the hub; write a path relative to the sweep folder."""
    path = Path(source).expanduser()
    if source.startswith(PREFIX):
        return source
    return str(path) if path.is_absolute() else os.path.relpath(path, folder.path)


def _find_plan(folder: SweepFolder, code: Any) -> Plan | None:
    """Return the plan of a folder; None if its code has changed before any trial had a result."""
    plan = load_plan(folder)
    is_changed = plan and plan.code != code
    return plan if not is_changed or any(map(TrialFolder.find_result, folder.trials())) else None


def save_plan(plan: Plan, folder: SweepFolder) -> Plan:
    """Write a plan with the trials on disk, and config.json of every trial that has none."""
    stored = _find_plan(folder, plan.code)  # another command may have written it meanwhile
    plan = grow_plan(stored, plan, folder.path) if stored else plan
    folder.path.mkdir(parents=True, exist_ok=True)
    if not plan.sweep_uid:  # new, or written again after the user removed it
        uid = read_record(folder).get("sweep_uid") or uuid.uuid4().hex
        plan = plan.model_copy(update={"sweep_uid": uid})
    for row in plan.known_trials:
        trial = folder.trial(str(row.id))
        if not trial.config_path.exists():
            trial.write_config(plan.trial_config(row, folder.name))
    saved = plan.model_copy(update={"trials": plan.known_trials})
    write_json(folder.plan_path, saved.model_dump(mode="json"))
    return plan


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be written, before anything is prepared; writes nothing."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise SweepError(
            f"out must be a folder that can be written, got {str(out)!r}. Choose another --out."
        )
