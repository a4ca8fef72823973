"""Plans, trial states and progress on the terminal."""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table
from rich.text import Text

from sweep.cli.options import build_console, echo, print_document, say
from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.gpus import find_gpu
from sweep.config.numbers import format_both, format_bytes, format_count, format_seconds
from sweep.config.objective import LOSS, Objective
from sweep.config.optimizers import optimizer_facts
from sweep.config.trial import tokenizer_of
from sweep.data.describe import data_lines, summarize_data
from sweep.decision.next import most_trials
from sweep.decision.proposal import common_tokens, propose_answer
from sweep.decision.times import TimeEstimate, estimate_time, ratio_of_rounds
from sweep.errors import SweepError, printable
from sweep.orchestration.planning import Planned, whole_plan
from sweep.orchestration.progress import stage_of, state_of, time_text
from sweep.orchestration.runner import rows_to_run
from sweep.plan.course import EVALUATIONS, MOST_EPOCHS, repeats_too_often, tokens_per_trial
from sweep.plan.needs import settings_without_effect
from sweep.plan.plan import Plan, PlannedTrial, stages_of
from sweep.plan.policies import describe_policy
from sweep.trial.folder import SweepFolder
from sweep.trial.status import Cause, State
from sweep.trial.timing import Timing

if TYPE_CHECKING:
    from sweep.analysis.answer import Answer

LEFT = ("id", "state", "optimizer", "trials")  # columns of texts; the others are numbers
UNFOLDED = ("id", "state")
Number = TypeVar("Number", int, float)


