"""`sweep run`, `sweep plan`, `sweep forecast` and `sweep probe`."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sweep.cli.show import Progress, show_plan, show_status
from sweep.config.numbers import format_bytes, format_seconds, parse_count
from sweep.errors import SweepError
from sweep.orchestration.costs import (
    ClusterCost,
    cost_on_cluster,
    estimate,
    parse_cluster,
)
from sweep.orchestration.planning import Planned, Request, check_writable, read_request
from sweep.plan.plan import Plan
from sweep.plan.retry import is_to_run
from sweep.trial.folder import Cause, SweepFolder

if TYPE_CHECKING:
    from sweep.memory.search import Measurement

CONFIRM_SECONDS = 3600
NOT_SETTINGS = {  # flags of the commands themselves
    *("out", "json", "yes", "dry_run", "quiet", "only", "retry", "cluster", "price"),
    *("largest", "multiple", "soak"),
}


def settings_in(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that are settings, without those that were not given."""
    given = {name: value for name, value in flags.items() if value is not None}
    return {name: value for name, value in given.items() if name not in NOT_SETTINGS}


def plan_command(experiment: str, flags: dict[str, Any]) -> int:
    """Print the plan; with --out, write it there for `python -m sweep.training`."""
    request, folder = read_request(experiment, settings_in(flags), flags["out"]), None
    cluster = None if flags["cluster"] is None else parse_cluster(flags["cluster"])
    if flags["price"] is not None and cluster is None:
        raise SweepError("--price needs --cluster. Add it, or leave --price out.")
    if flags["out"]:
        folder = request.folder
        check_writable(folder.path)
    planned = estimate(request.plan(is_elsewhere=cluster is not None), request.folder)
    rows, cost = planned.command_rows(), None
    if cluster:
        done = _finished(rows, request.folder)
        cost = cost_on_cluster(rows, *cluster, flags["price"], done)
    _print_plan(rows, flags["json"], to_stderr=False, cost=cost)
    if folder:
        from sweep.orchestration.runner import holding, save_grown

        with holding(folder):
            save_grown(planned.plan, folder)
        if not flags["json"]:
            click.echo(f"Written to {folder.plan_path}.")
    return 0


def run_command(experiment: str, flags: dict[str, Any]) -> int:
    """Plan, run what is left, write the report."""
    from sweep.orchestration.executors import check_services
    from sweep.orchestration.runner import check_trains, finished_summary, run_plan

    request = read_request(experiment, settings_in(flags), flags["out"])
    folder, services = request.folder, request.services
    check_services(services)
    check_writable(folder.path)
    planned = request.plan()
    check_trains(planned.plan)
    if flags["only"]:
        planned = _only(planned, flags["only"])
    also = frozenset({Cause.DIVERGED} if flags["retry"] == "diverged" else ())
    _check_stores(request, planned)
    summary = finished_summary(planned, folder, services, also)
    if flags["dry_run"]:
        rows = estimate(planned, folder).command_rows()
        _print_plan(rows, flags["json"], to_stderr=False)
        return 0
    if summary is None:
        planned = estimate(planned, folder)
        rows = planned.command_rows()
        if not flags["quiet"]:
            _print_plan(rows, as_json=False, to_stderr=True)
        _confirm(rows, folder, flags["yes"], also)
        ids = None if planned.is_tuned else set(planned.requested)
        progress = Progress(folder, ids, is_quiet=flags["quiet"])
        with progress:
            summary = run_plan(
                planned,
                folder,
                services,
                also=also,
                on_prepare=progress.preparing,
                on_change=progress.update,
                on_finished=lambda: _report(folder),
            )
    elif not (folder.path / "report.md").exists():
        _report(folder)
    _print_end(folder, flags["json"], summary.untracked)
    if summary.is_interrupted:
        click.echo("Interrupted. The same command resumes.", err=True)
    return summary.exit_code


def _finished(plan: Plan, folder: SweepFolder) -> set[str]:
    """Return the ids of trials that `sweep run` would not run again."""
    ids = (str(row.id) for row in plan.known_trials)
    return {i for i in ids if not is_to_run(folder.trial(i).read_status())}


def _check_stores(request: Request, planned: Planned) -> None:
    """Refuse stores that do not answer, before anything is written."""
    if uri := request.services.tracking_uri:
        from sweep.tracking.store import check_answers, check_tracking_uri, is_recorded

        check_tracking_uri(uri)
        if not is_recorded(request.folder, uri):
            check_answers(uri)
    if request.services.storage and planned.is_tuned:
        from sweep.orchestration.studies import open_storage

        open_storage(request.services.storage)


