"""Progress of a running sweep on stderr."""

import math
import time
from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sweep.config.numbers import format_seconds
from sweep.config.objective import Objective
from sweep.errors import printable
from sweep.orchestration.status import sweep_status, time_left
from sweep.trial.folder import SweepFolder
from sweep.trial.status import State

LINE_SECONDS = 60.0  # between lines of progress without a terminal


def state_of(row: dict[str, Any]) -> str:
    return f"{row['state']} {row['cause'] or ''}".strip()


def time_text(seconds: float | None, qualifier: str = "about ") -> str:
    return f", {qualifier}{format_seconds(math.ceil(seconds))} left" if seconds else ""


def stage_of(row: dict[str, Any]) -> str:
    return "tuning" if row["stage"] == "tune" else f"seed {row['seed']}"


def describe_trial(prefix: str, row: dict[str, Any], title: str, width: int) -> str:
    """Write a trial in columns: its optimizer in a width, and the newest value of the metric."""
    name = f"{printable(row['optimizer'] or ''):<{width}}"
    cell = f"batch size {row['batch_size']:<5} lr {row['learning_rate']:<8.3g} {stage_of(row):<7}"
    value = "" if row["value"] is None else f"{title} {row['value']:.4f}"
    state = "" if row["state"] in (State.RUNNING, State.COMPLETE) else state_of(row)
    return " ".join(part for part in (f"{prefix:<12}", name, cell, value, state) if part)


def share_of(rows: list[dict[str, Any]]) -> float:
    """Return the share of the planned tokens that is done; an ended trial counts as planned."""
    done = 0
    planned = 0
    for row in rows:
        planned += row["planned_tokens"]
        done += row["planned_tokens"] if State(row["state"]).is_finished else row["tokens"]
    return done / max(1, planned)


class Display(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True  # training goes on


class Progress(AbstractContextManager["Progress"]):
    """Progress of some trials (None: all) on stderr: a bar, or without a terminal a line a minute.

    On a terminal each trial that ends leaves a line. `finals`: the number of final trials if
    more trials may follow than the plan has, else 0.
    """

    def __init__(
        self, folder: SweepFolder, ids: Collection[str] | None, is_quiet: bool, finals: int = 0
    ) -> None:
        self._folder = folder
        self._ids = ids
        self._is_quiet = is_quiet
        self._finals = finals

        self._console = Display(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

        self._ended: set[str] | None = None  # trials
        self._first_share = 0.0
        self._started = time.monotonic()
        self._next_update = 0.0
        self._next_line = self._started + LINE_SECONDS

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._next_update = self._next_line = 0.0
            self.update()
        self._live.stop()

    def update(self) -> None:
        """Read the folder and show it, at most once a second and in a tenth of the time."""
        now = time.monotonic()
        if self._is_quiet or now < self._next_update:
            return

        document = sweep_status(self._folder)
        rows = document["trials"]
        if self._ids is not None:
            rows = [row for row in rows if row["id"] in self._ids]
        self._show(document, rows, now)

        seconds_taken = time.monotonic() - now
        self._next_update = time.monotonic() + max(1.0, 9 * seconds_taken)

    def _show(self, document: dict[str, Any], rows: list[dict[str, Any]], now: float) -> None:
        ended = [row for row in rows if State(row["state"]).is_finished]
        final_count = sum(row["stage"] == "final" for row in rows)
        awaited = max(0, self._finals - final_count)
        total = len(rows) + awaited
        is_open = self._finals > 0 and len(ended) < total

        share = share_of(rows) * len(rows) / max(1, total)
        if self._ended is None:
            self._ended = {row["id"] for row in ended}
            self._first_share = share
        new = [row for row in ended if row["id"] not in self._ended]
        self._ended |= {row["id"] for row in new}

        elapsed = now - self._started
        seconds = time_left(rows)
        if awaited:
            seconds = self._extrapolate(share, elapsed, seconds)
        left = time_text(seconds, "at least " if is_open else "about ")
        least = "at least " if is_open else ""
        counts = f"{len(ended)} of {least}{total} trials have ended"

        title = Objective(document["metric"]).title.removeprefix("final validation ")
        names = [row["optimizer"] for row in rows if row["optimizer"]]
        width = max(map(len, names), default=0)
        describe = partial(describe_trial, title=title, width=width)
        known = [row for row in rows if row["id"]]
        lines = [describe("best so far:", row) for row in known if row["id"] == document["best"]]

        if not self._console.is_terminal:
            self._print_line(f"{share:.0%}, {counts}{left}", lines, now)
            return
        for number, row in enumerate(new, len(ended) - len(new) + 1):
            self._console.print(describe(f"{number} of {total}", row), markup=False)
        lines += [describe("running:", row) for row in rows if row["state"] == State.RUNNING]
        if self._ids or self._finals:  # not a command that began earlier
            left = f", {format_seconds(round(elapsed))} elapsed{left}"
        self._draw_bar(share, f"{share:4.0%}{left}", [counts, *lines])

    def _extrapolate(self, share: float, elapsed: float, seconds: float | None) -> float | None:
        """Return the seconds left if trials that are not planned yet take their part of them."""
        gained = share - self._first_share
        if gained <= 0.05:
            return seconds
        extrapolated = elapsed * (1 - share) / gained
        return extrapolated if seconds is None else max(seconds, extrapolated)

    def _draw_bar(self, share: float, text: str, lines: list[str]) -> None:
        """Draw the bar with its text and lines below it, in place of those drawn before."""
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(1.0, share, 24), text)
        self._live.start()
        below = Text("\n".join(lines), no_wrap=True)
        self._live.update(Group(bar, below), refresh=True)

    def _print_line(self, text: str, lines: list[str], now: float) -> None:
        """Print one line, if the last one was printed long enough ago."""
        if now < self._next_line:
            return
        self._next_line = now + LINE_SECONDS
        self._console.print("; ".join([text, *lines]), markup=False, soft_wrap=True)