def build_table(rows: Sequence[Mapping[str, str | None]], gap: int = 2) -> Table:
    """Build a table without the columns that are None in each row; ids are never folded.

    A cell that is None is empty.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    names = []
    for name in rows[0] if rows else ():
        if any(row[name] is not None for row in rows):
            names.append(name)

    for name in names:
        table.add_column(
            Text(printable(name)),
            justify="left" if name in LEFT else "right",
            no_wrap=name in UNFOLDED,
            overflow="fold",
        )
    for row in rows:
        cells = [row[name] for name in names]
        table.add_row(*(Text("" if cell is None else printable(cell)) for cell in cells))
    return table


def write_if(value: float | None, write: Callable[[float], str] = "{:.5g}".format) -> str:
    return "" if value is None else write(value)


def print_plans(
    plans: Sequence[Planned],
    folder: SweepFolder,
    retried_causes: frozenset[Cause] = frozenset(),
    as_json: bool = False,
    costs: Sequence[dict[str, Any]] | None = None,
    is_verbose: bool = False,
) -> None:
    """Print the plan of each budget; as JSON, one document of all."""
    all_costs: Sequence[dict[str, Any] | None] = costs if costs else [None] * len(plans)
    if not as_json:
        for planned, cost in zip(plans, all_costs, strict=True):
            print_plan(
                planned,
                folder,
                retried_causes,
                cost=cost,
                is_verbose=is_verbose,
                is_only=len(plans) == 1,
            )
        if len(plans) > 1:
            say("\n".join(_about_budgets(plans, folder, retried_causes)))
        return

    whole = whole_plan(plans)
    for line in _data_lines(whole, folder):
        say(line, to_stderr=True)
    to_run = rows_to_run(whole, folder, retried_causes)
    document = whole.model_dump(mode="json") | _price_of(whole, to_run)
    if costs:
        document["cluster"] = costs[-1] if len(costs) == 1 else costs
    print_document(document)


def _about_budgets(
    plans: Sequence[Planned], folder: SweepFolder, retried_causes: frozenset[Cause]
) -> list[str]:
    """Return what several budgets have together, and which of them no law includes."""
    following = "first rates"
    if plans[0].experiment.chooses_batches:
        following = "batch sizes and first rates"
    lines = [
        f"The {following} of larger budgets follow from the results of smaller ones; those above "
        "are a guess."
    ]
    repetitive = [
        format_count(planned.plan.budget_tokens)
        for planned in plans
        if repeats_too_often(planned.plan.epochs)
    ]
    if repetitive:
        lines.append(
            f"At {', '.join(repetitive)} tokens the data are repeated over {MOST_EPOCHS} times. No "
            "law includes these budgets: use more data, or leave them out."
        )
    seconds = []
    factors = []
    for planned in plans:
        plan = planned.command_rows()
        to_run = rows_to_run(plan, folder, retried_causes)
        seconds.append(total_seconds(to_run, plan.execution))
        factors.append(plan.forecast_factor or 1.0)
    known = [value for value in seconds if value is not None]
    if len(known) == len(seconds):
        least = sum(value / factor for value, factor in zip(known, factors, strict=True))
        most = sum(value * factor for value, factor in zip(known, factors, strict=True))
        lines.append(
            f"All budgets: estimated time {format_seconds(least)} to {format_seconds(most)}, "
            "without the trials that follow from these."
        )
    return lines


def print_plan(
    planned: Planned,
    folder: SweepFolder,
    retried_causes: frozenset[Cause] = frozenset(),
    to_stderr: bool = False,
    cost: dict[str, Any] | None = None,
    is_verbose: bool = False,
    is_only: bool = True,
) -> None:
    """Print a line per batch size and policy, the common settings, and the cost on a cluster.

    If it is the only budget and cannot tell which batch size is best, the command that can follows.
    """
    plan = planned.command_rows()
    to_run = rows_to_run(plan, folder, retried_causes)
    console = build_console(to_stderr)
    header = Text.assemble((plan.experiment, "bold"), f": {printable(_plan_facts(plan))}")
    console.print(header, soft_wrap=not console.is_terminal)
    is_wide = is_verbose or bool(plan.settings.optimizers)
    console.print(build_table(_plan_lines(plan, is_verbose), gap=1 if is_wide else 2))

    unused = settings_without_effect(planned.experiment)
    notes = {"Without effect": "; ".join(map(str, unused)), **_plan_notes(plan, to_run)}
    if cost:
        del notes["Price"]  # that of all devices of the cluster replaces it
        notes |= _cost_notes(cost)
    if is_verbose:
        notes |= _internal_notes(plan)
    note_lines = [f"{subject}: {text}" for subject, text in notes.items() if text]
    say("\n".join([*_data_lines(plan, folder), *note_lines]), to_stderr)
    if is_only:
        _print_proposal(plan, to_stderr)
    echo("", err=to_stderr)


def _plan_facts(plan: Plan) -> str:
    """Return what all trials share: model, data, tokens and device."""
    facts = [plan.model.name]
    if plan.model.parameters:
        facts.append(f"{plan.model.parameters:,} parameters")
    if plan.model.trained_parameters:
        facts.append(f"{plan.model.trained_parameters:,} trained")
    if plan.settings.data:
        facts.append(plan.settings.data)
    if plan.tokens_per_sequence > 1:
        facts.append(f"{plan.tokens_per_sequence} tokens per sequence")
    counts = _ends_of(sorted({row.tokens for row in plan.trials if row.tokens}))
    tokens = " to ".join(f"{count:,}" for count in counts)
    if plan.token_budget is None:
        facts.append(f"{plan.settings.budget} of steps a trial")
    if tokens:
        facts.append(f"{tokens} {plan.settings.token_unit} a trial")
    facts.append(_describe_device(plan))
    return ", ".join(fact for fact in facts if fact)


def _describe_device(plan: Plan) -> str:
    execution = plan.execution
    device = f"{execution.device}, {_name_threads(execution.threads)}"
    if execution.devices > 1:
        device = f"{execution.devices} × {device} each, ZeRO {execution.zero}"
    if plan.settings.model.supports_half_precision:
        device = f"{plan.settings.precision} on {device}"
    return device


def _plan_lines(plan: Plan, is_verbose: bool) -> list[dict[str, str | None]]:
    """Return the cells of a plan's table: a line per stage, policy and arm."""
    groups: dict[tuple[str, str, Arm], list[PlannedTrial]] = {}
    for row in plan.trials:
        groups.setdefault((row.stage, row.policy, row.arm), []).append(row)

    # With optimizers, the table of both columns would exceed 80 columns.
    has_microbatches = not plan.settings.optimizers
    has_microbatches |= any(row.microbatch_size != row.batch_size for row in plan.trials)
    has_tokens = not (plan.settings.optimizers and has_microbatches)
    has_warmup = is_verbose and plan.settings.workload.receives("warmup_steps")
    lines = []
    for rows in groups.values():
        first = rows[0]
        factors = [first.microbatch_size]
        factors += [n for n in (first.devices, first.gradient_accumulation_steps) if n > 1]
        cells = {
            "optimizer": first.optimizer,
            "batch size": str(first.batch_size),
            "tokens": _in_tokens(first.batch_size, plan) if has_tokens else None,
            "lr": _rates_of(rows),
            "trials": f"{len(rows)} tuning" if first.stage == "tune" else str(len(rows)),
            "steps": f"{first.steps:,}" if first.tokens else "not timed yet",
            "warmup": f"{first.warmup_steps:,}" if has_warmup and first.tokens else None,
            "microbatch": " × ".join(map(str, factors)) if has_microbatches else None,
            "memory": format_bytes(first.forecast_bytes) if first.forecast_bytes else "unknown",
            "time": _time_of_line(rows, plan),
        }
        lines.append(cells)
    return lines


