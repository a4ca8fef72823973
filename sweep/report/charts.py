"""The charts of a report. Each `plot_*` function returns None if there is nothing to compare."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sweep.analysis.answer_data import AnswerData, join
from sweep.analysis.budget_laws import describe_best, describe_interval
from sweep.analysis.checks import supports_fit
from sweep.analysis.judge import PolicyResult
from sweep.analysis.rate_rules import rate_exponent
from sweep.analysis.results import Sweep
from sweep.analysis.tables import (
    Estimate,
    compare_batch_sizes,
    final_trials,
    format_range,
    mean_of,
)
from sweep.config.numbers import format_count
from sweep.config.objective import LOSS
from sweep.decision.decision import OUTSIDE, UNDECIDED, WITHIN
from sweep.decision.trials import End
from sweep.plan.policies import LEAST_SEEDS
from sweep.report import vega
from sweep.report.drawing import draw, own_style
from sweep.report.vega import BOTTOM, COUNT, DASHES, SHAPES, SIZE, TOP, Spec
from sweep.trial.status import State

RED = "#d0342c"
LONG_SECONDS = 120  # from which on times are in minutes
GREEN = "#1a9468"
VERDICTS = {WITHIN: "diamond", UNDECIDED: "square", OUTSIDE: "circle"}
SQUEEZED = 3  # a policy whose means span less than this part of all has a panel of its own
FAR = 3.0  # interquartile ranges above the third quartile (Tukey 1977)
START = 0.05  # share of the tokens whose losses may lie above the panel
POLICY = "policy"  # its label, with the optimizer or the fixed rate
CURVE = [POLICY, SIZE, "trial"]  # the columns that identify a curve; a mean has an empty trial
RATE = "learning rate"
EXTRAPOLATED = 10.0  # largest budget up to which a law is drawn, over the largest that was trained
NAMES = {"batch_size": SIZE, "label": POLICY, "learning_rate": RATE, "tolerance_verdict": "verdict"}


@dataclass(frozen=True)
class Chart:
    """A figure: what it shows, and its panels, which are Vega-Lite specifications."""

    title: str
    panels: list[Spec] = field(repr=False)

    def draw(self) -> Figure:
        """Draw it with matplotlib."""
        return draw(self.panels, self.title)

    @cached_property
    def png(self) -> bytes:
        """The picture as a file whose bytes depend on it alone."""
        file = BytesIO()
        with own_style(), np.errstate(over="ignore"):  # limits beyond the largest float
            self.draw().savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png


def _final_trials(trials: pd.DataFrame) -> pd.DataFrame:
    return final_trials(trials).drop(columns=POLICY).rename(columns=NAMES)


def _worst_edge(sweep: Sweep) -> Spec:
    return BOTTOM if sweep.plan.settings.objective.sign < 0 else TOP


def plot_all(sweep: Sweep) -> dict[str, Chart | None]:
    """Return the charts of a report by name."""
    plots = (
        plot_budgets,
        plot_frontier,
        plot_answer,
        plot_loss,
        plot_steps,
        plot_rates,
        plot_curves,
        plot_throughput,
    )
    return {plot.__name__.removeprefix("plot_"): plot(sweep) for plot in plots}


def plot_frontier(sweep: Sweep) -> Chart | None:
    """Plot the validation loss against tokens and against the time of training.

    Points are the final results of the policy that the report opens with, with their intervals, and
    curves are means over the complete seeds.
    """
    ends = _frontier(sweep)
    answer = sweep.answer()
    if answer is not None:
        ends = ends[ends[POLICY].isin([each.policy for each in answer.of_all_optimizers])]
    has_several_sizes = ends.groupby(POLICY)[SIZE].nunique().gt(1).any()
    if not has_several_sizes:
        return None
    objective = sweep.plan.settings.evaluated
    name = objective.title.removeprefix("final ")
    curves = _validation_curves(sweep, ends, name)
    longest = pd.concat([curves["seconds"], ends["seconds"]]).max()
    unit, seconds = _time_unit(longest)
    curves["seconds"] /= seconds
    ends[["seconds", "earliest", "latest"]] /= seconds

    panels = []
    token_unit = sweep.plan.settings.token_unit
    if len(curves) or ends["tokens"].nunique() > 1:  # else all points have the same tokens
        panels.append(_plot_frontier(sweep, curves, ends, "tokens", name, f"training {token_unit}"))
    if ends["seconds"].notna().any():
        panels.append(_plot_frontier(sweep, curves, ends, "seconds", name, f"{unit} of training"))
    target = sweep.plan.settings.target
    if not panels or (target is not None and curves.empty):
        return None
    title = f"The {name} ends at {format_range(ends['result'], '.4g')}"
    if target is not None:
        verb = "reaches" if ends["result"].notna().any() else "is not known to reach"
        title = f"The {name} {verb} {target:g}"
    if ends["seconds"].notna().any():
        title += f" after {format_range(ends['seconds'], '.3g')} {unit} of training"
    return Chart(title, panels)


def _frontier(sweep: Sweep) -> pd.DataFrame:
    """Return the ends of trainings by policy and batch size, and their seconds per token.

    The result is the mean of the complete seeds, with `low` and `high` for its 95 % interval; with
    a target, it is that target. `earliest` and `latest` bound the time. What is not known is NaN.
    """
    settings = sweep.plan.settings
    trials = _final_trials(sweep.trials)
    complete = trials[trials["trial_end"] == End.COMPLETE]
    answers = {result.label: result.answer for result in sweep.policies}
    rows = []
    for _, of_cell in complete.groupby([POLICY, SIZE], sort=False):
        policy = str(of_cell[POLICY].iloc[0])
        size = int(of_cell[SIZE].iloc[0])
        answer = answers.get(policy)
        answered = None if answer is None else answer[size]
        bounds = None if answered is None else answered.seconds_bounds
        tokens = float(of_cell["tokens"].median())
        seconds = float(of_cell["seconds_training"].median())
        seconds_per_token = seconds / tokens
        result = mean_of(of_cell[settings.evaluated.name].astype(float).to_list())
        if settings.target is not None:
            mean = None if answered is None else answered.mean  # tokens to the target
            tokens = math.nan if mean is None else mean
            result = Estimate(settings.target if mean else math.nan, math.nan, math.nan)
        if answered is not None and answered.seconds is not None:
            seconds = answered.seconds
            if math.isfinite(tokens):
                seconds_per_token = seconds / tokens
        is_ended = math.isfinite(tokens)
        has_interval = len(of_cell) >= LEAST_SEEDS
        rows.append(
            {
                POLICY: policy,
                SIZE: size,
                "tokens": tokens,
                "seconds": seconds if is_ended else math.nan,
                "earliest": bounds[0] if bounds and is_ended else math.nan,
                "latest": bounds[1] if bounds and is_ended else math.nan,
                "result": result.value,
                "low": result.low if has_interval else math.nan,
                "high": result.high if has_interval else math.nan,
                "seconds per token": seconds_per_token,
            }
        )
    numbers = ["tokens", "seconds", "earliest", "latest", "result", "low", "high"]
    numbers.append("seconds per token")
    table = pd.DataFrame(rows, columns=[POLICY, SIZE, *numbers])
    return table.astype(dict.fromkeys(numbers, float))


def _validation_curves(sweep: Sweep, ends: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the mean curves of the evaluated metric, at tokens and at times of training."""
    curves = _curves_of_trials(sweep, sweep.plan.settings.evaluated.curve, name)
    curves["trial"] = curves["trial"].mask(curves["trial"] == "")
    rates = ends[[POLICY, SIZE, "seconds per token"]]
    curves = curves[curves[POLICY].isin(ends[POLICY])].merge(rates, on=[POLICY, SIZE], how="left")
    return curves.assign(seconds=curves["tokens"] * curves["seconds per token"])


