"""`sweep plan --cluster`: the plan's trials on machines elsewhere."""

import math
from typing import Any

from sweep.cli.show import build_table, console
from sweep.config.numbers import format_seconds
from sweep.errors import SweepError
from sweep.plan.cluster import Cluster, ClusterSchedule, Cost, parse_cluster, schedule_plan
from sweep.plan.plan import Plan
from sweep.plan.retry import is_to_run
from sweep.trial.folder import SweepFolder


def read_cluster(flags: dict[str, Any]) -> tuple[Cluster, float | None] | None:
    """Return what flags say of a cluster and of its price; None where there is none."""
    price = flags["price"]
    if price is not None and not (flags["cluster"] and 0 <= price < math.inf):
        raise SweepError(
            f"price must be a number of at least 0, of a device-hour of --cluster, got {price:g}. "
            "Write it such as --cluster nodes=2,gpus=8 --price 2.5."
        )
    return (parse_cluster(flags["cluster"]), price) if flags["cluster"] is not None else None


def schedule_left(
    plan: Plan, folder: SweepFolder, cluster: Cluster, price: float | None
) -> ClusterSchedule:
    """Place what `sweep run` would still run."""
    finished = {
        str(row.id)
        for row in plan.known_trials
        if not is_to_run(folder.trial(str(row.id)).read_status())
    }
    return schedule_plan(plan, cluster, price, finished)


def show_schedule(schedule: ClusterSchedule) -> None:
    """Print what a plan takes on its cluster, and on the fewest devices that do as well."""
    out, cluster, per_trial = console(), schedule.cluster, schedule.devices_per_trial
    fewest, unused = schedule.fewest, schedule.unused_gpus_per_node
    out.print(
        f"\n[bold]Cluster[/]: {cluster.nodes:,} nodes × {cluster.gpus:,} devices, {per_trial} per "
        "trial, the longest first"
    )
    if not schedule.placed:
        out.print("Nothing is left to run.")
        return
    table = build_table("devices", "makespan", "idle", "device-hours", "cost")
    shown = [schedule.cost, fewest] if fewest.devices < schedule.cost.devices else [schedule.cost]
    for cost in shown:
        table.add_row(*_cells(cost))
    out.print(table)
    said = [f"Times are estimates of {schedule.times_from}; other devices take others."]
    if len(shown) > 1:
        said.append("The second row is the fewest devices that end within 5 % of the first.")
    if unused:
        said.append(
            f"Of each node {unused} of {cluster.gpus} devices have no trial, idle but paid."
        )
    if schedule.finished:
        said.append(f"Trials that have ended already are left out: {schedule.finished}.")
    out.print(" ".join([*said, schedule.assumption]).rstrip())


def _cells(cost: Cost) -> tuple[str, ...]:
    amount = cost.amount
    return (
        f"{cost.devices:,}",
        format_seconds(cost.makespan_seconds),
        f"{cost.idle_share:.1%}",
        f"{cost.device_hours:,.3g}",
        "no --price" if amount is None else f"{amount:,.2f}",
    )
