"""Plans and states as people read them on a terminal."""

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sweep.config.execution import Execution
from sweep.config.numbers import format_bytes, format_count, format_seconds
from sweep.orchestration.status import sweep_status, time_left
from sweep.plan.commands import ANSWERING_SEEDS, answering_command, answering_cost
from sweep.plan.plan import Plan
from sweep.plan.policy import describe_policy
from sweep.trial.folder import Cause, State, SweepFolder

PLAIN_WIDTH = 140  # columns where there is no terminal
LIVE_ROWS = 24


def console(to_stderr: bool = False) -> Console:
    """Return a console; without a terminal, wide and plain."""
    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(stderr=to_stderr, width=width, highlight=False, soft_wrap=False)


def build_table(*columns: str) -> Table:
    """Return an empty table without lines; words to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("id", "state") else "right")
    return table


def show_plan(plan: Plan, to_stderr: bool = False) -> None:
    """Print the plan: one line per batch size and policy, and what is the same for all."""
    out = console(to_stderr)
    settings, execution = plan.settings, plan.execution
    parameters = plan.model["parameters"]
    out.print(
        f"[bold]{plan.experiment}[/]: {plan.model['name']}, {parameters:,} parameters, "
        f"{settings.data or settings.workload}, {plan.tokens_per_sequence} tokens a sequence, "
        f"{settings.precision} on {_device_of(execution)}"
    )
    several = f" × {execution.devices}" if execution.devices > 1 else ""
    split = "microbatch × devices × steps" if several else "microbatch"
    table = build_table(
        "batch size", "rate", "seeds", "tokens", "steps", "warmup", split, "memory (eager)",
        "time (estimate)",
    )  # fmt: skip
    groups: dict[tuple[str, str, int], list[Any]] = {}
    for row in plan.trials:
        groups.setdefault((row.stage, row.policy, row.batch_size), []).append(row)
    for (stage, _, batch), rows in groups.items():
        first, seconds = rows[0], [row.forecast_seconds for row in rows]
        rates = [row.learning_rate for row in rows]
        low, high = min(rates, key=lambda r: r or 0), max(rates, key=lambda r: r or 0)
        rate = (
            "after tuning"
            if low is None
            else f"{low:.3g}"
            if low == high
            else f"{low:.3g}…{high:.3g}"
        )
        what = f"{len(rows)} (tuning)" if stage == "tune" else str(len(rows))
        table.add_row(
            str(batch),
            rate,
            what,
            f"{first.tokens:,}",
            f"{first.steps:,}",
            f"{first.warmup_steps:,} ({first.warmup_steps / first.steps:.2%})",
            f"{first.microbatch_size}{several} × {first.gradient_accumulation_steps}",
            "not known" if first.forecast_bytes is None else format_bytes(first.forecast_bytes),
            "not known" if None in seconds else format_seconds(sum(seconds)),
        )
    out.print(table)
    _show_rest(plan, out)
    _show_answer(plan, out)


def _device_of(execution: Execution) -> str:
    """Write where each trial runs, and how it is split."""
    threads = f"{execution.threads} thread{'s' * (execution.threads > 1)}"
    if execution.devices == 1:
        return f"{execution.device}, {threads}"
    by = "" if execution.strategy == "torch" else f" by {execution.strategy}"
    on = f"{execution.devices} × {execution.device} for each trial"
    return f"{on}, ZeRO {execution.zero}{by}, {threads} each"


def _show_rest(plan: Plan, out: Console) -> None:
    settings, schedule = plan.settings, plan.settings.schedule
    if not plan.tokens_are_common:
        out.print(
            "Token counts differ between batch sizes: a common one would give up more than 1 % "
            "of the budget."
        )
    decay = f"cosine to {schedule.final_fraction:.0%}" if schedule.name == "cosine" else "constant"
    if schedule.average:
        decay += f", weights averaged, with a width of {schedule.average:.0%} of the steps so far"
    sequences = f"{settings.evaluation.sequences} sequences"
    if settings.target is not None:
        out.print(
            f"Target: a trial ends where its validation loss reaches {settings.target:g} to stay, "
            f"is pruned at twice the least tokens of its batch size, or ends at its budget: tokens "
            "and times are the most that can be."
        )
        sequences = "the whole validation split"
    policies = sorted({row.policy for row in plan.trials})
    for policy in policies:
        held = describe_policy(policy, settings.optimizer, settings.tuning.dimensions)
        out.print(f"Rate: {policy}: {held}.")
    out.print(
        f"Schedule: warmup {schedule.warmup_fraction:.0%}, then {decay}. "
        f"Evaluation: {settings.evaluation.points} × {sequences}. "
        f"Steps: {plan.execution.compile_reason}."
    )
    if plan.execution.reason:
        preset = "Preset " * (plan.execution.preset is not None)
        out.print(f"{preset}{plan.execution.reason}.")
    if plan.epochs is not None:
        about = "about " if plan.epochs_are_estimated else ""
        out.print(f"Epochs of the data: {about}{plan.epochs:.3g}.")
    if plan.disk_bytes is not None:
        out.print(f"Disk: at most {format_bytes(plan.disk_bytes)}.")
    seconds = [row.forecast_seconds for row in plan.trials]
    if None not in seconds:
        total = sum(s for s in seconds if s)
        out.print(f"In all: {len(seconds)} trials, estimated {format_seconds(total)}.")
        if plan.execution.device == "cpu" and total > 3600:
            out.print("On a CPU, `sweep run quick` answers a small question in a minute.")


def _show_answer(plan: Plan, out: Console) -> None:
    """Name the command that answers the question, and what it costs beside this one."""
    command = answering_command(plan)
    if command is None:
        searched = plan.settings.tuning.dimensions
        more = "Tuning trials beyond the five shown follow from what these find."
        if len(searched) > 1:
            more = (
                f"{plan.settings.tuning.trials} tuning trials at each batch size search "
                f"{' and '.join(searched)}, of which five are shown; then the winner's rate is "
                "bracketed."
            )
        out.print(f"Rates are tuned at each batch size and reported on fresh seeds. {more}")
        return
    policies = {row.policy for row in plan.trials}
    seeds = len({row.seed for row in plan.trials if row.stage == "report"})
    why = "one rate for all batch sizes" if policies == {"fixed"} else "a rate that is not tuned"
    if seeds < ANSWERING_SEEDS:
        why += f" and {seeds} seed{'s' if seeds > 1 else ''}"
    reports = (row for row in plan.trials if row.stage == "report")
    by_batch = {row.batch_size: row.forecast_seconds for row in reports}
    trainings, seconds = answering_cost(plan, by_batch)
    time = f", estimated {format_seconds(seconds)}" if seconds else ""
    out.print(
        f"With {why}, this cannot tell which batch size is best. The command that answers:\n"
        f"    {command}\n"
        f"It costs about {trainings} trainings{time}, instead of {len(plan.trials)}.",
        markup=False,
        soft_wrap=True,
    )


def status_table(document: dict[str, Any]) -> Table:
    """Return the states as a table; running and failed trials first where there are many."""
    table = build_table(
        "id", "batch size", "seed", "rate", "state", "tokens", "loss", "tokens/s", "left"
    )
    for row in document["trials"]:
        rate, eta = row["learning_rate"], row["eta_seconds"]
        cause = f" {row['cause']}" if row["cause"] else ""
        table.add_row(
            row["id"],
            str(row["batch_size"]),
            str(row["seed"]),
            f"{rate:.3g}",
            f"{row['state']}{cause}",
            format_count(row["tokens"]) if row["tokens"] else "",
            "" if row["loss"] is None else f"{row['loss']:.4f}",
            "" if row["tokens_per_second"] is None else format_count(row["tokens_per_second"]),
            format_seconds(eta) if eta and not State(row["state"]).is_finished else "",
        )
    return table


def show_status(document: dict[str, Any]) -> None:
    """Print the states to stdout."""
    out = console()
    eta = document["eta_seconds"]
    left = f", about {format_seconds(eta)} left" if eta else ""
    out.print(f"[bold]{document['sweep']}[/]: {document['state']}{left}")
    out.print(status_table(document))
    for row in document["trials"]:
        if row["state"] == State.FAILED:
            what = "diverged" if row["cause"] == Cause.DIVERGED else f"failed ({row['cause']})"
            out.print(
                f"Batch size {row['batch_size']}, seed {row['seed']} {what}: {row['message']}",
                markup=False,
            )


class Progress:
    """A live table on a terminal, plain lines otherwise; on stderr. Of all trials by default."""

    def __init__(self, folder: SweepFolder, ids: set[str] | None, is_quiet: bool) -> None:
        self._folder, self._ids, self._is_quiet = folder, ids, is_quiet
        self._console = console(to_stderr=True)
        self._live: Live | None = None
        self._said: dict[str, str] = {}
        self._next = 0.0

    def preparing(self, what: str, fraction: float) -> None:
        """Show how far data preparation is."""
        if self._is_quiet:
            return
        line = f"{what}: {fraction:.0%}"
        if self._console.is_terminal:
            self._console.print(line, end="\r")
        elif self._said.get(what) != (quarter := str(int(4 * fraction))):
            self._said[what] = quarter
            self._console.print(line)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.update(now=True)
        if self._live:
            self._live.stop()

    def update(self, now: bool = False) -> None:
        """Read the folder and show it, at most once a second unless it must be `now`.

        With very many trials more seldom: a tenth of the time is enough for it.
        """
        started = time.monotonic()
        if self._is_quiet or (started < self._next and not now):
            return
        self._show(sweep_status(self._folder))
        ended = time.monotonic()
        self._next = ended + max(1.0, 9 * (ended - started))

    def _show(self, document: dict[str, Any]) -> None:
        rows = [r for r in document["trials"] if self._ids is None or r["id"] in self._ids]
        if self._console.is_terminal:
            self._live = self._live or self._begin_live()
            shown = _most_telling(rows)
            table = status_table({"trials": shown})
            done = sum(State(row["state"]).is_finished for row in rows)
            left = format_seconds(time_left(rows) or 0)
            table.caption = f"{done} of {len(rows)} trials, about {left} left"
            self._live.update(table, refresh=True)
            return
        for row in rows:
            self._say(row)

    def _begin_live(self) -> Live:
        live = Live(console=self._console, auto_refresh=False, transient=True)
        live.start()
        return live

    def _say(self, row: dict[str, Any]) -> None:
        """Print a plain line when a trial's state changes."""
        state = f"{row['state']} {row['cause'] or ''}".strip()
        if self._said.get(row["id"], State.WAITING) == state:
            return
        self._said[row["id"]] = state
        loss = "" if row["loss"] is None else f", loss {row['loss']:.4f}"
        self._console.print(
            f"{row['id']} batch size {row['batch_size']} seed {row['seed']}: {state}{loss}",
            markup=False,
        )


def _most_telling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most a screenful: running ones, then the newest finished and next waiting."""
    if len(rows) <= LIVE_ROWS:
        return rows
    running = [i for i, row in enumerate(rows) if row["state"] == State.RUNNING]
    first = max(0, (running[0] if running else 0) - LIVE_ROWS // 2)
    return rows[first : first + LIVE_ROWS]
