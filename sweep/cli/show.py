"""Plans, trial states and progress on the terminal."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from sweep.config.numbers import format_bytes, format_count, format_seconds
from sweep.orchestration.status import sweep_status, time_left
from sweep.plan.plan import Plan, PlannedTrial, answering_command, answering_cost
from sweep.plan.policy import describe_policy
from sweep.trial.folder import Cause, State, SweepFolder

PLAIN_WIDTH = 140  # columns if the output is not a terminal
LIVE_ROWS = 24


def console(to_stderr: bool = False) -> Console:
    """Return a console for stdout or stderr; without a terminal it is wide and plain."""
    is_terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    return Console(stderr=to_stderr, width=None if is_terminal else PLAIN_WIDTH, highlight=False)


def build_table(*columns: str) -> Table:
    """Return an empty table without lines, with numbers on the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("id", "state") else "right")
    return table


def show_plan(plan: Plan, to_stderr: bool = False) -> None:
    """Print one line per batch size and policy, then what all trials share."""
    out, settings, execution = console(to_stderr), plan.settings, plan.execution
    device = f"{execution.device}, {execution.threads} threads"
    if execution.devices > 1:
        device = f"{execution.devices} × {device} each, {execution.strategy} ZeRO {execution.zero}"
    out.print(
        f"[bold]{plan.experiment}[/]: {plan.model['name']}, {plan.model['parameters']:,} "
        f"parameters, {settings.data or settings.workload}, {plan.tokens_per_sequence} tokens per "
        f"sequence, {settings.precision} on {device}"
    )
    columns = ("batch size", "rate", "seeds", "tokens", "steps", "warmup")
    split = "microbatch × devices × steps"
    table = build_table(*columns, split, "memory (eager)", "time (estimate)")
    groups: dict[tuple[str, str, int], list[PlannedTrial]] = {}
    for row in plan.trials:
        groups.setdefault((row.stage, row.policy, row.batch_size), []).append(row)
    for rows in groups.values():
        table.add_row(*_plan_row(rows))
    out.print(table)
    notes = [f"{subject}: {text}" for subject, text in _plan_notes(plan).items() if text]
    out.print("\n".join(notes), markup=False, soft_wrap=True)


def _plan_row(rows: list[PlannedTrial]) -> list[str]:
    first = rows[0]
    rates = sorted(row.learning_rate for row in rows if row.learning_rate)
    return [
        str(first.batch_size),
        "…".join(dict.fromkeys(f"{rate:.3g}" for rate in rates[:1] + rates[-1:])) or "after tuning",
        f"{len(rows)}{' (tuning)' if first.stage == 'tune' else ''}",
        f"{first.tokens:,}",
        f"{first.steps:,}",
        f"{first.warmup_steps:,} ({first.warmup_steps / first.steps:.2%})",
        f"{first.microbatch_size} × {first.devices} × {first.gradient_accumulation_steps}",
        format_bytes(first.forecast_bytes) if first.forecast_bytes else "unknown",
        _total_time([row.forecast_seconds for row in rows]),
    ]