def _time_of_line(rows: Sequence[PlannedTrial], plan: Plan) -> str:
    """Write the time of some trials; with both ends if no step was measured."""
    total = total_seconds(rows, plan.execution.alone())
    if total is None:
        return "unknown"
    factor = plan.forecast_factor
    if plan.execution.gpu is None or factor is None:
        return format_seconds(total)
    return f"{format_seconds(total / factor)} to {format_seconds(total * factor)}"


def _in_tokens(batch_size: int, plan: Plan) -> str | None:
    """Write a batch size in tokens; None for examples without tokens."""
    if plan.tokens_per_sequence == 1:
        return None
    return f"{batch_size * plan.tokens_per_sequence:,}"


def _rates_of(rows: Sequence[PlannedTrial]) -> str:
    """Write the least and the largest rate; if none is known yet, where they will come from."""
    rates = sorted({row.learning_rate for row in rows if row.learning_rate})
    if not rates:
        return "predicted" if rows[0].stage == "tune" else rows[0].policy
    form = ".2g" if len(rates) == 1 else ".0e"
    return "…".join(f"{rate:{form}}".replace("e-0", "e-") for rate in _ends_of(rates))


def _ends_of(values: Sequence[Number]) -> Sequence[Number]:
    """Return the first and the last of several values."""
    return values if len(values) < 2 else [values[0], values[-1]]


def _cost_notes(cost: Mapping[str, Any]) -> dict[str, str]:
    return {
        "Devices": str(cost["devices"]),
        "Trials to run": str(cost["trials"]),
        "Makespan": format_seconds(cost["makespan_seconds"]),
        "Device-hours": f"{cost['device_hours']:.4g}",
        "Price": _write_price(cost["price"], cost["price_range"]),
    }


def _write_price(price: float | None, ends: Sequence[float] | None) -> str:
    if price is None or ends is None:
        return ""
    low, high = ends
    return f"{price:.3g} ({low:.3g} to {high:.3g}; estimated, not measured)"


def _data_lines(plan: Plan, folder: SweepFolder) -> list[str]:
    """Return what is read of the user's files or of a data set of the hub, and what is not."""
    plan = folder.located(plan)
    tokenizer = tokenizer_of(plan.settings)
    if plan.data is None or tokenizer is None or plan.data["name"] not in ("path", "hf"):
        return []
    return data_lines(summarize_data(plan.data, plan.data_path, tokenizer))


def _print_proposal(plan: Plan, to_stderr: bool) -> None:
    """Print the command that can tell which batch size is best, if this plan cannot."""
    subject = "This plan cannot tell which batch size is best."
    try:
        proposal = propose_answer(plan)
    except SweepError as error:  # why no command can
        say(f"{subject} {error}", to_stderr)
        return
    if proposal:
        say(f"{subject} The command that can:", to_stderr)
        echo(f"  {proposal.command}", err=to_stderr)


