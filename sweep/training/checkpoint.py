"""Checkpoints: everything that exact resume needs, in tensors and numbers only."""

import random
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.trial.files import remove, replacing, sync_folder
from sweep.trial.folder import TrialFolder
from sweep.trial.metrics import MetricsLog, SilentLog, is_start_intact
from sweep.workloads import ranks

KEPT = 2  # the newest may be lost with the machine


class CheckpointStore:
    """Reads and writes the checkpoints of one trial, for one attempt.

    Args:
        folder: of the trial.
        fencing: number of this attempt; a superseded attempt's writes raise Superseded.
        in_background: write copies, in a thread, while training goes on. On a CPU that would
            take memory and cores of the training.
    """

    def __init__(self, folder: TrialFolder, fencing: int, in_background: bool = False) -> None:
        self.folder = folder
        self.check, self._fencing = folder.fence(fencing), fencing
        self._writer = ThreadPoolExecutor(1) if in_background else None
        self._writing: Future[None] | None = None
        self._step: int | None = None  # of the newest, once one was read or written
        self._unread: list[Path] = []  # what no attempt can go on from

    def load(self, step: TrainingStep, progress: Progress) -> int:
        """Restore the newest checkpoint whose metrics.jsonl is intact.

        Returns:
            The bytes of metrics.jsonl that the checkpoint knows of; 0 when starting anew.
        """
        half_read = ""
        for name in self.folder.checkpoints():
            why, length = "", 0
            try:
                state = self._read(name.path)
                length, sha256 = state["metrics_length"], state["metrics_sha256"]
                if not is_start_intact(self.folder.metrics_path, length, sha256):
                    why = f"metrics.jsonl does not match {name.path.name}"
            except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
                why = f"checkpoint {name.path.name} is damaged ({error})"
            if ranks.largest(bool(why)):  # what one process cannot read all leave alone
                self._leave(name.path, why or f"another process cannot read {name.path.name}")
                continue
            if not name.path.is_dir():
                _restore(state, step)
            elif why := self._load_parts(step, state, name.path):
                self._leave(name.path, f"checkpoint {name.path.name} is damaged ({why})")
                half_read = why
                continue
            for key, value in state["progress"].items():
                setattr(progress, key, value)
            self._step = progress.step
            return int(length)
        if half_read:
            raise OSError(f"no checkpoint could be read: {half_read}")
        return 0

    def _leave(self, path: Path, why: str) -> None:
        print(f"{why}; trying an older one", flush=True)
        self._unread.append(path)

    def _load_parts(self, step: TrainingStep, notes: dict[str, Any], folder: Path) -> str:
        """Restore a checkpoint of several devices; return why not, the same in all processes."""
        from sweep.training.sharded import load_parts  # takes a second to import

        try:
            load_parts(step, notes, folder)
        except OSError as error:
            return str(error) or type(error).__name__
        return ""

    def _read(self, path: Path) -> dict[str, Any]:
        if path.is_dir():
            from sweep.training.sharded import read_notes

            return read_notes(path)
        if ranks.are_many():
            raise ValueError("of one device, and this trial is on several")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def open_log(self, length: int) -> MetricsLog:
        """Open metrics.jsonl, its first bytes kept; of several processes only the first writes."""
        if ranks.rank():
            return SilentLog()
        return MetricsLog(self.folder.metrics_path, length, self.check)

    def save(self, step: TrainingStep, progress: Progress, log: MetricsLog) -> None:
        """Write a checkpoint, durably and whole, and remove all but the newest two.

        In the background it is there once `wait` returns; at most one is under way. Nothing is
        written where the newest is of this step already.
        """
        self.wait()
        if progress.step == self._step:
            return
        self._step = progress.step
        log.flush()
        notes = {
            "progress": asdict(progress),
            "metrics_length": log.length,
            "metrics_sha256": log.sha256,
        }
        name = f"checkpoint-{progress.step:010d}-{log.length:010d}"
        if ranks.are_many():
            self._save_parts(str(ranks.agreed(name)), step, notes)
            return
        assert step.optimizer is not None
        state = {
            **notes,
            "model": step.model.state_dict(),
            "optimizer": step.optimizer.state_dict(),
            "average": step.average.state() if step.average else None,
            "rng_python": random.getstate(),
            "rng_cpu": torch.get_rng_state(),
            "rng_device": _device_rng(step.device),
        }
        if self._writer is None:
            self._write(f"{name}.pt", state)
        else:
            self._writing = self._writer.submit(self._write, f"{name}.pt", _copied_to_host(state))

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raise what went wrong with it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, name: str, state: dict[str, Any]) -> None:
        with replacing(self.folder.path / name, self.check) as part:
            torch.save(state, part)
        self._remove_older(name)

    def _save_parts(self, name: str, step: TrainingStep, notes: dict[str, Any]) -> None:
        from sweep.training.sharded import save_parts

        part = self.folder.path / f".{name}.{self._fencing}.part"
        save_parts(step, notes, part)
        if ranks.rank() == 0:
            self.check()
            remove(self.folder.path / name)  # a damaged one: a folder replaces only an empty one
            part.replace(self.folder.path / name)
            sync_folder(self.folder.path)
            self._remove_older(name)

    def _remove_older(self, name: str) -> None:
        """Remove what could not be read, which would count as newer, and all but the newest two."""
        for path in self._unread:
            if path.name != name:
                remove(path)
        self._unread = []
        self.folder.remove_checkpoints(KEPT)

    def save_weights(self, step: TrainingStep) -> None:
        """Write the weights of a complete trial."""
        with step.averaged():
            weights = step.whole_weights()
            if ranks.rank() == 0:
                with replacing(self.folder.weights_path, self.check) as part:
                    save_file(weights, str(part))

    def save_tokenizer(self, source: Path) -> None:
        """Put a pretrained model's tokenizer beside the weights, so that they can be a start."""
        with replacing(self.folder.tokenizer_path, self.check) as part:
            shutil.copyfile(source, part)

    def remove_all(self) -> None:
        """Remove every checkpoint."""
        self.folder.remove_checkpoints()


def _copied_to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied_to_host(part) for key, part in value.items()}
    return [_copied_to_host(part) for part in value] if isinstance(value, list) else value


def _restore(state: dict[str, Any], step: TrainingStep) -> None:
    step.model.load_state_dict(state["model"])
    assert step.optimizer is not None
    step.optimizer.load_state_dict(state["optimizer"])
    for group in step.optimizer.param_groups:  # which torch moves the states to, but not the rate
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = group["lr"].to(step.device)
    if step.average is not None:
        step.average.restore(state["average"])
    random.setstate(state["rng_python"])
    torch.set_rng_state(state["rng_cpu"])
    if step.device.type == "cuda":
        torch.cuda.set_rng_state(state["rng_device"], step.device)
    elif step.device.type == "mps":
        torch.mps.set_rng_state(state["rng_device"])


def _device_rng(device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def seed_everything(seed: int) -> None:
    """Seed the global generators, for user code that draws from them."""
    random.seed(seed)
    torch.manual_seed(seed)
