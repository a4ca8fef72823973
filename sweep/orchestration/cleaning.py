"""List and remove files that a finished sweep no longer needs."""

from dataclasses import dataclass
from pathlib import Path

from sweep.trial import files
from sweep.trial.folder import State, SweepFolder
from sweep.trial.lease import FileLock


@dataclass(frozen=True)
class Unneeded:
    """A file or folder that can be removed."""

    path: Path
    size: int  # bytes
    reason: str


def list_unneeded(folder: SweepFolder, weights: bool = False) -> list[Unneeded]:
    """List checkpoints of finished trials and half-written files; weights only on request."""
    paths = [(path, "half-written") for path in folder.path.glob(".*.part")]
    for trial in folder.trials():
        if trial.read_status().state in (State.COMPLETE, State.PRUNED):
            paths += [(c.path, "checkpoint of a finished trial") for c in trial.checkpoints()]
            if weights and trial.weights_path.exists():
                paths.append((trial.weights_path, "weights"))
        paths += [(path, "half-written") for path in trial.path.glob(".*.part")]
    return [Unneeded(path, _size(path), reason) for path, reason in paths]


def remove(folder: SweepFolder, unneeded: list[Unneeded]) -> None:
    """Remove files and folders.

    Raises:
        FolderInUse: if a command runs the sweep.
    """
    with FileLock(folder.lock_path):
        for item in unneeded:
            files.remove(item.path)


def _size(path: Path) -> int:
    return sum(part.stat().st_size for part in (path, *path.rglob("*")) if part.is_file())