def total_seconds(rows: Sequence[PlannedTrial], execution: Execution) -> float | None:
    """Return the estimated time of some trials; None if that of one is not known."""
    total = 0.0
    for stage in stages_of(rows):
        seconds = [row.forecast_seconds for row in stage if row.forecast_seconds is not None]
        if len(seconds) < len(stage):
            return None
        total += _seconds_at_once(seconds, execution)
    return total


def _seconds_at_once(seconds: Sequence[float], execution: Execution) -> float:
    """Return the time of trials that may share a device.

    How much trials slow each other down on a GPU is not known: together they may take as long as
    one after the other.
    """
    if execution.device != "cpu":
        return sum(seconds)
    return max([sum(seconds) / execution.trials_at_once, *seconds])


def _total_time(
    rows: Sequence[PlannedTrial], execution: Execution, factor: float = 1.0, reason: str = ""
) -> str:
    total = total_seconds(rows, execution)
    if total is None:
        return f"unknown, because {reason}" if reason else "unknown"
    ends = f"{format_seconds(total / factor)} to {format_seconds(total * factor)}"
    if reason:
        return f"{ends}, because {reason}"
    return format_seconds(total) if factor == 1 else f"{format_seconds(total)} ({ends})"


def _most_time(plan: Plan, to_run: Sequence[PlannedTrial]) -> str:
    """Write the time of the most trials of `--seeds auto` that can follow, and its limit."""
    seconds = {row.arm: row.forecast_seconds for row in plan.trials}
    ended = Counter(row.arm for row in plan.trials) - Counter(row.arm for row in to_run)
    following: list[float] = []
    for arm, count in most_trials(plan).items():
        following += [seconds[arm] or 0.0] * max(0, count - ended[arm])
    total = _seconds_at_once(following, plan.execution)

    text = format_seconds(total * (plan.forecast_factor or 1.0))
    if None in seconds.values():
        text = "unknown time"
    hours = plan.settings.answer.max_hours
    return f"{text}, and no seeds after {hours:g} hours" if hours else text


def _plan_notes(plan: Plan, to_run: Sequence[PlannedTrial]) -> dict[str, Any]:
    """Return lines below the plan's table by subject; None or "" if one does not apply."""
    settings = plan.settings
    target = None
    if settings.target:
        target = f"a trial ends when its validation loss stays below {settings.target:g}"
    sizes = [
        f"{size.name} {size.used:,} in place of the {size.owner}'s {size.size:,}"
        for size in plan.model.replaced_sizes
    ]
    epochs = None
    if plan.epochs:
        epochs = f"{plan.epochs:.3g}"
    elif plan.data:
        epochs = "unknown, and the last evaluation not counted, until it is tokenized"
    return {
        settings.token_unit.capitalize(): _about_tokens(plan),
        "Target": target,
        "Initial weights": settings.init,
        "Sizes": "; ".join(sizes),
        "Warmup": _shortened_warmup(plan),
        "Evaluations": _sparse_evaluations(plan),
        "Microbatch": about_microbatch(plan),
        "GPU": _about_gpu(plan.execution),
        "Memory": plan.execution.reason,
        "At once": _describe_sharing(plan),
        "Epochs of the data": epochs,
        "Your code, part of every trial's id": _about_code(plan),
        "Disk": f"at most {format_bytes(plan.disk_bytes)}" if plan.disk_bytes else None,
        "Total": _about_total(plan, to_run),
        "Price": _about_price(plan, to_run),
    }


def _about_gpu(execution: Execution) -> str:
    """Name the GPU that a plan was made for, and its memory."""
    if execution.gpu is None:
        return ""
    gpu = find_gpu(execution.gpu)
    return f"{gpu.title}, which has {format_both(gpu.memory_bytes)} in PyTorch; nothing is measured"


def _sparse_evaluations(plan: Plan) -> str:
    """Name the batch sizes at which a program would evaluate less than half as often as planned."""
    if not plan.settings.workload.is_program:
        return ""
    sparse = {}
    for row in plan.trials:
        course = plan.course(row)
        if row.tokens and course.steps >= EVALUATIONS:
            count = course.steps // course.steps_between_evaluations()
            if count < EVALUATIONS / 2:
                sparse[row.batch_size] = f"{count} of {course.steps:,} steps"
    if not sparse:
        return ""
    listed = ", ".join(f"{text} at batch size {size}" for size, text in sparse.items())
    return f"with eval_steps only {listed}, because these steps divide badly"


