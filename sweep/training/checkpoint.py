"""Checkpoints: everything that exact resume needs, in tensors and numbers only.

A trial on one device writes one file. A trial on several devices writes a folder: safetensors files
by torch.distributed.checkpoint, to which each process writes its part, and progress.json for
everything else. Any number of processes can continue from such a folder.
"""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.trial.files import MetricsLog, SilentLog, is_start_intact, remove, replacing, sync_folder
from sweep.trial.folder import TrialFolder
from sweep.workloads import ranks

KEPT = 2  # the newest may be lost with the machine
NOTES = "progress.json"


class CheckpointStore:
    """Reads and writes the checkpoints of one trial, for one attempt.

    Args:
        folder: the trial's folder.
        fencing: number of this attempt; a superseded attempt's writes raise Superseded.
    """

    def __init__(self, folder: TrialFolder, fencing: int) -> None:
        self.folder, self.check, self._fencing = folder, partial(folder.fence, fencing), fencing
        self._step: int | None = None  # of the newest checkpoint that was read or written
        self._unreadable: list[Path] = []

    def load(self, step: TrainingStep, progress: Progress) -> int:
        """Restore the newest checkpoint whose metrics.jsonl is intact.

        Returns:
            The length in bytes of metrics.jsonl at the checkpoint; 0 without a checkpoint.
        """
        is_half_restored = ""
        for name in self.folder.checkpoints():
            try:
                state, problem = self._read(name.path), ""
            except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
                state, problem = {}, f"checkpoint {name.path.name} is damaged ({error})"
            if ranks.largest(bool(problem)):  # no process may use what another cannot read
                self._skip(name.path, problem or f"a process cannot read {name.path.name}")
                continue
            try:
                _restore(state, step, name.path)
            except OSError as error:  # in all processes
                is_half_restored = str(error) or type(error).__name__
                self._skip(name.path, f"checkpoint {name.path.name} is damaged ({error})")
                continue
            for key, value in state["progress"].items():
                setattr(progress, key, value)
            self._step = progress.step
            return int(state["metrics_length"])
        if is_half_restored:
            raise OSError(f"no checkpoint could be read: {is_half_restored}")
        return 0

    def _read(self, path: Path) -> dict[str, Any]:
        """Return a file's state, or a folder's notes.

        Raises:
            ValueError: if it is incomplete or does not belong to metrics.jsonl.
        """
        state: dict[str, Any]
        if path.is_dir():
            state = read_notes(path)
        elif ranks.are_many():
            raise ValueError("of one device, and this trial is on several")
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        length, sha256 = state["metrics_length"], state["metrics_sha256"]
        if not is_start_intact(self.folder.metrics_path, length, sha256):
            raise ValueError("metrics.jsonl does not match")
        return state

    def _skip(self, path: Path, problem: str) -> None:
        print(f"{problem}; trying an older one", flush=True)
        self._unreadable.append(path)

    def open_log(self, length: int) -> MetricsLog:
        """Open metrics.jsonl and keep its first bytes; only the first process writes to it."""
        if ranks.rank():
            return SilentLog()
        return MetricsLog(self.folder.metrics_path, length, self.check)

    def save(self, step: TrainingStep, progress: Progress, log: MetricsLog) -> None:
        """Write a checkpoint durably, unless this step has one, and remove all but the newest two.

        Every process of the trial must call this.
        """
        if progress.step == self._step:
            return
        self._step = progress.step
        log.flush()
        state = {
            "progress": asdict(progress),
            "metrics_length": log.length,
            "metrics_sha256": log.sha256,
        }
        name = f"checkpoint-{progress.step:010d}-{log.length:010d}"
        if ranks.are_many():
            self._save_parts(str(ranks.agreed(name)), state, step)
        else:
            with replacing(self.folder.path / f"{name}.pt", self.check) as part:
                torch.save({**state, **_state_of(step)}, part)
            self._remove_older(f"{name}.pt")

    def _save_parts(self, name: str, notes: dict[str, Any], step: TrainingStep) -> None:
        part = self.folder.path / f".{name}.{self._fencing}.part"
        save_parts(notes, step, part)
        if ranks.rank() == 0:
            self.check()
            remove(self.folder.path / name)  # a damaged one: only an empty folder can be replaced
            part.replace(self.folder.path / name)
            sync_folder(self.folder.path)
            self._remove_older(name)

    def _remove_older(self, name: str) -> None:
        """Remove unreadable checkpoints, which may count as newer, and all but the newest two."""
        for path in self._unreadable:
            if path.name != name:
                remove(path)
        self._unreadable = []
        self.folder.remove_checkpoints(KEPT)

    def save_weights(self, step: TrainingStep) -> None:
        """Write the weights of a complete trial. Every process of the trial must call this."""
        with step.averaged():
            weights = step.whole_weights()
        if ranks.rank() == 0:
            with replacing(self.folder.weights_path, self.check) as part:
                save_file(weights, str(part))

    def save_tokenizer(self, source: Path) -> None:
        """Copy a pretrained model's tokenizer next to the weights, to start other trials from."""
        with replacing(self.folder.tokenizer_path, self.check) as part:
            shutil.copyfile(source, part)

    def remove_all(self) -> None:
        """Remove every checkpoint."""
        self.folder.remove_checkpoints()


