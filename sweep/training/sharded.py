"""Checkpoints of a trial on several devices: a folder to which each process writes its part.

The tensors lie in safetensors files, written and read by torch.distributed.checkpoint, so that any
number of processes can go on, whatever each of them holds; what is no tensor lies in progress.json.
"""

import contextlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from sweep.training.step import TrainingStep
from sweep.workloads import ranks

NOTES = "progress.json"


def save_parts(step: TrainingStep, notes: dict[str, Any], folder: Path) -> None:
    """Write this process's part of a checkpoint; the first one writes the notes behind all others.

    Args:
        step: whose state it is.
        notes: what else a resume needs, for JSON.
        folder: to be made.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _as_os_error():
        state_dict_saver.save(_tensors(step), storage_writer=writer)
    if ranks.rank() == 0:
        for path in folder.iterdir():
            _sync(path)
        version, internal, gauss = random.getstate()
        notes |= {
            "average_steps": step.average.steps if step.average else 0,
            "rng_python": [version, list(internal), gauss],
            "bytes": {path.name: path.stat().st_size for path in folder.iterdir()},
        }
        (folder / NOTES).write_text(json.dumps(notes))
        _sync(folder / NOTES)


def read_notes(folder: Path) -> dict[str, Any]:
    """Return the notes of a checkpoint.

    Raises:
        ValueError: if a file of it is missing or torn.
    """
    notes: dict[str, Any] = json.loads((folder / NOTES).read_text())
    for name, size in notes["bytes"].items():
        if not (folder / name).exists() or (folder / name).stat().st_size != size:
            raise ValueError(f"{name} is missing or torn")
    return notes


def load_parts(step: TrainingStep, notes: dict[str, Any], folder: Path) -> None:
    """Restore what this process holds; of a process that had no part, all but its random state."""
    assert step.optimizer is not None
    step.parallel.make_states(step.optimizer, step.parameters, step.clip)
    tensors, reader = _tensors(step), HuggingFaceStorageReader(str(folder))
    known, why = _known(reader)
    wanted = {key: value for key, value in tensors.items() if key in known}
    if lacking := [key for key in tensors.keys() - wanted.keys() if not key.startswith("rng.")]:
        why = why or f"it lacks {', '.join(sorted(lacking)[:3])}"
    if ranks.largest(bool(why)):  # else the others would wait for this one
        raise OSError(f"{folder.name}: {why or 'another process cannot read it'}")
    with _as_os_error():
        state_dict_loader.load(wanted, storage_reader=reader)
    step.parallel.put(step.model, _part(tensors, "model."), _part(tensors, "optimizer."))
    if (name := f"rng.cpu.{ranks.rank()}") in known:
        torch.set_rng_state(tensors[name])
    if (name := f"rng.device.{ranks.rank()}") in known and step.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[name], step.device)
    version, internal, gauss = notes["rng_python"]
    random.setstate((version, tuple(internal), gauss))
    if step.average is not None:
        step.average.steps = notes["average_steps"]


def _known(reader: HuggingFaceStorageReader) -> tuple[dict[str, Any], str]:
    """Return what a checkpoint says that it holds, or nothing and why it cannot be read."""
    try:
        return reader.read_metadata().state_dict_metadata, ""
    except Exception as error:  # whatever is wrong with a file
        return {}, f"{type(error).__name__}: {error}"


def _tensors(step: TrainingStep) -> dict[str, Tensor]:
    """Return all state by name, as this process holds it: to be written, or to be filled."""
    assert step.optimizer is not None
    states = step.parallel.states(step.model, step.optimizer)
    found = {f"model.{name}": tensor for name, tensor in step.weights().items()}
    found |= {f"optimizer.{name}": tensor for name, tensor in states.items()}
    names: dict[Tensor, str] = {p: name for name, p in step.model.named_parameters()}
    if step.average is not None:
        for parameter, value in zip(step.parameters, step.average.values, strict=True):
            found[f"average.{names[parameter]}"] = value
    found[f"rng.cpu.{ranks.rank()}"] = torch.get_rng_state()
    if step.device.type == "cuda":
        found[f"rng.device.{ranks.rank()}"] = torch.cuda.get_rng_state(step.device)
    return found


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise what torch raises outside of Exception, and in all processes, as any other error."""
    try:
        yield
    except CheckpointException as error:
        causes = {str(failure[0]) for failure in error.failures.values()}
        raise OSError("; ".join(sorted(causes))) from None


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
