"""The folders of a sweep and of its trials: what is where, and the states a trial can be in."""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from sweep.config.trial import TrialConfig
from sweep.errors import CorruptFile, Superseded, SweepError
from sweep.trial.files import read_json, remove, write_json

MESSAGE_CHARACTERS = 1000  # of a message that reports and tracking stores keep


class State(StrEnum):
    """Where a trial stands."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"

    @property
    def is_finished(self) -> bool:
        """Whether no attempt is under way or awaited."""
        return self not in (State.WAITING, State.RUNNING)


class Cause(StrEnum):
    """Why a trial FAILED."""

    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    PREEMPTED = "preempted"
    LOST = "lost"  # killed, segmentation fault, no heartbeat
    ERROR = "error"


@dataclass(frozen=True)
class TrialStatus:
    """state.json: written by the runner only."""

    state: State = State.WAITING
    cause: Cause | None = None
    message: str = ""  # one line for people
    attempts: int = 0
    fencing: int = 0  # of the newest attempt
    microbatch_size: int | None = None  # None: as planned
    evaluation_batch_size: int | None = None  # None: as planned
    pause_step: int | None = None  # where the attempt checkpoints and ends; None: at the last
    mlflow_run_id: str | None = None

    def changed(self, **fields: Any) -> "TrialStatus":
        """Return a copy with some fields changed."""
        return replace(self, **fields)


@dataclass(frozen=True)
class MemoryBounds:
    """memory.json: sizes that later trials do not exceed, because memory ran out before."""

    model: str
    device: str
    precision: str
    microbatch_size: int | None = None  # None: as planned
    evaluation_batch_size: int | None = None


class CheckpointName(NamedTuple):
    """What a checkpoint's file name says."""

    path: Path
    step: int
    metrics_length: int  # bytes of metrics.jsonl that it knows of


CHECKPOINT = re.compile(r"checkpoint-(\d+)-(\d+)(\.pt)?")  # without: a folder, of several devices


@dataclass(frozen=True)
class TrialFolder:
    """One trial on disk: `trials/<id>`."""

    path: Path

    @property
    def id(self) -> str:
        """The trial's id."""
        return self.path.name

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def state_path(self) -> Path:
        return self.path / "state.json"

    @property
    def lease_path(self) -> Path:
        return self.path / "lease.json"

    @property
    def runner_lock_path(self) -> Path:
        """Held by a bare worker, which is its own runner, as long as it may write state.json."""
        return self.path / "runner.lock"

    @property
    def stop_path(self) -> Path:
        """Tells an attempt on another machine to checkpoint and end; see `ask_to_stop`."""
        return self.path / "stop.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    @property
    def losses_path(self) -> Path:
        return self.path / "valid_losses.npy"

    @property
    def weights_path(self) -> Path:
        return self.path / "weights.safetensors"

    @property
    def tokenizer_path(self) -> Path:
        """A pretrained model's, beside the weights that were made of it."""
        return self.path / "tokenizer.json"

    @property
    def log_path(self) -> Path:
        return self.path / "log.txt"

    def read_config(self) -> TrialConfig:
        """Read config.json.

        Raises:
            SweepError: if there is none, or it is not a trial's.
        """
        try:
            data = read_json(self.config_path)
        except FileNotFoundError:
            raise SweepError(
                f"{self.path} must be a trial folder with a config.json, and has none. "
                "Write one with `sweep plan --out DIR`."
            ) from None
        data.pop("format_version")
        sweep = SweepFolder(self.path.absolute().parents[1])
        for name in ("data_path", "init_path"):
            data[name] = sweep.locate(data.get(name))
        return TrialConfig.model_validate(data)

    def write_config(self, config: TrialConfig) -> None:
        """Write config.json, and the folder if need be."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, config.model_dump(mode="json"))

    def read_status(self) -> TrialStatus:
        """Read state.json; a trial without one is WAITING."""
        try:
            data = read_json(self.state_path)
        except FileNotFoundError:
            return TrialStatus()
        data.pop("format_version")
        cause = Cause(data["cause"]) if data["cause"] else None
        return TrialStatus(**{**data, "state": State(data["state"]), "cause": cause})

    def write_status(self, status: TrialStatus) -> None:
        """Write state.json."""
        write_json(self.state_path, asdict(status))

    def read_result(self) -> dict[str, Any] | None:
        """Read result.json: the final record, or None while there is none."""
        try:
            return read_json(self.result_path)
        except FileNotFoundError:
            return None

    def checkpoints(self) -> list[CheckpointName]:
        """List checkpoints, newest first."""
        found = []
        for path in self.path.glob("checkpoint-*"):
            if match := CHECKPOINT.fullmatch(path.name):
                found.append(CheckpointName(path, int(match[1]), int(match[2])))
        return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)

    def settled_length(self) -> int:
        """Return how many bytes of metrics.jsonl no resume will take back.

        All of them once result.json is there or the trial was pruned, else up to the older of two
        kept checkpoints.
        """
        if self.result_path.exists() or self.read_status().state is State.PRUNED:
            return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0
        kept = self.checkpoints()
        return kept[1].metrics_length if len(kept) > 1 else 0

    def fence(self, number: int) -> Callable[[], None]:
        """Return a check that raises Superseded once a newer attempt holds the trial."""

        def check() -> None:
            newest = self.read_status().fencing
            if newest != number:
                raise Superseded(f"trial {self.id}: attempt {number} was superseded by {newest}")

        return check

    def ask_to_stop(self, number: int) -> None:
        """Ask an attempt, wherever it runs, to checkpoint and end; later ones are not meant."""
        write_json(self.stop_path, {"fencing": number})

    def is_asked_to_stop(self, number: int) -> bool:
        """Tell whether the attempt of this fencing number is to end."""
        if self.stop_path.name not in self.listed():
            return False
        return bool(read_json(self.stop_path)["fencing"] >= number)

    def listed(self) -> list[str]:
        """Return the names of the files here; over a network file system this looks anew.

        Without it, what was not there a moment ago may stay unseen for a minute.
        """
        return os.listdir(self.path)

    def remove_half_written(self) -> None:
        """Remove what dead attempts left unfinished; state.json is the runner's own."""
        for part in self.path.glob(".*.part"):
            if not part.name.startswith(f".{self.state_path.name}"):
                remove(part)

    def remove_checkpoints(self, kept: int = 0) -> None:
        """Remove what only a resume would need; all but the newest so many."""
        for checkpoint in self.checkpoints()[kept:]:
            remove(checkpoint.path)

    def clear(self) -> None:
        """Remove what attempts wrote, so that the trial starts anew; config and log stay."""
        made = (self.result_path, self.metrics_path, self.losses_path)
        for path in (*made, self.weights_path, self.tokenizer_path):
            path.unlink(missing_ok=True)
        self.remove_checkpoints()