def _report(folder: SweepFolder) -> None:
    from sweep.report.report import write_report

    write_report(folder.path)


def _only(planned: Planned, prefixes: tuple[str, ...]) -> Planned:
    chosen = []
    for prefix in prefixes:
        matches = [trial for trial in planned.requested if trial.startswith(prefix)]
        if len(matches) != 1:
            raise SweepError(
                f"only must name one trial of this plan, got {prefix!r}, which matches "
                f"{len(matches)}. `sweep plan --json` lists the ids."
            )
        chosen += matches
    plan = planned.plan.model_copy(update={"trials": planned.plan.known_trials})
    return replace(planned, plan=plan, requested=tuple(chosen))


def _confirm(plan: Plan, folder: SweepFolder, is_confirmed: bool, also: frozenset[Cause]) -> None:
    """Ask before running more than an hour of estimated time."""
    seconds = sum(
        row.forecast_seconds or 0
        for row in plan.trials
        if row.id is None or is_to_run(folder.trial(row.id).read_status(), also)
    )
    if is_confirmed or seconds <= CONFIRM_SECONDS:
        return
    hint = " `sweep run quick` takes a minute." if plan.execution.device == "cpu" else ""
    question = f"This takes an estimated {format_seconds(seconds)}.{hint}"
    if not sys.stdin.isatty():
        raise SweepError(f"{question} Confirm with --yes.")
    if not click.confirm(f"{question} Run it?", err=True):
        raise click.Abort


def _print_plan(
    plan: Plan, as_json: bool, to_stderr: bool, cost: ClusterCost | None = None
) -> None:
    if as_json:
        document = plan.model_dump(mode="json")
        if cost:
            document["cluster"] = asdict(cost)
        click.echo(json.dumps(document, indent=1), err=to_stderr)
        return
    show_plan(plan, to_stderr)
    if cost:
        click.echo(f"Cluster: {cost.devices} devices, {cost.trials} trials to run")
        click.echo(f"Makespan: {format_seconds(cost.makespan_seconds)}")
        click.echo(f"Device-hours: {cost.device_hours:.4g}, busy {cost.busy_device_hours:.4g}")
        if cost.price is not None:
            click.echo(f"Price: {cost.price:.4g}")
        if any(row.id is None for row in plan.trials):
            click.echo("Tuning trials that follow from these are not counted.")


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


def forecast_command(experiment: str, flags: dict[str, Any]) -> int:
    """Print the memory that each batch size would take."""
    if flags["out"] is not None:
        check_writable(flags["out"])
    from sweep.orchestration.memory import forecast_memory

    return _print(forecast_memory(experiment, **settings_in(flags)), flags)


def probe_command(experiment: str, flags: dict[str, Any]) -> int:
    """Measure, showing each point, and print the largest that fits."""
    if flags["out"] is not None:
        check_writable(flags["out"])
    from sweep.orchestration.memory import probe_memory

    cap, soak, multiple = flags["largest"], flags["soak"], flags["multiple"]
    document = probe_memory(
        experiment,
        cap=None if cap is None else parse_count(cap, "largest"),
        multiple=1 if multiple is None else parse_count(multiple, "multiple"),
        soak_steps=None if soak is None else _read_soak(soak),
        on_point=_show_point,
        **settings_in(flags),
    )
    return _print(document, flags)


def _show_point(point: "Measurement") -> None:
    peak = "" if point.peak_bytes is None else f", peak {format_bytes(point.peak_bytes)}"
    sizes = f"batch size {point.batch_size} in microbatches of {point.microbatch_size}"
    click.echo(f"{sizes}: {point.status}{peak} {point.message}".rstrip(), err=True)


def _read_soak(text: str) -> int:
    return 0 if text.strip() == "0" else parse_count(text, "soak")


def _print(document: dict[str, Any], flags: dict[str, Any]) -> int:
    from sweep.report.memory import markdown_of, write_memory

    out: Path | None = flags["out"]
    if flags["json"]:
        click.echo(json.dumps(document, indent=1))
    else:
        click.echo(markdown_of(document), nl=False)
    if out is not None:
        path = write_memory(document, out)
        if not flags["json"]:
            click.echo(f"\nWritten to {path}.")
    return 0
