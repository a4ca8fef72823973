"""From an experiment and flags to the plan of this machine, grown from the one on disk."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweep.config.experiment import Experiment, load_experiment
from sweep.config.numbers import format_bytes
from sweep.config.trial import Execution
from sweep.errors import SweepError
from sweep.plan.commands import typed_command
from sweep.plan.estimates import with_estimates
from sweep.plan.growth import grow_plan
from sweep.plan.plan import (
    COMPILE_FLOPS,
    Plan,
    build_plan,
    load_plan,
    tokenizer_of,
    tokens_at_once,
)
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder

BYTES_PER_TOKEN = {"bpe": 4.0, "bytes": 1.0}  # for estimates before anything is tokenized
SMALL_TEXT = 1 << 22  # bytes


@dataclass(frozen=True)
class Logistics:
    """What the command line decides: where and how fast, never a number."""

    device: str = "auto"
    microbatch: int | None = None
    activation_checkpointing: bool = False
    keep: str | None = None  # none, weights or checkpoints; None: as decided, else weights


@dataclass(frozen=True)
class Planned:
    """A plan, and what this command wants of it."""

    plan: Plan  # with everything that the folder already holds
    requested: tuple[str, ...]  # ids that this command names
    is_known: bool  # plan.json already holds all of them

    def command_rows(self) -> Plan:
        """Return the plan with only the rows that this command names."""
        rows = tuple(row for row in self.plan.trials if row.id is None or row.id in self.requested)
        return self.plan.model_copy(update={"trials": rows})


def default_out(experiment: Experiment) -> Path:
    """Return results/<experiment>."""
    return Path("results") / experiment.name


def plan_sweep(
    experiment: str = "tinystories",
    *,
    out: str | Path | None = None,
    device: str = "auto",
    microbatch: int | None = None,
    **overrides: Any,
) -> Plan:
    """Plan a sweep; trains and writes nothing.

    Args:
        experiment: a shipped name or the path of a TOML file.
        out: the sweep's folder, whose plan is grown if there is one.
        device: auto, cpu, cuda, cuda:i or mps.
        microbatch: sequences per forward-backward; chosen by default.
        **overrides: fields of the experiment: budget, batches, model, data, lr, seeds, …

    Raises:
        SweepError: for anything that cannot be planned.
    """
    settings = load_experiment(experiment, overrides)
    folder = SweepFolder(Path(out)) if out else SweepFolder(default_out(settings))
    command = typed_command(experiment, {**overrides, "out": out})
    planned = make_plan(settings, Logistics(device, microbatch), folder, command)
    return estimate(planned, folder).command_rows()


def make_plan(
    experiment: Experiment,
    logistics: Logistics,
    folder: SweepFolder,
    command: tuple[str, ...] = (),
) -> Planned:
    """Plan what the command names on top of what the folder holds. Imports torch only when new."""
    identity, path = None, None
    if experiment.data is not None:
        from sweep.data.identity import identify_data
        from sweep.data.sources import check_text_length
        from sweep.data.tokenizer import check_tokenizer

        check_tokenizer(tokenizer_of(experiment))
        check_text_length(experiment.data, experiment.model.context)
        identity = identify_data(experiment.data)
        path = _data_path(experiment.data, folder)
    old = load_plan(folder)
    if old is not None:
        experiment = _resolve_precision(experiment, old.settings.precision)
        _refuse_other_execution(old, logistics, folder)
        execution = old.execution
    else:
        execution = _decide_execution(experiment, logistics)
        is_cuda = execution.device.startswith("cuda")
        experiment = _resolve_precision(experiment, "bf16" if is_cuda else "fp32")
    new = build_plan(
        experiment,
        execution,
        data=identity,
        data_path=path,
        microbatch=logistics.microbatch,
        also_batches=tuple({row.batch_size for row in old.trials}) if old else (),
        command=command,
    )
    requested = tuple(row.id for row in new.known_trials if row.id)
    if old is not None:
        known = {row.id for row in old.known_trials}
        grown = grow_plan(old, new)
        undecided = tuple(row for row in new.trials if row.id is None)
        rows = (*grown.trials, *undecided)
        plan = grown.model_copy(update={"trials": rows, "data_path": path})
        return Planned(plan, requested, known.issuperset(requested))
    _check_workload(new)
    return Planned(_decide_compile(_with_parameters(new)), requested, False)


def _check_workload(plan: Plan) -> None:
    """Build a user's workload once, so that its mistakes show before anything is written."""
    if ":" not in plan.settings.workload:
        return
    import torch

    from sweep.workloads.protocol import build_workload

    row = plan.trials[0].model_copy(update={"id": "check", "learning_rate": 1.0})
    try:
        build_workload(plan.trial_config(row, ""), torch.device("cpu"))
    except SweepError:
        raise
    except Exception as error:
        raise SweepError(
            f"workload {plan.settings.workload!r} must be built from a trial's config and a "
            f"device, but raised {type(error).__name__}: {error}. Correct it."
        ) from error


def _data_path(source: str, folder: SweepFolder) -> str | None:
    """Keep an absolute path; write any other as seen from the sweep folder, which may move too."""
    if source in ("tinystories", "synthetic"):
        return None
    path = Path(source).expanduser()
    return str(path) if path.is_absolute() else os.path.relpath(path, folder.path)


def _resolve_precision(experiment: Experiment, default: str) -> Experiment:
    if experiment.precision != "auto":
        return experiment
    return experiment.model_copy(update={"precision": default})


