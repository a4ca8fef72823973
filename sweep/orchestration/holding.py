"""Hold the lock of a sweep folder."""

import contextlib
from collections.abc import Iterator

from sweep.errors import FolderInUse, SweepError
from sweep.trial.files import remove
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import Lease, refuse_live_owner_elsewhere


def _take_lease(folder: SweepFolder, is_new: bool) -> Lease:
    """Take the sweep's lock; if the file system has no locks, leave nothing in a new folder."""
    try:
        return Lease(folder.lock_path)
    except FolderInUse:
        raise
    except SweepError:
        if is_new:
            folder.lock_path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def holding(folder: SweepFolder) -> Iterator[None]:
    """Hold the sweep's lock, or raise FolderInUse. If no plan is written, leave no new folder."""
    created = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        refuse_live_owner_elsewhere(folder.lock_path)
        with _take_lease(folder, is_new=bool(created)):
            folder.stop_path.unlink(missing_ok=True)  # meant for an earlier command
            for part in folder.half_written():
                remove(part)
            try:
                yield
            finally:
                if not folder.plan_path.exists():
                    folder.lock_path.unlink(missing_ok=True)
                    folder.stop_path.unlink(missing_ok=True)
    finally:
        for path in created:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