def _plot_frontier(
    sweep: Sweep, curves: pd.DataFrame, ends: pd.DataFrame, amount: str, name: str, title: str
) -> Spec:
    """Plot curves, and their ends with intervals, against tokens or against the time."""
    objective = sweep.plan.settings.evaluated
    ends = ends.rename(columns={"result": name})
    settled = curves.loc[curves["tokens"] >= START * curves["tokens"].max(), name]
    y_title = f"{name} [{objective.label}]" if objective.label else name
    is_time = amount == "seconds"
    columns = [amount, "earliest", "latest"] if is_time else [amount]
    drawn = [*curves[amount], *ends[columns].to_numpy().ravel()]
    x = vega.channel(amount, [0.0, *drawn], title, "" if is_time else COUNT)
    on_axis = [*settled, *ends[[name, "low", "high"]].to_numpy().ravel()]
    y = vega.channel(name, on_axis, y_title, scale="narrow")

    labels = [*dict.fromkeys([*ends[POLICY], *curves[POLICY]])]
    dash = vega.names(POLICY, labels, DASHES)
    shape = vega.names(POLICY, labels, SHAPES)
    color = vega.size_color(sweep.all_batch_sizes)
    detail = {"field": "trial"}
    layers = [
        vega.layer("line", curves, x, y, color=color, strokeDash=dash, detail=detail, tooltip=True),
        vega.layer("rule", ends, x, y | {"field": "low"}, y2={"field": "high"}, color=color),
        vega.layer("point", ends, x, y, color=color, shape=shape, size=60),
    ]
    if not is_time:
        trials = _final_trials(sweep.trials)
        has_diverged = (trials["trial_end"] == End.DIVERGED) & trials[POLICY].isin(labels)
        diverged = trials.loc[has_diverged, [SIZE, "seed", amount]]
        edge = _worst_edge(sweep)
        layers.append(vega.layer("point", diverged, x, edge, color=RED, shape="cross", size=70))
    else:
        earliest = x | {"field": "earliest"}
        latest = {"field": "latest"}
        layers.insert(1, vega.layer("rule", ends, earliest, y, x2=latest, color=color))
    return vega.panel(layers, sweep.all_batch_sizes)


