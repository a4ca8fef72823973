"""The parts of the report of a sweep to a target loss: steps, their curve, tables, figure."""

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sweep.analysis.claims import lacking
from sweep.analysis.comparison import cell_records
from sweep.analysis.frames import Sweep
from sweep.analysis.target import Reached, headline, losses_at, words
from sweep.report import axes as look
from sweep.report import gates, sections, summary
from sweep.report import markdown as md

QUESTION = "what the critical batch size is"
UNITS = {
    "tokens": ("tokens", "training tokens"),
    "steps": ("steps", "steps"),
    "seconds": ("seconds", "seconds of training, at each trial's own speed"),
}


def opening(sweep: Sweep, cells: pd.DataFrame, judged: tuple[Reached, ...]) -> str:
    """Say what was found, what forbids a conclusion, and what was done."""
    claims = [f"**{said}**" for one in judged if (said := headline(one))]
    open_ones = (lacking(one, QUESTION) for one in judged if one.label == "tuned")
    claims += [f"**{said}**" for said in open_ones if said]
    done = f"Each trial was to end at a validation loss of {sweep.plan.settings.target:g}."
    parts = [
        *claims,
        summary.unreported(sweep),
        summary.standing(sweep, cells),
        f"{summary.what_was_done(sweep)} {done}",
        _steps_table(judged),
    ]
    return "\n\n".join(part for part in parts if part)


def results(sweep: Sweep, cells: pd.DataFrame, judged: tuple[Reached, ...]) -> str:
    """Tabulate the fits, losses at equal tokens, steps and seconds, and every trial."""
    parts = [_fit_table(judged)]
    for measure in UNITS:
        parts += [f"### Losses at equal {UNITS[measure][0]}", _equal(sweep, judged, measure)]
    rows = [[str(c["batch_size"]), c["label"], sections.status(c)] for c in cell_records(cells)]
    parts += ["### Trials", md.table(["batch size", "policy", "status"], rows)]
    return "\n\n".join([*parts, sections.trial_table(sweep)])


def claims(sweep: Sweep, judged: tuple[Reached, ...]) -> str:
    """Give, for each policy, the critical batch size or what it lacks, and the gates."""
    parts = [part for one in judged for part in gates.verdict(one, headline(one), QUESTION)]
    return "\n\n".join(part for part in [*parts, gates.noise_table(sweep, judged)] if part)


def recommendations(judged: tuple[Reached, ...]) -> str:
    """Say which batch sizes take the fewest tokens, steps and seconds, as measured."""
    rows = []
    for one in judged:
        every = one.trials.groupby("batch_size")["is_censored"].transform("sum") == 0
        known = one.trials[every]  # means over some of the seeds would be of the lucky ones
        means = known.groupby("batch_size")[["tokens", "steps", "seconds"]].mean()
        standing = "measured, not tested" if one.passes else "INCONCLUSIVE: see the gates"
        for measure in means if len(means) else ():
            batch, value = means[measure].idxmin(), float(means[measure].min())
            amount = md.seconds(value) if measure == "seconds" else md.count(value)
            rows.append([f"fewest {measure}", one.label, str(batch), amount, standing])
        fit, carried = one.fit, "every gate passes" if one.passes else standing
        if fit is not None and one.batch_sizes[0] <= fit.b_overhead.value < math.inf:
            overhead = words(fit.b_overhead)
            rows.append(["20 % more tokens than the least", one.label, overhead, "", carried])
    if not rows:
        return "At no batch size has every seed reached the target."
    headers = ["question", "policy", "batch size", "to the target", "standing"]
    return md.table(headers, rows)


def _steps_table(judged: tuple[Reached, ...]) -> str:
    rows = []
    for one in judged:
        slopes, residuals = dict[int, float](), dict[int, float]()
        if one.fit is not None:
            slopes = dict(zip(one.batch_sizes[1:], one.fit.slopes.tolist(), strict=True))
            means = one.fit.residuals.mean(0).tolist()
            residuals = dict(zip(one.batch_sizes, means, strict=True))
        for batch, group in one.trials.groupby("batch_size"):
            crossed, size = group[~group["is_censored"]], int(str(batch))
            spread = crossed["steps"].std()
            steps = f"{crossed['steps'].mean():,.0f}" if len(crossed) else ""
            steps += f" ± {spread:,.0f}" if len(crossed) > 2 else ""
            bound = f"more than {group['steps'].min():,.0f}"
            rows.append(
                [
                    *(str(size), one.label, md.rate(float(group["learning_rate"].iloc[0]))),
                    f"{len(crossed)} of {len(group)}",
                    steps or bound,
                    md.count(crossed["tokens"].mean()) if len(crossed) else md.MISSING,
                    md.seconds(crossed["seconds"].mean()) if len(crossed) else md.MISSING,
                    _signed(slopes.get(size, math.nan)),
                    _signed(residuals.get(size, math.nan)),
                ]
            )
    if not rows:
        return "No trial has ended."
    headers = ["batch size", "policy", "rate", "reached", "steps to the target", "tokens"]
    text = md.table([*headers, "seconds of training", "local slope", "residual"], rows)
    return (
        f"{text}\n\nMeans over the seeds that reached it. *Local slope* is d log S / d log B "
        "against the smaller neighbour: −1 where twice the batch halves the steps, 0 where it "
        "saves none. *Residual* is log S minus the curve."
    )


