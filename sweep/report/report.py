"""Writes the report of one sweep: report.md, report.html, trials.csv and figures/*.png.

Reached through `sweep report DIR` and `sweep.write_report`. Reads only; a sweep that is still
running, or lost trials, gets its report too. The same data give the same bytes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from sweep.analysis.comparison import compare_batch_sizes
from sweep.analysis.frames import Sweep, load_stored_sweep, load_sweep, write_trials_csv
from sweep.analysis.gates import Judged, judge
from sweep.analysis.limits import find_limits
from sweep.analysis.target import Reached, judge_target
from sweep.report import figures, gates, sections, summary, target
from sweep.report import markdown as md
from sweep.report.axes import say_if_empty
from sweep.report.html import to_html
from sweep.trial.files import replacing

FIGURES: dict[str, tuple[Callable[[Sweep, pd.DataFrame], Figure], str]] = {
    "loss": (
        figures.plot_loss,
        "Final validation loss against batch size; points are seeds, lines their means.",
    ),
    "curves": (
        figures.plot_curves,
        "Training loss (for GRPO the reward) and validation loss against tokens. Points within a "
        "trial are not final points: batch sizes are compared at the end only.",
    ),
    "time": (figures.plot_time, "Time of one trial by what it went into, mean over seeds."),
    "pareto": (
        figures.plot_pareto,
        "Final validation loss against total time; small points are seeds, large ones means.",
    ),
    "throughput": (
        figures.plot_throughput,
        "Throughput and peak memory against batch size; points are seeds, lines their means.",
    ),
}
CLAIM_FIGURES: dict[str, tuple[Callable[[Sweep, tuple[Judged, ...]], Figure | None], str]] = {
    "differences": (
        gates.plot_differences,
        "Differences between batch sizes, paired by seed, with their 95 % intervals; within the "
        "band losses count as equal.",
    ),
    "rates": (
        gates.plot_rates,
        "Final loss of the tuning trials against the rate, with a quadratic near the best and its "
        "vertex (star); ticks at the bottom were pruned, crosses at the top diverged.",
    ),
    "noise": (
        gates.plot_noise,
        "Gradient noise scale over tokens: means over seeds and three milestones of trace and "
        "square apart, then their ratio.",
    ),
}
NOT_TO_A_TARGET = ("loss", "pareto")  # all trials end at about the same loss
TARGET_FIGURES: dict[str, tuple[Callable[[Sweep, tuple[Reached, ...]], Figure | None], str]] = {
    "steps": (
        target.plot_steps,
        "Steps to the target against batch size: points are seeds, triangles bounds; with the "
        "curve, its part that scales linearly, and the critical batch size with its interval.",
    ),
    "rates": (
        gates.plot_rates,
        "Tokens to the target of the tuning trials against the rate, with a quadratic near the "
        "best and its vertex (star); ticks at the bottom were pruned, crosses at the top diverged.",
    ),
    "noise": (gates.plot_noise, CLAIM_FIGURES["noise"][1]),
}


def write_report(path: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a sweep folder; return the path of report.md.

    Args:
        path: of the sweep folder.
        out: folder to write to; None: the sweep's own.

    Raises:
        SweepError: if the folder is not a sweep's.
    """
    return write_report_of(load_sweep(path), Path(out or path))


def write_report_from_store(
    tracking_uri: str, experiment: str, run_id: str | None, out: str | Path
) -> Path:
    """Write the report of a sweep in an MLflow store to the folder `out`.

    Args:
        tracking_uri: of the store.
        experiment: its name there.
        run_id: of the sweep's parent run; None: the newest.
        out: folder to write to; made if need be.
    """
    return write_report_of(load_stored_sweep(tracking_uri, experiment, run_id), Path(out))