def _time_unit(longest: float) -> tuple[str, float]:
    """Return the unit in which times up to this one are drawn, and its seconds."""
    if longest >= LONG_SECONDS:
        return "minutes", 60.0
    return "seconds", 1.0


def plot_budgets(sweep: Sweep) -> Chart | None:
    """Plot the best batch size against the budget, and losses against tokens and times.

    A thick line is the range of batch sizes within the tolerance, a thin one the interval of the
    best one. The law is drawn with its interval, and dashed beyond the budgets.
    """
    budgets = sweep.budgets
    if len(budgets) < 2:
        return None
    losses = _losses_of_budgets(sweep)
    objective = sweep.plan.settings.evaluated
    name = objective.title
    y_title = f"{name} [{objective.label}]" if objective.label else name
    panels = [_plot_best_batch_sizes(sweep)]
    unit, seconds = _time_unit(losses["seconds"].max())
    losses["seconds"] /= seconds
    titles = {
        "tokens": f"training {sweep.plan.settings.token_unit}",
        "seconds": f"{unit} of training",
    }
    for amount, title in titles.items():
        if losses[amount].notna().any():
            panels.append(_plot_losses_of_budgets(sweep, losses, amount, title, y_title))

    unit_of_tokens = sweep.plan.settings.token_unit
    texts = [
        f"at {format_count(budget.tokens)} {unit_of_tokens}: {describe_best(budget.best)}"
        + describe_interval(budget.best)
        for budget in (budgets[0], budgets[-1])
    ]
    title = f"The best batch size {'; '.join(texts)}"
    return Chart(title, panels)


def _plot_best_batch_sizes(sweep: Sweep) -> Spec:
    unit = sweep.plan.settings.token_unit
    best_size = "best batch size"
    rows = []
    for budget in sweep.budgets:
        interval = budget.best.interval
        within = budget.best.range_within_tolerance
        bounds = {"smallest": within[0], "largest": within[1]}
        rows.append(
            {
                "budget": budget.tokens,
                best_size: budget.best.value,
                "bound": bounds.get(budget.best.edge),
                "low": interval[0],
                "high": interval[1],
                "within from": within[0],
                "within to": within[1],
            }
        )
    table = pd.DataFrame(rows).astype(float)
    largest = table["budget"].max()
    law = sweep.growth.best
    lines = pd.DataFrame()
    if law is not None:
        grid = np.geomspace(table["budget"].min(), EXTRAPOLATED * largest, 60)
        estimates = pd.DataFrame([law.at(tokens) for tokens in grid])
        lines = estimates.assign(budget=grid)
        lines["law"] = np.where(grid <= largest, "law", "extrapolated")

    x = vega.channel("budget", [*table["budget"], *lines.get("budget", [])], unit, COUNT, "log")
    drawn = [*table.drop(columns="budget").to_numpy().ravel(), *lines.get("value", [])]
    title = f"{best_size} [{vega.unit_of_sizes(sweep.plan.tokens_per_sequence)}]"
    y = vega.channel(best_size, drawn, title, scale="log")
    dash = vega.names("law", ["law", "extrapolated"], ([1, 0], [4, 3]))
    start = y | {"field": "within from"}
    low = y | {"field": "low"}
    layers = [
        vega.layer(
            "rule",
            table,
            x,
            start,
            y2={"field": "within to"},
            color=GREEN,
            strokeWidth=7,
            opacity=0.3,
        ),
        vega.layer("rule", table, x, low, y2={"field": "high"}, strokeWidth=1.5),
        vega.layer("point", table, x, y, size=60),
        vega.layer("point", table, x, y | {"field": "bound"}, shape="triangle-down", size=60),
    ]
    for end, width in (("value", 1.5), ("low", 0.7), ("high", 0.7)):
        layers.append(
            vega.layer("line", lines, x, y | {"field": end}, strokeDash=dash, strokeWidth=width)
        )
    return vega.panel(layers, sweep.all_batch_sizes)