def _total_time(seconds: Sequence[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    return "unknown" if len(known) < len(seconds) else format_seconds(sum(known))


def _time_range(plan: Plan) -> str:
    """Return the range of the estimated time, or an empty text if the time is unknown."""
    seconds = [row.forecast_seconds for row in plan.trials if row.forecast_seconds is not None]
    if plan.forecast_factor is None or len(seconds) < len(plan.trials):
        return ""
    low, high = sum(seconds) / plan.forecast_factor, sum(seconds) * plan.forecast_factor
    return f" ({format_seconds(low)} to {format_seconds(high)})"


def _plan_notes(plan: Plan) -> dict[str, str]:
    """Return what the plan's table does not show, by subject; empty if it does not apply."""
    settings, schedule, execution = plan.settings, plan.settings.schedule, plan.execution
    notes = {"Schedule": f"warmup {schedule.warmup_fraction:.0%}, then {schedule.name}"}
    if schedule.name == "cosine":
        notes["Schedule"] += f" to {schedule.final_fraction:.0%}"
    if schedule.average:
        notes["Schedule"] += f", weights averaged over {schedule.average:.0%} of the steps so far"
    for policy in sorted({row.policy for row in plan.trials}):
        rule = describe_policy(policy, settings.optimizer, settings.tuning.dimensions)
        notes[f"Rate, {policy}"] = rule
    if not plan.tokens_are_common:
        notes["Tokens"] = "they differ, because equal counts would lose over 1 % of the budget"
    notes["Evaluation"] = (
        f"{settings.evaluation.points} × {settings.evaluation.sequences} sequences"
    )
    if settings.target is not None:
        notes["Evaluation"] = f"{settings.evaluation.points} × the whole validation split"
        notes["Target"] = f"a trial ends when its validation loss stays below {settings.target:g}, "
        notes["Target"] += "or is pruned at twice the fewest tokens of its batch size"
    notes["Compilation"], notes["Memory"] = execution.compile_reason, execution.reason
    if plan.epochs is not None:
        about = "about " if plan.epochs_are_estimated else ""
        notes["Epochs of the data"] = f"{about}{plan.epochs:.3g}"
    if plan.disk_bytes is not None:
        notes["Disk"] = f"at most {format_bytes(plan.disk_bytes)}"
    seconds = {row.batch_size: row.forecast_seconds for row in plan.trials}
    total = _total_time([row.forecast_seconds for row in plan.trials])
    notes["Total"] = f"{len(plan.trials)} trials, estimated time {total}{_time_range(plan)}"
    if plan.code:
        sources = [*plan.code["files"], *(f"{k} {v}" for k, v in plan.code["packages"].items())]
        notes["Your code, part of every trial's id"] = ", ".join(sources)
    if command := answering_command(plan):
        trainings, cost = answering_cost(plan, seconds)
        notes["This plan cannot tell which batch size is best. The command that can"] = (
            f"{trainings} trainings, estimated time {_total_time([cost])}\n    {command}"
        )
    else:
        notes["Tuning"] = "the first trials are listed; more follow from their losses"
    return notes


def status_table(rows: list[dict[str, Any]]) -> Table:
    """Return the states of trials, as `sweep_status` lists them, as a table."""
    columns = ("id", "batch size", "seed", "rate", "state", "tokens", "loss", "tokens/s")
    table = build_table(*columns, "time left")
    for row in rows:
        loss, speed, eta = row["loss"], row["tokens_per_second"], row["eta_seconds"]
        table.add_row(
            row["id"],
            str(row["batch_size"]),
            str(row["seed"]),
            f"{row['learning_rate']:.3g}",
            _state(row),
            format_count(row["tokens"]) if row["tokens"] else "",
            "" if loss is None else f"{loss:.4f}",
            "" if speed is None else format_count(speed),
            format_seconds(eta) if eta and not State(row["state"]).is_finished else "",
        )
    return table


def _state(row: dict[str, Any]) -> str:
    return f"{row['state']} {row['cause'] or ''}".strip()


def show_status(document: dict[str, Any]) -> None:
    """Print the document of `sweep_status` to stdout."""
    out, eta = console(), document["eta_seconds"]
    time_text = f", about {format_seconds(eta)} left" if eta else ""
    out.print(f"[bold]{document['sweep']}[/]: {document['state']}{time_text}")
    out.print(status_table(document["trials"]))
    for row in document["trials"]:
        if row["state"] == State.FAILED:
            what = "diverged" if row["cause"] == Cause.DIVERGED else f"failed ({row['cause']})"
            trial = f"Batch size {row['batch_size']}, seed {row['seed']}"
            out.print(f"{trial} {what}: {row['message']}", markup=False)


class Progress:
    """Progress on stderr: a live table, or lines without a terminal; `ids` None: all trials."""

    def __init__(self, folder: SweepFolder, ids: set[str] | None, is_quiet: bool) -> None:
        self._folder, self._ids, self._is_quiet = folder, ids, is_quiet
        self._console = console(to_stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._printed: dict[str, str] = {}
        self._next_update = 0.0

    def preparing(self, work: str) -> None:
        """Print the part of the data preparation that begins."""
        if not self._is_quiet:
            self._console.print(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.update(now=True)
        self._live.stop()

    def update(self, now: bool = False) -> None:
        """Read the folder and show it, at most once a second and in a tenth of the time."""
        started = time.monotonic()
        if self._is_quiet or (started < self._next_update and not now):
            return
        trials = sweep_status(self._folder)["trials"]
        rows = [row for row in trials if self._ids is None or row["id"] in self._ids]
        if self._console.is_terminal:
            self._show_table(rows)
        else:
            for row in rows:
                name = f"{row['id']} batch size {row['batch_size']} seed {row['seed']}"
                loss = "" if row["loss"] is None else f", loss {row['loss']:.4f}"
                if row["state"] != State.WAITING or name in self._printed:
                    self._print_change(name, _state(row), loss)
        ended = time.monotonic()
        self._next_update = ended + max(1.0, 9 * (ended - started))

    def _show_table(self, rows: list[dict[str, Any]]) -> None:
        """Show a screenful of trials around the first running one."""
        running = [index for index, row in enumerate(rows) if row["state"] == State.RUNNING]
        first = max(0, (running or [0])[0] - LIVE_ROWS // 2)
        table = status_table(rows[first : first + LIVE_ROWS])
        finished = sum(State(row["state"]).is_finished for row in rows)
        time_text = format_seconds(time_left(rows) or 0)
        table.caption = f"{finished} of {len(rows)} trials finished, about {time_text} left"
        self._live.start()
        self._live.update(table, refresh=True)

    def _print_change(self, name: str, state: str, details: str = "") -> None:
        if self._printed.get(name) != state:
            self._printed[name] = state
            self._console.print(f"{name}: {state}{details}", markup=False)