def _refuse_other_execution(old: Plan, logistics: Logistics, folder: SweepFolder) -> None:
    """What plan.json decided stays decided; a flag that differs is not ignored silently."""
    if logistics.microbatch is not None:
        for row in old.trials:
            wanted = min(logistics.microbatch, row.batch_size // row.devices)
            if row.microbatch_size != wanted:
                raise SweepError(
                    f"microbatch was decided as {row.microbatch_size} for batch size "
                    f"{row.batch_size} when {folder.plan_path} was written, got "
                    f"{logistics.microbatch}. Leave the flag out, or choose another --out."
                )
    asked = {
        "device": None if logistics.device == "auto" else logistics.device,
        "activation_checkpointing": logistics.activation_checkpointing or None,
        "keep": logistics.keep,
    }
    for name, value in asked.items():
        decided = getattr(old.execution, name)
        if value is not None and value != decided:
            raise SweepError(
                f"{name} was decided as {decided!r} when {folder.plan_path} was first written, "
                f"got {value!r}. Leave the flag out, or choose another --out."
            )


def _decide_execution(experiment: Experiment, logistics: Logistics) -> Execution:
    from sweep.training.device import available_cores, resolve_device

    device = resolve_device(logistics.device)
    return Execution(
        device=device,
        threads=available_cores(),
        activation_checkpointing=logistics.activation_checkpointing,
        evaluation_batch_size=max(1, tokens_at_once(device) // experiment.model.context),
        keep=logistics.keep or "weights",  # type: ignore[arg-type]
    )


def _decide_compile(plan: Plan) -> Plan:
    """On CUDA whenever a compiler exists; on CPU only if the plan is also large enough."""
    from sweep.training.device import has_compiler

    device, flops = plan.execution.device, plan.total_flops()
    wanted = device.startswith("cuda") or (device == "cpu" and flops >= COMPILE_FLOPS)
    if wanted and not has_compiler(device):
        compiles, reason = False, "eager: no compiler on this machine"
    elif wanted:
        compiles, reason = True, "torch.compile"
    else:
        compiles, reason = False, f"eager: {flops:.1e} training FLOPs are too few to compile for"
    execution = plan.execution.model_copy(update={"compile": compiles, "compile_reason": reason})
    return plan.model_copy(update={"execution": execution})


def _with_parameters(plan: Plan) -> Plan:
    """Count a user's model by building it once without weights."""
    if plan.model["parameters"] is not None:
        return plan
    from sweep.models import count_parameters

    parameters = count_parameters(plan.settings.model)
    return plan.model_copy(update={"model": {**plan.model, "parameters": parameters}})


def estimate(planned: Planned, folder: SweepFolder) -> Planned:
    """Fill in seconds, epochs and disk: estimates, from this machine's calibration."""
    from sweep.data.tokens import find_prepared
    from sweep.orchestration.calibration import estimate_seconds
    from sweep.orchestration.local import attempt_slots

    plan = planned.plan
    seconds = estimate_seconds(plan)
    tokens, is_exact = None, False
    if plan.data is not None:
        text = find_prepared(plan.data, tokenizer_of(plan.settings))
        if text is not None:
            tokens, is_exact = len(text.train), True
        else:
            tokens = int(_data_bytes(plan, folder) / BYTES_PER_TOKEN[plan.settings.tokenizer])
    at_once = len(attempt_slots(plan.execution.device))
    return replace(planned, plan=with_estimates(plan, seconds, tokens, is_exact, at_once))


def _data_bytes(plan: Plan, folder: SweepFolder) -> int:
    """Return about how many bytes the training text has, without tokenizing it."""
    from itertools import islice

    from sweep.data.sources import find_text_files
    from sweep.data.synthetic import synthetic_documents
    from sweep.data.tinystories import TINYSTORIES

    assert plan.data is not None
    if plan.data["name"] == "tinystories":
        return TINYSTORIES.train.size
    if plan.data["name"] == "synthetic":
        sample = [len(text) for text in islice(synthetic_documents(plan.data, "train"), 100)]
        return int(plan.data["documents"]["train"] * sum(sample) / len(sample))
    files = find_text_files(str(folder.locate(plan.data_path)))
    return sum(file.path.stat().st_size for file in files if file.path.stem != "valid")


def is_quickly_prepared(plan: Plan, folder: SweepFolder) -> bool:
    """Tell whether the data are tokenized in a second or two: a small text, or built in."""
    if plan.data is None or plan.data["name"] == "tinystories":
        return plan.data is None
    return _data_bytes(plan, folder) <= SMALL_TEXT


def save_plan(plan: Plan, folder: SweepFolder) -> None:
    """Write plan.json, and config.json of every trial that has none.

    Raises:
        SweepError: if the folder cannot be written.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        known = plan.model_copy(update={"trials": plan.known_trials})
        for row in known.trials:
            assert row.id
            trial = folder.trial(row.id)
            if not trial.config_path.exists():
                trial.write_config(plan.trial_config(row, folder.name))
        write_json(folder.plan_path, known.model_dump(mode="json"))
    except OSError as error:
        raise SweepError(
            f"out must be a folder that can be written, got {str(folder.path)!r} "
            f"({error.strerror}). Choose another --out."
        ) from error


def check_writable(folder: SweepFolder) -> None:
    """Refuse a folder that cannot be written, before anything is prepared; writes nothing."""
    existing = folder.path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise SweepError(
            f"out must be a folder that can be written, got {str(folder.path)!r}. "
            "Choose another --out."
        )


def check_disk(plan: Plan, folder: SweepFolder) -> None:
    """Refuse a sweep that the disk cannot hold."""
    existing = next(
        path for path in (folder.path, *folder.path.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(existing).free
    held = sum(file.stat().st_size for file in folder.path.rglob("*") if file.is_file())
    needed = (plan.disk_bytes or 0) - held
    if needed > free:
        raise SweepError(
            f"the disk must have {format_bytes(needed)} free for this sweep, got "
            f"{format_bytes(free)} at {existing}. Free some, choose another --out, or --keep none."
        )
