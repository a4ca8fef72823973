"""Plans, trial states and progress on the terminal."""

import sys
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from sweep.cli.options import echo, print_document
from sweep.config.experiment import Cell
from sweep.config.numbers import format_bytes, format_count, format_seconds
from sweep.config.objective import LOSS, Objective
from sweep.errors import printable
from sweep.orchestration.status import sweep_status, time_left
from sweep.plan.plan import Plan, PlannedTrial, answering_command, most_trials
from sweep.plan.rates import describe_policy, optimizer_facts
from sweep.trial.folder import State, SweepFolder


def build_console(to_stderr: bool = False) -> Console:
    is_terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    return Console(stderr=to_stderr, width=None if is_terminal else 140, highlight=False)


def build_table(*names: str) -> Table:
    texts = ("id", "optimizer", "state")  # the others are numbers
    columns = (Column(name, justify="left" if name in texts else "right") for name in names)
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def print_plan(
    plan: Plan, as_json: bool = False, to_stderr: bool = False, cost: dict[str, Any] | None = None
) -> None:
    """Print a line per batch size and policy, the common settings, and the cost on a cluster."""
    if as_json:
        print_document(plan.model_dump(mode="json") | ({"cluster": cost} if cost else {}))
        return
    console, settings, execution = build_console(to_stderr), plan.settings, plan.execution
    device = f"{execution.device}, {execution.threads} threads"
    if execution.devices > 1:
        device = f"{execution.devices} × {device} each, ZeRO {execution.zero}"
    unit, parameters = settings.traits.tokens, plan.model.parameters
    facts = [plan.model.name, f"{parameters:,} parameters" if parameters else None, settings.data]
    if plan.tokens_per_sequence > 1:
        facts.append(f"{plan.tokens_per_sequence} tokens per sequence")
    if settings.model.supports_half_precision:
        device = f"{settings.precision} on {device}"
    text = ", ".join(filter(None, (*facts, device)))
    console.print(f"[bold]{plan.experiment}[/]: {escape(printable(text))}")
    shows_warmup = settings.passes("warmup_steps")
    columns = ("lr", "seeds", unit, "steps", "warmup", "microbatch × devices × accumulation")
    first_columns = [*["optimizer"] * bool(settings.optimizers), "batch size"]
    table = build_table(*first_columns, *columns, "memory (eager)", "time (estimate)")
    groups: dict[tuple[str, str, Cell], list[PlannedTrial]] = {}
    for row in plan.trials:
        groups.setdefault((row.stage, row.policy, row.cell), []).append(row)
    for rows in groups.values():
        first, rates = rows[0], sorted(row.learning_rate for row in rows if row.learning_rate)
        ends = dict.fromkeys(f"{rate:.3g}" for rate in rates[:1] + rates[-1:])
        table.add_row(
            *filter(None, [first.optimizer]),
            str(first.batch_size),
            "…".join(ends) or "after tuning",
            f"{len(rows)}{' (tuning)' if first.stage == 'tune' else ''}",
            f"{first.tokens:,}",
            f"{first.steps:,}",
            f"{first.warmup_steps:,} ({first.warmup_steps / first.steps:.2%})" * shows_warmup,
            f"{first.microbatch_size} × {first.devices} × {first.gradient_accumulation_steps}",
            format_bytes(first.forecast_bytes) if first.forecast_bytes else "unknown",
            _total_time(rows),
        )
    console.print(table)
    notes = _plan_notes(plan)
    if cost:
        notes |= {"Devices": str(cost["devices"]), "Trials to run": str(cost["trials"])}
        notes["Makespan"] = format_seconds(cost["makespan_seconds"])
        notes["Device-hours"] = f"{cost['device_hours']:.4g}"
        notes["Price"] = "" if cost["price"] is None else f"{cost['price']:.4g}"
    lines = [f"{subject}: {text}" for subject, text in notes.items() if text]
    console.print(printable("\n".join(lines)), markup=False, soft_wrap=True)


