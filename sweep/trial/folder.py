"""The folders of a sweep and of its trials, the states of a trial, and its initial weights."""

import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from sweep.config.trial import TrialConfig
from sweep.errors import CorruptFile, Superseded, SweepError
from sweep.trial.files import find_json, read_json, remove, sha256_of, sha256_of_file, write_json

MESSAGE_CHARACTERS = 1000  # kept of a message by reports and tracking stores
CHECKPOINT = re.compile(r"checkpoint-(\d+)-(\d+)")


class State(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"

    @property
    def is_finished(self) -> bool:  # no attempt is running or to be started
        return self not in (State.WAITING, State.RUNNING)


class Cause(StrEnum):  # why a trial FAILED
    OUT_OF_MEMORY = "out_of_memory"
    DIVERGED = "diverged"
    PREEMPTED = "preempted"
    LOST = "lost"  # killed, segmentation fault, no heartbeat
    ERROR = "error"


def has_failed(state: str | None, cause: str | None) -> bool:
    """Return True for a failure that can be tried again; a divergence is a result."""
    return state == State.FAILED and cause != Cause.DIVERGED


def overall_state(ends: Collection[tuple[State, Cause | None]]) -> State:
    """Return WAITING, FAILED or COMPLETE for trials of which none is running, by their ends."""
    if not all(state.is_finished for state, _ in ends):
        return State.WAITING
    return State.FAILED if any(has_failed(*end) for end in ends) else State.COMPLETE


@dataclass(frozen=True)
class TrialStatus:  # state.json, which only the runner writes
    state: State = State.WAITING
    cause: Cause | None = None
    message: str = ""  # one line for people
    attempts: int = 0
    fencing: int = 0  # number of the newest attempt
    microbatch_size: int | None = None  # None: as planned
    pause_step: int | None = None  # step at which the attempt checkpoints and ends

    def changed(self, **fields: Any) -> "TrialStatus":
        return replace(self, **fields)


class CheckpointName(NamedTuple):
    step: int
    metrics_length: int  # bytes of metrics.jsonl up to the checkpoint
    path: Path


class TrialFolder:
    def __init__(self, path: Path) -> None:
        self.path, self.id = path, path.name
        self.config_path = path / "config.json"
        self.state_path = path / "state.json"
        self.lease_path = path / "lease.json"
        self.stop_path = path / "stop.json"  # asks an attempt to end
        self.metrics_path = path / "metrics.jsonl"
        self.result_path = path / "result.json"
        self.losses_path = path / "valid_losses.npy"
        self.weights_path = path / "weights.safetensors"
        self.tokenizer_path = path / "tokenizer.json"  # tokenizer of the pretrained model
        self.log_path = path / "log.txt"

    def read_config(self) -> TrialConfig:
        if (data := find_json(self.config_path)) is None:
            raise SweepError(f"{self.path} must be a trial folder with a config.json.")
        data.pop("format_version")
        sweep = SweepFolder(self.path.absolute().parents[1])
        for name in ("data_path", "init_path"):
            data[name] = sweep.locate(data.get(name))
        return TrialConfig.model_validate(data)

    def write_config(self, config: TrialConfig) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, config.model_dump(mode="json"))

    def read_status(self) -> TrialStatus:
        """Read state.json. A trial without one is WAITING, and one with a result has ended."""
        data = find_json(self.state_path) or asdict(TrialStatus())
        data.pop("format_version", None)
        if data["state"] in (State.WAITING, State.RUNNING) and (result := self.read_result()):
            data |= {"state": result["state"], "cause": result["cause"], "message": ""}
        cause = Cause(data["cause"]) if data["cause"] else None
        return TrialStatus(**{**data, "state": State(data["state"]), "cause": cause})

    def write_status(self, status: TrialStatus) -> None:
        write_json(self.state_path, asdict(status))

    def read_result(self) -> dict[str, Any] | None:
        return find_json(self.result_path)

    def checkpoints(self) -> list[CheckpointName]:
        """Return the checkpoints, newest first."""
        matches = [CHECKPOINT.fullmatch(path.name) for path in self.path.glob("checkpoint-*")]
        names = [CheckpointName(int(m[1]), int(m[2]), self.path / m[0]) for m in matches if m]
        return sorted(names, reverse=True)

    def remove_checkpoints(self, kept: int = 0) -> None:
        for checkpoint in self.checkpoints()[kept:]:
            remove(checkpoint.path)

    def settled_length(self) -> int:
        """Return how many bytes of metrics.jsonl no resume will truncate."""
        if self.result_path.exists() or self.read_status().state is State.PRUNED:
            return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0
        kept = self.checkpoints()
        return kept[1].metrics_length if len(kept) > 1 else 0

    def fence(self, number: int) -> None:
        if (newest := self.read_status().fencing) != number:
            raise Superseded(f"trial {self.id}: attempt {number} was superseded by {newest}")

    def ask_to_stop(self, number: int) -> None:
        """Ask attempts up to this number, on any machine, to checkpoint and end."""
        write_json(self.stop_path, {"fencing": number})

    def is_asked_to_stop(self, number: int) -> bool:
        is_asked = self.stop_path.name in self.listed()
        return is_asked and read_json(self.stop_path)["fencing"] >= number

    def listed(self) -> list[str]:
        """List the folder, which makes a network file system notice new files at once."""
        return os.listdir(self.path)

    def remove_half_written(self) -> None:
        """Remove partial files of dead attempts, except the runner's."""
        for part in set(self.path.glob(".*.part")) - set(self.path.glob(".state.json.*")):
            remove(part)

    def clear(self) -> None:
        """Remove everything that attempts measured."""
        measured = (self.result_path, self.metrics_path, self.losses_path)
        for path in (*measured, self.weights_path, self.tokenizer_path):
            path.unlink(missing_ok=True)
        self.remove_checkpoints()


