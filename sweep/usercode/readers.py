"""Read what programs write by themselves into the lines of a log: `--read`.

A reader is a class in `READERS`. Names of metrics are translated by `sweep.script.metric_name`.
"""

import csv
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sweep.errors import SweepError, did_you_mean
from sweep.script import metric_name
from sweep.usercode.objects import require_extra

STEP = "step"
STEP_FROM_0 = "step_from_0"  # group of a regular expression: steps counted from 0
SUMMARY = "train_runtime"  # in the last entry of transformers, which sums up the training
Line = dict[str, Any]


@dataclass(frozen=True)
class Places:
    """Where a program writes."""

    folders: tuple[Path, ...]  # {folder} and {resume}, which need not exist
    output: Path  # its standard output and error
    output_start: int  # length of `output` before the program started


class Reader(ABC):
    """Reads the new lines of one program. What it leaves out is counted."""

    name: ClassVar[str]  # the value of --read, or its part up to the colon
    has_argument: ClassVar[bool] = False  # after a colon
    counts: ClassVar[tuple[str, ...]] = ()  # names of what was trained on so far, as in `sweep.log`

    def __init__(self, argument: str, places: Places) -> None:
        self.argument = argument
        self.places = places
        self.count = 0  # lines that were read
        self.left_out = 0  # values that are no numbers; entries without a metric or a step

    @classmethod
    def refuse(cls, argument: str) -> None:
        """Raise SweepError if the argument cannot be used; any can, unless a reader says so."""
        return

    @abstractmethod
    def read(self, is_last: bool = False) -> Iterable[Line]:
        """Return the lines since the last call, each with a step and metrics by name.

        With `is_last` the program has ended, so that a last line without its end counts too.
        """

    def describe(self) -> str:
        left_out = f", {self.left_out} left out" if self.left_out else ""
        return f"--read {self.name}: {self.count} lines{left_out}"

    def _line(self, step: Any, values: Mapping[str, Any]) -> Line | None:
        """Return a line of the values that are metrics; None if there is none."""
        count = _number(step)
        line: Line = {}
        for name, value in values.items():
            metric = name if name in self.counts else metric_name(name)
            number = _number(value)
            if metric is None:
                continue
            if number is None:
                self.left_out += 1
                continue
            line[metric] = number if math.isfinite(number) else None
        if not line:
            self.left_out += not any(metric_name(name) is not None for name in values)
            return None
        if count is None or not count.is_integer():
            self.left_out += 1
            return None
        self.count += 1
        return {STEP: int(count), **line}


class TrainerState(Reader):
    """The history in the newest trainer_state.json, which transformers writes with checkpoints."""

    name = "trainer_state.json"

    def __init__(self, argument: str, places: Places) -> None:
        super().__init__(argument, places)
        self._entries = 0  # entries of the history that were read

    def read(self, is_last: bool = False) -> Iterator[Line]:
        newest = _newest(self.places.folders, self.name)
        if newest is None:
            return
        try:
            history = json.loads(newest.read_text(encoding="utf-8"))["log_history"]
        except (OSError, ValueError, KeyError):  # while it is written
            return
        if len(history) < self._entries:  # the program went back to an earlier checkpoint
            self._entries = 0
        new = history[self._entries :]
        self._entries = len(history)
        for entry in new:
            if SUMMARY in entry:
                self.left_out += 1
                continue
            line = self._line(entry.get(STEP), entry)
            if line is not None:
                yield line


class MetricsCsv(Reader):
    """The newest metrics.csv of Lightning's CSVLogger, which counts steps from 0."""

    name = "metrics.csv"

    def __init__(self, argument: str, places: Places) -> None:
        super().__init__(argument, places)
        self._path: Path | None = None
        self._rows = 0  # rows of the file that were read

    def read(self, is_last: bool = False) -> Iterator[Line]:
        newest = _newest(self.places.folders, self.name)
        if newest is None:
            return
        if newest != self._path:
            self._path = newest
            self._rows = 0
        text = newest.read_text(encoding="utf-8")
        complete = text if is_last else text[: text.rfind("\n") + 1]
        rows = [*csv.DictReader(complete.splitlines())]
        if len(rows) < self._rows:
            self._rows = 0
        new = rows[self._rows :]
        self._rows = len(rows)
        for row in new:
            cells = {name: cell for name, cell in row.items() if name and cell}
            step = _number(cells.get(STEP))
            line = self._line(None if step is None else step + 1, cells)
            if line is not None:
                yield line


