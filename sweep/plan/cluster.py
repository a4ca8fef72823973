"""A plan on a cluster: how long it takes, how much of that is idle, what it costs. Pure.

Trials are placed longest first, each where devices are free first; a round of them ends within
4/3 − 1/(3·slots) of the least time there is (Graham 1969).
"""

import heapq
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sweep.config.numbers import parse_count
from sweep.errors import SweepError
from sweep.plan.plan import Plan, PlannedTrial

NEAR = 1.05  # times a makespan, within which fewer devices do as well
TUNING = (
    "Tuning is counted as the trials shown, each trained to its end. Those that follow from them "
    "(at least one more training in turn at each batch size) come on top, pruning takes away. No "
    "report starts before all rates are known."
)


@dataclass(frozen=True)
class Cluster:
    """Machines that are held from the start of the first trial to the end of the last."""

    nodes: int
    gpus: int  # of each node

    def slots_per_node(self, devices: int) -> int:
        """Return how many trials of so many devices run on a node at a time.

        Raises:
            SweepError: if a node has fewer devices than a trial takes.
        """
        if devices > self.gpus:
            raise SweepError(
                f"a trial must fit on one node of the cluster, got {devices} devices per trial and "
                f"gpus={self.gpus}. Give nodes of {devices} at least, or fewer devices per trial."
            )
        return self.gpus // devices


@dataclass(frozen=True)
class Placed:
    """Where and when a job runs."""

    job: int
    slot: int
    start_seconds: float
    seconds: float

    @property
    def end_seconds(self) -> float:
        """When it has ended."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True)
class Cost:
    """What a schedule takes on so many devices, which are paid for until its end."""

    devices: int
    makespan_seconds: float
    busy_device_hours: float
    price: float | None  # of a device-hour

    @property
    def device_hours(self) -> float:
        """Hours that are paid for: of all devices, busy or not."""
        return self.devices * self.makespan_seconds / 3600

    @property
    def idle_share(self) -> float:
        """Share of them in which no trial runs; 0 where there is nothing to run."""
        held = self.device_hours
        return max(0.0, 1 - self.busy_device_hours / held) if held else 0.0

    @property
    def amount(self) -> float | None:
        """What is paid; None without a price."""
        return None if self.price is None else self.price * self.device_hours

    def as_document(self) -> dict[str, Any]:
        """Return it as `sweep plan --json` prints it."""
        return {
            "devices": self.devices,
            "makespan_seconds": self.makespan_seconds,
            "idle_share": self.idle_share,
            "device_hours": self.device_hours,
            "busy_device_hours": self.busy_device_hours,
            "cost": self.amount,
        }


@dataclass(frozen=True)
class ClusterSchedule:
    """A plan's unfinished trials on a cluster."""

    cluster: Cluster
    devices_per_trial: int
    placed: tuple[Placed, ...]  # jobs are places in the plan's trials
    finished: int  # trials of the plan that are left out
    cost: Cost
    fewest: Cost  # the fewest devices that end within 5 % of it
    times_from: str  # what they are estimated by
    assumption: str  # on trials that are not known yet; empty where all are

    @property
    def slots_per_node(self) -> int:
        """Trials that run on a node at a time."""
        return self.cluster.slots_per_node(self.devices_per_trial)

    @property
    def unused_gpus_per_node(self) -> int:
        """Devices of each node that are too few for a trial: idle, and paid for."""
        return self.cluster.gpus % self.devices_per_trial

    def as_document(self) -> dict[str, Any]:
        """Return it as `sweep plan --json` prints it."""
        per_node = self.slots_per_node
        return {
            **asdict(self.cluster),
            "devices_per_trial": self.devices_per_trial,
            "slots": self.cluster.nodes * per_node,
            "unused_gpus_per_node": self.unused_gpus_per_node,
            "price": self.cost.price,
            **self.cost.as_document(),
            "fewest": self.fewest.as_document(),
            "times_from": self.times_from,
            "assumption": self.assumption,
            "finished_trials": self.finished,
            "schedule": [
                {
                    "trial": one.job,
                    "node": one.slot // per_node,
                    "slot": one.slot,
                    "start_seconds": one.start_seconds,
                    "end_seconds": one.end_seconds,
                }
                for one in self.placed
            ],
        }


