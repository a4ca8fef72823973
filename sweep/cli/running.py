"""`sweep run` and `sweep plan`."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from sweep.cli.cluster import read_cluster, schedule_left, show_schedule
from sweep.cli.show import Progress, show_plan, show_status
from sweep.config.experiment import batches_left_out, load_experiment
from sweep.config.numbers import format_seconds, parse_bytes, parse_count
from sweep.errors import SweepError
from sweep.orchestration.costs import estimate, is_quickly_prepared
from sweep.orchestration.execution import Logistics
from sweep.orchestration.executors import Place, check_services
from sweep.orchestration.planning import (
    BeforeForecast,
    Planned,
    check_writable,
    default_out,
    do_nothing,
    make_plan,
)
from sweep.plan.cluster import ClusterSchedule
from sweep.plan.commands import typed_command
from sweep.plan.plan import Plan
from sweep.plan.retry import is_to_run
from sweep.trial.folder import Cause, SweepFolder

ASK_ABOVE_SECONDS = 3600
FIELDS = (
    *("budget", "batches", "model", "data", "workload", "lr", "seeds"),
    *("context", "vocabulary", "tokenizer", "precision", "tune", "tune_budget"),
    *("target", "init", "group_size"),
)
# Of these the command that is kept in plan.json consists.
TYPED = (
    *(*FIELDS, "device", "microbatch", "accumulation", "activation_checkpointing", "device_memory"),
    *("devices_per_trial", "zero", "strategy", "preset"),
    *("loss_chunk_rows", "generation_batch_size", "shares_prompts", "keep", "out"),
)


def _read(
    experiment: str, flags: dict[str, Any], before_forecast: BeforeForecast = do_nothing
) -> tuple[Planned, SweepFolder]:
    overrides = read_overrides(experiment, flags)
    settings = load_experiment(experiment, overrides)
    logistics = read_logistics(flags)
    folder = SweepFolder(flags["out"] or default_out(settings))
    refuse_file(folder.path)
    if flags["out"] or "only" in flags:  # something may be written
        check_writable(folder)
    given = {name: flags[name] for name in TYPED if (name, flags[name]) != ("device", "auto")}
    command = typed_command(experiment, given)
    return make_plan(settings, logistics, folder, command, before_forecast), folder


def refuse_file(out: Path) -> None:
    """Refuse an --out that is a file."""
    if out.exists() and not out.is_dir():
        raise SweepError(f"out must be a folder, got the file {str(out)!r}. Choose another --out.")


def read_overrides(experiment: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an experiment that flags override; say what that leaves out of it."""
    overrides = {name: flags.get(name) for name in FIELDS}
    for name in ("seeds", "context", "vocabulary", "group_size"):
        if (given := overrides[name]) is not None:
            overrides[name] = parse_count(given, name)
    if (left_out := batches_left_out(experiment, overrides)) and not flags.get("quiet"):
        listed = ", ".join(map(str, left_out))
        click.echo(
            f"Batch sizes of {experiment} that are no whole groups of completions are left out: "
            f"{listed}. Name others with --batches.",
            err=True,
        )
    return overrides


def read_logistics(flags: dict[str, Any]) -> Logistics:
    """Return what flags say of where and how fast."""
    microbatch, memory, rows = (
        flags[name] for name in ("microbatch", "device_memory", "loss_chunk_rows")
    )
    at_once, parts = flags["generation_batch_size"], flags["accumulation"]
    devices = flags["devices_per_trial"]
    if rows is not None:
        rows = 0 if rows.strip() == "0" else parse_count(rows, "loss-chunk-rows")
    return Logistics(
        device=flags["device"],
        microbatch=None if microbatch is None else parse_count(microbatch, "microbatch"),
        accumulation=parts and parse_count(parts, "accumulation"),
        devices=devices and parse_count(devices, "devices-per-trial"),
        zero=flags["zero"],
        strategy=flags.get("strategy"),
        preset=flags.get("preset"),
        activation_checkpointing=flags["activation_checkpointing"],
        device_memory=None if memory is None else parse_bytes(memory, "device-memory"),
        loss_chunk_rows=rows,
        generation_batch_size=at_once and parse_count(at_once, "generation-batch-size"),
        shares_prompts=flags["shares_prompts"],
        keep=flags.get("keep"),
        is_elsewhere=flags["device"] == "cuda"
        and (flags.get("executor", "local") != "local" or flags.get("cluster") is not None),
    )


def plan_command(experiment: str, flags: dict[str, Any]) -> int:
    """Print the plan; with --out, write it there for `python -m sweep.training`."""
    cluster = read_cluster(flags)
    planned, folder = _read(experiment, flags)
    planned = estimate(planned, folder)
    shown = planned.command_rows()
    schedule = schedule_left(shown, folder, *cluster) if cluster else None
    _print_plan(shown, flags["json"], to_stderr=False, schedule=schedule)
    if flags["out"]:
        from sweep.orchestration.runner import holding, save_grown

        with holding(folder):
            save_grown(planned.plan, folder)
        if not flags["json"]:
            click.echo(f"Written to {folder.plan_path}.")
    return 0


