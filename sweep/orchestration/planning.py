"""From an experiment and flags to the plan of this machine, grown from the one on disk."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.config.experiment import Experiment, load_experiment
from sweep.config.trial import Execution
from sweep.errors import SweepError
from sweep.orchestration.execution import (
    Logistics,
    choose_by_preset,
    decide_compile,
    decide_execution,
    refuse_other_execution,
    refuse_sampling,
    within_memory,
)
from sweep.orchestration.inputs import Inputs, identify_inputs
from sweep.plan.commands import typed_command
from sweep.plan.growth import grow_plan, with_decided_rates
from sweep.plan.plan import (
    Plan,
    build_plan,
    load_plan,
)
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder

BeforeForecast = Callable[[SweepFolder], None]


def do_nothing(folder: SweepFolder) -> None:
    """Begin nothing while a plan is forecast."""


@dataclass(frozen=True)
class Planned:
    """A plan, and what this command wants of it."""

    plan: Plan  # with everything that the folder already holds
    requested: tuple[str, ...]  # ids that this command names
    is_known: bool  # plan.json already holds all of them, with their rates

    @property
    def is_tuned(self) -> bool:
        """Whether some reports await their rate."""
        return any(row.id is None for row in self.plan.trials)

    def command_rows(self) -> Plan:
        """Return the plan with only the rows that this command names."""
        named = {None, *self.requested}
        rows = tuple(row for row in self.plan.trials if row.id in named)
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
    from sweep.orchestration.costs import estimate

    planned, folder = plan_call(experiment, out, device, microbatch, overrides)
    return estimate(planned, folder).command_rows()


def plan_call(
    experiment: str,
    out: str | Path | None,
    device: str,
    microbatch: int | None,
    overrides: dict[str, Any],
    before_forecast: BeforeForecast = do_nothing,
) -> tuple["Planned", SweepFolder]:
    """Plan what a call from Python names, as the command line would have been typed."""
    settings = load_experiment(experiment, overrides)
    folder = SweepFolder(Path(out) if out else default_out(settings))
    flags = {"device": None if device == "auto" else device, "microbatch": microbatch, "out": out}
    command = typed_command(experiment, {**overrides, **flags})
    logistics = Logistics(device, microbatch)
    return make_plan(settings, logistics, folder, command, before_forecast), folder


def make_plan(
    experiment: Experiment,
    logistics: Logistics,
    folder: SweepFolder,
    command: tuple[str, ...] = (),
    before_forecast: BeforeForecast = do_nothing,
) -> Planned:
    """Plan what the command names on top of what the folder holds. Imports torch only when new.

    A new plan is forecast by a process that imports torch; `before_forecast` is called first.
    """
    refuse_sampling(experiment, logistics)
    inputs, precision = identify_inputs(experiment, folder), experiment.precision
    old = load_plan(folder)
    if old is not None:
        experiment = _resolve_precision(experiment, old.settings.precision)
        refuse_other_execution(old, logistics, folder)
        execution = old.execution
    else:
        execution = decide_execution(experiment, logistics)
        is_half = execution.device.startswith("cuda") and experiment.model.kind != "quadratic"
        experiment = _resolve_precision(experiment, "bf16" if is_half else "fp32")
    also = tuple({row.batch_size for row in old.trials}) if old else ()

    def build(execution: Execution) -> Plan:
        return build_plan(
            experiment,
            execution,
            data=inputs.data,
            data_path=inputs.data_path,
            start=inputs.start,
            microbatch=logistics.microbatch,
            accumulation=logistics.accumulation,
            also_batches=also,
            command=command,
        )

    new = build(execution)
    if old is not None:
        return _grown(old, new, build, logistics, folder, inputs)
    check_start(new, folder, logistics)
    before_forecast(folder)
    if logistics.preset:
        execution, chosen = choose_by_preset(new, precision, logistics)
        experiment = _resolve_precision(experiment, chosen, is_forced=True)
        new = build(execution)
    elif not logistics.asks_memory:
        new = build(within_memory(new))
    new = decide_compile(_with_parameters(new), logistics.is_elsewhere)
    return Planned(new, _requested(new, None), False)


def _grown(
    old: Plan,
    new: Plan,
    build: Callable[[Execution], Plan],
    logistics: Logistics,
    folder: SweepFolder,
    inputs: Inputs,
) -> Planned:
    """Return the folder's plan with what the command names; `build` does so within other bounds."""
    known = {row.id for row in old.known_trials}
    new = with_decided_rates(new, old)
    grown = grow_plan(old, new)
    requested = _requested(new, old)
    if not known.issuperset(requested):
        if not logistics.is_split and _largest_microbatch(new) > _largest_microbatch(old):
            bounded = build(within_memory(new))  # larger than what was forecast before
            new = with_decided_rates(bounded, old)
            grown = grow_plan(old, new)
        _with_parameters(new)
        check_start(new, folder, logistics)
    rows = (*grown.trials, *(row for row in new.trials if row.id is None))
    plan = grown.model_copy(update={"trials": rows, **inputs.paths()})
    return Planned(plan, requested, known.issuperset(row.id for row in new.trials))


def _requested(new: Plan, old: Plan | None) -> tuple[str, ...]:
    """Return the ids that a command names; of rates still being tuned all that were tried."""
    tuning = {row.batch_size for row in new.trials if row.id is None}
    tried = [
        row
        for row in (old.known_trials if old else ())
        if row.stage == "tune" and row.batch_size in tuning
    ]
    return tuple(dict.fromkeys(str(row.id) for row in (*tried, *new.known_trials)))


def _largest_microbatch(plan: Plan) -> int:
    return max(row.microbatch_size for row in plan.trials)


def check_start(plan: Plan, folder: SweepFolder, logistics: Logistics | None = None) -> None:
    """Check that the workload can start; a memory question does not need the prompts of GRPO.

    Raises:
        SweepError: as `check_workload`.
    """
    if logistics and logistics.asks_memory and plan.settings.traits.samples:
        return
    from sweep.data.tokens import find_prepared
    from sweep.workloads import check_workload

    config, text = plan.located(folder).sample_config(plan.trials[0]), None
    if config.science.data is not None and config.science.tokenizer is not None:
        text = find_prepared(config.science.data, config.science.tokenizer)
    check_workload(config, text)


def _resolve_precision(experiment: Experiment, default: str, is_forced: bool = False) -> Experiment:
    if experiment.precision != "auto" and not is_forced:
        return experiment
    return experiment.model_copy(update={"precision": default})


def _with_parameters(plan: Plan) -> Plan:
    """Count a user's model by building it once without weights, as trials will build it."""
    if plan.settings.model.parameters is not None:
        return plan
    from sweep.models import count_parameters

    checkpointing = plan.execution.activation_checkpointing
    parameters = count_parameters(plan.settings.model, checkpointing)
    return plan.model_copy(update={"model": {**plan.model, "parameters": parameters}})


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
