"""Write the report of one sweep (report.md, report.html, trials.csv and figures/*.png).

Also write the pages of `sweep forecast` and `sweep probe`.
"""

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined

from sweep.analysis import tables
from sweep.analysis.answer import Answer
from sweep.analysis.answer_data import MISSING, BatchSizeAnswer
from sweep.analysis.budget_laws import describe_best, describe_growth
from sweep.analysis.budgets import BestBatchSize
from sweep.analysis.checks import check_curve, supports_crossings, supports_fit
from sweep.analysis.critical_batch_size import StepsCurve, losses_at
from sweep.analysis.next_step import command_for_times
from sweep.analysis.noise_scale import LEAST_RECORDS, noise_scales
from sweep.analysis.rate_rules import (
    RULES,
    RuleCost,
    describe_costs,
    rate_exponent,
    rule_costs,
    rules_table,
    summarize_rules,
)
from sweep.analysis.results import Sweep, load_sweep
from sweep.analysis.tables import format_range
from sweep.config.numbers import format_both, format_bytes, format_count, format_seconds, short
from sweep.config.objective import LOSS
from sweep.config.optimizers import optimizer_facts
from sweep.config.workloads import FINAL_PROMPTS
from sweep.decision.proposal import command_with, recorded_out
from sweep.errors import SweepError, printable
from sweep.plan.plan import Plan
from sweep.plan.policies import LEAST_SEEDS, describe_policy
from sweep.report.charts import Chart, plot_all
from sweep.report.page import LOADER, to_html
from sweep.trial.files import replacing, sha256_of
from sweep.trial.folder import SweepFolder
from sweep.version import __version__