@dataclass(frozen=True)
class SweepFolder:
    """One sweep on disk."""

    path: Path

    @property
    def name(self) -> str:
        """The sweep's name: that of its folder."""
        return self.path.absolute().name

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def tracking_path(self) -> Path:
        return self.path / "tracking.json"

    @property
    def memory_path(self) -> Path:
        return self.path / "memory.json"

    @property
    def lock_path(self) -> Path:
        return self.path / "sweep.lock"

    @property
    def figures_path(self) -> Path:
        return self.path / "figures"

    def locate(self, data_path: str | None) -> str | None:
        """Return where data lie whose path is absolute or as seen from this folder."""
        return data_path and os.path.normpath(self.path.absolute() / data_path)

    def read_bounds(self, config: TrialConfig) -> MemoryBounds:
        """Read memory.json for a trial's model, device and precision; unbounded where none is."""
        science = config.science
        key = (science.model.name, config.execution.device, science.precision)
        with contextlib.suppress(FileNotFoundError, CorruptFile, TypeError):
            data = read_json(self.memory_path)
            data.pop("format_version")
            bounds = MemoryBounds(**data)
            if (bounds.model, bounds.device, bounds.precision) == key:
                return bounds
        return MemoryBounds(*key)

    def write_bounds(self, bounds: MemoryBounds) -> None:
        """Write memory.json."""
        write_json(self.memory_path, asdict(bounds))

    def trial(self, trial_id: str) -> TrialFolder:
        """Return the folder of a trial."""
        return TrialFolder(self.path / "trials" / trial_id)

    def read_plan(self) -> dict[str, Any] | None:
        """Read plan.json, or None where nothing was planned yet.

        Raises:
            CorruptFile: if it is damaged.
        """
        try:
            plan = read_json(self.plan_path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not isinstance(plan.get("trials"), list):
            raise CorruptFile(f"{self.plan_path} must hold a plan, but lists no trials.")
        return plan

    def require_plan(self) -> dict[str, Any]:
        """Read plan.json of a folder that must be a sweep's."""
        plan = self.read_plan()
        if plan is None:
            raise SweepError(
                f"{self.path} must be a sweep folder with a plan.json, and has none. "
                "Give the folder that `sweep run` wrote to."
            )
        return plan

    def trials(self) -> list[TrialFolder]:
        """Return the folders of the planned trials, in the plan's order."""
        return [self.trial(row["id"]) for row in self.require_plan()["trials"] if row["id"]]