def _state_of(step: TrainingStep) -> dict[str, Any]:
    """Return the state of a trial on one device."""
    assert step.optimizer is not None
    average = step.average and {"values": step.average.values, "steps": step.average.steps}
    return {
        "model": step.model.state_dict(),
        "optimizer": step.optimizer.state_dict(),
        "average": average,
        "rng_python": random.getstate(),
        "rng_cpu": torch.get_rng_state(),
        "rng_device": _device_rng(step.device),
    }


def _restore(state: dict[str, Any], step: TrainingStep, path: Path) -> None:
    if path.is_dir():
        load_parts(state, step, path)
        return
    assert step.optimizer is not None
    step.model.load_state_dict(state["model"])
    step.optimizer.load_state_dict(state["optimizer"])
    if step.average is not None:
        for value, saved in zip(step.average.values, state["average"]["values"], strict=True):
            value.copy_(saved)
        step.average.steps = state["average"]["steps"]
    random.setstate(state["rng_python"])
    torch.set_rng_state(state["rng_cpu"])
    _set_device_rng(step.device, state["rng_device"])


def save_parts(notes: dict[str, Any], step: TrainingStep, folder: Path) -> None:
    """Write this process's part of a checkpoint; the first process writes the notes afterwards.

    Raises:
        OSError: in all processes, if one of them fails.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save  # takes a second

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _as_os_error():
        save(_tensors(step), storage_writer=writer)
    if ranks.rank() == 0:
        version, internal, gauss = random.getstate()
        notes |= {
            "average_steps": step.average.steps if step.average else 0,
            "rng_python": [version, list(internal), gauss],
            "bytes": {path.name: path.stat().st_size for path in folder.iterdir()},
        }
        (folder / NOTES).write_text(json.dumps(notes))
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def read_notes(folder: Path) -> dict[str, Any]:
    """Return the notes of a checkpoint of several devices.

    Raises:
        ValueError: if a file is missing or torn.
    """
    notes: dict[str, Any] = json.loads((folder / NOTES).read_text())
    for name, size in notes["bytes"].items():
        if not (folder / name).exists() or (folder / name).stat().st_size != size:
            raise ValueError(f"{name} is missing or torn")
    return notes


def load_parts(notes: dict[str, Any], step: TrainingStep, folder: Path) -> None:
    """Restore this process's part; a process that had none keeps its random state.

    Raises:
        OSError: in all processes, if one of them cannot read it.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load  # takes a second

    assert step.optimizer is not None
    step.parallel.make_states(
        step.optimizer,
        step.parameters,
        lambda count: step.backward(step.workload.random_batch(count)),
    )
    tensors, reader, stored, problem = _tensors(step), None, set[str](), ""
    try:
        reader = HuggingFaceStorageReader(str(folder))
        stored = set(reader.read_metadata().state_dict_metadata)
        missing = [name for name in tensors if name not in stored and not name.startswith("rng.")]
        problem = f"{missing[0]} is missing" if missing else ""
    except Exception as error:  # whatever a damaged file raises
        problem = f"{type(error).__name__}: {error}"
    if ranks.largest(bool(problem)):  # otherwise the others would wait for this one
        raise OSError(f"{folder.name}: {problem or 'another process cannot read it'}")
    with _as_os_error():
        load({k: v for k, v in tensors.items() if k in stored}, storage_reader=reader)
    groups = [
        {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        for prefix in ("model.", "optimizer.")
    ]
    step.parallel.load(step.model, *groups)
    if (name := f"rng.cpu.{ranks.rank()}") in stored:
        torch.set_rng_state(tensors[name])
    if (name := f"rng.device.{ranks.rank()}") in stored and name in tensors:
        _set_device_rng(step.device, tensors[name])
    version, internal, gauss = notes["rng_python"]
    random.setstate((version, tuple(internal), gauss))
    if step.average is not None:
        step.average.steps = notes["average_steps"]


def _tensors(step: TrainingStep) -> dict[str, Tensor]:
    """Return this process's state by name, to be written or to be filled."""
    assert step.optimizer is not None
    states = step.parallel.states(step.model, step.optimizer)
    tensors = {f"model.{name}": tensor for name, tensor in step.weights().items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in states.items()}
    names: dict[Tensor, str] = {p: name for name, p in step.model.named_parameters()}
    if step.average is not None:
        for parameter, value in zip(step.parameters, step.average.values, strict=True):
            tensors[f"average.{names[parameter]}"] = value
    tensors[f"rng.cpu.{ranks.rank()}"] = torch.get_rng_state()
    if (state := _device_rng(step.device)) is not None:
        tensors[f"rng.device.{ranks.rank()}"] = state
    return tensors


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise torch's CheckpointException, which is no Exception, as an OSError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = {str(failure[0]) for failure in error.failures.values()}
        raise OSError("; ".join(sorted(causes))) from None


def _device_rng(device: torch.device) -> Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def _set_device_rng(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


def seed_everything(seed: int) -> None:
    """Seed the global generators, for user code that draws from them."""
    random.seed(seed)
    torch.manual_seed(seed)