def _losses_of_budgets(sweep: Sweep) -> pd.DataFrame:
    """Return the losses of each budget and batch size, and the medians of their times."""
    name = sweep.plan.settings.evaluated.title
    rows = []
    for budget in sweep.budgets:
        for row in budget.answer.batch_sizes:
            rows.append(
                {
                    SIZE: row.batch_size,
                    "tokens": budget.tokens,
                    "seconds": row.seconds,
                    name: row.mean,
                }
            )
    return pd.DataFrame(rows).astype({"tokens": float, "seconds": float, name: float})


def _plot_losses_of_budgets(
    sweep: Sweep, losses: pd.DataFrame, amount: str, title: str, y_title: str
) -> Spec:
    name = sweep.plan.settings.evaluated.title
    form = COUNT if amount == "tokens" else ""
    x = vega.channel(amount, losses[amount], title, form, "log")
    y = vega.channel(name, losses[name], y_title, scale="narrow")
    color = vega.size_color(sweep.all_batch_sizes)
    layers = [
        vega.layer("line", losses, x, y, color=color),
        vega.layer("point", losses, x, y, color=color, size=40),
    ]
    return vega.panel(layers, sweep.all_batch_sizes)


def plot_answer(sweep: Sweep) -> Chart | None:
    """Plot what each batch size gives up against the best, and the times of training."""
    answer = sweep.answer()
    if answer is None:
        return None
    answers = answer.of_all_optimizers
    panels = [_plot_gaps(sweep, one, is_named=len(answers) > 1) for one in answers]

    if any(row.seconds is not None for row in answer.batch_sizes):
        panels.append(_plot_times(sweep, answer))
    return Chart(answer.headline, panels)


def _axis_of_answer(sweep: Sweep, answer: AnswerData) -> Spec:
    """Return the axis of an answer's batch sizes, which may be of a smaller budget."""
    sizes = [row.batch_size for row in answer.batch_sizes]
    return vega.batch_axis(sizes, sweep.plan.tokens_per_sequence)


def _plot_times(sweep: Sweep, answer: AnswerData) -> Spec:
    """Plot the median times of a training, with their intervals, or thinly with their ranges."""
    measured = [row for row in answer.batch_sizes if row.seconds is not None]
    times = pd.DataFrame({"median": [row.seconds for row in measured]}, dtype=float)
    times[["low", "high"]] = [row.seconds_bounds or (math.nan, math.nan) for row in measured]
    unit, seconds = _time_unit(times["median"].max())
    times /= seconds
    end = "of training" if sweep.plan.settings.target is None else "to the target"
    name = f"{unit} {end}"
    rows = times.rename(columns={"median": name})
    rows[SIZE] = [row.batch_size for row in measured]
    is_interval = np.array([row.seconds_interval is not None for row in measured])

    x = _axis_of_answer(sweep, answer)
    y = vega.channel(name, [0.0, *times.to_numpy().ravel()], name)
    color = vega.size_color(sweep.all_batch_sizes)
    low = y | {"field": "low"}
    high = {"field": "high"}
    layers = [
        vega.layer("line", rows, x, y),
        vega.layer("rule", rows[is_interval], x, low, y2=high, color=color, strokeWidth=2.5),
        vega.layer("rule", rows[~is_interval], x, low, y2=high, color=color, strokeWidth=1),
        vega.layer("point", rows, x, y, color=color, size=70),
    ]
    return vega.panel(layers, sweep.all_batch_sizes)


