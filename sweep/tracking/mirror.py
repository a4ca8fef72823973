"""The mirror: brings an MLflow store to what the trial folders say, again and again.

Runs in a daemon thread. A store that is slow, down or coming back costs training nothing: what
it did not accept stays in the folders and is sent later.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sweep.plan.plan import Plan
from sweep.tracking.address import one_sentence
from sweep.tracking.delivery import REST, Delivery, OutOfTime
from sweep.tracking.record import load_record
from sweep.tracking.store import check_tracking_uri
from sweep.trial.folder import SweepFolder

POLL_SECONDS = 5.0
PAUSES = (1.0, 30.0)  # seconds after a failure: the first, the longest


@dataclass(frozen=True)
class MirrorStatus:
    """What the store does not hold yet, and why."""

    trials: int = 0  # with something not mirrored
    error: str | None = None  # the first since the store last accepted everything

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to send."""
        return not self.trials and self.error is None

    def __str__(self) -> str:
        if self.is_complete:
            return "MLflow holds everything."
        why = f" ({self.error})" if self.error else ""
        return (
            f"MLflow lacks something of {self.trials} trials{why}. Nothing is lost: "
            "the same command again, or `sweep report`, sends it."
        )


class Mirror:
    """Keeps one sweep's MLflow runs.

    Args:
        folder: of the sweep.
        plan: of the sweep, as in plan.json, which is read again when it grows.
        tracking_uri: a server or a database; None: as recorded, else SQLite in the folder.
        on_run_created: called in the mirror's thread with a trial's id and its MLflow run id.

    Raises:
        SweepError: if the address cannot be one.
    """

    def __init__(
        self,
        folder: SweepFolder,
        plan: Plan,
        tracking_uri: str | None,
        on_run_created: Callable[[str, str], None] | None = None,
    ) -> None:
        self.folder = folder
        address = check_tracking_uri(tracking_uri) if tracking_uri else None
        record = load_record(folder, address)
        self._delivery = Delivery(folder, plan, record, on_run_created, address)
        self._error: str | None = None
        self._had_error = False
        self._woken, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def sweep_uid(self) -> str:
        """The random name under which shared stores know this sweep; kept by `start`."""
        return self._delivery.record.sweep_uid

    def start(self) -> None:
        """Mirror in a daemon thread from now on."""
        self._delivery.record.save(self.folder)
        self._thread = threading.Thread(target=self._loop, name="mirror", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that something changed on disk; a pass follows soon."""
        self._woken.set()

    def log_report(self) -> None:
        """Say that the report on disk is whole; the next pass keeps it with the parent run."""
        self._delivery.has_report = True
        self.wake()

    def close(self, timeout: float, is_hurried: bool = True) -> MirrorStatus:
        """Send what is left and end the thread.

        Args:
            timeout: seconds, at most.
            is_hurried: if not, behind a report, count them anew when the store takes something.
        """
        is_patient = self._delivery.has_report and not is_hurried
        self._delivery.patience = timeout if is_patient else None
        self._delivery.deadline = time.monotonic() + timeout
        self._closing.set()
        self.wake()
        if self._thread is None:
            self.start()
        assert self._thread is not None
        while self._thread.is_alive() and (left := self._delivery.deadline - time.monotonic()) > 0:
            self._thread.join(left)
        return self.status

    @property
    def status(self) -> MirrorStatus:
        """What is not mirrored as of now; reads the folders, asks nobody."""
        trials = 0
        for row in self._delivery.plan.known_trials:
            trial = self.folder.trial(str(row.id))
            entry, status = self._delivery.record.trials.get(trial.id), trial.read_status()
            if entry is None or not entry.covers(status):
                sent = entry.offset if entry else 0
                trials += status.state.is_finished or trial.settled_length() > sent
        return MirrorStatus(trials, self._error)

    def _loop(self) -> None:
        pause = PAUSES[0]
        while True:
            self._woken.clear()
            closing = self._closing.is_set()
            done = self._attempt(is_alive=not closing)
            left = self._delivery.deadline - time.monotonic()
            if left <= 0 or (closing and done):
                return
            if done:
                pause = PAUSES[0]
                self._closing.wait(REST * self._delivery.look_seconds)
                self._woken.wait(POLL_SECONDS)
            elif closing:
                time.sleep(min(PAUSES[0], left))
            else:
                self._closing.wait(min(pause, left))
                pause = min(2 * pause, PAUSES[1])

    def _attempt(self, is_alive: bool) -> bool:
        if not is_alive and self._had_error:
            self._delivery.disconnect()  # look again for runs that a lost answer made twice
        try:
            trouble = self._delivery.run(is_alive)
        except OutOfTime:
            trouble = self._error or "there was no time left"
        except Exception as error:
            # Nothing that a store can do may reach training; the status says it.
            trouble = one_sentence(error)
        if trouble is None:
            self._error = None
        else:
            self._had_error, self._error = True, self._error or trouble
            self._delivery.disconnect()
        return trouble is None
