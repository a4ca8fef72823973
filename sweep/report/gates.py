"""The report's section on claims: gates with their evidence, pairs, rates and noise scale."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sweep.analysis.claims import headline, lacking
from sweep.analysis.comparison import report_trials
from sweep.analysis.estimate import Estimate
from sweep.analysis.frames import Sweep
from sweep.analysis.gates import Judged
from sweep.analysis.noise_scale import NoiseScale, noise_scale
from sweep.analysis.statistics import Pair
from sweep.analysis.target import Reached
from sweep.plan.steps import probe_sizes
from sweep.report import axes as look
from sweep.report import markdown as md

MOST_PAIRS = 15  # listed and drawn; of more only those with the best
VERDICTS = {"different": ("#D55E00", "o"), "equal": ("#009E73", "D"), "undecided": ("#555555", "s")}
PROBES = "probes"
NOISE_COLUMNS = {  # by what measured it
    PROBES: ["noise/trace", "noise/square"],
    "own microbatches": ["noise/train_trace", "noise/train_square"],
}
LATER_HALF = 0.5  # of the tokens, over which the noise scale is averaged
BESIDE_NOISE = (
    "The noise scale is a diagnostic: measured critical batch sizes can be far from it (Merrill et "
    "al. 2025). It rises during training; the table is of the later half."
)


def claims(sweep: Sweep, judged: tuple[Judged, ...]) -> str:
    """Give, for each policy, the claim or what it lacks, the gates, the pairs and the rates."""
    parts = []
    for one in judged:
        parts += verdict(one, headline(one), "which batch size is best")
        if one.comparison.pairs:
            parts += [_pair_table(one), _left_out(one)]
    return "\n\n".join(part for part in [*parts, noise_table(sweep, judged)] if part)


def verdict(judged: Judged | Reached, claim: str, question: str) -> list[str]:
    """Give one policy's claim, or what it lacks, and its gates."""
    said = claim or lacking(judged, question)
    return [f"### {judged.label}", f"**{said}**" if said else "", _gate_table(judged)]


def _gate_table(judged: Judged | Reached) -> str:
    rows = [
        [str(gate.number), gate.name, gate.verdict, gate.evidence, gate.settle or md.MISSING]
        for gate in judged.gates
    ]
    return md.table(["gate", "what must hold", "verdict", "evidence", "what would settle it"], rows)


def shown_pairs(judged: Judged) -> list[Pair]:
    """Return all pairs, or of many those with the batch size of the least mean loss."""
    pairs = judged.comparison.pairs
    if len(pairs) <= MOST_PAIRS:
        return list(pairs)
    worse = {size: 0.0 for size in judged.comparison.batch_sizes}
    for pair in pairs:
        small, large = pair.batch_sizes
        worse[large] += pair.difference.value
        worse[small] -= pair.difference.value
    best = min(worse, key=lambda size: worse[size])
    return [pair for pair in pairs if best in pair.batch_sizes]


def _pair_table(judged: Judged) -> str:
    rows = [
        [
            f"{pair.batch_sizes[1]} − {pair.batch_sizes[0]}",
            f"{pair.difference.value:+.4f}",
            f"[{pair.difference.low:+.4f}, {pair.difference.high:+.4f}]",
            _p(pair.p_different_holm),
            _p(pair.p_equivalent_holm),
            _pair_verdict(pair, judged.comparison.margin),
        ]
        for pair in shown_pairs(judged)
    ]
    headers = [
        "batch sizes",
        f"difference [{judged.comparison.unit}]",
        "95 %",
        "p (Holm)",
        "p of equality (Holm)",
    ]
    return md.table([*headers, "verdict"], rows)


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _pair_verdict(pair: Pair, margin: float) -> str:
    if pair.is_equivalent:
        return f"equal within ±{margin:g}"
    return "different" if pair.is_different else "undecided"


def _left_out(judged: Judged) -> str:
    left = judged.comparison.left_out
    if not left:
        return ""
    listed = "; ".join(f"batch size {size}: {list(seeds)}" for size, seeds in left.items())
    return f"Seeds that another batch size lacks took no part: {listed}."