def _plot_gaps(sweep: Sweep, answer: AnswerData, is_named: bool) -> Spec:
    """Plot what each batch size gives up, with its interval, on a scale that is linear near 0."""
    factor, unit = answer.compared.scale
    margin = factor * answer.tolerance
    ends = ["given up", "at least", "at most"]
    rows = pd.DataFrame(answer.batch_sizes).rename(columns=NAMES)
    rows[ends] = [[row.gap, *row.gap_to_best] for row in answer.batch_sizes]
    rows[ends] = factor * rows[ends].astype(float)

    # Intervals without an end reach the edges.
    top = 1.3 * float(np.nanmax(rows[ends], initial=2 * margin))
    is_open = rows["at most"].isna() & rows["at least"].notna()
    bounded = rows.copy()
    bounded["at most"] = rows["at most"].mask(is_open, top)
    bounded["at least"] = rows["at least"].fillna(0.0)

    x = _axis_of_answer(sweep, answer)
    y = _gap_axis(top, margin, unit)
    low = y | {"field": "at least"}
    high = {"field": "at most"}
    color = vega.size_color(sweep.all_batch_sizes)
    present = rows["verdict"].to_list()
    verdicts = [verdict for verdict in VERDICTS if verdict in present]
    shape = vega.names("verdict", verdicts, [VERDICTS[verdict] for verdict in verdicts])

    tolerance = [{"at least": 0, "at most": margin}]
    recommended = [{"recommended": answer.recommended}]
    at_recommended = x | {"field": "recommended"}
    points = rows[[SIZE, *ends, "seeds", RATE, "verdict"]]
    intervals = bounded[[SIZE, *ends]]
    layers = [
        vega.layer("rect", tolerance, None, low, y2=high, color=GREEN, opacity=0.15),
        vega.layer("rule", recommended, at_recommended, None, strokeDash=[3, 3]),
        vega.layer("rule", intervals, x, low, y2=high, color=color, strokeWidth=2.5),
        vega.layer("point", points[is_open], x, TOP, color=color, shape="triangle-up"),
        vega.layer("point", points, x, y, color=color, shape=shape, size=90),
    ]
    return vega.panel(layers, sweep.all_batch_sizes, answer.policy if is_named else "")


def _gap_axis(top: float, margin: float, unit: str) -> Spec:
    """Return the axis of what is given up, which is logarithmic above the tolerance."""
    in_unit = f" [{unit}]" if unit else ""
    y = vega.channel("given up", [0, top], f"given up{in_unit}, log from {margin:g}")
    y["scale"] = {"type": "symlog", "constant": margin, "domain": [0, top], "clamp": True}

    ticks: list[float] = [0]
    for power, step in product(range(300), (1, 2, 5)):
        tick = margin * step * 10.0**power
        if tick <= top:
            ticks.append(tick)
    y["axis"]["values"] = ticks
    return y


def plot_loss(sweep: Sweep) -> Chart | None:
    """Plot the final loss against batch size: seeds, their mean, and its 95 % interval.

    A second panel shows the leading policy alone, if others squeeze it.
    """
    settings = sweep.plan.settings
    objective = settings.evaluated
    cells = compare_batch_sizes(sweep.trials, objective)
    means = cells[cells["is_comparable"]].groupby("label", sort=False)
    has_several_sizes = means["batch_size"].nunique() > 1
    spans = means[objective.name].agg(np.ptp)[has_several_sizes]
    if settings.target is not None or spans.empty:
        return None

    name = objective.title
    unit = f" {objective.unit}".rstrip()
    parts = [f"{span:.3g}{unit} ({label})" for label, span in spans.items()]
    if len(parts) > 5:
        parts = [*parts[:4], f"{len(parts) - 4} more"]
    title = f"Between batch sizes, the {name} differs by up to {join(parts)}"

    trials = _final_trials(sweep.trials)
    y_title = f"{name} [{objective.label}]" if objective.label else name
    panels = [_plot_sizes(sweep, trials, objective.name, name, y_title)]

    leading = sweep.leading.label if sweep.leading else ""
    span_of_all = np.ptp(cells[objective.name].dropna())
    if leading in spans and SQUEEZED * spans[leading] < span_of_all:
        trials_of_leading = trials[trials[POLICY] == leading]
        y_title = f"{name}, {leading} only"
        panels.append(_plot_sizes(sweep, trials_of_leading, objective.name, name, y_title))
    return Chart(title, panels)


def plot_throughput(sweep: Sweep) -> Chart | None:
    """Plot tokens per second, and peak memory, against batch size."""
    unit = sweep.plan.settings.token_unit
    trials = _final_trials(sweep.trials)
    trials["peak_memory_bytes"] = trials["peak_memory_bytes"].astype(float) / 2.0**30

    complete = trials[trials["trial_end"] == End.COMPLETE]
    compared = complete
    with_policy = ""
    if sweep.leading:
        compared = complete[complete[POLICY] == sweep.leading.label]
        if len(sweep.policies) > 1:
            with_policy = f" with {sweep.leading.label}"
    speeds = compared.groupby(SIZE)["tokens_per_second"].median().dropna()
    if len(speeds) < 2:
        return None

    slowest = format_count(speeds.min())
    fastest = format_count(speeds.max())
    title = f"Throughput is {slowest} to {fastest} {unit} per second{with_policy}"
    names = {"tokens_per_second": f"{unit} per second", "peak_memory_bytes": "peak memory in GiB"}
    panels = []
    for metric, name in names.items():
        if complete[metric].notna().any():
            panels.append(_plot_sizes(sweep, trials, metric, name))
    return Chart(title, panels)