def _total_time(rows: Sequence[PlannedTrial], factor: float | None = None) -> str:
    seconds = [row.forecast_seconds for row in rows if row.forecast_seconds is not None]
    if len(seconds) < len(rows):
        return "unknown"
    total = sum(seconds)
    if factor is None:
        return format_seconds(total)
    ends = f"{format_seconds(total / factor)} to {format_seconds(total * factor)}"
    return f"{format_seconds(total)} ({ends})"


def _most_time(plan: Plan) -> str:
    """Write the time of the most trials of `--seeds auto`, and its limit."""
    seconds = {row.cell: row.forecast_seconds for row in plan.trials}
    counts, hours = most_trials(plan), plan.settings.answer.max_hours
    times = [count * (seconds[cell] or 0.0) for cell, count in counts.items()]
    text = "unknown time" if None in seconds.values() else format_seconds(sum(times))
    return f"{text}, and no seeds after {hours:g} hours" if hours else text


def _plan_notes(plan: Plan) -> dict[str, str | float | None]:
    """Return lines below the plan's table by subject; None or "" if one does not apply."""
    settings, target, code = plan.settings, plan.settings.target, plan.code or {}
    vocabulary, trained = settings.model.vocabulary, plan.model.trained_parameters
    policies = sorted({row.policy for row in plan.trials})
    tokens = "they differ (equal counts lose over 1 % of the budget), so no claim can be made"
    own_code = [*code.get("files", {}), *map(" ".join, code.get("packages", {}).items())]
    total = _total_time(plan.trials, plan.forecast_factor)
    if settings.seeds == "auto":
        counts = most_trials(plan)
        total = f"at least {total}; at most {sum(counts.values())} trials, {_most_time(plan)}"
    elif any(row.id is None for row in plan.trials):
        total += "; tuning trials that follow from these are not counted"
    answer = "This plan cannot tell which batch size is best. The command that can"
    dimensions = settings.tuning.dimensions
    is_rate_only = not settings.passes("beta2", "weight_decay")
    notes = {f"Rate, {p}": describe_policy(p, dimensions, is_rate_only) for p in policies}
    for name in settings.optimizer_names if settings.command is None else ():
        notes[f"Optimizer, {name}"] = optimizer_facts(name)["rules"]
    notes = {name: text.replace("tokens", settings.traits.tokens) for name, text in notes.items()}
    return notes | {
        settings.traits.tokens.capitalize(): None if plan.tokens_are_common else tokens,
        "Target": target and f"a trial ends when its validation loss stays below {target:g}",
        "Vocabulary": vocabulary and f"{vocabulary:,}, the tokenizer is {settings.tokenizer}",
        "Initial weights": settings.init,
        "Trained": trained and f"{trained:,} parameters; the others are frozen",
        "Compilation": plan.execution.compile_reason,
        "Memory": plan.execution.reason,
        "Epochs of the data": plan.epochs and f"{plan.epochs:.3g}",
        "Disk": plan.disk_bytes and f"at most {format_bytes(plan.disk_bytes)}",
        "Your code, part of every trial's id": ", ".join(own_code) or "no file" * bool(code),
        "Total": f"{len(plan.trials)} trials, estimated time {total}",
        answer: answering_command(plan),
    }


