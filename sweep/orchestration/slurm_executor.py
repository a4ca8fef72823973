"""Attempts as SLURM jobs, through submitit: arrays, time limits, requeues.

Only the path of a trial's folder and a number go to a job. When SLURM says that it takes the node
away, or that the time is up, the attempt saves a checkpoint and puts its job back into the queue.
Jobs need no command: one that was killed is started again and finds them by their leases.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sweep.config.numbers import parse_bytes, parse_count
from sweep.config.paths import cache_dir
from sweep.config.trial import Execution
from sweep.errors import SweepError
from sweep.plan.retry import Outcome
from sweep.trial.files import sha256_of
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import LeaseWatch, read_owner

NOTICE = getattr(signal, "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2"))
MINUTES = {"m": 1, "h": 60, "d": 1440}
WORDS = ("partition", "account", "qos", "constraint")  # as sbatch knows them
SHORTEST_MINUTES = 5  # of a job: less would be spent on beginning and ending
DEFAULTS = {"time": "4h", "at_once": "16", "cluster": "slurm"}
GPU_CORES = 8  # of an attempt, at most and per device
POLL_SECONDS = 1.0  # between two looks for results, and for what is to be submitted
ASK_SECONDS = 30.0  # between two questions to SLURM, at most; the first come sooner
PREEMPTED_SECONDS = 120.0  # in which SLURM puts a preempted job back into its queue, or never
REFUSED_SECONDS = 15.0  # until it is asked again for jobs that it has refused
FORGOTTEN_SECONDS = 60.0  # behind its last refusal: the next one is another matter
PATIENCE_SECONDS = 180.0  # with a SLURM, or a file system, that only fails
PAUSED = ("SUSPENDED", "RESIZING")  # states of jobs that submitit takes for ended
KINDS = {  # of what SLURM ended, by the state's first letters
    "CANCELLED": "error",
    "NODE_FAIL": "lost",
    "OUT_OF_ME": "out_of_memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "preempted",
}
GIB = 2**30
LOG = logging.getLogger(__name__)


def parse_request(text: str | None) -> dict[str, Any]:
    """Return what `--slurm` asks for, as parameters of submitit and `at_once` and `cluster`.

    Raises:
        SweepError: for what cannot be asked for.
    """
    given = dict(DEFAULTS)
    for part in (text or "").split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if part.strip() and not (name in (*DEFAULTS, *WORDS, "memory", "cores") and value):
            raise SweepError(
                f"slurm must be KEY=VALUE, with {', '.join((*DEFAULTS, *WORDS))}, memory or cores "
                f"as KEY, got {part.strip()!r}."
            )
        given |= {name: value} if name else {}
    if given["cluster"] not in ("slurm", "local"):
        raise SweepError(f"slurm's cluster must be slurm or local, got {given['cluster']!r}.")
    minutes = _minutes(given["time"])
    if given["cluster"] == "slurm" and minutes < SHORTEST_MINUTES:
        raise SweepError(
            f"slurm's time must be at least {SHORTEST_MINUTES}m, got {given['time']!r}: an attempt "
            "is told to end 90 s before, and would begin again and again."
        )
    asked: dict[str, Any] = {"timeout_min": minutes, "cluster": given["cluster"]}
    asked |= {f"slurm_{name}": given[name] for name in WORDS if name in given}
    asked["at_once"] = parse_count(given["at_once"], "slurm's at_once")
    if "memory" in given:
        asked["mem_gb"] = parse_bytes(given["memory"], "slurm's memory") / GIB
    if "cores" in given:
        asked["cpus_per_task"] = parse_count(given["cores"], "slurm's cores")
    return asked


def _minutes(text: str) -> int:
    unit = MINUTES.get(text[-1:], 0)
    if not unit or not text[:-1].isdigit() or not int(text[:-1]):
        raise SweepError(f"slurm's time must be like 30m, 4h or 2d, got {text!r}.")
    return int(text[:-1]) * unit


class Attempt:
    """The body of a job; pickled by submitit, again for every requeue."""

    def __init__(self, path: str, number: int) -> None:
        self.path, self.number = path, number

    def __call__(self) -> Outcome:
        """Run the attempt; once its checkpoint is durable, let submitit requeue the job."""
        from sweep.training.worker import run_remote_attempt

        requeue = signal.getsignal(NOTICE)  # submitit's, which does not wait for a checkpoint
        outcome = run_remote_attempt(Path(self.path), self.number, [NOTICE])
        if outcome.kind == "preempted" and callable(requeue):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it follows, and scontrol inherits this
            try:
                requeue(NOTICE, None)  # ends this process
            except Exception as error:  # as where JobRequeue=0
                print(f"its job was not requeued, which is left to the command: {error}")
        return outcome

    def checkpoint(self) -> Any:
        """Return what the requeued job runs: the same attempt, from its checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class SlurmExecutor:
    """Attempts as jobs.

    Args:
        execution: how many devices, or threads, an attempt takes.
        folder: of the sweep; every node sees it at the same place.
        request: from `parse_request`.

    Raises:
        SweepError: where there is no SLURM.
    """

    queues = True

    def __init__(self, execution: Execution, folder: SweepFolder, request: dict[str, Any]) -> None:
        import submitit

        asked = dict(request)
        cluster, at_once = asked.pop("cluster"), asked.pop("at_once")
        own = sha256_of(str(folder.path.resolve()))[:8]
        jobs = cache_dir() / "submitit" / f"{folder.name}-{own}"
        try:
            self._submitit = submitit.AutoExecutor(
                jobs, cluster=cluster, slurm_max_num_timeout=10**6, local_max_num_timeout=10**6
            )
        except RuntimeError as error:
            raise SweepError(
                f"executor slurm must be called where srun is, and there is none ({error}). Log in "
                "to a node of the cluster, or try it here with --slurm cluster=local."
            ) from error
        self._submitit.update_parameters(
            **{"name": f"sweep-{folder.name}", **_needs(execution), **asked}
        )
        self.slots: list[dict[str, str]] = [{} for _ in range(at_once)]
        self._folder, self._is_closing = folder, False
        self._is_stopping = self._is_killing = False
        self._gathered: list[tuple[Future[Outcome], TrialFolder, int]] = []
        self._seen = 0  # of them, at the last look
        self._refused: list[tuple[float, Future[Outcome], Outcome]] = []  # until when, and its end
        self._failing: dict[object, float] = {}  # since when, by job; None: submitting
        self._refused_at = 0.0  # monotonic, the last time
        self._jobs: dict[Future[Outcome], tuple[Any, TrialFolder, int, LeaseWatch]] = {}
        self._states, self._preempted = _build_watcher(), dict[str, float]()
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name="slurm", daemon=True)
        self._watcher.start()

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Submit the newest attempt of a trial, with all others of this moment as one array."""
        future: Future[Outcome] = Future()
        with self._lock:
            self._gathered.append((future, folder, folder.read_status().fencing))
        return future

    def stop(self) -> None:
        """Ask all attempts of the sweep to checkpoint and end, an earlier command's too."""
        self._is_stopping = True
        for _, trial, number, _ in list(self._jobs.values()):
            trial.ask_to_stop(number)
        for trial in self._folder.trials() if self._folder.plan_path.exists() else ():
            if (live := _live_attempt(trial)) is not None:
                trial.ask_to_stop(live)

    def kill(self) -> None:
        """Cancel all jobs."""
        self._is_stopping = self._is_killing = True

    def close(self) -> None:
        """Wait for what is left."""
        self._is_closing = True
        self._watcher.join()

    def _watch(self) -> None:
        while not (self._is_closing and not (self._jobs or self._gathered or self._refused)):
            self._submit_gathered()
            for future, (job, trial, number, lease) in list(self._jobs.items()):
                try:
                    outcome = self._look(job, trial, number, lease)
                    self._failing.pop(job.job_id, None)
                except Exception as error:  # of a command of SLURM's, or of the file system
                    outcome = self._unseen(job, error)
                if outcome:
                    del self._jobs[future]
                    future.set_result(outcome)
            self._end_refused()
            time.sleep(POLL_SECONDS)

    def _look(self, job: Any, trial: TrialFolder, number: int, lease: LeaseWatch) -> Outcome | None:
        """Return how an attempt has ended; None while it has not."""
        is_idle = _live_attempt(trial) != number  # it waits in the queue, or has ended
        if self._is_killing or (self._is_stopping and is_idle and not job.done()):
            job.cancel(check=False)
            return Outcome("stopped", "its job was cancelled")
        if job.done() or self._was_taken_away(job):
            return _outcome(job, trial, self._is_stopping)
        if not is_idle and _died_unseen(job, trial, number, lease):
            return Outcome("lost", f"job {job.job_id} shows no sign of life; see {trial.log_path}")
        return None

    def _unseen(self, job: Any, error: Exception) -> Outcome | None:
        """Take a job for lost only where looking at it has failed for long."""
        if not self._has_failed_for_long(job.job_id):
            return None
        what = f"{type(error).__name__}: {_last(str(error))}"
        return Outcome("lost", f"job {job.job_id} cannot be looked at: {what}")

    def _has_failed_for_long(self, what: object) -> bool:
        since = self._failing.setdefault(what, time.monotonic())
        return self._is_killing or time.monotonic() - since > PATIENCE_SECONDS

    def _submit_gathered(self) -> None:
        with self._lock:
            if len(self._gathered) > self._seen:  # more may follow: they become one array
                self._seen = len(self._gathered)
                return
            gathered, self._gathered, self._seen = self._gathered, [], 0
        if self._is_stopping:
            for future, _, _ in gathered:
                future.set_result(Outcome("stopped", "was not submitted", has_begun=False))
        elif gathered:
            bodies = [Attempt(str(trial.path.absolute()), number) for _, trial, number in gathered]
            try:
                jobs = self._submitit.submit_array(bodies)
            except Exception as error:  # whatever sbatch or submitit refuses
                self._note_refusal([future for future, _, _ in gathered], _last(str(error)))
            else:
                self._failing.pop(None, None)
                for job, (future, trial, number) in zip(jobs, gathered, strict=True):
                    job.watcher = self._states
                    self._states.register_job(job.job_id)
                    self._jobs[future] = job, trial, number, LeaseWatch(trial.lease_path)

    def _note_refusal(self, futures: list[Future[Outcome]], why: str) -> None:
        """Let refused attempts be submitted again a little later, as others of a higher number.

        Of what timed out SLURM may have taken the jobs. Where it only refuses, nothing more is
        submitted, so that not all of a sweep fails.
        """
        kind, pause, message = "preempted", REFUSED_SECONDS, f"was not submitted: {why}"
        now = time.monotonic()
        if now - self._refused_at > FORGOTTEN_SECONDS:
            self._failing.pop(None, None)
        self._refused_at = now
        if self._is_stopping:
            kind = "stopped"
        elif None not in self._failing:
            LOG.warning(
                "SLURM refuses jobs: %s It is asked again for %.0f s.", why, PATIENCE_SECONDS
            )
        if kind != "stopped" and self._has_failed_for_long(None):
            kind, pause, self.slots = "error", 0.0, []
        outcome = Outcome(kind, message, has_begun=False)
        self._refused += [(now + pause, future, outcome) for future in futures]

    def _end_refused(self) -> None:
        now = time.monotonic()
        due = [one for one in self._refused if one[0] <= now or self._is_stopping]
        self._refused = [one for one in self._refused if one not in due]
        for _, future, outcome in due:
            future.set_result(outcome)

    def _was_taken_away(self, job: Any) -> bool:
        """Tell whether a job was preempted and stays out of the queue, as some clusters do it."""
        if str(job.state).upper() != "PREEMPTED":
            self._preempted.pop(job.job_id, None)
            return False
        since = self._preempted.setdefault(job.job_id, time.monotonic())
        return time.monotonic() - since > PREEMPTED_SECONDS


