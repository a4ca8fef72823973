"""Makespan, device-hours and price of a plan on a cluster, from the plan's estimates."""

import heapq
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from sweep.config.numbers import parse_count
from sweep.errors import SweepError
from sweep.plan.plan import Plan


@dataclass(frozen=True)
class ClusterCost:
    """What a plan takes on a cluster whose devices are all held until the last trial ends."""

    devices: int
    trials: int  # that are still to run
    makespan_seconds: float
    device_hours: float  # of all devices, idle or not
    busy_device_hours: float
    price: float | None  # of the device-hours; None without --price

    def as_document(self) -> dict[str, Any]:
        """Return the JSON that `sweep plan --json` prints under "cluster"."""
        return asdict(self)


def parse_cluster(text: str) -> tuple[int, int]:
    """Read `nodes=16,gpus=8`, or `gpus=8` for one node; return nodes and GPUs per node.

    Raises:
        SweepError: if the text has another form.
    """
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    values = {name: value for name, _, value in parts}
    if len(values) < len(parts) or "gpus" not in values or values.keys() - {"nodes", "gpus"}:
        raise SweepError(
            f"cluster must be nodes=N,gpus=G, or gpus=G for one node, got {text!r}. Write it such "
            "as nodes=16,gpus=8."
        )
    nodes = parse_count(values.get("nodes", 1), "cluster: nodes")
    return nodes, parse_count(values["gpus"], "cluster: gpus")


def cost_on_cluster(
    plan: Plan,
    nodes: int,
    gpus: int,
    price_per_device_hour: float | None = None,
    finished: Collection[str] = (),
) -> ClusterCost:
    """Schedule a plan's unfinished trials, the longest first, and return what that takes.

    Each trial starts on the slot that is free first; this makespan is within 4/3 of the optimum
    (Graham 1969). Trials whose rate awaits tuning start after all tuning trials have ended.

    Args:
        plan: with its estimates; devices of the cluster count as equally fast.
        nodes: machines.
        gpus: devices per machine; a trial must fit on one machine.
        price_per_device_hour: in any currency.
        finished: ids of trials that will not run again.

    Raises:
        SweepError: if a trial does not fit on a node, or has no estimate.
    """
    if price_per_device_hour is not None and not 0 <= price_per_device_hour < math.inf:
        raise SweepError(f"price must be at least 0 and finite, got {price_per_device_hour}.")
    per_trial = plan.execution.devices
    if per_trial > gpus:
        raise SweepError(
            f"a trial must fit on one node of the cluster, got {per_trial} devices per trial and "
            f"gpus={gpus}. Use larger nodes, or fewer devices per trial."
        )
    rows = [row for row in plan.trials if row.id not in finished]
    unknown = sorted({row.batch_size for row in rows if row.forecast_seconds is None})
    if unknown:
        raise SweepError(
            "every trial needs a time estimate for --cluster, but batch size "
            f"{', '.join(map(str, unknown))} has none. Run one trial of each here first."
        )
    is_tuning = any(row.id is None for row in rows)
    rounds: list[list[float]] = [[], [], []]  # known rates, tuning, reports that await a rate
    for row in rows:
        number = 2 if row.id is None else int(is_tuning and row.stage == "tune")
        rounds[number].append(row.forecast_seconds or 0.0)
    slots, makespan = nodes * (gpus // per_trial), 0.0
    for lengths in rounds:
        free = [makespan] * slots
        for seconds in sorted(lengths, reverse=True):
            heapq.heapreplace(free, free[0] + seconds)
        makespan = max(free)
    devices = nodes * gpus
    hours = devices * makespan / 3600
    return ClusterCost(
        devices=devices,
        trials=len(rows),
        makespan_seconds=makespan,
        device_hours=hours,
        busy_device_hours=per_trial * sum(map(sum, rounds)) / 3600,
        price=None if price_per_device_hour is None else price_per_device_hour * hours,
    )
