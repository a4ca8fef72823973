"""Plans, trial states and progress on the terminal."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from sweep.cli.options import build_console, echo, print_document, say
from sweep.config.experiment import Cell
from sweep.config.numbers import format_bytes, format_count, format_seconds
from sweep.config.objective import LOSS, Objective
from sweep.errors import printable
from sweep.orchestration.progress import state_of, time_text
from sweep.plan.plan import Plan, PlannedTrial, answering_command, most_trials
from sweep.plan.rates import describe_policy, optimizer_facts
from sweep.plan.steps import common_budget
from sweep.trial.folder import State, SweepFolder

LEFT = ("id", "optimizer", "state", "trials")  # columns of texts; the others are numbers


def build_table(*names: str, gap: int = 2) -> Table:
    columns = (Column(name, justify="left" if name in LEFT else "right") for name in names)
    return Table(*columns, box=None, padding=(0, gap, 0, 0), header_style="bold")


def print_plan(
    plan: Plan,
    as_json: bool = False,
    to_stderr: bool = False,
    cost: dict[str, Any] | None = None,
    is_verbose: bool = False,
) -> None:
    """Print a line per batch size and policy, the common settings, and the cost on a cluster."""
    if as_json:
        print_document(plan.model_dump(mode="json") | ({"cluster": cost} if cost else {}))
        return
    console, settings, execution = build_console(to_stderr), plan.settings, plan.execution
    device = f"{execution.device}, {execution.threads} threads"
    if execution.devices > 1:
        device = f"{execution.devices} × {device} each, ZeRO {execution.zero}"
    if settings.model.supports_half_precision:
        device = f"{settings.precision} on {device}"
    unit, parameters = settings.traits.tokens, plan.model.parameters
    facts = [plan.model.name, f"{parameters:,} parameters" if parameters else None]
    trained = plan.model.trained_parameters
    facts += [f"{trained:,} trained" if trained else None, settings.data]
    if plan.tokens_per_sequence > 1:
        facts.append(f"{plan.tokens_per_sequence} tokens per sequence")
    counts = sorted({row.tokens for row in plan.trials})
    facts.append(f"{' to '.join(f'{n:,}' for n in counts[:: len(counts) - 1 or 1])} {unit} a trial")
    text = escape(printable(", ".join(filter(None, (*facts, device)))))
    console.print(f"[bold]{plan.experiment}[/]: {text}")
    has_warmup = is_verbose and settings.passes("warmup_steps")
    columns = ["batch size", "lr", "trials", "steps", *["warmup"] * has_warmup]
    columns += ["microbatch", "memory", "time"]
    gap = 1 if settings.optimizers or is_verbose else 2
    table = build_table(*["optimizer"] * bool(settings.optimizers), *columns, gap=gap)
    groups: dict[tuple[str, str, Cell], list[PlannedTrial]] = {}
    for row in plan.trials:
        groups.setdefault((row.stage, row.policy, row.cell), []).append(row)
    for rows in groups.values():
        first, rates = rows[0], sorted(row.learning_rate for row in rows if row.learning_rate)
        ends = dict.fromkeys(f"{rate:.2g}" for rate in rates[:1] + rates[-1:])
        parts = [first.microbatch_size, first.devices, first.gradient_accumulation_steps]
        table.add_row(
            *filter(None, [first.optimizer]),
            str(first.batch_size),
            "…".join(ends) or "tuned",
            f"{len(rows)}{' tuning' if first.stage == 'tune' else ''}",
            f"{first.steps:,}",
            *[f"{first.warmup_steps:,}"] * has_warmup,
            " × ".join(str(part) for part in parts[:1] + [n for n in parts[1:] if n > 1]),
            format_bytes(first.forecast_bytes) if first.forecast_bytes else "unknown",
            _total_time(rows),
        )
    console.print(table)
    notes = _plan_notes(plan, cost) | (_internal_notes(plan) if is_verbose else {})
    lines = [f"{subject}: {text}" for subject, text in notes.items() if text]
    say("\n".join(lines), to_stderr)
    if command := answering_command(plan):
        say("This plan cannot tell which batch size is best. The command that can:", to_stderr)
        echo(f"  {command}", err=to_stderr)
    echo("", err=to_stderr)


def _total_time(rows: Sequence[PlannedTrial], factor: float = 1.0, reason: str = "") -> str:
    seconds = [row.forecast_seconds for row in rows if row.forecast_seconds is not None]
    if len(seconds) < len(rows):
        return "unknown"
    total = sum(seconds)
    ends = f"{format_seconds(total / factor)} to {format_seconds(total * factor)}"
    if reason:
        return f"{ends}, because {reason}"
    return format_seconds(total) if factor == 1 else f"{format_seconds(total)} ({ends})"


def _most_time(plan: Plan) -> str:
    """Write the time of the most trials of `--seeds auto`, and its limit."""
    seconds = {row.cell: row.forecast_seconds for row in plan.trials}
    counts, hours = most_trials(plan), plan.settings.answer.max_hours
    times = [count * (seconds[cell] or 0.0) for cell, count in counts.items()]
    text = "unknown time" if None in seconds.values() else format_seconds(sum(times))
    return f"{text}, and no seeds after {hours:g} hours" if hours else text


def _plan_notes(plan: Plan, cost: dict[str, Any] | None) -> dict[str, Any]:
    """Return lines below the plan's table by subject; None or "" if one does not apply."""
    settings, code = plan.settings, plan.code or {}
    own_code = [*code.get("files", {}), *map(" ".join, code.get("packages", {}).items())]
    numbers = plan.token_budget, {row.batch_size for row in plan.trials}, plan.tokens_per_sequence
    unequal = (
        f"they differ between batch sizes, because equal counts would lose over 1 % of the "
        f"budget. No claim can be made; with --budget {common_budget(*numbers)} it can."
    )
    total = _total_time(plan.trials, plan.forecast_factor or 1.0, plan.forecast_reason or "")
    if settings.seeds == "auto":
        counts = most_trials(plan)
        total = f"at least {total}; at most {sum(counts.values())} trials, {_most_time(plan)}"
    elif any(row.id is None for row in plan.trials):
        total += "; tuning trials that follow from these are not counted"
    notes = {
        settings.traits.tokens.capitalize(): None if plan.tokens_are_common else unequal,
        "Target": settings.target
        and f"a trial ends when its validation loss stays below {settings.target:g}",
        "Initial weights": settings.init,
        "Epochs of the data": f"{plan.epochs:.3g}"
        if plan.epochs
        else plan.data and "unknown, and the last evaluation not counted, until it is tokenized",
        "Your code, part of every trial's id": ", ".join(own_code) or "no file" * bool(code),
        "Disk": plan.disk_bytes and f"at most {format_bytes(plan.disk_bytes)}",
        "Total": f"{len(plan.trials)} trials, estimated time {total}",
    }
    if cost:
        notes |= {"Devices": str(cost["devices"]), "Trials to run": str(cost["trials"])}
        notes["Makespan"] = format_seconds(cost["makespan_seconds"])
        notes["Device-hours"] = f"{cost['device_hours']:.4g}"
        notes["Price"] = "" if cost["price"] is None else f"{cost['price']:.4g}"
    return notes