def _signed(value: float) -> str:
    return f"{value:+.3f}" if math.isfinite(value) else md.MISSING


def _fit_table(judged: tuple[Reached, ...]) -> str:
    rows, lacking = [], []
    for one in judged:
        fit = one.fit
        if fit is None:
            lacking.append(f"{one.label}: no curve: {one.no_fit}")
            continue
        star = words(fit.b_star) if fit.b_star else md.MISSING
        numbers = [words(n) for n in (fit.s_min, fit.e_min, fit.b_crit, fit.b_overhead)]
        rows.append([one.label, *numbers, star, f"{fit.spread:.3f}"])
    headers = ["policy", "S_min [steps]", "E_min [sequences]", "B_crit", "0.2·B_crit", "B*"]
    text = md.table([*headers, "spread of log S"], rows) if rows else ""
    note = (
        "S(B) = S_min + E_min/B, fitted to log S; 95 % intervals from seeds, censored trials as "
        "bounds. At 0.2·B_crit training takes 20 % more tokens than the least; at B* 20 % more "
        "steps than linear scaling from the largest batch size that is still on it."
    )
    return "\n\n".join(part for part in (text and f"{text}\n\n{note}", *lacking) if part)


def _equal(sweep: Sweep, judged: tuple[Reached, ...], measure: str) -> str:
    texts = []
    for one in judged:
        common, table = losses_at(sweep, one, measure)
        if table.empty:
            texts.append(f"{one.label}: no number of {measure} that trials share is known.")
            continue
        rows = [
            [str(row["batch_size"]), md.spread_loss(row["loss"], row["loss_sd"], row["seeds"])]
            for row in cell_records(table)
        ]
        of_all = "all" if measure != "seconds" else "all that were timed"
        amount = f"{common:,.4g} {UNITS[measure][1]}"
        named = f"{one.label}: at {amount}, the most that {of_all} have reached"
        texts.append(f"{named}.\n\n{md.table(['batch size', 'validation loss'], rows)}")
    return "\n\n".join(texts)


def plot_steps(sweep: Sweep, judged: tuple[Reached, ...]) -> Figure | None:
    """Draw steps to the target against batch size, with the curve and B_crit."""
    if all(one.trials.empty for one in judged):
        return None
    figure, (axis,) = look.new_figure(1)
    sizes = sorted({int(size) for one in judged for size in one.trials["batch_size"]})
    for place, one in enumerate(judged):
        colour = look.POLICY_COLOURS[place % len(look.POLICY_COLOURS)]
        style: dict[str, Any] = {"color": colour, "linestyle": "none"}
        for is_censored, marker, name in ((False, "o", ""), (True, "^", ", more than")):
            rows = one.trials[one.trials["is_censored"] == is_censored]
            at = np.log2(rows["batch_size"].astype(float))
            label = f"{one.label}{name}" if len(rows) else ""
            axis.plot(at, rows["steps"], marker, markersize=5, label=label, **style)
        if one.fit is not None:
            _draw_fit(axis, one, sizes, colour)
    axis.set_yscale("log")
    axis.set_ylabel(f"steps to a validation loss of {sweep.plan.settings.target:g}")
    look.batch_axis(axis, sizes)
    look.legend_above(axis)
    return figure


def _draw_fit(axis: Any, one: Reached, sizes: list[int], colour: str) -> None:
    assert one.fit is not None
    grid = np.geomspace(sizes[0], sizes[-1], 100)
    s_min, e_min, critical = one.fit.s_min.value, one.fit.e_min.value, one.fit.b_crit
    axis.plot(np.log2(grid), s_min + e_min / grid, color=colour, linewidth=1, label="S_min+E_min/B")
    axis.plot(np.log2(grid), e_min / grid, ":", color=look.GREY, linewidth=1, label="E_min/B")
    if sizes[0] < critical.value < sizes[-1]:
        axis.axvline(math.log2(critical.value), color=colour, linewidth=1, linestyle="--")
        ends = np.clip([critical.low, critical.high], sizes[0], sizes[-1])
        if np.isfinite(ends).all():
            name = f"B_crit {critical.value:.3g}"
            axis.axvspan(*np.log2(ends), color=colour, alpha=0.12, label=name)