def noise_by_batch(sweep: Sweep, label: str, measured: str = PROBES) -> dict[int, NoiseScale]:
    """Return the noise scale of each batch size over the later half of training, seeds together."""
    found = {}
    for batch, lines in _noise_lines(sweep, label, measured).groupby("batch_size"):
        later = lines[lines["tokens"] >= LATER_HALF * lines["tokens"].max()]
        later = later.sort_values(["seed", "tokens"])
        if len(later) >= 4:
            traces, squares = (later[name].to_list() for name in NOISE_COLUMNS[measured])
            found[int(str(batch))] = noise_scale(traces, squares)
    return found


def _noise_lines(sweep: Sweep, label: str, measured: str = PROBES) -> pd.DataFrame:
    """Return the records of one policy's reports: batch_size, seed, tokens, trace, square."""
    trials, columns = report_trials(sweep.trials), NOISE_COLUMNS[measured]
    trials = trials.loc[trials["label"] == label, ["id", "batch_size", "seed"]]
    if columns[0] not in sweep.curves:
        return trials.iloc[:0].assign(tokens=0)
    lines = sweep.curves.dropna(subset=columns)
    return lines.assign(id=lines["id"].astype(object)).merge(trials, on="id")


def noise_table(sweep: Sweep, judged: Sequence[Judged | Reached]) -> str:
    """Tabulate the gradient noise scale by batch size; nothing where it was not measured."""
    rows = [
        [
            *(str(batch), one.label, f"{found.records} {measured}"),
            _estimate(found.value) if found.value else "unresolved",
            *(_estimate(found.trace), _estimate(found.square)),
        ]
        for one in judged
        for measured in NOISE_COLUMNS
        for batch, found in noise_by_batch(sweep, one.label, measured).items()
    ]
    if not rows:
        return ""
    headers = ["batch size", "policy", "measured by", "noise scale [sequences]", "tr Σ", "|G|²"]
    notes = " ".join(filter(None, [BESIDE_NOISE, _not_fresh(sweep)]))
    return f"### Gradient noise scale\n\n{notes}\n\n{md.table(headers, rows)}"


def _not_fresh(sweep: Sweep) -> str:
    """Say so where training and probes took more than the data's first epoch."""
    plan, evaluation = sweep.plan, sweep.plan.settings.evaluation
    trials = report_trials(sweep.trials).dropna(subset=["epochs"])
    sequences, points = plan.token_budget // plan.tokens_per_sequence, evaluation.noise_points
    sizes = probe_sizes(sequences, points, evaluation.noise_share, 1)
    trained = trials["epochs"].astype(float)
    tokens = sizes.points * sizes.sequences * plan.tokens_per_sequence
    probed = trained * (tokens / trials["tokens"])
    if not (trained + probed > 1).any():
        return ""
    return (
        f"The data held too little that was fresh: training took {trained.max():.3g} epochs and "
        f"the probes {probed.max():.2g} of one, so training saw probed sequences too."
    )


def _estimate(found: Estimate) -> str:
    return f"{found.value:.3g} [{found.low:.3g}, {found.high:.3g}]"


def plot_rates(sweep: Sweep, judged: Sequence[Judged | Reached]) -> Figure | None:
    """Draw loss against rate for each batch size, with its quadratic; None where none was tuned.

    With a target, the tokens that it took.
    """
    has_target = sweep.plan.settings.target is not None
    rates = [rate for one in judged for rate in one.rates]
    if not rates:
        return None
    figure, (axis,) = look.new_figure(1)
    colours = look.batch_colours(pd.DataFrame({"batch_size": [r.batch_size for r in rates]}))
    for rate in rates:
        colour, table = colours[rate.batch_size], rate.trials
        fine = table[np.isfinite(table["loss"])]
        style: dict[str, Any] = {"color": colour, "label": f"batch {rate.batch_size}"}
        heights = np.exp(fine["loss"]) if has_target else fine["loss"]
        axis.plot(fine["learning_rate"], heights, "o", markersize=5, **style)
        pruned = table[table["state"] == "PRUNED"]["learning_rate"]
        edge = axis.get_xaxis_transform()
        axis.plot(pruned, [0.03] * len(pruned), "|", color=colour, transform=edge, markersize=8)
        late = (table["state"] == "COMPLETE") & np.isinf(table["loss"])  # not at the target
        gone = table[(table["state"] == "FAILED") | late]["learning_rate"]
        axis.plot(gone, [look.TOP_EDGE] * len(gone), "X", color=colour, transform=edge)
        _draw_parabola(axis, fine, rate.optimum.rate, colour, np.exp if has_target else np.array)
    axis.set_xscale("log")
    axis.set_xlabel("peak learning rate")
    if has_target:
        axis.set_yscale("log")
        axis.set_ylabel("training tokens to the target, tuning seed")
    else:
        axis.set_ylabel("final validation loss of the tuning seed")
        look.loss_axis(axis)
    look.legend_above(axis)
    return figure