def _price_of(plan: Plan, to_run: Sequence[PlannedTrial]) -> dict[str, Any]:
    """Return what the trials to run cost by the estimate of their time, and its range."""
    per_hour = plan.settings.answer.price
    seconds = total_seconds(to_run, plan.execution)
    if per_hour is None or seconds is None or plan.forecast_factor is None:
        return {"price": None, "price_range": None}
    price = per_hour * plan.execution.devices * seconds / 3600
    factor = plan.forecast_factor
    return {"price": price, "price_range": [price / factor, price * factor]}


def _about_price(plan: Plan, to_run: Sequence[PlannedTrial]) -> str:
    if plan.settings.answer.price is None or not to_run:
        return ""
    cost = _price_of(plan, to_run)
    if cost["price"] is None:
        return "unknown, because the time is"
    return _write_price(cost["price"], cost["price_range"])


def _about_total(plan: Plan, to_run: Sequence[PlannedTrial]) -> str:
    """Return the number of trials, how many have ended, and the time of the others."""
    count = len(plan.trials)
    ended = count - len(to_run)
    trials = "1 trial" if count == 1 else f"{count} trials"
    have_ended = f" {ended} of them have ended;" if ended else ""

    time = _total_time(
        to_run,
        plan.execution,
        plan.forecast_factor or 1.0,
        plan.forecast_reason or "",
    )
    if plan.settings.seeds == "auto":
        most = sum(most_trials(plan).values())
        time = f"at least {time}; at most {most} trials, {_most_time(plan, to_run)}"
    elif plan.awaits_rates:
        time += "; tuning trials that follow from these are not counted"
    if plan.execution.trials_at_once > 1 and plan.execution.device != "cpu":
        time += ", as if trials ran one after the other, because what sharing saves is not known"
    return f"{trials},{have_ended} estimated time {time}"


def _about_code(plan: Plan) -> str:
    """Return the user's files, and packages with their versions."""
    if not plan.code:
        return ""
    packages = plan.code.get("packages", {})
    names = [*plan.code.get("files", {})]
    names += [f"{package} {version}" for package, version in packages.items()]
    return ", ".join(names) if names else "no file"


def _shortened_warmup(plan: Plan) -> str:
    """Return where the warmup is shorter than the minimum that the schedule sets."""
    minimum = plan.settings.schedule.warmup_min_steps
    if not plan.settings.workload.receives("warmup_steps"):
        return ""
    planned = [row for row in plan.trials if row.tokens]
    shorter = {row.batch_size: row for row in planned if row.warmup_steps < minimum}
    if not shorter:
        return ""
    steps = ", ".join(
        f"{row.warmup_steps:,} of {row.steps:,} steps at batch size {batch_size}"
        for batch_size, row in sorted(shorter.items())
    )
    rule = "applies to fixed rates only"
    if any(row.warmup_min_steps for row in shorter.values()):
        rule = "is cut to a tenth of the steps"
    return f"{steps}; the minimum of {minimum:,} (schedule.warmup_min_steps) {rule}"


def _describe_sharing(plan: Plan) -> str:
    """Return how many trials share a device, and why; "" if the user did not ask for it."""
    execution = plan.execution
    if not execution.at_once_reason:
        return ""
    trials = "1 trial" if execution.trials_at_once == 1 else f"{execution.at_once} trials"
    each = f"with {_name_threads(execution.threads)}"
    return f"{trials} per device, {each}: {execution.at_once_reason}"


def about_microbatch(plan: Plan) -> str:
    """Return which batch sizes are smaller than the microbatch that the user chose; "" if none."""
    chosen = plan.execution.microbatch
    if chosen is None:
        return ""
    smaller = sorted({row.batch_size for row in plan.trials if row.microbatch_size < chosen})
    if not smaller:
        return ""
    sizes = ", ".join(map(str, smaller))
    return f"less than {chosen} at batch size {sizes}, whose steps have fewer sequences per device"