def _build_watcher() -> Any:
    """Return what asks `sacct` for the states of all jobs at once, now and then."""
    from submitit.slurm.slurm import SlurmInfoWatcher

    class Watcher(SlurmInfoWatcher):  # type: ignore[misc]
        def is_done(self, job_id: str, mode: str = "standard") -> bool:
            is_paused = self.get_state(job_id, mode=mode).upper() in PAUSED
            return not is_paused and bool(super().is_done(job_id, mode="cache"))

    return Watcher(delay_s=ASK_SECONDS)


def _outcome(job: Any, trial: TrialFolder, is_stopping: bool) -> Outcome:
    """Tell how an attempt ended: by what it returned, else by the state of its job."""
    from submitit.core.utils import FailedJobError

    error, state = None, str(job.state).upper()
    kind = next((kind for word, kind in KINDS.items() if state.startswith(word)), None)
    if kind is None or job.paths.result_pickle.exists():
        error = job.exception()  # waits for a slow file system
        if error is None:
            outcome: Outcome = job.result()
            return outcome
    if is_stopping:
        return Outcome("stopped", "its job was cancelled")
    if isinstance(error, FailedJobError):
        return Outcome("error", f"the job failed; see {job.paths.stderr}")
    return Outcome(kind or "lost", f"job {job.job_id} ended in state {state}; see {trial.log_path}")


def _died_unseen(job: Any, trial: TrialFolder, number: int, lease: LeaseWatch) -> bool:
    """Tell whether an attempt that has begun is dead and SLURM, which knows better, keeps silent.

    The lease's owner is read again once its life was judged: it may just have ended in order.
    """
    is_known = str(job.state).upper() != "UNKNOWN"
    return not (is_known or lease.is_alive()) and _live_attempt(trial) == number


def _live_attempt(trial: TrialFolder) -> int | None:
    """Return the number of the attempt whose lease is held, as far as the file says it."""
    owner = read_owner(trial.lease_path)
    return None if owner.get("ended") else owner.get("fencing")


def _needs(execution: Execution) -> dict[str, Any]:
    """Return what a job asks for, unless told otherwise."""
    if execution.device.startswith("cuda"):
        cores = min(execution.threads, GPU_CORES) * execution.devices
        return {"gpus_per_node": execution.devices, "cpus_per_task": cores}
    return {"cpus_per_task": execution.threads * execution.devices}


def _last(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), text)