def _draw_parabola(
    axis: Any, fine: pd.DataFrame, vertex: float | None, colour: Any, shown: Callable[[Any], Any]
) -> None:
    """Draw the quadratic in log rate near the best, and its vertex."""
    if vertex is None:
        return
    place = int(np.argmin(fine["loss"].to_numpy()))
    near = fine.iloc[max(0, place - 2) : place + 3]
    coefficients = np.polyfit(np.log(near["learning_rate"]), near["loss"], 2)
    logs = np.log(near["learning_rate"])
    grid = np.linspace(float(logs.min()), float(logs.max()), 60)
    axis.plot(np.exp(grid), shown(np.polyval(coefficients, grid)), color=colour, linewidth=1)
    height = np.polyval(coefficients, np.log(vertex))
    axis.plot([vertex], [shown(height)], "*", color=colour, markersize=11, markeredgecolor="white")


def plot_differences(sweep: Sweep, judged: tuple[Judged, ...]) -> Figure | None:
    """Draw differences between batch sizes with their intervals; None where there are none."""
    found = [one for one in judged if one.comparison.pairs]
    if not found:
        return None
    one = next((one for one in found if one.rates), found[0])
    pairs = shown_pairs(one)
    figure, (axis,) = look.new_figure(1)
    places, named = np.arange(len(pairs))[::-1], set[str]()
    for place, pair in zip(places, pairs, strict=True):
        verdict = _pair_verdict(pair, one.comparison.margin).split()[0]
        colour, marker = VERDICTS[verdict]
        ends = [pair.difference.low, pair.difference.high]
        axis.plot(ends, [place, place], color=colour, linewidth=2)
        label = "" if verdict in named else verdict
        axis.plot([pair.difference.value], [place], marker, color=colour, label=label)
        named.add(verdict)
    margin = one.comparison.margin
    axis.axvspan(
        -margin, margin, color="#009E73", alpha=0.12, label=f"±{margin:g} {one.comparison.unit}"
    )
    axis.axvline(0, color=look.GREY, linewidth=0.8)
    axis.set_yticks(places, [f"{p.batch_sizes[1]} − {p.batch_sizes[0]}" for p in pairs])
    unit = one.comparison.unit
    axis.set_xlabel(f"difference of the final validation loss [{unit}], {one.label}, 95 %")
    look.legend_above(axis)
    return figure


def plot_noise(sweep: Sweep, judged: Sequence[Judged | Reached]) -> Figure | None:
    """Draw the noise scale over tokens; None where it was not measured."""
    label = next((one.label for one in judged if one.rates), judged[0].label if judged else "")
    lines = _noise_lines(sweep, label)
    if not len(lines):
        return None
    figure, (axis,) = look.new_figure(1)
    colours = look.batch_colours(lines)
    for batch, group in lines.groupby("batch_size"):
        means = group.groupby("tokens")[["noise/trace", "noise/square"]].mean()
        smooth = means.rolling(3, center=True, min_periods=1).mean()
        ratio = (smooth["noise/trace"] / smooth["noise/square"]).where(smooth["noise/square"] > 0)
        size = int(str(batch))
        axis.plot(ratio.index, ratio, "o-", color=colours[size], label=f"batch {size}")
    axis.set_yscale("log")
    look.token_axis(axis)
    axis.set_ylabel("gradient noise scale [sequences]")
    look.legend_above(axis)
    return figure