def status_table(document: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    metric, unit = Objective(document["metric"]), document["unit"]
    own = () if metric == LOSS else (metric.title.removeprefix("final "),)
    columns = ("batch size", "seed", "lr", "state", unit, "loss", *own, f"{unit}/s", "time left")
    optimizers = ["optimizer"] if any(row["optimizer"] for row in document["trials"]) else []
    table = build_table("id", *optimizers, *columns)
    for row in rows:
        values = (row["loss"], row["value"])[: 1 + len(own)]
        speed, eta = row["tokens_per_second"], row["eta_seconds"]
        table.add_row(
            row["id"],
            *filter(None, [row["optimizer"]]),
            str(row["batch_size"]),
            str(row["seed"]),
            f"{row['learning_rate']:.3g}",
            _state_of(row),
            format_count(row["tokens"]) if row["tokens"] else "",
            *("" if value is None else f"{value:.5g}" for value in values),
            "" if speed is None else format_count(speed),
            format_seconds(eta) if eta else "",  # finished trials have none
        )
    return table


def _state_of(row: dict[str, Any]) -> str:
    return f"{row['state']} {row['cause'] or ''}".strip()


def _time_text(seconds: float | None) -> str:
    return f", about {format_seconds(seconds)} left" if seconds else ""


def print_status(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_document(document)
        return
    console, eta = build_console(), document["eta_seconds"]
    name = escape(printable(document["sweep"]))
    console.print(f"[bold]{name}[/]: {document['state']}{_time_text(eta)}")
    console.print(status_table(document, document["trials"]))
    for row in document["trials"]:
        if row["state"] == State.FAILED:
            trial = f"Batch size {row['batch_size']}, seed {row['seed']}"
            echo(f"{trial}: {row['cause']}: {row['message']}")
    for sentence in document.get("damage", ()):
        echo(f"Damaged: {sentence}")
    if "damage" in document:
        echo("Some files are damaged." if document["damage"] else "All files are intact.")
    if "report" in document:
        echo(f"Report: {document['report']}")


def print_results(document: dict[str, Any], folder: SweepFolder, as_json: bool) -> None:
    """Print the states of all trials, then the answer, and what would make it clearer."""
    from sweep.analysis.results import load_sweep

    sweep = load_sweep(folder.path)
    answer = sweep.answer()
    if as_json:
        print_document(document | {"answer": answer and answer.as_json()})
        return
    print_status(document, as_json=False)
    echo("\n" + "\n".join(sweep.sentences()))
    if answer and answer.settle:
        seconds = answer.settle_seconds
        cost = f", at least {format_seconds(seconds)}" if seconds else ""
        echo(f"Next{cost}: {answer.settle}")


class Progress(AbstractContextManager["Progress"]):
    """Progress of some trials (None: all) on stderr: a live table, or lines without a terminal."""

    def __init__(self, folder: SweepFolder, ids: Collection[str] | None, is_quiet: bool) -> None:
        self._folder, self._ids, self._is_quiet = folder, ids, is_quiet
        self._console = build_console(to_stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._printed: dict[str, str] = {}  # state by trial
        self._next_update = 0.0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._next_update = 0.0
            self.update()
        self._live.stop()

    def update(self) -> None:
        """Read the folder and show it, at most once a second and in a tenth of the time."""
        started = time.monotonic()
        if self._is_quiet or started < self._next_update:
            return
        document = sweep_status(self._folder)
        rows = [row for row in document["trials"] if self._ids is None or row["id"] in self._ids]
        if self._console.is_terminal:
            running = [row for row in rows if row["state"] == State.RUNNING]
            table = status_table(document, running)
            finished = sum(State(row["state"]).is_finished for row in rows)
            counts = f"{finished} of {len(rows)} trials finished"
            table.caption = counts + _time_text(time_left(rows))
            self._live.start()
            self._live.update(table, refresh=True)
            rows = []
        for row in rows:
            if (state := _state_of(row)) != self._printed.get(row["id"], State.WAITING):
                loss = "" if row["loss"] is None else f", loss {row['loss']:.4f}"
                name = " ".join(filter(None, [row["id"], row["optimizer"]]))
                name += f" batch size {row['batch_size']} seed {row['seed']}"
                self._console.print(f"{name}: {state}{loss}", markup=False)
            self._printed[row["id"]] = state
        ended = time.monotonic()
        self._next_update = ended + max(1.0, 9 * (ended - started))