def _plot_sizes(
    sweep: Sweep, trials: pd.DataFrame, metric: str, name: str, title: str = ""
) -> Spec:
    """Plot complete seeds by batch size, and means of the objective with intervals, or medians."""
    is_objective = metric == sweep.plan.settings.evaluated.name
    sizes = sweep.batch_sizes
    trials = trials.rename(columns={metric: name}).astype({name: float})
    complete = trials[trials["trial_end"] == End.COMPLETE]

    groups = complete.groupby([POLICY, SIZE], sort=False)[name]
    middle = groups.agg(["mean" if is_objective else "median", "size"])
    middle = middle.set_axis([name, "seeds"], axis=1)
    middle[["low", "high"]] = math.nan
    if is_objective:
        intervals = [mean_of(values.to_list())[1:] for _, values in groups]
        has_few_seeds = middle[["seeds"]] < LEAST_SEEDS
        middle[["low", "high"]] = np.where(has_few_seeds, np.nan, intervals)
        planned = trials.groupby([POLICY, SIZE]).size().reindex(middle.index)
        middle = middle[middle["seeds"] == planned]
    middle = middle.reset_index()

    on_axis = [*complete[name]]
    if is_objective:
        on_axis += [*middle["low"], *middle["high"]]
    else:
        on_axis.append(0.0)
    form = COUNT if metric.startswith("tokens") else ""
    x = vega.batch_axis(sizes, sweep.plan.tokens_per_sequence)
    y = vega.channel(name, on_axis, title if title else name, form)

    # Each panel gives a policy the same shape and dash, also if it does not have all policies.
    labels = _final_trials(sweep.trials)[POLICY].unique().tolist()
    present = trials[POLICY].unique().tolist()
    shape = vega.names(POLICY, labels, SHAPES, present)
    dash = vega.names(POLICY, labels, DASHES, present)
    color = vega.size_color(sizes)

    columns = [SIZE, POLICY, "seed"]
    seeds = complete[[*columns, name]]
    diverged = trials.loc[trials["trial_end"] == End.DIVERGED, [*columns, "cause"]]
    edge = _worst_edge(sweep)
    layers = [
        vega.layer("line", middle, x, y, strokeDash=dash),
        vega.layer("rule", middle, x, y | {"field": "low"}, y2={"field": "high"}, color=color),
        vega.layer("point", seeds, x, y, color=color, shape=shape, size=25, opacity=0.5),
        vega.layer("point", middle, x, y, color=color, shape=shape, size=70),
        vega.layer("point", diverged, x, edge, color=RED, shape="cross", size=70),
    ]
    return vega.panel(layers, sizes)


def plot_curves(sweep: Sweep) -> Chart | None:
    """Plot training loss (or mean reward) against tokens.

    Curves are means over the complete seeds; other trials have their own.
    """
    if len(sweep.batch_sizes) < 2:
        return None
    metric = "train/loss"
    name = "training loss"
    if sweep.plan.settings.workload.samples:  # the training loss is a surrogate close to 0
        metric = "reward/mean"
        name = "mean reward of a step's completions"
    rows = _curves_of_trials(sweep, metric, name)
    if rows.empty:
        return None
    means = rows[rows["trial"] == ""].sort_values("tokens").groupby(CURVE).last()[name]
    title = f"The curves of {name} end at {format_range(means, '.4g')}"
    return Chart(title, [_plot_curves(sweep, rows, metric, name)])


def _curves_of_trials(sweep: Sweep, metric: str, name: str) -> pd.DataFrame:
    """Return the curves of a metric by policy, batch size and trial, which is "" for a mean.

    There are none if each has one point.
    """
    trials = _final_trials(sweep.trials)
    trial = trials["id"].where(trials["trial_end"] != End.COMPLETE, "")
    curves = trials[["id", POLICY, SIZE]].assign(trial=trial)
    points = sweep.curves.astype({"id": object}).merge(curves, on="id")
    if metric not in points:
        points = points.assign(**{metric: math.nan})
    rows = _mean_curves(points, metric).rename(columns={metric: name})
    has_line = (rows.groupby(CURVE).size() > 1).any()
    return rows if has_line else rows.iloc[:0]


