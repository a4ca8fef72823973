"""Load an experiment from a file and from flags."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweep.config.experiment import Experiment, TrainingSettings
from sweep.config.models import MODEL_PRESETS, SIZES, model_preset
from sweep.config.numbers import batches_in_sequences, parse_count, parse_options
from sweep.config.pretrained import with_transformers
from sweep.config.secrets import refuse_secrets
from sweep.config.settings import merge_settings, parse_settings, settings_of
from sweep.config.workloads import (
    KIND_OF_KEY,
    KINDS,
    SETTINGS_OF_KIND,
    Program,
    UserWorkload,
    workload_table,
)
from sweep.errors import SweepError, cut, did_you_mean, reason_of
from sweep.resources import DEFAULT_EXPERIMENTS, EXPERIMENTS, shipped_experiments
from sweep.usercode.commands import (
    files_of_command,
    files_of_module,
    refuse_incomplete_command,
    refuse_unreadable_command,
    title_of_command,
    values_read_by,
)
from sweep.usercode.objects import search_path

MAX_EXPERIMENT_BYTES = 1 << 20
# Flags, in addition to another --model, with which an experiment's file names another model's rate.
OF_OTHER_MODEL = {*KIND_OF_KEY, "init", "lora", "workload"}
# Flags of the keys of a workload, such as group_size.
WORKLOAD_KEYS = [
    field.name for field in settings_of(Experiment) if field.path[:-1] == ("workload",)
]


def load_experiment(
    name: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    keeps_model_sizes: bool = False,
) -> Experiment:
    """Load a shipped experiment or a TOML file; apply overrides by the name of flag or field.

    By default it is `tinystories`; for the user's workload or command it has no model or text.
    With `keeps_model_sizes` a model of transformers keeps its vocabulary and context.
    """
    overrides = {} if overrides is None else overrides
    flags = {key: value for key, value in overrides.items() if value is not None}
    _refuse_repeated(flags)

    file = _fields_of_file(name, flags)
    file_with_sizes = _sizes_of_file(file) | file
    is_other_model = flags.get("model") not in (None, file.get("model"))
    fields = dict(file)
    unused_sizes: dict[str, Any] = {}
    if is_other_model and ":" in str(flags["model"]):
        fields = file_with_sizes  # a model of the user takes any size
    elif is_other_model:  # sizes in the file belong to the file's model
        unused_sizes = {key: fields.pop(key) for key in SIZES if key in fields}
    merged = _merge_flags(fields, flags)

    fields = with_transformers(merged, file_with_sizes, flags, keeps_model_sizes)
    is_of_transformers = fields is not merged
    if is_of_transformers and "init" in flags:
        is_other_model = True
    if is_other_model and "schedule" not in flags and not _is_path(name):
        _drop_warmup_of_shipped_model(fields)

    if not is_other_model:
        _keep_own_rate(fields, file, flags)
    _check_program(fields, flags)
    fields |= _fields_without_text(fields)
    _complete_model(fields)
    if fields.get("target") is not None:
        complete_schedule_of_target(fields)
    if not is_of_transformers:
        fields["replaced_sizes"] = _replaced_sizes(unused_sizes, flags, fields["model"])

    subject = f"experiment {name or fields.get('name')!r}"
    if fields.get("batches") == "auto":
        if "batches" not in file:
            raise SweepError(
                f"batches auto needs an {subject} that names the batch sizes of the smallest "
                "budget. List batch sizes, such as 4,16,64."
            )
        fields |= {"batches": file["batches"], "chooses_batches": True}
    if "tok" in str(fields.get("batches")):
        parts = {str(key): fields[key] for key in ("model", "workload") if key in fields}
        tokens_per_sequence = parse_settings(TrainingSettings, parts, subject).tokens_per_sequence
        fields["batches"] = batches_in_sequences(fields["batches"], tokens_per_sequence)
    experiment = parse_settings(Experiment, fields, subject)
    is_trained = not keeps_model_sizes  # else only its memory counts
    if is_trained and experiment.model.adapter_rank and experiment.init is None:
        raise SweepError(f"{subject}: lora needs pretrained weights. Name them with --init.")
    return _with_one_optimizer(experiment)


def _keep_own_rate(
    fields: dict[str, Any], file: Mapping[str, Any], flags: Mapping[str, Any]
) -> None:
    """Keep the file's rate for the first rates of a search; a flag may replace it.

    It is the rate of the file's model and optimizer, and says nothing about other models. Of
    several optimizers, it is not known which one it is meant for.
    """
    tuning = fields.get("tuning", {})
    optimizer = file.get("optimizer", {})
    if not (isinstance(tuning, Mapping) and isinstance(optimizer, Mapping)):
        return  # refused later
    names_rate = "name" in file and "lr" in file and "own_rate" not in tuning
    is_of_others = "optimizers" in file or not flags.keys().isdisjoint(OF_OTHER_MODEL)
    if names_rate and not is_of_others:
        own_rate = {"lr": str(file["lr"]), "optimizer": optimizer.get("name", "adamw")}
        fields["tuning"] = {**tuning, "own_rate": own_rate}


def _with_one_optimizer(experiment: Experiment) -> Experiment:
    """Put the first optimizer into the table `optimizer`; `optimizers` lists two or more."""
    names = experiment.optimizer_names
    optimizer = experiment.optimizer.model_copy(update={"name": names[0]})
    several = names if len(names) > 1 else ()
    return experiment.model_copy(update={"optimizer": optimizer, "optimizers": several})


def _merge_flags(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the file with the flags, and the table of the workload."""
    of_workload = {"workload", *WORKLOAD_KEYS}
    others = {key: value for key, value in flags.items() if key not in of_workload}
    fields = merge_settings(Experiment, file, others)
    fields["workload"] = _workload_with_flags(_choose_workload(file, flags), flags)
    return fields