def _about_tokens(plan: Plan) -> str | None:
    """Return a note if the tokens of the final trials differ; with a target they are a cap."""
    finals = [row for row in plan.trials if row.stage == "final"]
    if plan.awaits_times:
        return "fixed once steps are timed, by `sweep run` or --timing"
    tokens = {row.tokens for row in finals}
    sizes = {row.batch_size for row in finals}
    if plan.is_part and plan.token_budget is not None:  # that of other parts differ too
        sizes = {*plan.settings.batches}
        of_sizes, _ = tokens_per_trial(plan.token_budget, sizes, plan.tokens_per_sequence)
        tokens = {*of_sizes.values()}
    if not plan.needs_common_tokens or len(tokens) < 2:
        return None
    if plan.can_compare(tokens):
        apart = 100 * (max(tokens) / min(tokens) - 1)
        return f"they differ by {apart:.2g} % between batch sizes, which the intervals allow for"
    text = "they differ between batch sizes, because equal counts would lose over 1 % of the budget"
    try:
        budget = common_tokens(plan, sizes)["budget"]
    except SweepError as error:
        return f"{text}. No claim can be made. {error}"
    return f"{text}. No claim can be made; --budget {budget} makes them equal."


def _internal_notes(plan: Plan) -> dict[str, Any]:
    """Return what `--verbose` adds to the plan's notes."""
    settings = plan.settings
    notes: dict[str, Any] = {}
    is_rate_only = not settings.workload.receives("beta2", "weight_decay")
    for policy in sorted({row.policy for row in plan.trials}):
        rule = describe_policy(policy, settings.tuning.dimensions, is_rate_only)
        notes[f"Rate, {policy}"] = rule.replace("tokens", settings.token_unit)
    if not settings.workload.is_program:
        for name in settings.optimizer_names:
            rules = optimizer_facts(name)["rules"]
            notes[f"Optimizer, {name}"] = rules.replace("tokens", settings.token_unit)

    vocabulary = settings.model.vocabulary
    if vocabulary:
        notes["Vocabulary"] = f"{vocabulary:,}, the tokenizer is {settings.tokenizer}"
    notes["Compilation"] = plan.execution.compile_reason
    if plan.execution.graph_reason:
        notes["CUDA graphs"] = plan.execution.graph_reason
    notes["Memory"] = f"The forecast is for eager steps. {plan.execution.reason}".strip()
    return notes


def print_status(document: dict[str, Any]) -> None:
    metric = Objective(document["metric"])
    unit = document["unit"]
    several = any(row["optimizer"] for row in document["trials"])  # optimizers
    rows = [
        {
            "id": row["id"],
            "optimizer": row["optimizer"],
            "budget": None if row["budget"] is None else format_count(row["budget"]),
            "batch size": str(row["batch_size"]),
            "seed": stage_of(row).removeprefix("seed "),
            "lr": "predicted" if row["learning_rate"] is None else f"{row['learning_rate']:.3g}",
            "state": state_of(row).replace(" ", "\n"),
            unit: write_if(row["tokens"], format_count),
            "loss": write_if(row["loss"]),
            metric.title.removeprefix("final "): None if metric == LOSS else write_if(row["value"]),
            f"{unit}/s": None if several else write_if(row["tokens_per_second"], format_count),
            "left": write_if(row["eta_seconds"], format_seconds),  # finished trials have none
        }
        for row in document["trials"]
    ]
    state = f": {document['state']}{time_text(document['eta_seconds'])}"
    title = Text.assemble((printable(document["sweep"]), "bold"), state)
    build_console().print(title, build_table(rows, gap=1), sep="\n")
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