class SweepFolder:
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.absolute().name
        self.plan_path = path / "plan.json"
        self.tracking_path = path / "tracking.json"
        self.trials_path = path / "trials"
        self.lock_path = path / "sweep.lock"
        self.stop_path = path / "stop"  # asks the command that holds the lock to end

    def locate(self, data_path: str | None) -> str | None:
        """Return the absolute form of a path that may be relative to this folder."""
        return data_path and os.path.normpath(self.path.absolute() / data_path)

    def trial(self, trial_id: str) -> TrialFolder:
        return TrialFolder(self.trials_path / trial_id)

    def read_plan(self) -> dict[str, Any] | None:
        plan = find_json(self.plan_path)
        if plan and not isinstance(plan.get("trials"), list):
            raise CorruptFile(f"{self.plan_path} must list trials. Restore it from a copy.")
        return plan

    def require_plan(self) -> dict[str, Any]:
        if plan := self.read_plan():
            return plan
        raise SweepError(f"{self.path} must be a sweep folder with a plan.json.")

    def trials(self) -> list[TrialFolder]:
        return [self.trial(row["id"]) for row in self.require_plan()["trials"] if row["id"]]


def identify_start(path: str) -> dict[str, Any]:
    """Return the hash of initial weights, and for a trial its model, tokenizer and data."""
    folder = TrialFolder(Path(path).expanduser())
    files = sorted(folder.path.glob("*.safetensors"))
    if not files or not folder.config_path.is_file():
        expected = "a complete trial or of a model, with config.json and weights in safetensors"
        raise SweepError(f"init must be the folder of {expected}, got {path!r}.")
    if folder.weights_path not in files:
        return {"weights": sha256_of({file.name: sha256_of_file(file) for file in files})}
    science = folder.read_config().science
    start = {
        "weights": sha256_of_file(folder.weights_path),
        "model": science.model.model_dump(mode="json"),
        "tokenizer": science.tokenizer and science.tokenizer.model_dump(mode="json"),
    }
    if not (science.tokenizer and science.tokenizer.is_pretrained):
        start["data"] = science.data  # a pretrained model's tokenizer does not depend on them
    return start
