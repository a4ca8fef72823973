"""Plan a sweep, run it, and check a command."""

import contextlib
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from sweep.cli.commands.arguments import (
    common_options,
    match_trial,
    number_option,
    verbose_option,
)
from sweep.cli.options import SettingsCommand, echo, print_document, say
from sweep.config.numbers import format_seconds
from sweep.errors import SweepError

LOG = logging.getLogger(__name__)
CONFIRM_SECONDS = 3600  # longest estimate that runs without a confirmation


@click.command(cls=SettingsCommand)
@common_options("Folder of the sweep; by default results/EXPERIMENT.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--quiet", is_flag=True, help="No plan, no progress.")
@verbose_option
@click.option("--only", multiple=True, metavar="ID", help="Run this trial.")
@click.option("--retry", type=click.Choice(["diverged"]), help="Also run diverged trials again.")
def run(
    experiment: str | None,
    out: Path | None,
    json: bool,
    yes: bool,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
    only: tuple[str, ...],
    retry: str | None,
    **settings: Any,
) -> int:
    """Plan, run every trial, write the report. Run the same command again to resume.

    EXPERIMENT is a shipped name (tinystories, tinystories-8m, quick, quadratic, gpt2, elman,
    grpo-words, grpo-chess) or a TOML file.
    """
    if quiet:
        logging.getLogger("sweep").setLevel("WARNING")
    LOG.info(f"Planning {experiment or 'the sweep'}")
    from sweep.cli.show import print_plan, print_results, total_seconds
    from sweep.orchestration.estimates import estimate
    from sweep.orchestration.planning import make_plan
    from sweep.orchestration.request import read_request
    from sweep.orchestration.runner import (
        finished_summary,
        prepare,
        refuse_unusable_request,
        rows_to_run,
    )
    from sweep.orchestration.status import sweep_status
    from sweep.orchestration.timing import fix_tokens, fix_tokens_by_file
    from sweep.trial.status import Cause

    request = read_request(experiment, settings, out)
    folder = request.folder
    services = request.services
    planned = make_plan(request)
    if only:
        ids = planned.requested
        chosen = [match_trial(prefix, ids, "only", "plan --json") for prefix in only]
        plan = planned.plan.model_copy(update={"trials": planned.plan.known_trials})
        planned = replace(planned, plan=plan, requested=tuple(dict.fromkeys(chosen)))
    refuse_unusable_request(planned.plan, folder, services)

    retried_causes = frozenset({Cause.DIVERGED} if retry else ())
    if dry_run:
        planned = fix_tokens_by_file(planned, services)
        planned = replace(planned, plan=estimate(planned.plan, folder))
        print_plan(planned, folder, retried_causes, json, is_verbose=verbose)
        return 0

    summary = finished_summary(planned, folder, services, retried_causes)
    if summary is None:
        if not quiet:  # preparing the data may take long
            logging.getLogger("sweep").setLevel("INFO")
        prepare(planned.plan, folder, services)
        is_asked = False
        budget = planned.plan.settings.time_budget_seconds
        if budget is not None and planned.plan.awaits_times and not yes:
            to_run = rows_to_run(planned.command_rows(), folder, retried_causes)
            is_asked = _confirm(budget * len(to_run), "at least ")
        planned = fix_tokens(planned, folder, services)
        planned = replace(planned, plan=estimate(planned.plan, folder))
        if not quiet:
            print_plan(planned, folder, retried_causes, to_stderr=True, is_verbose=verbose)
        if not yes and not is_asked:
            to_run = rows_to_run(planned.command_rows(), folder, retried_causes)
            seconds = total_seconds(to_run, planned.plan.execution)
            _confirm(seconds, "at least " if planned.adds_seeds else "")
        from sweep.api import run_planned  # slow

        summary = run_planned(planned, folder, services, quiet, retried_causes)

    document = sweep_status(folder) | {"report": str(folder.path / "report.md")}
    with contextlib.suppress(BrokenPipeError, SystemExit):  # Ctrl-C of `… | tee log`
        print_results(document, folder, json)
        if summary.untracked:
            echo(summary.untracked, err=True)
        if summary.problem:
            echo(f"Error: {summary.problem} The same command resumes.", err=True)
        elif summary.is_interrupted:
            echo("Interrupted. The same command resumes.", err=True)
    return summary.exit_code