def _name_threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def print_times(timing: Timing, plan: Plan, folder: SweepFolder) -> None:
    """Print the times of each batch size, and their ratios to the fastest for equal tokens."""
    per_sequence = {times.arm: times.seconds_per_sequence for times in timing.arms}
    fastest = min(per_sequence, key=lambda arm: estimate_time(per_sequence[arm]).median)
    rows = []
    for times in timing.arms:
        step = estimate_time(times.seconds_per_step)
        ratio = ratio_of_rounds(times.seconds_per_sequence, per_sequence[fastest], len(timing.arms))
        rate = plan.tokens_per_sequence / estimate_time(times.seconds_per_sequence).median
        is_fastest = times.arm == fastest
        rows.append(
            {
                "optimizer": times.optimizer,
                "batch size": str(times.batch_size),
                "tokens": _in_tokens(times.batch_size, plan),
                "microbatch": str(times.microbatch_size),
                "seconds per step": _write_estimate(step, ".4g"),
                f"{plan.settings.token_unit}/s": format_count(rate),
                "relative time": "1" if is_fastest else _write_estimate(ratio, ".3f"),
                "load": {True: "loaded", False: "", None: "unknown"}[times.is_loaded],
            }
        )
    threads = _name_threads(timing.execution["threads"])
    title = f"{timing.device}, {threads}, {timing.rounds} rounds"
    build_console().print(title, build_table(rows), sep="\n")
    say(
        f"Relative time: for equal {plan.settings.token_unit}, the fastest is 1. In parentheses: "
        "95 % intervals; those of relative times hold together."
    )
    for note in _timing_notes(timing):
        say(note)
    echo(f"Written to {folder.timing_path}.")


def _write_estimate(estimate: TimeEstimate, form: str) -> str:
    return f"{estimate.median:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def _timing_notes(timing: Timing) -> list[str]:
    """Return sentences about what limits these times."""
    notes = []
    if any(times.is_loaded for times in timing.arms):
        notes.append(
            "Other programs used the processors, so what follows from loaded times is provisional. "
            "Measure again on an idle machine."
        )
    if any(times.is_loaded is None for times in timing.arms):
        notes.append("This system does not tell whether other programs used the processors.")
    if not timing.has_real_batches:
        notes.append("Steps trained on random tokens, because the data is not prepared here.")
    return notes


def print_results(document: dict[str, Any], folder: SweepFolder, as_json: bool) -> None:
    """Print what failed, the answer, and what would make it clearer."""
    from sweep.analysis.results import load_sweep

    sweep = load_sweep(folder.path)
    answer = sweep.answer()
    if as_json:
        print_document(document | {"answer": sweep.answer_document()})
        return

    _print_failures(document)
    path = shlex.quote(str(folder.path))
    failed = [row["id"] for row in document["trials"] if row["state"] == State.FAILED]
    if failed:
        echo(f"`sweep log {path} {failed[0][:6]}` prints the output of a trial.")

    states = Counter(map(state_of, document["trials"]))
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    echo(f"{document['sweep']}: {counts}")
    echo(f"Report: {document['report']}, or `sweep open {path}`\n")
    say("\n".join(sweep.sentences()))
    print_next(answer)


def print_next(answer: "Answer | None") -> None:
    """Print the command that would settle what an answer leaves open, or why there is none."""
    if answer is None:
        return
    if answer.settle_reason:
        say(answer.settle_reason)
    if answer.settle:
        seconds = answer.settle_seconds
        cost = f", at least {format_seconds(seconds)}" if seconds else ""
        echo(f"Next{cost}: {answer.settle}")
    if answer.settle_longer:
        echo(f"Longer trainings: {answer.settle_longer}")


def print_metrics(lines: Sequence[dict[str, Any]], unit: str) -> None:
    """Print the evaluations of a trial: tokens, seconds since its first line, and losses."""
    names: dict[str, None] = {}  # a set in the order of the first lines
    for line in lines:
        names |= dict.fromkeys(name for name in line if name.startswith("valid/"))

    rows = []
    train_loss = None
    for line in lines:
        train_loss = line.get("train/loss", train_loss)
        if any(name in line for name in names):
            row = {
                unit: f"{line['tokens']:,}",
                "time": format_seconds(line["time"] - lines[0]["time"]),
                "train/loss": write_if(train_loss),
            }
            row |= {name: write_if(line.get(name)) for name in names}
            rows.append(row)
    build_console().print(build_table(rows))
