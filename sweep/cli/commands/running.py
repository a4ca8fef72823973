"""Plan a sweep, run it, and check a command."""

import contextlib
import logging
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from sweep.orchestration.planning import Planned
    from sweep.orchestration.request import Request
    from sweep.orchestration.runner import Summary
    from sweep.trial.status import Cause

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
    from sweep.cli.show import print_plans, print_results
    from sweep.orchestration.budgets import estimate_plans, following_requests, make_plans
    from sweep.orchestration.request import read_request
    from sweep.orchestration.runner import Summary, refuse_unusable_request
    from sweep.orchestration.status import sweep_status
    from sweep.trial.status import Cause

    request = read_request(experiment, settings, out)
    folder = request.folder
    plans = make_plans(request)
    for planned in plans:
        refuse_unusable_request(planned.plan, folder, request.services)
    ids = [trial_id for planned in plans for trial_id in planned.requested]
    options = RunOptions(
        only=frozenset(match_trial(prefix, ids, "only", "plan --json") for prefix in only),
        retried_causes=frozenset({Cause.DIVERGED} if retry else ()),
        is_quiet=quiet,
        is_verbose=verbose,
    )
    if dry_run:
        chosen = estimate_plans([options.chosen(planned) for planned in plans], request)
        print_plans(chosen, folder, options.retried_causes, json, is_verbose=verbose)
        return 0

    is_confirmed = yes
    if len(plans) > 1 and not yes:
        _confirm_budgets(plans, request, options)
        is_confirmed = True
    summary = Summary(folder, {})
    for planned, of_budget in zip(plans, request.by_budget(), strict=True):
        if only and not options.chosen(planned).requested:
            continue
        # A single budget is planned; others follow from the results of smaller ones.
        ready = planned if len(plans) == 1 else None
        for following in following_requests(of_budget):
            summary = _run_budget(following, options, is_confirmed, ready)
            ready = None
            if summary.exit_code != 0:
                break
        if summary.exit_code != 0:
            break

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


@dataclass(frozen=True)
class RunOptions:
    """Options of `sweep run` that choose trials and what is printed."""

    only: frozenset[str]  # ids; empty: all
    retried_causes: "frozenset[Cause]"
    is_quiet: bool
    is_verbose: bool

    def chosen(self, planned: "Planned") -> "Planned":
        """Return the plan of one budget with the trials that --only names."""
        if not self.only:
            return planned
        plan = planned.plan.model_copy(update={"trials": planned.plan.known_trials})
        requested = tuple(i for i in planned.requested if i in self.only)
        return replace(planned, plan=plan, requested=requested)


def _run_budget(
    request: "Request", options: RunOptions, is_confirmed: bool, planned: "Planned | None"
) -> "Summary":
    """Run the trials of one budget, which is planned first unless its plan is given."""
    from sweep.cli.show import print_plan, total_seconds
    from sweep.orchestration.estimates import estimate
    from sweep.orchestration.planning import make_plan
    from sweep.orchestration.runner import finished_summary, prepare, rows_to_run
    from sweep.orchestration.timing import fix_tokens
    from sweep.plan.plan import load_plan

    folder = request.folder
    services = request.services
    causes = options.retried_causes
    if planned is None:
        planned = make_plan(request)
    planned = options.chosen(planned)
    summary = finished_summary(planned, folder, services, causes)
    if summary is not None:
        return summary

    if not options.is_quiet:  # preparing the data may take long
        logging.getLogger("sweep").setLevel("INFO")
    prepare(planned.plan, folder, services)
    budget = planned.plan.settings.time_budget_seconds
    if budget is not None and planned.plan.awaits_times and not is_confirmed:
        to_run = rows_to_run(planned.command_rows(), folder, causes)
        is_confirmed = _confirm(budget * len(to_run), "at least ")
    planned = fix_tokens(planned, folder, services)
    planned = replace(planned, plan=estimate(planned.plan, folder))
    if not options.is_quiet:
        stored = load_plan(folder)
        budgets = {planned.plan.token_budget, *request.later_budgets}
        if stored is not None:
            budgets |= {of_budget.token_budget for of_budget in stored.by_budget}
        print_plan(
            planned,
            folder,
            causes,
            to_stderr=True,
            is_verbose=options.is_verbose,
            is_only=len(budgets) == 1,
        )
    if not is_confirmed:
        to_run = rows_to_run(planned.command_rows(), folder, causes)
        seconds = total_seconds(to_run, planned.plan.execution)
        _confirm(seconds, "at least " if planned.adds_seeds else "")
    from sweep.api import run_planned  # slow

    return run_planned(planned, folder, services, options.is_quiet, causes)


