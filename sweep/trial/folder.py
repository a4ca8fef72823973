"""The folders of a sweep and of its trials, the states of a trial, and its initial weights."""

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from sweep.config.models import find_pretrained
from sweep.config.trial import TrialConfig
from sweep.errors import CorruptFile, Superseded, SweepError
from sweep.trial.files import read_json, remove, sha256_of, sha256_of_file, write_json

MESSAGE_CHARACTERS = 1000  # kept of a message by reports and tracking stores


class State(StrEnum):
    """The state of a trial."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"

    @property
    def is_finished(self) -> bool:
        """Whether no attempt is running or to be started."""
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
    """state.json, which only the runner writes."""

    state: State = State.WAITING
    cause: Cause | None = None
    message: str = ""  # one line for people
    attempts: int = 0
    fencing: int = 0  # number of the newest attempt
    microbatch_size: int | None = None  # None: as planned
    evaluation_batch_size: int | None = None  # None: as planned
    pause_step: int | None = None  # step at which the attempt checkpoints and ends
    mlflow_run_id: str | None = None

    def changed(self, **fields: Any) -> "TrialStatus":
        """Return a copy with some fields changed."""
        return replace(self, **fields)


@dataclass(frozen=True)
class MemoryBounds:
    """memory.json: sizes that later trials must not exceed, after an out-of-memory error."""

    model: str
    device: str
    precision: str
    microbatch_size: int | None = None  # None: as planned
    evaluation_batch_size: int | None = None


class CheckpointName(NamedTuple):
    """A checkpoint and the numbers in its file name."""

    path: Path  # a folder
    step: int
    metrics_length: int  # bytes of metrics.jsonl up to the checkpoint


CHECKPOINT = re.compile(r"checkpoint-(\d+)-(\d+)")


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
        """Lock of a bare worker, which writes state.json itself."""
        return self.path / "runner.lock"

    @property
    def stop_path(self) -> Path:
        """Asks an attempt on another machine to checkpoint and end."""
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
        """Tokenizer of the pretrained model that the trial started from."""
        return self.path / "tokenizer.json"

    @property
    def log_path(self) -> Path:
        return self.path / "log.txt"

    def read_config(self) -> TrialConfig:
        """Read config.json.

        Raises:
            SweepError: if there is none.
        """
        try:
            data = read_json(self.config_path)
        except FileNotFoundError:
            raise SweepError(
                f"{self.path} must be a trial folder with a config.json, which is missing. "
                "Write one with `sweep plan --out DIR`."
            ) from None
        data.pop("format_version")
        sweep = SweepFolder(self.path.absolute().parents[1])
        for name in ("data_path", "init_path"):
            data[name] = sweep.locate(data.get(name))
        return TrialConfig.model_validate(data)

    def write_config(self, config: TrialConfig) -> None:
        """Write config.json; create the folder if necessary."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, config.model_dump(mode="json"))

    def read_status(self) -> TrialStatus:
        """Read state.json. A trial without one is WAITING."""
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
        """Read result.json, the final record; return None if it does not exist yet."""
        try:
            return read_json(self.result_path)
        except FileNotFoundError:
            return None

    def checkpoints(self) -> list[CheckpointName]:
        """Return the checkpoints, newest first."""
        names = []
        for path in self.path.glob("checkpoint-*"):
            if match := CHECKPOINT.fullmatch(path.name):
                names.append(CheckpointName(path, int(match[1]), int(match[2])))
        return sorted(names, key=lambda checkpoint: checkpoint.step, reverse=True)

    def settled_length(self) -> int:
        """Return how many bytes of metrics.jsonl no resume will truncate.

        These are all bytes once the trial has ended, else those up to the older of two checkpoints.
        """
        if self.result_path.exists() or self.read_status().state is State.PRUNED:
            return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0
        kept = self.checkpoints()
        return kept[1].metrics_length if len(kept) > 1 else 0

    def fence(self, number: int) -> Callable[[], None]:
        """Return a check that raises Superseded once there is a newer attempt."""

        def check() -> None:
            newest = self.read_status().fencing
            if newest != number:
                raise Superseded(f"trial {self.id}: attempt {number} was superseded by {newest}")

        return check

    def ask_to_stop(self, number: int) -> None:
        """Ask attempts up to this number, on any machine, to checkpoint and end."""
        write_json(self.stop_path, {"fencing": number})

    def is_asked_to_stop(self, number: int) -> bool:
        """Return True if the attempt of this number is to end."""
        if self.stop_path.name not in self.listed():
            return False
        return bool(read_json(self.stop_path)["fencing"] >= number)

    def listed(self) -> list[str]:
        """Return the names of the files here.

        Listing the folder makes a network file system notice new files at once.
        """
        return os.listdir(self.path)

    def remove_half_written(self) -> None:
        """Remove partial files of dead attempts, except the runner's."""
        for part in self.path.glob(".*.part"):
            if not part.name.startswith(f".{self.state_path.name}"):
                remove(part)

    def remove_checkpoints(self, kept: int = 0) -> None:
        """Remove all checkpoints but the newest `kept`."""
        for checkpoint in self.checkpoints()[kept:]:
            remove(checkpoint.path)

    def clear(self) -> None:
        """Remove everything that attempts wrote, except the log."""
        written = (self.result_path, self.metrics_path, self.losses_path)
        for path in (*written, self.weights_path, self.tokenizer_path):
            path.unlink(missing_ok=True)
        self.remove_checkpoints()