def _confirm(seconds: float | None, least: str) -> bool:
    """Ask before a command that takes long, or for an unknown time; return whether it asked."""
    question = "The time that this takes is not known."
    if seconds is not None:
        if seconds <= CONFIRM_SECONDS:
            return False
        question = f"This takes an estimated {least}{format_seconds(seconds)}."
    if not sys.stdin.isatty():
        raise SweepError(f"{question} Confirm with --yes.")
    click.confirm(f"{question} Run it?", abort=True, err=True)
    return True


@click.command(cls=SettingsCommand)
@common_options("Also write the plan to this folder; by default results/EXPERIMENT is only read.")
@click.option("--cluster", metavar="nodes=N,gpus=G", help="Also print the cost on this cluster.")
@verbose_option
def plan(
    experiment: str | None,
    out: Path | None,
    json: bool,
    cluster: str | None,
    verbose: bool,
    **settings: Any,
) -> None:
    """Print the plan with memory, time, disk and cost, without training."""
    LOG.info(f"Planning {experiment or 'the sweep'}")
    from sweep.cli.show import print_plan
    from sweep.orchestration.estimates import cost_on_cluster, estimate, parse_cluster
    from sweep.orchestration.holding import holding
    from sweep.orchestration.planning import make_plan, save_plan
    from sweep.orchestration.request import read_request
    from sweep.orchestration.runner import rows_to_run
    from sweep.orchestration.timing import fix_tokens_by_file

    request = read_request(experiment, settings, out)
    folder = request.folder
    size = None if cluster is None else parse_cluster(cluster)
    planned = make_plan(request, is_elsewhere=size is not None)
    planned = fix_tokens_by_file(planned, request.services)
    if out and planned.plan.awaits_times:
        raise SweepError(
            "a plan with a --budget of time is written once its steps are timed. Name a --timing, "
            "or leave --out out; `sweep run` times them."
        )
    planned = replace(planned, plan=estimate(planned.plan, folder))

    cost = None
    if size is not None:
        nodes, gpus = size
        rows = rows_to_run(planned.command_rows(), folder)
        to_run = planned.plan.model_copy(update={"trials": rows})
        cost = cost_on_cluster(to_run, nodes, gpus)
    print_plan(planned, folder, as_json=json, cost=cost, is_verbose=verbose)
    if out:
        with holding(folder):
            save_plan(planned.plan, folder, planned.timing)
        say(f"Written to {folder.plan_path}.", json)


@click.command(cls=SettingsCommand)
@common_options("Folder of the sweep; by default results/EXPERIMENT.")
@number_option("--steps", default=24, help="Train for N steps, or the budget if it is less.")
def check(experiment: str | None, out: Path | None, json: bool, **settings: Any) -> None:
    """Check a --command: the same losses again, with half the microbatch, after a kill?

    Takes the options of `sweep run`. The report of a sweep in the same folder shows the results.
    """
    from sweep.analysis.checks import checks_of_command
    from sweep.orchestration.check import check_command
    from sweep.orchestration.request import read_request

    steps = settings.pop("steps")
    request = read_request(experiment, settings, out)
    document = check_command(request, partial(echo, err=True), steps)
    if json:
        print_document(document)
        return
    for row in checks_of_command(document, ""):
        echo(f"{row.status}: {row.code}. {row.evidence} {row.remedy}".rstrip())
    echo("\n".join(f"NOT CHECKED: {sentence}" for sentence in document["not_checked"]))
