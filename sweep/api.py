"""Run a sweep from Python, and read its results."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.analysis.results import Sweep, load_sweep
from sweep.orchestration.costs import estimate
from sweep.orchestration.planning import make_plan, read_request
from sweep.orchestration.progress import Progress
from sweep.orchestration.runner import Summary, check_request, finished_summary, run_plan
from sweep.report.report import write_report

if TYPE_CHECKING:
    from typing import Unpack

    import pandas as pd

    from sweep.analysis.answer import Answer
    from sweep.config.overrides import Overrides


@dataclass(frozen=True)
class SweepRun:
    """A sweep that `run_sweep` ended, complete or not."""

    summary: Summary

    @property
    def exit_code(self) -> int:
        """0 complete, pruned or diverged; 1 any other failure; 130 interrupted."""
        return self.summary.exit_code

    @property
    def report(self) -> Path:
        """The path of report.html, next to report.md, trials.csv and answer.json."""
        return self.summary.folder.path / "report.html"

    @cached_property
    def sweep(self) -> Sweep:
        """What `load_sweep` reads from the folder."""
        return load_sweep(self.summary.folder.path)

    @property
    def trials(self) -> "pd.DataFrame":
        """One row per planned trial, with the columns of trials.csv."""
        return self.sweep.trials

    def answer(self) -> "Answer | None":
        """Return the answer; None if fewer than two batch sizes have results."""
        return self.sweep.answer()

    def _repr_html_(self) -> str:
        return self.sweep._repr_html_()


def run_sweep(
    experiment: str | None = None,
    *,
    out: str | Path | None = None,
    show_progress: bool = True,
    **settings: "Unpack[Overrides]",
) -> SweepRun:
    """Run the unfinished trials of a sweep, and write its report.

    Args:
        experiment: a shipped name or the path of a TOML file.
        out: the sweep's folder; results/<experiment> by default. If it has a plan, that grows.
        show_progress: on stderr.
        **settings: any setting of `sweep run` by name: budget, batches, model, lr, device, …

    Raises:
        SweepError: bad input, before anything is written.
    """
    planned = make_plan(read_request(experiment, {**settings}, out))
    check_request(planned)
    folder = planned.request.folder
    summary = finished_summary(planned)
    if summary is None:
        is_open = planned.is_tuned or planned.adds_seeds
        ids = None if is_open else planned.requested
        with Progress(folder, ids, is_quiet=not show_progress) as progress:
            summary = run_plan(
                estimate(planned),
                on_change=progress.update,
                on_finished=lambda: write_report(folder.path),
            )
    elif not (folder.path / "report.md").exists():
        write_report(folder.path)
    return SweepRun(summary)