def run_command(experiment: str, flags: dict[str, Any]) -> int:
    """Plan, run what is left, write the report."""
    from sweep.orchestration.runner import check_trains, finished_summary, prepare, run_plan
    from sweep.tracking.store import import_ahead

    def ahead(folder: SweepFolder) -> None:
        if not flags["dry_run"]:
            import_ahead(folder, flags["tracking_uri"])

    place = Place(flags["executor"], flags["ray_address"], flags["slurm"])
    check_services(place)
    planned, folder = _read(experiment, flags, ahead)
    check_trains(planned.plan)
    if flags["only"]:
        planned = _only(planned, flags["only"])
    also = frozenset({Cause.DIVERGED} if flags["retry"] == "diverged" else ())
    if flags["tracking_uri"]:
        from sweep.tracking.record import is_recorded
        from sweep.tracking.store import check_answers, check_tracking_uri

        check_tracking_uri(flags["tracking_uri"])
        if not is_recorded(folder, flags["tracking_uri"]):
            check_answers(flags["tracking_uri"])
    if flags["storage"] and planned.is_tuned:
        from sweep.orchestration.studies import open_storage

        open_storage(flags["storage"])
    summary = finished_summary(planned, folder, flags["tracking_uri"], also)
    if summary is None or flags["dry_run"]:
        ahead(folder)
        planned = estimate(planned, folder)
        if flags["dry_run"]:
            _print_plan(planned.command_rows(), flags["json"], to_stderr=False)
            return 0
        if is_quickly_prepared(planned.plan, folder):
            prepare(planned, folder)  # what it refuses is refused before the plan is shown
        if not flags["quiet"]:
            _print_plan(planned.command_rows(), as_json=False, to_stderr=True)
        _confirm(planned.command_rows(), folder, flags["yes"], also)
        shown = None if planned.is_tuned else set(planned.requested)
        progress = Progress(folder, shown, is_quiet=flags["quiet"])
        with progress:
            summary = run_plan(
                planned,
                folder,
                place=place,
                tracking_uri=flags["tracking_uri"],
                storage=flags["storage"],
                also=also,
                on_prepare=progress.preparing,
                on_change=progress.update,
                on_finished=lambda: _report(folder),
            )
    elif not (folder.path / "report.md").exists():
        _report(folder)
    _print_end(folder, flags["json"], summary.untracked)
    if summary.is_interrupted:
        click.echo("Interrupted; the same command resumes.", err=True)
    return summary.exit_code


def _report(folder: SweepFolder) -> None:
    from sweep.report.report import write_report

    write_report(folder.path)


def _only(planned: Planned, prefixes: tuple[str, ...]) -> Planned:
    chosen = []
    for prefix in prefixes:
        found = [trial for trial in planned.requested if trial.startswith(prefix)]
        if len(found) != 1:
            raise SweepError(
                f"only must name one trial of this plan, got {prefix!r}, which names "
                f"{len(found)}. `sweep plan --json` lists the ids."
            )
        chosen += found
    known = planned.plan.model_copy(update={"trials": planned.plan.known_trials})
    return Planned(known, tuple(chosen), planned.is_known)


def _confirm(plan: Plan, folder: SweepFolder, is_agreed: bool, also: frozenset[Cause]) -> None:
    """Ask before more than an hour of estimated time is still to run."""
    seconds = sum(
        row.forecast_seconds or 0
        for row in plan.trials
        if row.id is None or is_to_run(folder.trial(row.id).read_status(), also)
    )
    if is_agreed or seconds <= ASK_ABOVE_SECONDS:
        return
    hint = " `sweep run quick` takes a minute." if plan.execution.device == "cpu" else ""
    question = f"This is estimated to take {format_seconds(seconds)}.{hint}"
    if not sys.stdin.isatty():
        raise SweepError(f"{question} Confirm with --yes.")
    if not click.confirm(f"{question} Run it?", err=True):
        raise click.Abort


def _print_plan(
    plan: Plan, as_json: bool, to_stderr: bool, schedule: ClusterSchedule | None = None
) -> None:
    if as_json:
        document = plan.model_dump(mode="json")
        if schedule:
            document["cluster"] = schedule.as_document()
        click.echo(json.dumps(document, indent=1), err=to_stderr)
    else:
        show_plan(plan, to_stderr)
        if schedule:
            show_schedule(schedule)


def _print_end(folder: SweepFolder, as_json: bool, untracked: str) -> None:
    from sweep.orchestration.status import sweep_status

    document = sweep_status(folder)
    if as_json:
        document["report"] = str(folder.path / "report.md")
        click.echo(json.dumps(document, indent=1))
    else:
        show_status(document)
        click.echo(f"Report: {folder.path / 'report.md'}")
    if untracked:
        click.echo(untracked, err=True)