def _internal_notes(plan: Plan) -> dict[str, Any]:
    """Return what `--verbose` adds to the plan's notes."""
    settings = plan.settings
    vocabulary, unit = settings.model.vocabulary, settings.traits.tokens
    is_rate_only = not settings.passes("beta2", "weight_decay")
    policies, dimensions = {row.policy for row in plan.trials}, settings.tuning.dimensions
    notes = {f"Rate, {p}": describe_policy(p, dimensions, is_rate_only) for p in sorted(policies)}
    for name in settings.optimizer_names if settings.command is None else ():
        notes[f"Optimizer, {name}"] = optimizer_facts(name)["rules"]
    return {name: text.replace("tokens", unit) for name, text in notes.items()} | {
        "Vocabulary": vocabulary and f"{vocabulary:,}, the tokenizer is {settings.tokenizer}",
        "Compilation": plan.execution.compile_reason,
        "Memory": f"forecast for eager steps. {plan.execution.reason}".strip(),
    }


def status_table(document: dict[str, Any]) -> Table:
    metric, unit = Objective(document["metric"]), document["unit"]
    own = () if metric == LOSS else (metric.title.removeprefix("final "),)
    columns = ("batch size", "seed", "lr", "state", unit, "loss", *own, f"{unit}/s", "left")
    optimizers = ["optimizer"] if any(row["optimizer"] for row in document["trials"]) else []
    table = build_table("id", *optimizers, *columns, gap=1)
    for row in document["trials"]:
        values = (row["loss"], row["value"])[: 1 + len(own)]
        speed, eta = row["tokens_per_second"], row["eta_seconds"]
        table.add_row(
            row["id"],
            *filter(None, [row["optimizer"]]),
            str(row["batch_size"]),
            str(row["seed"]),
            f"{row['learning_rate']:.3g}",
            state_of(row),
            format_count(row["tokens"]) if row["tokens"] else "",
            *("" if value is None else f"{value:.5g}" for value in values),
            "" if speed is None else format_count(speed),
            format_seconds(eta) if eta else "",  # finished trials have none
        )
    return table