def parse_cluster(text: str) -> Cluster:
    """Read `nodes=16,gpus=8`, or `gpus=8` for one node.

    Raises:
        SweepError: for anything else.
    """
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    given = {name: value for name, _, value in parts}
    if len(given) < len(parts) or "gpus" not in given or given.keys() - {"nodes", "gpus"}:
        raise SweepError(
            f"cluster must be nodes=N,gpus=G, or gpus=G for one node, got {text!r}. Write it such "
            "as nodes=16,gpus=8."
        )
    return Cluster(
        parse_count(given.get("nodes", 1), "cluster: nodes"),
        parse_count(given["gpus"], "cluster: gpus"),
    )


def longest_first(rounds: Sequence[Mapping[int, float]], slots: int) -> tuple[Placed, ...]:
    """Place jobs: in each round the longest first, on the slot that is free first.

    Args:
        rounds: seconds by job; a round starts when the one before has ended.
        slots: jobs that run at a time, at least 1.
    """
    placed: list[Placed] = []
    for seconds in rounds:
        begin = makespan(placed)
        free = [(begin, slot) for slot in range(min(slots, len(seconds)))]  # a heap
        for job in sorted(seconds, key=seconds.__getitem__, reverse=True):
            start, slot = free[0]
            placed.append(Placed(job, slot, start, seconds[job]))
            heapq.heapreplace(free, (placed[-1].end_seconds, slot))
    return tuple(placed)


def makespan(placed: Sequence[Placed]) -> float:
    """Return when the last of the jobs has ended, in seconds."""
    return max((one.end_seconds for one in placed), default=0.0)


def fewest_slots(rounds: Sequence[Mapping[int, float]], slots: int) -> int:
    """Return the fewest slots that end within 5 % of so many, found by bisection."""
    useful = min(slots, max(map(len, rounds), default=1))
    most = NEAR * makespan(longest_first(rounds, useful))
    return 1 + bisect_left(
        range(1, useful), True, key=lambda fewer: makespan(longest_first(rounds, fewer)) <= most
    )


def schedule_plan(
    plan: Plan, cluster: Cluster, price: float | None = None, finished: Collection[str] = ()
) -> ClusterSchedule:
    """Place a plan's trials on a cluster, by their estimated seconds.

    Args:
        plan: with its estimates.
        cluster: of devices that are as fast as those that the estimates are of.
        price: of a device-hour.
        finished: ids of trials that are not to run any more.

    Raises:
        SweepError: if a trial does not fit on a node, or has no time.
    """
    devices, execution = plan.execution.devices, plan.execution
    slots = cluster.nodes * cluster.slots_per_node(devices)
    left = {job: row for job, row in enumerate(plan.trials) if row.id not in finished}
    unknown = sorted({row.batch_size for row in left.values() if row.forecast_seconds is None})
    if unknown:
        raise SweepError(
            "trials must have an estimated time to be placed on a cluster, got none at batch size "
            f"{', '.join(map(str, unknown))}. Run one of each there first; `sweep probe` shows "
            "what keeps a step from being timed here."
        )
    rounds = _rounds(left)
    placed, fewest = longest_first(rounds, slots), fewest_slots(rounds, slots)
    busy = devices * sum(one.seconds for one in placed) / 3600
    is_tuning = any(row.id is None for row in left.values())
    return ClusterSchedule(
        cluster=cluster,
        devices_per_trial=devices,
        placed=placed,
        finished=len(plan.trials) - len(left),
        cost=Cost(cluster.nodes * cluster.gpus, makespan(placed), busy, price),
        fewest=Cost(fewest * devices, makespan(longest_first(rounds, fewest)), busy, price),
        times_from=f"this machine ({execution.device}, {execution.threads} threads), or of this "
        "sweep's complete trials where there are any",
        assumption=TUNING if is_tuning else "",
    )


def _rounds(rows: Mapping[int, PlannedTrial]) -> list[dict[int, float]]:
    """Return seconds by place in the plan, in the rounds that `sweep run` takes.

    Where rates await tuning: reports whose rate is known, then tuning, then the other reports.
    """
    is_tuning = any(row.id is None for row in rows.values())
    rounds: list[dict[int, float]] = [{}, {}, {}]
    for job, row in rows.items():
        assert row.forecast_seconds is not None
        number = 2 if row.id is None else int(is_tuning and row.stage == "tune")
        rounds[number][job] = row.forecast_seconds
    return rounds