def write_report(path: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a sweep folder, by default into it, and return the path of report.md.

    Each file is replaced atomically, report.md last.
    """
    sweep = load_sweep(path)
    out = Path(out) if out else Path(path)
    if SweepFolder(Path(path)).is_published and out.resolve() == Path(path).resolve():
        raise SweepError(f"{path} is published and stays as it is. Write to another --out FOLDER.")

    charts = plot_all(sweep)
    _write_figures(charts, out / "figures")
    tables.write_trials_csv(sweep, out / "trials.csv")

    rates = _rates(sweep)
    _write_rules(rates["rules"], out / "rules.csv")
    text = _markdown_of_sweep(sweep, charts, rates)
    page = to_html(text, f"Batch-size sweep: {sweep.name}", charts, sweep.all_batch_sizes)
    document = json.dumps(sweep.answer_document(), indent=1)
    for name, content in (("answer.json", document), ("report.html", page), ("report.md", text)):
        with replacing(out / name) as part:
            part.write_text(content, encoding="utf-8")
    return out / "report.md"


def _write_rules(costs: Sequence[RuleCost], path: Path) -> None:
    """Write what each rule for the rate gives up; no file without rules."""
    if not costs:
        path.unlink(missing_ok=True)  # an earlier report may have had them
        return
    with replacing(path) as part:
        rules_table(costs).to_csv(part, index=False, lineterminator="\n")


def _write_figures(charts: Mapping[str, Chart | None], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in charts.items():
        path = folder / f"{name}.png"
        if chart is None:
            path.unlink(missing_ok=True)  # an earlier report may have had it
            continue
        with replacing(path) as part:
            part.write_bytes(chart.png)


def _markdown_of_sweep(
    sweep: Sweep, charts: Mapping[str, Chart | None], rates: Mapping[str, Any]
) -> str:
    objective = sweep.plan.settings.evaluated
    cells = tables.compare_batch_sizes(sweep.trials, objective)
    trials = sweep.trials.fillna({"state": "unknown"})
    has_failed = trials["cause"].notna()
    is_loss = objective.name == LOSS.name
    has_gap = is_loss and sweep.plan.settings.data is not None
    if objective.train_column in trials and trials[objective.train_column].notna().any():
        has_gap = True
    curves = {policy.label: policy.curve for policy in sweep.policies if policy.curve}
    scope = ""
    if sweep.leading:
        scope = sweep.leading.scope
    return render(
        "report.md.j2",
        version=__version__,
        charts=charts,
        sweep=sweep,
        policies=sorted(sweep.policies, key=lambda policy: policy is not sweep.leading),
        answer=sweep.answer(),
        budgets=sweep.budgets if sweep.smaller else (),
        growth=_describe_growth_of(sweep),
        has_law=sweep.growth.best is not None,
        lines=sweep.sentences(),
        scope=scope,
        warmup_fractions=[row.warmup_steps / row.steps for row in sweep.plan.known_trials],
        cells=cells.to_dict("records"),
        is_loss=is_loss,
        has_gap=has_gap,
        other_metrics=tables.other_metrics(sweep.trials, objective),
        all_trials=sweep.trials.to_dict("records"),
        failures=trials[has_failed].to_dict("records"),
        gains=tables.find_gains(sweep) if sweep.plan.settings.workload.samples else (),
        final_prompts=FINAL_PROMPTS,
        noise=list(noise_scales(sweep)),
        least_noise_records=LEAST_RECORDS,
        noise_command=_noise_command(sweep.plan),
        time_command=command_for_times(sweep),
        other_curves=sweep.other_curves if curves else (),
        check_curve=check_curve,
        supports_crossings=supports_crossings,
        supports_fit=supports_fit,
        steps=[*chain.from_iterable(_steps(curve) for curve in curves.values())],
        equal_losses=_equal_losses(sweep, curves),
        **rates,
    )


def _equal_losses(sweep: Sweep, curves: Mapping[str, StepsCurve]) -> list[tuple[Any, ...]]:
    """Return each measure and policy with the losses that batch sizes reach with as much of it."""
    rows = []
    for measure, (label, curve) in product(("tokens", "steps", "seconds"), curves.items()):
        trials = curve.trials
        if measure == "seconds":
            per_token = trials["batch_size"].map(_seconds_per_token(sweep, label))
        else:
            per_token = trials[measure] / trials["tokens"]
        if trials["has_curve"].any():
            rows.append((measure, label, *losses_at(sweep, trials, per_token)))
    return rows


def _seconds_per_token(sweep: Sweep, label: str) -> dict[int, float]:
    """Return the times of the answer of a policy over its tokens to the target, if it has any."""
    answers = [result.answer for result in sweep.policies if result.label == label]
    seconds = {}
    for row in chain.from_iterable(answer.batch_sizes for answer in answers if answer):
        if row.seconds is not None and row.mean is not None:
            seconds[row.batch_size] = row.seconds / row.mean
    return seconds


def _describe_growth_of(sweep: Sweep) -> list[str]:
    if not sweep.budgets:
        return []
    unit = sweep.plan.settings.token_unit
    return describe_growth(sweep.growth, sweep.budgets[-1], unit)


def _noise_command(plan: Plan) -> str | None:
    """Return the command that trains this sweep again and measures the gradient noise scale.

    None if the sweep measures it, if its workload cannot, or if no command line has its settings.
    """
    settings = plan.settings
    if settings.noise_scale.measure or not settings.workload.can_measure_noise:
        return None
    try:
        return command_with(plan, noise=True, out=f"{recorded_out(plan)}-noise")
    except SweepError:
        return None


def _rates(sweep: Sweep) -> dict[str, Any]:
    """Return what the report says about learning rates."""
    result = sweep.leading
    if result is None or not result.rates:
        return {"rates": (), "exponent": None, "rules": (), "rule_summaries": ()}
    sigma: dict[int, float] = {}
    if result.answer and result.decision:
        sizes = [row.batch_size for row in result.answer.batch_sizes]
        sigma = dict(zip(sizes, np.sqrt(result.decision.variance).tolist(), strict=True))
    costs = rule_costs(sweep.plan, result.rates, sigma)
    rules = dict.fromkeys(cost.rule for cost in costs)  # in their order
    return {
        "rates": result.rates,
        "exponent": rate_exponent(result.rates),
        "rules": costs,
        "rule_summaries": summarize_rules(costs),
        "rules_sentence": describe_costs(costs, sweep.plan.settings.objective.margin),
        "rule_names": {name: RULES[name] for name in rules},
    }


def _steps(curve: StepsCurve) -> list[dict[Any, Any]]:
    """Return each batch size's steps to the target: means over the seeds that reached it."""
    batches = curve.trials.groupby("batch_size")
    table = batches[["label", "learning_rate"]].first()
    table["seeds"] = batches["is_known"].sum()
    table["bound"] = batches["steps"].min()

    is_reached = curve.trials["is_known"] & ~curve.trials["is_censored"]
    reached = curve.trials[is_reached].groupby("batch_size")
    table["reached"] = reached.size().reindex(table.index, fill_value=0)
    table[["tokens", "steps"]] = reached[["tokens", "steps"]].mean()
    table["steps_sd"] = reached["steps"].std()

    table["slope"] = np.nan
    table["residual"] = np.nan
    if curve.fit:
        sizes = list(curve.batch_sizes)
        table["slope"] = pd.Series(curve.fit.slopes, sizes[1:])
        table["residual"] = pd.Series(curve.fit.residuals.mean(0), sizes)
    return table.reset_index().to_dict("records")


def render(template: str, **context: Any) -> str:
    text = MARKDOWN.get_template(template).render(context)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def markdown_of(document: Mapping[str, Any]) -> str:
    """Return the page of `sweep forecast` or `sweep probe`."""
    peaks = [point["peak_bytes"] for point in document["points"] if point["peak_bytes"]]
    # One unit for the whole page, so that rows can be compared.
    if max(peaks, default=0) >= 2**30:
        unit = "GiB"
        scale = 2.0**30
        default_digits = 3
    else:
        unit = "MiB"
        scale = 2.0**20
        default_digits = 1

    def size(number_of_bytes: float | None, digits: int = default_digits) -> str | None:
        if number_of_bytes is None:
            return None
        return f"{number_of_bytes / scale:.{digits}f}"

    return render(f"{_kind_of(document)}.md.j2", document=document, unit=unit, size=size)


def write_memory(document: Mapping[str, Any], out: Path) -> Path:
    """Write the page and its JSON into a folder; return the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    contents = {"json": json.dumps(document, indent=1) + "\n", "md": markdown_of(document)}
    for suffix, content in contents.items():
        with replacing(out / f"{_kind_of(document)}.{suffix}") as part:
            part.write_text(content, encoding="utf-8")
    return out / f"{_kind_of(document)}.md"


def _kind_of(document: Mapping[str, Any]) -> str:
    return "probe" if "verdict" in document else "forecast"


class Code(str):
    """Text for a code block, which is not escaped."""


# Characters with a meaning in Markdown; GitHub also reads dollars and tildes.
MARKUP = re.compile(
    r"[\\`*$~|]"
    r"|<(?=[a-zA-Z/!?])"  # HTML, and links
    r"|&(?=#?\w+;)"
    r"|(?<!\S)#+(?=\s|$)"  # ends a heading
)
UNDERSCORES = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])")  # at the edge of a word
BRACKETS = re.compile(r"[\[\]]")


def escape(value: Any) -> Any:
    """Escape what Markdown would not show as it is, for text in a line or in a table's cell."""
    if _is_missing(value):
        return MISSING
    if isinstance(value, Code):
        return printable(value)
    if not isinstance(value, str):
        return value
    line = printable(re.sub(r"[\r\n\t]+", " ", value))
    may_link = not _has_pairs(line)
    line = MARKUP.sub(r"\\\g<0>", line)
    line = UNDERSCORES.sub(lambda run: r"\_" * len(run[0]), line)
    if may_link:
        line = BRACKETS.sub(r"\\\g<0>", line)
    return line


def _has_pairs(line: str) -> bool:
    """Return True if each bracket has its partner, and none could begin or end a link."""
    depth = 0
    for bracket in BRACKETS.findall(line):
        depth += 1 if bracket == "[" else -1
        if depth < 0:
            return False
    return depth == 0 and not re.search(r"\][(\[]", line)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _or_missing(form: Callable[..., str]) -> Callable[..., str]:
    return lambda value, *more: MISSING if _is_missing(value) else form(value, *more)


def _with_spread(form: Callable[[float], str]) -> Callable[..., str]:
    def write(mean: float, sd: float = math.nan, seeds: int = 0) -> str:
        if seeds < LEAST_SEEDS or not math.isfinite(sd):
            return form(mean)
        return f"{form(mean)} ± {form(sd)}"

    return write


def _write_best_rate(row: BatchSizeAnswer) -> str:
    if row.best_learning_rate is None:
        return MISSING
    bounds = "not bounded"
    if row.learning_rate_interval is not None:
        bounds = NUMBER_FORMATS["interval"](row.learning_rate_interval, ".3g")
    return f"{NUMBER_FORMATS['rate'](row.best_learning_rate)} ({bounds})"


def _write_regret(row: BatchSizeAnswer, answer: Answer) -> str:
    if row.estimated_regret is None or row.regret_interval is None:
        return MISSING
    _, most = row.regret_interval
    value = answer.compared.write(row.estimated_regret)
    return f"{value.split()[0]}, at most {answer.compared.write(most)}"


def _write_time(row: BatchSizeAnswer) -> str:
    if row.seconds is None:
        return MISSING
    text = format_seconds(row.seconds)
    if row.seconds_bounds is None:
        return text
    low, high = map(format_seconds, row.seconds_bounds)
    note = "range " if row.seconds_interval is None else ""
    return f"{text} ({note}{low} to {high})"


def _write_price(row: BatchSizeAnswer) -> str:
    if row.price is None:
        return MISSING
    text = f"{row.price:.3g}"
    if row.price_bounds is None:
        return text
    low, high = row.price_bounds
    note = "range " if row.price_interval is None else ""
    return f"{text} ({note}{low:.3g} to {high:.3g})"


def _write_batch(ends: Sequence[float | None], tokens_per_sequence: int) -> str:
    """Write a batch size, or the two ends of a range, in sequences and in tokens."""

    known = [end for end in ends if end is not None]
    if len(known) < len(ends):
        return "not bounded"
    text = " to ".join(f"{end:.3g}" for end in known)
    if tokens_per_sequence == 1:
        return text
    tokens = " to ".join(format_count(end * tokens_per_sequence) for end in known)
    return f"{text} ({tokens} tokens)"


def _write_best_size(best: BestBatchSize, tokens_per_sequence: int) -> str:
    if best.value is None:
        return describe_best(best)
    return _write_batch([best.value], tokens_per_sequence)


def _write_worth(worth: tuple[float, float | None] | None) -> str:
    """Write a share of the tokens, as a percentage."""
    if worth is None:
        return MISSING
    low, high = worth
    if high is None:
        return f"{100 * low:.0f} % or more"
    return f"{100 * low:.0f} to {100 * high:.0f} %"


def _write_frontier(row: BatchSizeAnswer) -> str:
    """Write whether no other batch size is better and sooner."""
    if row.dominated is not None:
        return "no, dominated" if row.dominated else "yes"
    return "may be" if row.seconds is not None and row.mean is not None else MISSING


MARKDOWN = Environment(
    loader=LOADER, undefined=StrictUndefined, finalize=escape, trim_blocks=True, lstrip_blocks=True
)
NUMBER_FORMATS: dict[str, Callable[..., str]] = {
    "loss": _with_spread(lambda x: format(x, ".4f" if 1e-3 <= abs(x) < 1e3 else ".5g")),
    "estimate": lambda estimate, form=".4g": format(estimate, form),
    "count": _with_spread("{:,.0f}".format),
    "signed": "{:+.3f}".format,
    "rate": lambda value: short(float(f"{value:.3g}")),
    "interval": lambda ends, form: f"{ends[0]:{form}} to {ends[1]:{form}}",
    "best_rate": _write_best_rate,
    "regret": _write_regret,
    "time": _write_time,
    "batch": _write_batch,
    "worth": _write_worth,
    "best_size": _write_best_size,
    "price": _write_price,
    "frontier": _write_frontier,
    "percent": lambda value: f"{100 * value:.{2 if abs(value) < 0.995 else 3}g} %",
    "number": lambda value: f"{value:.3g}" if value < 1000 else format_count(value),
    "short_count": format_count,
    "seconds": format_seconds,
    "bytes": format_bytes,
    "both": format_both,
}
MARKDOWN.filters |= {name: _or_missing(form) for name, form in NUMBER_FORMATS.items()}
MARKDOWN.filters |= {
    "range": format_range,
    "mean": mean,
    "json": json.dumps,
    "sha256": sha256_of,
    "join_unique": lambda texts: ", ".join(sorted(set(filter(None, texts)))),
    "code": Code,
    "rule_cost": lambda cost: "outside" if cost is None else format(cost, "z.3f"),
    "words": shlex.split,
    "word": lambda argument: Code(" ".join(shlex.quote(argument).split())),
    "yes_or_no": {True: "yes", False: "no"}.get,
}
MARKDOWN.globals |= {"describe_policy": describe_policy, "optimizer_facts": optimizer_facts}