def print_status(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_document(document)
        return
    console, eta = build_console(), document["eta_seconds"]
    name = printable(document["sweep"])
    console.print(f"[bold]{escape(name)}[/]: {document['state']}{time_text(eta)}")
    console.print(status_table(document))
    _print_failures(document)
    for sentence in document.get("damage", ()):
        echo(f"Damaged: {sentence}")
    if "damage" in document:
        echo("Some files are damaged." if document["damage"] else "All files are intact.")


def _print_failures(document: dict[str, Any]) -> None:
    for row in document["trials"]:
        if row["state"] == State.FAILED:
            trial = f"Batch size {row['batch_size']}, seed {row['seed']}"
            say(f"{trial}: {row['cause']}: {row['message']}")


def print_results(document: dict[str, Any], folder: SweepFolder, as_json: bool) -> None:
    """Print what failed, the answer, and what would make it clearer."""
    from sweep.analysis.results import load_sweep

    sweep = load_sweep(folder.path)
    answer = sweep.answer()
    if as_json:
        print_document(document | {"answer": answer and answer.as_json()})
        return
    _print_failures(document)
    states = Counter(map(state_of, document["trials"]))
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    echo(f"{document['sweep']}: {counts}")
    echo(f"Report: {document['report']}, or `sweep open {folder.path}`\n")
    say("\n".join(sweep.sentences()))
    if answer and answer.settle:
        seconds = answer.settle_seconds
        cost = f", at least {format_seconds(seconds)}" if seconds else ""
        echo(f"Next{cost}: {answer.settle}")


def print_metrics(lines: Sequence[dict[str, Any]]) -> None:
    """Print the evaluations of a trial: tokens, seconds since its first line, and losses."""
    names = ["train/loss", *dict.fromkeys(n for line in lines for n in line if n[:6] == "valid/")]
    table, newest = build_table("tokens", "time", *names), dict[str, float]()
    for line in lines:
        newest |= {name: line[name] for name in names if line.get(name) is not None}
        if any(name in line for name in names[1:]):
            values = [f"{newest[name]:.5g}" if name in newest else "" for name in names]
            seconds = format_seconds(line["time"] - lines[0]["time"])
            table.add_row(f"{line['tokens']:,}", seconds, *values)
    build_console().print(table)