class TensorBoard(Reader):
    """The scalars of TensorBoard's event files, by its own package.

    Lightning, which also writes the scalar `epoch`, counts steps from 0.
    """

    name = "tensorboard"
    has_argument = True

    def __init__(self, argument: str, places: Places) -> None:
        super().__init__(argument, places)
        self._accumulators: dict[Path, Any] = {}
        self._scalars: dict[tuple[Path, str], int] = {}  # by folder and tag, that were read

    def read(self, is_last: bool = False) -> Iterator[Line]:
        require_extra("tensorboard", "tensorboard", "--read tensorboard:DIR")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for folder in self._folders():
            if folder not in self._accumulators:
                everything = {"scalars": 0, "tensors": 0}
                self._accumulators[folder] = EventAccumulator(str(folder), everything)
            events = self._accumulators[folder]
            events.Reload()
            values = [*self._new_values(folder, events)]
            first = 1 if "epoch" in events.Tags()["scalars"] else 0
            for step, tag, value in sorted(values, key=lambda item: item[0]):
                line = self._line(step + first, {tag: value})
                if line is not None:
                    yield line

    def _folders(self) -> list[Path]:
        folders: set[Path] = set()
        for place in self.places.folders:
            parent = place / self.argument
            if parent.is_dir():
                folders |= {path.parent for path in parent.rglob("events.out.tfevents.*")}
        return sorted(folders)

    def _new_values(self, folder: Path, events: Any) -> Iterator[tuple[int, str, float]]:
        tags = events.Tags()
        for tag in tags["scalars"]:
            scalars = events.Scalars(tag)
            before = self._scalars.get((folder, tag), 0)
            self._scalars[folder, tag] = len(scalars)
            for scalar in scalars[before:]:
                yield scalar.step, tag, scalar.value


class Expression(Reader):
    """Named groups of a regular expression over the lines of the program's output.

    The group `step`, or `step_from_0`, is the step, `tokens` and `examples` are counts, and the
    others are metrics, such as `valid_loss`.
    """

    name = "regex"
    has_argument = True
    counts = ("tokens", "examples")

    def __init__(self, argument: str, places: Places) -> None:
        super().__init__(argument, places)
        self._pattern = re.compile(argument)
        self._position = places.output_start

    @classmethod
    def refuse(cls, argument: str) -> None:
        try:
            groups = {*re.compile(argument).groupindex}
        except re.error as error:
            raise SweepError(
                f"read: {argument!r} must be a regular expression ({error})."
            ) from None
        steps = groups & {STEP, STEP_FROM_0}
        metrics = [name for name in groups - steps if metric_name(name) is not None]
        if len(steps) != 1 or not metrics:
            raise SweepError(
                "read: a regular expression must have a group (?P<step>…) or (?P<step_from_0>…), "
                f"and one for each metric, such as (?P<valid_loss>…), got {argument!r}. Add them."
            )

    def read(self, is_last: bool = False) -> Iterator[Line]:
        with self.places.output.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        end = len(data) if is_last else max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._position += end
        for text in re.split(r"[\r\n]+", data[:end].decode(errors="replace")):
            for match in self._pattern.finditer(text):
                values = {name: value for name, value in match.groupdict().items() if value}
                step = _number(values.pop(STEP, None))
                from_0 = _number(values.pop(STEP_FROM_0, None))
                if from_0 is not None:
                    step = from_0 + 1
                line = self._line(step, values)
                if line is not None:
                    yield line


READERS: dict[str, type[Reader]] = {
    reader.name: reader for reader in (TrainerState, MetricsCsv, TensorBoard, Expression)
}


def refuse_unknown_reader(text: str | None) -> str | None:
    """Refuse a value of --read that names no reader, or that its reader cannot use."""
    if text is None:
        return None
    name, colon, argument = text.partition(":")
    reader = READERS.get(name)
    if reader is None or reader.has_argument != bool(colon):
        known = "trainer_state.json, metrics.csv, tensorboard:DIR or 'regex:PATTERN'"
        hint = did_you_mean(name, READERS) or "Correct it."
        raise SweepError(f"read must be {known}, got {text!r}. {hint}")
    reader.refuse(argument)
    return text


def build_reader(text: str, places: Places) -> Reader:
    """Return the reader of a value of --read."""
    name, _, argument = text.partition(":")
    return READERS[name](argument, places)


def _number(value: Any) -> float | None:
    """Return a number, also from a text; None if it is none."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _newest(folders: Iterable[Path], name: str) -> Path | None:
    """Return the file of a name that was written last in some folders, or in a file's folder."""
    found: list[tuple[float, Path]] = []
    for folder in folders:
        for path in folder.rglob(name) if folder.is_dir() else ():
            try:
                found.append((path.stat().st_mtime, path))
            except OSError:  # removed meanwhile
                continue
    return max(found)[1] if found else None