def write_report_of(sweep: Sweep, out: Path) -> Path:
    """Write the report of a loaded sweep; every file is replaced whole, report.md last."""
    cells = compare_batch_sizes(sweep.trials)
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Figure | None]
    if sweep.plan.settings.target is None:
        judged = judge(sweep, cells)
        drawn = {name: plot(sweep, cells) for name, (plot, _) in FIGURES.items()}
        drawn |= {name: plot(sweep, judged) for name, (plot, _) in CLAIM_FIGURES.items()}
        parts = build_sections(sweep, cells, judged, _shown(drawn))
    else:
        reached = judge_target(sweep, cells)
        drawn = {
            name: plot(sweep, cells)
            for name, (plot, _) in FIGURES.items()
            if name not in NOT_TO_A_TARGET
        }
        drawn |= {name: plot(sweep, reached) for name, (plot, _) in TARGET_FIGURES.items()}
        parts = build_target_sections(sweep, cells, reached, _shown(drawn))
    for name, figure in drawn.items():
        path = folder / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)  # of an earlier report
            continue
        say_if_empty(figure)
        with replacing(path) as part:
            # Without the writer's version the bytes depend on the picture alone.
            figure.savefig(part, format="png", metadata={"Software": None})
    write_trials_csv(sweep, out / "trials.csv")
    title = f"Batch-size sweep: {sweep.name}"
    text = md.document(title, parts)
    for name, content in (("report.html", to_html(text, title, out)), ("report.md", text)):
        with replacing(out / name) as part:
            part.write_text(content, encoding="utf-8")
    return out / "report.md"


def _shown(drawn: Mapping[str, Figure | None]) -> set[str]:
    return {name for name, figure in drawn.items() if figure is not None}


def build_sections(
    sweep: Sweep, cells: pd.DataFrame, judged: tuple[Judged, ...], shown: set[str]
) -> list[tuple[str, str]]:
    """Return heading and text of every section, in order; `shown` names the figures of claims."""
    limits = find_limits(sweep, cells)
    pictures = {name: md.figure(name, text) for name, (_, text) in FIGURES.items()}
    claims = [md.figure(n, text) for n, (_, text) in CLAIM_FIGURES.items() if n in shown]
    time = [pictures["time"], pictures["pareto"], pictures["throughput"]]
    parts = [
        ("Summary", summary.summary(sweep, cells, judged)),
        ("Set-up", sections.setup(sweep)),
        ("Results", "\n\n".join([pictures["loss"], sections.results(sweep, cells)])),
        *sections.rewards(sweep),
        ("Claims and their gates", "\n\n".join([gates.claims(sweep, judged), *claims])),
        ("Curves", pictures["curves"]),
        ("Time, throughput and memory", "\n\n".join([sections.time_and_memory(cells), *time])),
        ("Recommendations", summary.recommendations(sweep, cells, limits, judged)),
        ("What this sweep cannot show", summary.cannot_show(limits)),
        ("Reproduction", sections.reproduction(sweep)),
    ]
    return _with_warnings(sweep, parts)


def build_target_sections(
    sweep: Sweep, cells: pd.DataFrame, reached: tuple[Reached, ...], shown: set[str]
) -> list[tuple[str, str]]:
    """Return the same sections for a sweep to a target; `shown` names the figures."""
    pictures = {
        name: md.figure(name, text)
        for name, (_, text) in (FIGURES | TARGET_FIGURES).items()
        if name in shown
    }
    claims = [target.claims(sweep, reached), *(pictures.get(n, "") for n in ("rates", "noise"))]
    time = [sections.time_and_memory(cells), pictures["time"], pictures["throughput"]]
    results = [pictures.get("steps", ""), target.results(sweep, cells, reached)]
    parts = [
        ("Summary", target.opening(sweep, cells, reached)),
        ("Set-up", sections.setup(sweep)),
        ("Results", "\n\n".join(filter(None, results))),
        ("Claims and their gates", "\n\n".join(filter(None, claims))),
        ("Curves", pictures["curves"]),
        ("Time, throughput and memory", "\n\n".join(time)),
        ("Recommendations", target.recommendations(reached)),
        ("What this sweep cannot show", summary.cannot_show(find_limits(sweep, cells))),
        ("Reproduction", sections.reproduction(sweep)),
    ]
    return _with_warnings(sweep, parts)


def _with_warnings(sweep: Sweep, parts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    if sweep.warnings:
        parts.insert(1, ("Warnings", md.bullets(sweep.warnings)))
    return parts
