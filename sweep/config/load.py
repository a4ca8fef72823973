"""Load an experiment from a file and from flags."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.config.experiment import Experiment
from sweep.config.models import MODEL_PRESETS, SIZES, model_preset
from sweep.config.numbers import parse_count, parse_options
from sweep.config.pretrained import with_transformers
from sweep.config.secrets import refuse_secrets
from sweep.config.settings import merge_settings, parse_settings, settings_of
from sweep.config.workloads import DECLARATIONS, Command
from sweep.errors import SweepError, cut, did_you_mean, reason_of
from sweep.resources import EXPERIMENTS, shipped_experiments
from sweep.usercode.commands import check_command, title_of_command

MAX_EXPERIMENT_BYTES = 1 << 20


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
    usual = _sizes_of_file(file) | file
    is_other_model = flags.get("model") not in (None, file.get("model"))
    replaced: dict[str, Any] = {}
    if is_other_model and ":" in str(flags["model"]):
        file = dict(usual)
    elif is_other_model:  # sizes in the file belong to the file's model
        replaced = {key: file[key] for key in SIZES if key in file}
        file = {key: value for key, value in file.items() if key not in SIZES}

    file["workload"] = _choose_workload(file, flags)
    others = {key: value for key, value in flags.items() if key != "workload"}
    merged = merge_settings(Experiment, file, others)
    fields = with_transformers(merged, usual, flags, keeps_model_sizes)
    is_of_transformers = fields is not merged
    if is_of_transformers and "init" in flags:
        is_other_model = True
    if is_other_model and "schedule" not in flags and not _is_path(name):
        _drop_warmup_of_shipped_model(fields)

    _check_workload(fields, flags)
    fields |= _own_model(fields)
    _complete_model(fields)
    if fields.get("target") is not None:
        _complete_schedule_of_target(fields)
    if not is_of_transformers:
        fields["replaced_sizes"] = _replaced_sizes(replaced, flags, fields["model"])
    experiment = parse_settings(Experiment, fields, f"experiment {name or fields.get('name')!r}")

    optimizer = experiment.optimizer.model_copy(update={"name": experiment.optimizer_names[0]})
    several = experiment.optimizers if len(experiment.optimizers) > 1 else ()
    return experiment.model_copy(update={"optimizer": optimizer, "optimizers": several})


def _refuse_repeated(flags: Mapping[str, Any]) -> None:
    """Refuse a flag and a table that set the same key; only Python can give both."""
    keys = [(s.name, *s.path) for s in settings_of(Experiment) if len(s.path) == 2]
    keys += [(name, "model", name) for name in (*SIZES, "lora")]
    keys += [("model_option", "model", "options")]
    for name, table, key in keys:
        values = flags.get(table)
        if name in flags and isinstance(values, dict) and key in values:
            raise SweepError(f"{name} and {table}.{key} set the same value. Leave one out.")


def _fields_of_file(name: str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the experiment's file; of the user's workload or command, few."""
    workload = str(flags.get("workload", ""))
    if name is not None:
        return _read_experiment(name)
    if ":" in workload or "command" in flags:
        return {"lr": "1e-3"}
    return _read_experiment("quadratic" if workload == "quadratic" else "tinystories")


def _sizes_of_file(file: Mapping[str, Any]) -> dict[str, Any]:
    model = file.get("model", "tinystories")
    if not isinstance(model, dict):
        model = dict(MODEL_PRESETS.get(str(model), {}))
    return {key: model[key] for key in SIZES if key in model}


def _choose_workload(file: Mapping[str, Any], flags: Mapping[str, Any]) -> Any:
    """Return the table of the workload: the file's, unless a flag names another one."""
    table = _as_table(file.get("workload", "pretrain"))
    if "command" in flags:
        named: Any = {"kind": "command"}
    else:
        named = _as_table(flags.get("workload", table))
    if not isinstance(table, dict) or not isinstance(named, dict):
        return named  # which pydantic refuses
    kind = table.get("kind", "pretrain")
    named = {"kind": kind, **named}
    if named == {"kind": kind}:
        return {"kind": kind, **table}
    if ":" in str(named["kind"]) and kind == "grpo":
        of_grpo = {key: value for key, value in table.items() if key != "kind"}
        return {"grpo_settings": of_grpo, **named}  # the user's class may be derived from Grpo
    return named


def _as_table(workload: Any) -> Any:
    """Return the table of a workload that may be named by its kind or its command alone."""
    if isinstance(workload, str):
        return {"kind": workload}
    if isinstance(workload, dict) and "command" in workload:
        return {"kind": "command", **workload}
    return workload


def _check_workload(fields: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Refuse settings that do not apply to a command, or that only a command has."""
    table = fields["workload"]
    if not isinstance(table, dict):
        return
    command = table.get("command")
    if table["kind"] != "command":
        is_user_code = table["kind"] == "user" or ":" in str(table["kind"])
        if is_user_code and not table.keys().isdisjoint(DECLARATIONS):
            raise SweepError("objective, direction and unit need a command. Leave them out.")
        return
    if command is None:
        raise SweepError("workload 'command' needs a command. Use --command instead.")
    refuse_secrets(str(command))
    others = sorted(fields.keys() - Command.used_settings)
    if "command" in flags and _names_another(flags.get("workload")):
        others.insert(0, "workload")
    if not others:
        return
    names = [setting.name for setting in settings_of(Experiment) if setting.path[0] == others[0]]
    given = [name for name in (*names, others[0]) if name in flags]
    if given:
        subject = cut(given[0])
    elif "command" in flags:
        subject = f"experiment {fields['name']!r}"
    else:
        subject = cut(others[0])
    problem = "does not apply to a command, which has its own model, data and training"
    raise SweepError(f"{subject} {problem}. Leave it out.")


def _names_another(workload: Any) -> bool:
    """Return True if a flag names a workload other than a command."""
    table = _as_table(workload)
    kind = table.get("kind", "command") if isinstance(table, dict) else table
    return kind not in (None, "command")


def _own_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an experiment whose workload or command has its own model."""
    table = fields["workload"]
    kind = str(table.get("kind")) if isinstance(table, dict) else ""
    if kind == "command":
        command = table["command"]
        title = title_of_command(check_command(str(command)))
        name = f"command: {command}"
    elif "model" not in fields and (":" in kind or kind == "quadratic"):
        name = kind
        title = name.partition(":")[0].rpartition(".")[2]
    else:
        return {}
    own = {"kind": "object", "name": name, "vocabulary": None, "context": 1}
    return {"name": title, "data": None, **fields, "model": own}


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


def _complete_schedule_of_target(fields: dict[str, Any]) -> None:
    """Make the rate constant and average the weights, unless the schedule is given."""
    schedule = fields.get("schedule", {})
    if isinstance(schedule, dict) and "name" not in schedule:
        fields["schedule"] = {"average": 0.1, **schedule, "name": "constant"}


def _drop_warmup_of_shipped_model(fields: Mapping[str, Any]) -> None:
    schedule = fields.get("schedule")
    if isinstance(schedule, dict):
        schedule.pop("warmup_min_steps", None)


def _replaced_sizes(
    replaced: Mapping[str, Any], flags: Mapping[str, Any], model: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """List the sizes of a file that are left out, because a flag names another model."""
    sizes = []
    for name, value in replaced.items():
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
