"""What a finished sweep no longer needs."""

from dataclasses import dataclass
from pathlib import Path

from sweep.trial import files
from sweep.trial.folder import State, SweepFolder
from sweep.trial.lease import FileLock


@dataclass(frozen=True)
class Unneeded:
    """A file that can go, and why."""

    path: Path
    size: int  # bytes
    reason: str


def list_unneeded(folder: SweepFolder, weights: bool = False) -> list[Unneeded]:
    """List checkpoints of finished trials and half-written files; weights only on request."""
    found: list[tuple[Path, str]] = []
    for trial in folder.trials():
        status = trial.read_status()
        if status.state in (State.COMPLETE, State.PRUNED):
            found += [(c.path, "checkpoint of a finished trial") for c in trial.checkpoints()]
            if weights and trial.weights_path.exists():
                found.append((trial.weights_path, "weights"))
        found += [(path, "half-written") for path in trial.path.glob(".*.part")]
    found += [(path, "half-written") for path in folder.path.glob(".*.part")]
    return [Unneeded(path, _bytes_of(path), reason) for path, reason in found]


def remove(folder: SweepFolder, unneeded: list[Unneeded]) -> None:
    """Remove files, unless a runner works on the folder.

    Raises:
        FolderInUse: if one does.
    """
    with FileLock(folder.lock_path):
        for item in unneeded:
            files.remove(item.path)


def _bytes_of(path: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    return sum(part.stat().st_size for part in (path, *path.rglob("*")) if part.is_file())
