"""Plan and run a sweep, from Python or the command line."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Unpack

from sweep.analysis.results import Sweep, load_sweep
from sweep.config.execution import Services
from sweep.errors import SweepError
from sweep.orchestration.budgets import estimate_plans, following_requests, make_plans
from sweep.orchestration.estimates import estimate
from sweep.orchestration.execution import is_for_elsewhere
from sweep.orchestration.executors.build import AllOverrides
from sweep.orchestration.planning import Planned, make_plan, whole_plan
from sweep.orchestration.progress import Progress
from sweep.orchestration.request import Request, read_request
from sweep.orchestration.runner import (
    Summary,
    finished_summary,
    prepare,
    refuse_unusable_request,
    run_plan,
)
from sweep.orchestration.timing import fix_tokens
from sweep.plan.plan import Plan
from sweep.report.report import write_report
from sweep.trial.folder import SweepFolder
from sweep.trial.status import Cause


def plan_sweep(
    experiment: str | None = None,
    *,
    out: str | Path | None = None,
    **settings: Unpack[AllOverrides],
) -> Plan:
    """Plan a sweep, with the arguments of `run_sweep`; trains and writes nothing.

    With a budget of time and no `timing`, the tokens and steps of trials are 0: not known yet.
    """
    request = read_request(experiment, {**settings}, out)
    is_elsewhere = is_for_elsewhere(request.execution)
    return whole_plan(estimate_plans(make_plans(request, is_elsewhere), request))


def run_sweep(
    experiment: str | None = None,
    *,
    out: str | Path | None = None,
    show_progress: bool = True,
    **settings: Unpack[AllOverrides],
) -> Sweep:
    """Run the unfinished trials of a sweep, write its report, and read its results.

    Args:
        experiment: a shipped name or the path of a TOML file.
        out: the sweep's folder; results/<experiment> by default. If it has a plan, that grows.
        show_progress: on stderr.
        **settings: any setting of `sweep run` by name: budget, batches, model, lr, device, …

    Raises:
        SweepError: bad input, before anything is written; or the storage failed.
        KeyboardInterrupt: Ctrl-C, after the running trials were saved.
    """
    request = read_request(experiment, {**settings}, out)
    for following in chain.from_iterable(map(following_requests, request.by_budget())):
        summary = _run_budget(following, show_progress)
        if summary.problem:
            raise SweepError(summary.problem)
        if summary.is_interrupted:
            raise KeyboardInterrupt
        if summary.exit_code != 0:  # larger budgets are planned by the results of smaller ones
            break
    return load_sweep(request.folder.path)


def _run_budget(request: Request, show_progress: bool) -> Summary:
    """Run the unfinished trials of one budget."""
    folder = request.folder
    services = request.services
    planned = make_plan(request)
    refuse_unusable_request(planned.plan, folder, services)
    summary = finished_summary(planned, folder, services)
    if summary is not None:
        return summary
    prepare(planned.plan, folder, services)
    planned = fix_tokens(planned, folder, services)
    planned = replace(planned, plan=estimate(planned.plan, folder))
    return run_planned(planned, folder, services, not show_progress)


def run_planned(
    planned: Planned,
    folder: SweepFolder,
    services: Services,
    is_quiet: bool,
    retried_causes: frozenset[Cause] = frozenset(),
) -> Summary:
    """Run the trials of a plan with a display of progress, and write the report."""
    is_open = planned.plan.awaits_rates or planned.adds_seeds
    if is_open:  # more trials may follow
        ids = None
        finals = sum(row.stage == "final" for row in planned.plan.trials)
    else:
        ids = planned.requested
        finals = 0
    with Progress(folder, ids, is_quiet, finals) as progress:
        return run_plan(
            planned,
            folder,
            services,
            retried_causes=retried_causes,
            on_change=progress.update,
            on_finished=lambda: write_report(folder.path),
        )