def _mean_curves(points: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the means of a metric over the seeds of a curve, where all have it."""
    measured = points.dropna(subset=metric)
    seeds = measured.groupby(CURVE)["id"].nunique().rename("seeds")
    rows = measured.groupby([*CURVE, "tokens"])[metric].agg(["mean", "size"]).reset_index()
    rows = rows.merge(seeds, on=CURVE).query("size == seeds").drop(columns="size")
    return rows.rename(columns={"mean": metric})


def _plot_curves(sweep: Sweep, rows: pd.DataFrame, metric: str, name: str) -> Spec:
    """Plot the curves of a metric, and where other trials diverged."""
    objective = sweep.plan.settings.evaluated
    unit = sweep.plan.settings.token_unit
    trials = _final_trials(sweep.trials)
    rows = rows.rename(columns={"tokens": unit})
    rows["trial"] = rows["trial"].mask(rows["trial"] == "")

    is_loss = metric == "train/loss" and objective.name == LOSS.name
    y_title = f"{name} [{objective.label}]" if objective.label and is_loss else name
    scale = "narrow" if metric.endswith("/loss") else "linear"
    settled = rows.loc[rows[unit] >= START * rows[unit].max(), name]
    x = vega.channel(unit, [0, *rows[unit]], f"training {unit}", COUNT)
    y = vega.channel(name, settled, y_title, scale=scale)

    labels = [*trials[POLICY].unique()]
    by_trial = {
        "color": vega.size_color(sweep.all_batch_sizes),
        "strokeDash": vega.names(POLICY, labels, DASHES),
        "detail": {"field": "trial"},
    }
    diverged = trials.loc[trials["trial_end"] == End.DIVERGED, [SIZE, "seed", "tokens"]]
    diverged = diverged.rename(columns={"tokens": unit})
    layers = [
        vega.layer("line", rows, x, y, **by_trial, tooltip=True),
        vega.layer("point", diverged, x, TOP, color=RED, shape="cross", size=70),
    ]
    return vega.panel(layers, sweep.all_batch_sizes)


def plot_rates(sweep: Sweep) -> Chart | None:
    """Plot the objective (or the tokens to the target) of the tuning trials against the rate."""
    tuned = [result for result in sweep.policies if result.rates]
    if not tuned:
        return None
    tuned.sort(key=lambda result: result is not sweep.leading)
    has_several = len(tuned) > 1
    panels = [_plot_rates(sweep, result, is_named=has_several) for result in tuned]

    first = tuned[0]
    texts = []
    for tuning in first.rates:
        if not tuning.best:
            continue
        rate = tuning.optimum if tuning.optimum else tuning.best
        texts.append(f"{rate:.2g} at batch size {tuning.batch_size}")
    if not texts or len(sweep.batch_sizes) < 2:
        return None

    with_policy = f" with {first.label}" if has_several else ""
    title = f"The best learning rates{with_policy} are {join(texts)}"
    exponent = rate_exponent(first.rates)
    if exponent:
        title = f"The best rate is proportional to the batch size to the power of {exponent:.2f}"
    return Chart(title, panels)


def _plot_rates(sweep: Sweep, result: PolicyResult, is_named: bool) -> Spec:
    """Plot the losses of the tuning trials against their rates, with the fitted curves."""
    objective = sweep.plan.settings.objective
    values = np.vectorize(objective.value, [float])
    name = objective.title
    form = ""
    if objective.is_ratio:
        name = "training tokens to the target"
        form = COUNT
    parts = [rate.trials.assign(**{SIZE: rate.batch_size}) for rate in result.rates]
    trials = pd.concat(parts, ignore_index=True).rename(columns=NAMES)

    # Losses far above the others would squeeze them; they are drawn at the edge.
    losses = trials["value"][np.isfinite(trials["value"])]
    low, high = losses.quantile([0.25, 0.75])
    best_of_worst_size = losses.groupby(trials[SIZE]).min().max()
    limit = max(high + FAR * (high - low), best_of_worst_size)
    is_pruned = trials["state"] == State.PRUNED
    is_lost = trials["value"] == np.inf
    is_far = (trials["value"] > limit) & ~is_lost
    is_near = trials["value"] <= limit
    measured = values(trials["value"])
    trials[name] = np.where(is_near, measured, np.nan)

    fits = []
    optima = []
    for rate in result.rates:
        if rate.optimum is None:
            continue
        log_rates = rate.points.log_rates[np.isfinite(rate.points.log_rates)]
        grid = np.linspace(log_rates.min(), log_rates.max(), 40)
        curve = {
            RATE: np.exp(grid),
            name: values(rate.fit.losses_at(grid)),
            SIZE: rate.batch_size,
        }
        fits.append(pd.DataFrame(curve))
        lowest = float(values(rate.fit.level))
        optima.append({SIZE: rate.batch_size, RATE: rate.optimum, name: lowest})

    edge = _worst_edge(sweep)
    x = vega.channel(RATE, trials[RATE], "peak learning rate", scale="log")
    on_axis = [*trials[name], *(optimum[name] for optimum in optima)]
    y = vega.channel(name, on_axis, f"{name}, tuning seeds", form, "narrow")
    color = vega.size_color(sweep.all_batch_sizes)
    columns = [SIZE, RATE, "seed", "state"]
    at_edge = trials[columns].assign(**{name: measured})
    far = at_edge[is_far]
    lost = at_edge[is_lost & ~is_pruned]
    pruned = at_edge[is_pruned]
    curves: pd.DataFrame | list[object] = pd.concat(fits) if fits else []
    layers = [
        vega.layer("line", curves, x, y, color=color, strokeWidth=1),
        vega.layer("point", trials[[*columns, name]], x, y, color=color, size=35),
        vega.layer("point", optima, x, y, color=color, shape="diamond", size=80),
        vega.layer("point", far, x, edge, color=color, shape="triangle-up"),
        vega.layer("point", lost, x, edge, color=color, shape="cross", size=70),
        vega.layer("point", pruned, x, edge, color=color, shape="triangle-down"),
    ]
    return vega.panel(layers, sweep.all_batch_sizes, result.label if is_named else "")


def plot_steps(sweep: Sweep) -> Chart | None:
    """Plot steps to the target against batch size, with the fitted curve and B_crit."""
    curves = {result.label: result.curve for result in sweep.policies if result.curve}
    known = [curve.trials.dropna(subset="steps") for curve in curves.values()]
    parts = [trials.rename(columns=NAMES) for trials in known]
    trials = pd.concat([pd.DataFrame({SIZE: []}), *parts])
    if trials[SIZE].nunique() < 2:
        return None
    sizes = sweep.batch_sizes
    labels = [*curves]
    target = next(iter(curves.values())).target
    x = vega.batch_axis(sizes, sweep.plan.tokens_per_sequence)
    y_title = f"steps to a validation loss of {target:g}"
    y = vega.channel("steps", trials["steps"], y_title, scale="log")
    color = vega.size_color(sizes)
    shape = vega.names(POLICY, labels, SHAPES)
    dash = vega.names(POLICY, labels, DASHES)

    reached = trials[~trials["is_censored"].astype(bool)]
    means = reached.groupby(SIZE)["steps"].mean()
    outcome = f"takes {format_range(means)} steps" if len(means) else "was not reached"
    title = f"A validation loss of {target:g} {outcome}"

    layers = []
    for label, curve in curves.items():
        if curve.fit is None:
            continue
        grid = np.geomspace(min(sizes), max(sizes), 60)
        steps = curve.fit.s_min.value + curve.fit.e_min.value / grid
        fit = {"size": grid, POLICY: label, "steps": steps}
        on_grid = x | {"field": "size"}
        layers.append(vega.layer("line", fit, on_grid, y, strokeDash=dash, strokeWidth=1))

        critical = curve.fit.b_crit
        if not supports_fit(curve) or not curve.covers(critical.value):
            continue
        low, high = np.clip(critical[1:], min(sizes), max(sizes))
        row = [{"low": low, "high": high, "critical": critical.value}]
        start = x | {"field": "low"}
        end = {"field": "high"}
        layers.append(vega.layer("rect", row, start, None, x2=end, opacity=0.12))
        layers.append(vega.layer("rule", row, x | {"field": "critical"}, None))
        title += f"; critical batch size {critical:.3g} with {label}"

    columns = [SIZE, POLICY, "seed", "steps", "tokens"]
    for is_censored, rows in trials.groupby("is_censored"):
        form = {"shape": "triangle-up", "filled": False} if is_censored else {"shape": shape}
        layers.append(vega.layer("point", rows[columns], x, y, color=color, size=45, **form))
    return Chart(title, [vega.panel(layers, sizes)])
