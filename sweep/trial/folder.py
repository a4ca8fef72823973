"""The folders of a sweep and of its trials: the paths of their files, and how they are read."""

import contextlib
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from sweep.config.hub import PREFIX
from sweep.config.settings import Table, parse_settings
from sweep.config.trial import Science, TrialConfig
from sweep.errors import CorruptFile, Superseded, SweepError
from sweep.resources import sha256_of_file
from sweep.trial.files import (
    find_json,
    find_sha256,
    is_start_intact,
    read_metrics,
    remove,
    sha256_of,
    write_json,
)
from sweep.trial.lease import is_locked, read_owner
from sweep.trial.result import Result
from sweep.trial.status import Cause, State, TrialStatus

CHECKPOINT = re.compile(r"checkpoint-(\d+)-(\d+)")
TRIAL_ID = re.compile(r"[0-9a-f]{12}")
SEAL = "checkpoint.json"  # in a checkpoint: the hashes of its files


class CheckpointName(NamedTuple):
    step: int
    metrics_length: int  # bytes of metrics.jsonl up to the checkpoint
    path: Path


def trial_id(science: Science) -> str:
    """Return the first 12 hex digits of the sha256 of a trial's science settings."""
    excluded = {"workload": {*science.workload.comparison_keys}}
    return sha256_of(science.model_dump(mode="json", exclude=excluded))[:12]


class TrialFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
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
        self.reported_path = path / "reported.jsonl"  # {log} of a command
        self.work_path = path / "work"  # {folder} of a command
        self.resume_path = path / "resume"  # a command's own checkpoint: file or folder

    def read_config(self) -> TrialConfig:
        data = self.read_sealed(self.config_path)
        if data is None:
            raise SweepError(f"{self.path} must be a trial folder with a config.json.")
        data.pop("format_version")
        config = parse_settings(TrialConfig, data, str(self.config_path))
        config = SweepFolder(self.path.absolute().parents[1]).located(config)
        if trial_id(config.science) != self.id:
            problem = f"must hold the settings of trial {self.id}, but has other ones"
            raise CorruptFile(f"{self.config_path} {problem}. Restore it from a copy.")
        return config

    def write_config(self, config: TrialConfig) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config_path, config.model_dump(mode="json"))

    def read_sealed(self, path: Path) -> dict[str, Any] | None:
        """Read a sealed file of this trial; None without one; CorruptFile if it is another's."""
        data = find_json(path)
        if data is not None and data.get("id") != self.id:
            owner = data.get("id")
            raise CorruptFile(f"{path} belongs to trial {owner!r}. Restore it from a copy.")
        return data

    def read_status(self) -> TrialStatus:
        """Read state.json. Without one a trial is WAITING.

        Only its result makes a trial COMPLETE or diverged. A damaged file counts as missing.
        """
        try:
            stored = self.read_sealed(self.state_path)
            status = TrialStatus() if stored is None else TrialStatus(**stored)
        except (SweepError, OSError, ValueError) as damage:
            fencing = int(read_owner(self.lease_path).get("fencing", 0))
            message = " ".join(str(damage).split())
            status = TrialStatus(message=message, fencing=fencing, attempts=fencing)

        needs_result = status.state is State.COMPLETE or status.cause is Cause.DIVERGED
        if not (needs_result or status.state in (State.WAITING, State.RUNNING)):
            return status

        result = self.find_result()
        if result is not None:
            message = status.message if needs_result else ""
            return status.changed(state=result.state, cause=result.cause, message=message)
        if needs_result:
            message = f"{self.result_path} is missing or damaged; the trial runs again"
            return status.changed(state=State.WAITING, cause=None, message=message)
        return status

    def write_status(self, status: TrialStatus) -> None:
        write_json(self.state_path, {"id": self.id, **asdict(status)})

    def read_result(self) -> Result | None:
        """Read result.json; None if the trial has none, CorruptFile if it is damaged."""
        document = self.read_sealed(self.result_path)
        if document is None:
            return None
        try:
            return Result.model_validate(document)
        except ValidationError as error:
            raise CorruptFile(f"{self.result_path} lacks what a result has.") from error

    def find_result(self) -> Result | None:
        """Read result.json; None if the trial has none, or one that is damaged."""
        with contextlib.suppress(SweepError, IsADirectoryError):
            return self.read_result()
        return None

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl; CorruptFile if it is damaged, or does not match the result."""
        result = self.find_result()
        if result is None:
            return read_metrics(self.metrics_path)
        remedy = f"Its result is intact. Restore the file, or remove {self.path} and run it again."
        if find_sha256(self.metrics_path) != result.metrics_sha256:
            problem = "is missing or does not match the sha256 in result.json"
            raise CorruptFile(f"{self.metrics_path} {problem}. {remedy}")
        try:
            return read_metrics(self.metrics_path)
        except CorruptFile as damage:
            raise CorruptFile(f"{damage} {remedy}") from damage

    def find_metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl; empty if the trial has none, or one that is damaged."""
        with contextlib.suppress(CorruptFile):
            return self.read_metrics()
        return []

    def checkpoints(self) -> list[CheckpointName]:
        """Return the checkpoints, newest first."""
        matches = [CHECKPOINT.fullmatch(path.name) for path in self.path.glob("checkpoint-*")]
        names = [CheckpointName(int(m[1]), int(m[2]), self.path / m[0]) for m in matches if m]
        return sorted(names, reverse=True)

    def seal_checkpoint(
        self, path: Path, step: int, metrics_length: int, metrics_sha256: str
    ) -> None:
        """Write the hashes of a checkpoint's files, and of metrics.jsonl up to it, into it."""
        files = {file.name: sha256_of_file(file) for file in sorted(path.iterdir())}
        seal = {"id": self.id, "step": step, "metrics_length": metrics_length}
        write_json(path / SEAL, {**seal, "metrics_sha256": metrics_sha256, "files": files})

    def verify_checkpoint(self, checkpoint: CheckpointName) -> None:
        """Raise CorruptFile or OSError unless a checkpoint and its metrics are as written."""
        path = checkpoint.path
        seal = self.read_sealed(path / SEAL)
        if seal is None:
            seal = {}
        step = seal.get("step")
        if (step, seal.get("metrics_length")) != (checkpoint.step, checkpoint.metrics_length):
            raise CorruptFile(f"{path / SEAL} is missing, or another checkpoint's.")

        hashes = {file.name: sha256_of_file(file) for file in path.iterdir() if file.name != SEAL}
        if hashes != seal.get("files"):
            raise CorruptFile(f"{path} does not match the sha256 of each file in {SEAL}.")

        length = checkpoint.metrics_length
        if not is_start_intact(self.metrics_path, length, seal.get("metrics_sha256")):
            raise CorruptFile(f"{self.metrics_path} does not match the sha256 in {path / SEAL}.")

    def remove_checkpoints(self, kept: int = 0) -> None:
        for checkpoint in self.checkpoints()[kept:]:
            remove(checkpoint.path)

    def settled_length(self) -> int:
        """Return how many bytes of metrics.jsonl no resume will truncate."""
        if self.find_result() or self.read_status().state is State.PRUNED:
            return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0
        kept = self.checkpoints()
        return kept[1].metrics_length if len(kept) > 1 else 0

    def fence(self, number: int) -> None:
        newest = self.read_status().fencing
        if newest != number:
            raise Superseded(f"trial {self.id}: attempt {number} was superseded by {newest}")

    def ask_to_stop(self, number: int) -> None:
        """Ask attempts up to this number, on any machine, to checkpoint and end."""
        write_json(self.stop_path, {"id": self.id, "fencing": number})

    def is_asked_to_stop(self, number: int) -> bool:
        if self.stop_path.name not in self.listed():
            return False
        request = self.read_sealed(self.stop_path)
        asked = None if request is None else request.get("fencing")
        return isinstance(asked, int) and asked >= number

    def listed(self) -> list[str]:
        """List the folder, which makes a network file system notice new files at once."""
        return os.listdir(self.path) if self.path.exists() else []

    def remove_half_written(self) -> None:
        """Remove the partial files of dead attempts, but not the runner's."""
        for part in set(self.path.glob(".*.part")) - set(self.path.glob(".state.json.*")):
            remove(part)

    def clear(self) -> None:
        """Remove everything that attempts measured."""
        measured = (self.result_path, self.metrics_path, self.losses_path)
        weights = (self.weights_path, self.tokenizer_path)
        for path in (*measured, *weights, self.reported_path, self.work_path, self.resume_path):
            remove(path)
        self.remove_checkpoints()


class SweepFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.absolute().name
        self.plan_path = path / "plan.json"
        self.timing_path = path / "timing.json"
        self.tracking_path = path / "tracking.json"
        self.check_path = path / "check.json"
        self.trials_path = path / "trials"
        self.lock_path = path / "sweep.lock"
        self.stop_path = path / "stop"  # asks the command that holds the lock to end

    def half_written(self) -> list[Path]:
        """Return the partial files that dead commands left."""
        parts: list[Path] = []
        for pattern in (".*.part", "figures/.*.part", "trials/*/.state.json.*.part"):
            parts += self.path.glob(pattern)
        return parts

    def located(self, settings: Table) -> Table:
        """Return a plan or a config with absolute paths, which may be relative to this folder."""
        paths = {name: getattr(settings, name) for name in ("data_path", "init_path", "code_path")}
        for name, path in paths.items():
            if path and not path.startswith(PREFIX):
                paths[name] = os.path.normpath(self.path.absolute() / path)
        return settings.model_copy(update=paths)

    def trial(self, trial_id: str) -> TrialFolder:
        if not TRIAL_ID.fullmatch(str(trial_id)):
            raise CorruptFile(f"a trial's id must have 12 hexadecimal digits, got {trial_id!r}.")
        return TrialFolder(self.trials_path / trial_id)

    def read_plan(self) -> dict[str, Any] | None:
        plan = find_json(self.plan_path)
        rows = plan.get("trials") if plan else []
        if not (isinstance(rows, list) and all(isinstance(r, dict) and "id" in r for r in rows)):
            raise CorruptFile(f"{self.plan_path} must list trials. Restore it from a copy.")
        return plan

    @property
    def is_published(self) -> bool:
        """True if trials.csv alone has the results of the trials."""
        return (self.path / "trials.csv").exists() and not self.trials_path.exists()

    def require_plan(self) -> dict[str, Any]:
        plan = self.read_plan()
        if not plan and is_locked(self.lock_path):
            raise SweepError(
                f"{self.path} has no plan.json yet, because a command is still planning or timing "
                "its trials. Wait for it."
            )
        if not plan:
            raise SweepError(f"{self.path} has no plan.json. Give the folder of a `sweep run`.")
        return plan

    def trials(self) -> list[TrialFolder]:
        return [self.trial(row["id"]) for row in self.require_plan()["trials"] if row["id"]]