def _refuse_repeated(flags: Mapping[str, Any]) -> None:
    """Refuse a flag and a table that set the same key; only Python can give both."""
    keys = [(field.name, field.path) for field in settings_of(Experiment)]
    keys += [(field.name, ("workload", *field.path)) for field in settings_of(UserWorkload)]
    keys += [(name, ("model", name)) for name in (*SIZES, "lora")]
    keys.append(("model_option", ("model", "options")))
    for name, path in keys:
        is_in_table = len(path) > 1 and _contains(flags, path)
        is_flag = name in flags and not isinstance(flags[name], Mapping)
        if is_flag and is_in_table:
            raise SweepError(f"{name} and {'.'.join(path)} set the same value. Leave one out.")


def _contains(table: Any, path: Sequence[str]) -> bool:
    for key in path:
        if not isinstance(table, Mapping) or key not in table:
            return False
        table = table[key]
    return True


def _fields_of_file(name: str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the experiment's file; without a name, of the workload's default."""
    if not name:
        workload = _program_of(flags) or flags.get("workload", {})
        name = DEFAULT_EXPERIMENTS.get(workload_table(workload)["kind"])
    return _read_experiment(name) if name else {"lr": "1e-3"}


def _program_of(flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the table of the workload that --command or --train is the flag of, if one is there.

    Raises:
        SweepError: if both are.
    """
    kinds = [kind for key, kind in KIND_OF_KEY.items() if key in flags]
    if len(kinds) > 1:
        raise SweepError("command and train each name the training. Leave one out.")
    return {"kind": kinds[0]} if kinds else None


def _sizes_of_file(file: Mapping[str, Any]) -> dict[str, Any]:
    model = file.get("model", "tinystories")
    if not isinstance(model, dict):
        model = dict(MODEL_PRESETS.get(str(model), {}))
    return {key: model[key] for key in SIZES if key in model}


def _choose_workload(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of the workload: the file's, unless a flag names another one."""
    table = workload_table(file.get("workload", "pretrain"))
    kind = table["kind"]
    named = _program_of(flags)
    if named is None:
        named = workload_table(flags.get("workload", {}), default_kind=kind)

    settings = {key: value for key, value in table.items() if key not in ("kind", "object")}
    if named["kind"] == "user" and kind == "grpo":
        return {"grpo_settings": settings, **named}  # the class may be derived from Grpo
    is_other_kind = named["kind"] != kind
    if is_other_kind and settings:
        flag = next((key for key in KIND_OF_KEY if key in flags), "workload")
        keys = cut(", ".join(sorted(settings)))
        problem = f"does not apply to an experiment with settings of the workload {kind!r} ({keys})"
        raise SweepError(f"{flag} {problem}. Leave it out, or choose another experiment.")
    has_settings = not named.keys() <= {"kind", "object"}
    return named if is_other_kind or has_settings else {**table, **named}


def _workload_with_flags(table: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Add the flags that are keys of a workload, and refuse keys of other kinds of workload."""
    workload = SETTINGS_OF_KIND[table["kind"]]
    values = {name: flags[name] for name in WORKLOAD_KEYS if name in flags}
    merged = merge_settings(workload, table, values)

    for key in sorted(merged.keys() - workload.settable_keys()):
        kinds = [kind for kind in KINDS if key in SETTINGS_OF_KIND[kind].settable_keys()]
        if kinds:  # else it is not a known key
            subject = key if key in values else f"'workload.{key}'"
            problem = f"does not apply to {table.get('object', table['kind'])!r}"
            raise SweepError(f"{subject} {problem}, only to {' or '.join(kinds)}. Leave it out.")
    return merged


def _check_program(fields: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Refuse settings that do not apply to a program of the user."""
    table = fields["workload"]
    key = next((key for key, kind in KIND_OF_KEY.items() if kind == table["kind"]), None)
    if key is None:
        return
    if key not in table:
        raise SweepError(f"workload {table['kind']!r} needs a {key}. Use --{key} instead.")
    refuse_secrets(str(table[key]))

    others = sorted(fields.keys() - Program.used_settings)
    if "workload" in flags and workload_table(flags["workload"], "command")["kind"] != "command":
        others.insert(0, "workload")
    if not others:
        return
    names = [setting.name for setting in settings_of(Experiment) if setting.path[0] == others[0]]
    flag = next((name for name in (*names, others[0]) if name in flags), None)
    if flag is not None:
        subject = cut(flag)
    elif key in flags:
        subject = f"experiment {fields['name']!r}"
    else:
        subject = cut(others[0])
    problem = f"does not apply to a {table['kind']}, which has its own model, data and training"
    raise SweepError(f"{subject} {problem}. Leave it out.")


def _fields_without_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an experiment whose workload or program brings its own model."""
    table = fields["workload"]
    kind = table["kind"]
    if kind == "command":
        command = refuse_unreadable_command(str(table["command"]))
        read_by_script = values_read_by(files_of_command(command))
        refuse_incomplete_command(command, read_by_script)
        table = {**table, "read_by_script": read_by_script}
        title = title_of_command(command)
        model_name = f"command: {command}"
    elif kind == "function":
        module = str(table["train"]).partition(":")[0]
        files = files_of_module(module, map(Path, search_path(fields.get("code_folder"))))
        table = {**table, "read_by_script": values_read_by(files, is_function=True)}
        model_name = f"function: {table['train']}"
        title = module.rpartition(".")[2]
    elif "model" not in fields and not SETTINGS_OF_KIND[kind].reads_text:
        model_name = str(table.get("object", kind))
        title = model_name.partition(":")[0].rpartition(".")[2]
    else:
        return {}
    model = {"kind": "object", "name": model_name, "vocabulary": None, "context": 1}
    return {"name": title, "data": None, **fields, "workload": table, "model": model}


def _complete_model(fields: dict[str, Any]) -> None:
    """Replace the name of a preset by its sizes, and add the sizes and options of the flags."""
    model = fields.get("model", "tinystories")
    changes = dict(model) if isinstance(model, dict) else {"preset": model}
    completed = {}
    if "kind" not in changes:
        completed = model_preset(changes.pop("preset", "tinystories"))
    completed |= changes
    for key in (*SIZES, "lora"):
        if key in fields:
            completed[key] = parse_count(fields.pop(key), key)

    options = fields.pop("model_option", None)
    if options:
        refuse_secrets(str(options), "model_option")
        parsed = parse_options(options, "model_option")
        completed["options"] = {**completed.get("options", {}), **parsed}
    fields["model"] = completed


def complete_schedule_of_target(fields: dict[str, Any]) -> None:
    """Make the rate constant and average the weights, unless the schedule is given."""
    schedule = fields.get("schedule", {})
    if isinstance(schedule, dict) and "name" not in schedule:
        fields["schedule"] = {"average": 0.1, **schedule, "name": "constant"}


def _drop_warmup_of_shipped_model(fields: Mapping[str, Any]) -> None:
    schedule = fields.get("schedule")
    if isinstance(schedule, dict):
        schedule.pop("warmup_min_steps", None)


def _replaced_sizes(
    file_sizes: Mapping[str, Any], flags: Mapping[str, Any], model: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """List the sizes of a file that are left out, because a flag names another model."""
    sizes = []
    for name, value in file_sizes.items():
        size = parse_count(value, name)
        used = model.get(name)
        if name not in flags and used not in (None, size):
            sizes.append({"owner": "experiment", "name": name, "size": size, "used": used})
    return sizes


def _is_path(name: str | None) -> bool:
    """Return True for the path of an experiment, and False for the name of a shipped one."""
    if name is None:
        return False
    return name.endswith(".toml") or "/" in name


def _read_experiment(name: str) -> dict[str, Any]:
    path = Path(name) if _is_path(name) else EXPERIMENTS / f"{name}.toml"
    if not path.is_file():
        names = shipped_experiments()
        problem = f"experiment must be a TOML file or one of {', '.join(names)}, got {name!r}."
        raise SweepError(f"{problem} {did_you_mean(name, names) or 'Check the path.'}")
    try:
        if path.stat().st_size > MAX_EXPERIMENT_BYTES:
            raise ValueError(f"it has more than {MAX_EXPERIMENT_BYTES} bytes")
        fields = {"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))}
        repr(fields)  # raises for integers that are too long to print
    except (ValueError, RecursionError) as error:  # also of the encoding
        problem = f"must be TOML, but {reason_of(error)}"
        raise SweepError(f"experiment {path} {problem}. Correct it.") from error
    return {**fields, "code_folder": str(path.parent)}
