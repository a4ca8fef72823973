"""`sweep run`, `sweep plan`, `sweep forecast` and `sweep probe`."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sweep.cli.options import MemoryCommand, SettingsCommand, common_options, print_document
from sweep.config.numbers import format_bytes, format_seconds
from sweep.errors import SweepError

if TYPE_CHECKING:
    from sweep.config.execution import Services
    from sweep.memory.search import Measurement
    from sweep.orchestration.planning import Planned
    from sweep.plan.plan import Plan
    from sweep.trial.folder import Cause, SweepFolder

CONFIRM_SECONDS = 3600


@click.command(cls=SettingsCommand)
@common_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--quiet", is_flag=True, help="No plan, no progress.")
@click.option("--only", multiple=True, metavar="ID", help="Run this trial.")
@click.option("--retry", type=click.Choice(["diverged"]), help="Also run diverged trials again.")
def run(
    experiment: str,
    out: Path | None,
    json: bool,
    yes: bool,
    dry_run: bool,
    quiet: bool,
    only: tuple[str, ...],
    retry: str | None,
    **settings: Any,
) -> int:
    """Plan, run every trial, write the report. The same command again resumes.

    EXPERIMENT is a shipped name (tinystories, tinystories-8m, quick, quadratic, gpt2, elman,
    grpo-words, grpo-chess) or a TOML file.
    """
    from sweep.cli.show import Progress, print_end, print_plan
    from sweep.orchestration.costs import estimate
    from sweep.orchestration.planning import read_request
    from sweep.orchestration.runner import check_trains, finished_summary, run_plan
    from sweep.trial.folder import Cause

    request = read_request(experiment, settings, out)
    folder, services = request.folder, request.services
    planned = request.plan()
    check_trains(planned.plan)
    if only:
        planned = _only(planned, only)
    _check_services(services, planned.is_tuned)
    if dry_run:
        print_plan(estimate(planned, folder).command_rows(), json)
        return 0
    also = frozenset({Cause.DIVERGED} if retry else ())
    summary = finished_summary(planned, folder, services, also)
    if summary is None:
        planned = estimate(planned, folder)
        if not quiet:
            print_plan(planned.command_rows(), to_stderr=True)
        if not yes:
            _confirm(planned.command_rows(), folder, also)
        with Progress(folder, None if planned.is_tuned else planned.requested, quiet) as progress:
            summary = run_plan(
                planned,
                folder,
                services,
                also=also,
                on_prepare=lambda work: None if quiet else click.echo(work, err=True),
                on_change=progress.update,
                on_finished=lambda: _report(folder),
            )
    elif not (folder.path / "report.md").exists():
        _report(folder)
    print_end(summary, json)
    return summary.exit_code


def _only(planned: "Planned", prefixes: tuple[str, ...]) -> "Planned":
    chosen = tuple(trial for trial in planned.requested if trial.startswith(prefixes))
    if len(chosen) != len(prefixes):
        raise SweepError(f"only must name one trial of this plan each time, got {prefixes}.")
    plan = planned.plan.model_copy(update={"trials": planned.plan.known_trials})
    return replace(planned, plan=plan, requested=chosen)


def _check_services(services: "Services", is_tuned: bool) -> None:
    """Refuse an executor or a store that cannot be used, before anything is written."""
    from sweep.orchestration.executors import check_services
    from sweep.tracking.store import check_answers

    check_services(services)
    if services.tracking_uri:
        check_answers(services.tracking_uri)
    if services.storage and is_tuned:
        from sweep.orchestration.studies import open_storage  # imports optuna

        open_storage(services.storage)


def _confirm(plan: "Plan", folder: "SweepFolder", also: "frozenset[Cause]") -> None:
    """Ask before running more than an hour of estimated time."""
    from sweep.plan.retry import is_to_run

    seconds = sum(
        row.forecast_seconds or 0
        for row in plan.trials
        if row.id is None or is_to_run(folder.trial(row.id).read_status(), also)
    )
    question = f"This takes an estimated {format_seconds(seconds)}."
    if seconds > CONFIRM_SECONDS and not sys.stdin.isatty():
        raise SweepError(f"{question} Confirm with --yes, or try `sweep run quick`.")
    if seconds > CONFIRM_SECONDS:
        click.confirm(f"{question} Run it?", abort=True, err=True)


def _report(folder: "SweepFolder") -> None:
    """Write the report, and name the checks that failed."""
    from sweep.analysis.checks import judge
    from sweep.analysis.frames import load_sweep
    from sweep.report.report import write_report_of

    sweep = load_sweep(folder.path)
    write_report_of(sweep, folder.path)
    for policy in judge(sweep):
        for check in policy.failed:
            name = f"FAIL {check.code} ({policy.label})"
            click.echo(f"{name}: {check.condition} Remedy: {check.remedy}", err=True)


@click.command(cls=SettingsCommand)
@common_options
@click.option("--cluster", metavar="nodes=N,gpus=G", help="Also print the cost on this cluster.")
@click.option("--price", type=float, metavar="PRICE", help="Of one device-hour of the cluster.")
def plan(
    experiment: str,
    out: Path | None,
    json: bool,
    cluster: str | None,
    price: float | None,
    **settings: Any,
) -> None:
    """Print the plan with memory, time, disk and cost; trains nothing. --out writes it there."""
    from sweep.cli.show import print_plan
    from sweep.orchestration.costs import cost_on_cluster, estimate, parse_cluster
    from sweep.orchestration.planning import read_request
    from sweep.orchestration.runner import holding, save_grown
    from sweep.plan.retry import is_to_run

    request = read_request(experiment, settings, out)
    folder, size, cost = request.folder, cluster is not None and parse_cluster(cluster), None
    if price is not None and not size:
        raise SweepError("--price needs --cluster. Add it, or leave --price out.")
    planned = estimate(request.plan(is_elsewhere=bool(size)), folder)
    rows = planned.command_rows()
    if size:
        ids = [str(row.id) for row in rows.known_trials]
        finished = {i for i in ids if not is_to_run(folder.trial(i).read_status())}
        cost = cost_on_cluster(rows, *size, price, finished)
    print_plan(rows, json, cost=cost)
    if out:
        with holding(folder):
            save_grown(planned.plan, folder)
        click.echo(f"Written to {folder.plan_path}.", err=json)


@click.command(cls=MemoryCommand)
@common_options
def forecast(experiment: str, out: Path | None, json: bool, **settings: Any) -> None:
    """Predict memory per batch size without the device, and the largest that fits."""
    from sweep.orchestration.memory import forecast_memory

    _print_memory(forecast_memory(experiment, **settings), out, json)


@click.command(cls=MemoryCommand)
@common_options
@click.option("--largest", type=click.IntRange(1), help="Do not try sizes above this one.")
@click.option("--multiple", type=click.IntRange(1), default=1, help="Only try multiples of N.")
@click.option("--soak", type=click.IntRange(0), help="Run each choice for this many steps.")
def probe(experiment: str, out: Path | None, json: bool, **settings: Any) -> None:
    """Measure the largest microbatch that fits, and prove it in fresh processes."""
    from sweep.orchestration.memory import probe_memory

    settings |= {"cap": settings.pop("largest"), "soak_steps": settings.pop("soak")}
    _print_memory(probe_memory(experiment, on_point=_show_point, **settings), out, json)


def _show_point(point: "Measurement") -> None:
    peak = "" if point.peak_bytes is None else f", peak {format_bytes(point.peak_bytes)}"
    sizes = f"batch size {point.batch_size} in microbatches of {point.microbatch_size}"
    click.echo(f"{sizes}: {point.status}{peak} {point.message}".rstrip(), err=True)


def _print_memory(document: dict[str, Any], out: Path | None, json: bool) -> None:
    from sweep.report.memory import markdown_of, write_memory

    if json:
        print_document(document)
    else:
        click.echo(markdown_of(document), nl=False)
    if out is not None:
        click.echo(f"\nWritten to {write_memory(document, out)}.", err=json)