@dataclass(frozen=True)
class SweepFolder:
    """One sweep on disk."""

    path: Path

    @property
    def name(self) -> str:
        """The sweep's name, which is the folder's."""
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
        """Return the absolute form of a path that may be relative to this folder."""
        return data_path and os.path.normpath(self.path.absolute() / data_path)

    def read_bounds(self, config: TrialConfig) -> MemoryBounds:
        """Read the bounds for a trial's model, device and precision from memory.json."""
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
        """Read plan.json; return None if it does not exist.

        Raises:
            CorruptFile: if it is damaged.
        """
        try:
            plan = read_json(self.plan_path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not isinstance(plan.get("trials"), list):
            raise CorruptFile(f"{self.plan_path} must be a plan, but it lists no trials.")
        return plan

    def require_plan(self) -> dict[str, Any]:
        """Read plan.json of a folder that must have one."""
        plan = self.read_plan()
        if plan is None:
            raise SweepError(
                f"{self.path} must be a sweep folder with a plan.json, which is missing. "
                "Give the folder that `sweep run` wrote to."
            )
        return plan

    def trials(self) -> list[TrialFolder]:
        """Return the folders of the planned trials, in the plan's order."""
        return [self.trial(row["id"]) for row in self.require_plan()["trials"] if row["id"]]


def identify_start(path: str) -> dict[str, Any]:
    """Return the hash of initial weights, and for a trial its model, tokenizer and data.

    The data are left out if the trial started from a pretrained model, whose tokenizer does not
    depend on them.

    Raises:
        SweepError: if the folder is neither a trial with weights nor a pretrained model.
    """
    if (pretrained := find_pretrained(path)) is not None:
        return {"weights": _pretrained_sha256(pretrained)}
    folder = TrialFolder(Path(path).expanduser())
    if not folder.config_path.is_file() or not folder.weights_path.is_file():
        raise SweepError(
            f"init must be the folder of a complete trial, with config.json and "
            f"{folder.weights_path.name}, or of a pretrained model of transformers, got {path!r}. "
            "Name one of a sweep's trials/."
        )
    science = folder.read_config().science
    is_pretrained = science.tokenizer is not None and science.tokenizer.kind == "pretrained"
    if is_pretrained and not folder.tokenizer_path.is_file():
        raise SweepError(
            f"init must contain the model's tokenizer, got {path!r} without "
            f"{folder.tokenizer_path.name}. Copy it there from the pretrained model's folder."
        )
    return {
        "weights": sha256_of_file(folder.weights_path),
        "model": science.model.model_dump(mode="json"),
        "tokenizer": science.tokenizer and science.tokenizer.model_dump(mode="json"),
        **({} if is_pretrained else {"data": science.data}),  # the tokenizer is not trained on data
    }


def check_start(path: str, start: dict[str, Any] | None) -> None:
    """Check that the weights are those that a trial was planned with.

    Raises:
        SweepError: if they are missing or different.
    """
    if start is None or identify_start(path)["weights"] != start["weights"]:
        raise SweepError(
            f"init must contain the weights that the plan names, but {path} contains others. "
            "Restore them, or start a new sweep in another folder."
        )


def _pretrained_sha256(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SweepError(
            f"init must contain weights in safetensors, got {str(folder)!r} without any. Save them "
            "there with save_pretrained."
        )
    return sha256_of({file.name: sha256_of_file(file) for file in files})