def _confirm_budgets(plans: "list[Planned]", request: "Request", options: RunOptions) -> None:
    """Ask once for all budgets, before the first of them runs, if they take long."""
    from sweep.cli.show import total_seconds
    from sweep.orchestration.estimates import estimate
    from sweep.orchestration.runner import finished_summary, prepare, rows_to_run

    folder = request.folder
    chosen = [options.chosen(planned) for planned in plans]
    is_finished = [
        finished_summary(planned, folder, request.services, options.retried_causes) is not None
        for planned in chosen
    ]
    if all(is_finished):
        return
    prepare(plans[0].plan, folder, request.services)
    total: float | None = 0.0
    for planned in chosen:
        plan = estimate(planned.plan, folder)
        to_run = rows_to_run(
            replace(planned, plan=plan).command_rows(), request.folder, options.retried_causes
        )
        seconds = total_seconds(to_run, plan.execution)
        total = None if total is None or seconds is None else total + seconds
    _confirm(total, "at least ")


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
@click.option(
    "--export",
    type=click.Choice(["deepspeed", "accelerate", "trl", "torchtitan"]),
    help="Print the batch sizes in the words and the file format of this trainer.",
)
@verbose_option
def plan(
    experiment: str | None,
    out: Path | None,
    json: bool,
    cluster: str | None,
    export: str | None,
    verbose: bool,
    **settings: Any,
) -> None:
    """Print the plan with memory, time, disk and cost, without training."""
    LOG.info(f"Planning {experiment or 'the sweep'}")
    from sweep.cli.show import print_plans
    from sweep.orchestration.budgets import estimate_plans, make_plans
    from sweep.orchestration.estimates import cost_on_cluster, parse_cluster
    from sweep.orchestration.execution import is_for_elsewhere
    from sweep.orchestration.holding import holding
    from sweep.orchestration.planning import save_plan
    from sweep.orchestration.request import read_request
    from sweep.orchestration.runner import rows_to_run

    request = read_request(experiment, settings, out)
    folder = request.folder
    size = None if cluster is None else parse_cluster(cluster)
    is_elsewhere = size is not None or is_for_elsewhere(request.execution)
    if export is not None:
        from sweep.cli.show import about_microbatch
        from sweep.plan.exports import export_plan

        if json:
            raise SweepError("--export prints a file of its own. Leave --json out.")
        plans_of_export = make_plans(request, is_elsewhere)
        if len(plans_of_export) > 1:
            raise SweepError("--export writes one budget, got several. Name one --budget.")
        exported = plans_of_export[0].plan
        note = about_microbatch(exported)
        if note:
            say(f"Microbatch: {note}", to_stderr=True)
        echo(export_plan(exported, export), nl=False)
        return
    plans = estimate_plans(make_plans(request, is_elsewhere), request)
    if out and plans[0].plan.awaits_times:
        raise SweepError(
            "a plan with a --budget of time is written once its steps are timed. Name a --timing, "
            "or leave --out out; `sweep run` times them."
        )
    costs = None
    if size is not None:
        nodes, gpus = size
        costs = []
        for planned in plans:
            rows = rows_to_run(planned.command_rows(), folder)
            to_run = planned.plan.model_copy(update={"trials": rows})
            costs.append(cost_on_cluster(to_run, nodes, gpus))
    print_plans(plans, folder, as_json=json, costs=costs, is_verbose=verbose)
    if out and len(plans) > 1:
        say(f"Nothing is written to {folder.path}: budgets are planned as they run.", json)
    elif out:
        with holding(folder):
            save_plan(plans[0].plan, folder, plans[0].timing)
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
