"""Write the report of one sweep: report.md, report.html, trials.csv and figures/*.png.

    sweep report DIR

An unfinished sweep gets a report too. The same data give the same bytes.
"""

from pathlib import Path

from sweep.analysis.checks import run_checks
from sweep.analysis.comparison import compare_batch_sizes
from sweep.analysis.frames import Sweep, load_stored_sweep, load_sweep, write_trials_csv
from sweep.analysis.target import judge_target
from sweep.report.context import Policies, build_context
from sweep.report.figures import draw_figures
from sweep.report.rendering import render, to_html
from sweep.trial.files import replacing


def write_report(path: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a sweep folder and return the path of report.md.

    Args:
        path: the sweep folder.
        out: the folder to write to; by default the sweep folder.

    Raises:
        SweepError: if the folder holds no sweep.
    """
    return write_report_of(load_sweep(path), Path(out or path))


def write_report_from_store(
    tracking_uri: str, experiment: str, run_id: str | None, out: str | Path
) -> Path:
    """Write the report of a sweep in an MLflow store: the newest parent run unless one is named."""
    return write_report_of(load_stored_sweep(tracking_uri, experiment, run_id), Path(out))


def write_report_of(sweep: Sweep, out: Path) -> Path:
    """Write the report of a loaded sweep; each file is replaced atomically, report.md last."""
    cells = compare_batch_sizes(sweep.trials)
    has_target = sweep.plan.settings.target is not None
    policies: Policies = (
        judge_target(sweep, cells) if has_target else tuple(run_checks(sweep, cells).values())
    )
    figures = draw_figures(sweep, cells, policies)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        path = out / "figures" / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)  # an earlier report may have had it
            continue
        with replacing(path) as part:
            # Without the writer's version the bytes depend on the picture alone.
            figure.savefig(part, format="png", metadata={"Software": None})
    write_trials_csv(sweep, out / "trials.csv")
    text = render("report.md.j2", figures=figures, **build_context(sweep, cells, policies))
    page = to_html(text, f"Batch-size sweep: {sweep.name}", out)
    for name, content in (("report.html", page), ("report.md", text)):
        with replacing(out / name) as part:
            part.write_text(content, encoding="utf-8")
    return out / "report.md"
