"""Run attempts as SLURM jobs, through submitit.

A job needs no command: it requeues itself when SLURM ends it, and the next command adopts it.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from sweep.config.execution import Execution
from sweep.config.numbers import parse_bytes, parse_count
from sweep.config.settings import Group, RunFlag, Settings
from sweep.errors import SweepError, reason_of
from sweep.orchestration.executors.base import Executor
from sweep.plan.retry import Outcome
from sweep.training import run_cluster_attempt
from sweep.trial.files import cache_dir, sha256_of
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.lease import LeaseWatch, read_owner

NOTICE = getattr(signal, "SIG" + os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2"))
OWN_KEYS = ("cluster", "cores", "jobs", "memory", "setup", "time")  # other keys are sbatch's
GPU_OPTIONS = ("gpus", "gpus_per_node", "gpus_per_socket", "gpus_per_task", "gres")
CORE_OPTIONS = ("cpus_per_gpu", "cpus_per_task")
SET_BY_SWEEP = ("array", "error", "ntasks", "ntasks_per_node", "output", "signal", "wait", "wrap")
SAME_OPTIONS = {"memory": "mem", "mem": "memory", "cores": "cpus_per_task"}
SAME_OPTIONS |= {"cpus_per_task": "cores"}  # names of one option, by key
MINUTES = {"m": 1, "h": 60, "d": 1440}
NEXT_PAIR = re.compile(r",(?=\s*[a-z][a-z\d_-]*\s*=)")  # values may have commas: export=ALL,NAME=1
POLL_SECONDS = 1.0  # between two checks for results
RETRY_SECONDS = 15.0  # after sbatch has refused a job, or while one is suspended
OUTCOMES = {  # by state of a job; others are lost
    "CANCELLED": "error",
    "OUT_OF_MEMORY": "out_of_memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "preempted",
}


class SlurmSettings(Settings, use_attribute_docstrings=True):
    slurm: Annotated[str | None, RunFlag(Group.DEVICES, metavar="KEY=VALUE,…")] = None
    """Options of SLURM jobs, also any of sbatch: partition=gpu,time=4h,gres=gpu:a100:1."""


class SlurmOverrides(TypedDict, total=False):
    slurm: str | None


@dataclass(frozen=True)
class JobRequest:
    """The value of `--slurm`."""

    cluster: str  # slurm or local, as submitit names them
    jobs: int  # in the queue at the same time
    minutes: int  # time limit of a job
    nodes: int  # per job
    setup: list[str]  # lines of shell that a job runs first
    options: dict[str, Any]  # for sbatch, with underscores; True: one without a value


def parse_request(text: str | None) -> JobRequest:
    """Parse the value of `--slurm`."""
    values, setup = _parse_pairs(text or "")
    cluster = values.pop("cluster", "slurm")
    if cluster not in ("slurm", "local"):
        raise SweepError(f"slurm's cluster must be slurm or local, got {cluster!r}.")
    jobs = parse_count(values.pop("jobs", "16"), "slurm's jobs")
    minutes = _parse_minutes(values.pop("time", "4h"))
    memory = values.pop("memory", None)
    cores = values.pop("cores", None)
    nodes = parse_count(values.get("nodes", "1"), "slurm's nodes")

    options: dict[str, Any] = {key: value or True for key, value in values.items()}
    if memory:
        if memory.strip().isdigit():
            raise SweepError(
                f"slurm's memory must have a unit, got {memory!r}. Write it such as {memory}MiB."
            )
        mebibytes = parse_bytes(memory, "slurm's memory") // 2**20
        if not mebibytes:
            raise SweepError(f"slurm's memory must be 1 MiB or more, got {memory!r}. Raise it.")
        options["mem"] = f"{mebibytes}M"
    if cores:
        options["cpus_per_task"] = parse_count(cores, "slurm's cores")
    return JobRequest(cluster, jobs, minutes, nodes, setup, options)


def _parse_pairs(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the values by key, and those of `setup`, which may be given several times."""
    values: dict[str, str] = {}
    setup = []
    for pair in NEXT_PAIR.split(text):
        key, equals, value = (part.strip() for part in pair.partition("="))
        key = key.replace("-", "_")
        if not pair.strip():
            continue
        if not (key and equals):
            raise SweepError(
                f"slurm must be KEY=VALUE,…, got {pair.strip()!r}. The keys are "
                f"{', '.join(OWN_KEYS)} and the long options of sbatch; write one without a value "
                "as exclusive=."
            )
        if key in SET_BY_SWEEP:
            raise SweepError(
                f"slurm must not have the key {key}, which sweep or submitit sets. Leave it out."
            )
        if key in OWN_KEYS and not value:
            raise SweepError(f"slurm's {key} must have a value. Write {key}=VALUE.")
        same = SAME_OPTIONS.get(key, key)
        if same != key and same in values:
            raise SweepError(f"slurm must have {key} or {same}, got both. Leave one out.")
        if key in values:
            raise SweepError(f"slurm must have each key once, got {key} twice. Leave one out.")
        if key == "setup":
            setup.append(value)
        else:
            values[key] = value
    return values, setup


def _parse_minutes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([mhd])", text)
    minutes = int(match[1]) * MINUTES[match[2]] if match else 0
    if minutes < 5:  # SLURM announces the end of a job 90 s before
        raise SweepError(f"slurm's time must be 5m or longer, got {text!r}. Write it as 4h.")
    return minutes


@dataclass
class Job:
    """The function of a job; submitit pickles it, again for every requeue."""

    path: str
    number: int

    def __call__(self) -> dict[str, Any]:
        requeue = signal.getsignal(NOTICE)
        outcome = run_cluster_attempt(Path(self.path), self.number, {NOTICE: "preempted"})
        if outcome.kind == "preempted":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # follows NOTICE; scontrol inherits this
            signal.signal(NOTICE, requeue)
            try:
                signal.raise_signal(NOTICE)  # submitit calls checkpoint(), requeues and exits
            except Exception as error:  # for example JobRequeue=0
                print(f"The job was not requeued; the command submits another one: {error}")
        return asdict(outcome)

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class SlurmExecutor(Executor):
    """Executor that submits a job for each attempt; all nodes must share the sweep's folder."""

    name = "slurm"
    extra = "slurm"
    library = "submitit"
    settings = SlurmSettings

    @classmethod
    def refuse_unsuited(cls, settings: SlurmSettings) -> None:
        parse_request(settings.slurm)

    @classmethod
    def nodes_per_trial(cls, settings: SlurmSettings) -> int:
        return parse_request(settings.slurm).nodes

    def __init__(self, settings: SlurmSettings, execution: Execution, folder: SweepFolder) -> None:
        import submitit

        logging.getLogger("submitit").setLevel(logging.ERROR)  # warns of each failure of sacct
        request = parse_request(settings.slurm)
        jobs = f"{folder.name}-{sha256_of(str(folder.path.resolve()))[:8]}"
        requeues = dict.fromkeys(("slurm_max_num_timeout", "local_max_num_timeout"), 10**6)
        try:
            self._submitit = submitit.AutoExecutor(
                cache_dir() / "submitit" / jobs, cluster=request.cluster, **requeues
            )
        except RuntimeError as error:
            raise SweepError(
                "executor slurm must run on a machine of a SLURM cluster, but srun is not on PATH. "
                "Log in to such a machine, or try the executor here with --slurm cluster=local."
            ) from error

        os.environ["PYTHONSAFEPATH"] = "1"  # jobs of cluster=local inherit it
        options = _needs_of_a_trial(execution, request) | request.options
        if request.cluster == "slurm":
            _refuse_options(options)
        parameters = {
            "name": f"sweep-{folder.name}",
            "timeout_min": request.minutes,
            "slurm_additional_parameters": options,
            "slurm_setup": ["export PYTHONSAFEPATH=1", *request.setup],  # not the current folder
        }
        if request.nodes > 1:  # the attempt runs on the first node; its command starts the others
            parameters["slurm_srun_args"] = ["--overlap", "--nodes=1", "--ntasks=1"]
        self._submitit.update_parameters(**parameters)

        self._folder = folder
        self._threads = ThreadPoolExecutor(request.jobs, "slurm")
        self.slots = [{}] * request.jobs
        self._is_stopping = False
        self._is_killing = False

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        return self._threads.submit(self._run, folder, folder.read_status().fencing)

    def stop(self, force: bool = False) -> None:
        """Ask all attempts of the sweep to end, also an earlier command's; or cancel all jobs."""
        self._is_stopping = True
        self._is_killing = force or self._is_killing
        for trial in self._folder.trials():
            status = trial.read_status()
            if status.fencing and not status.state.is_finished:
                trial.ask_to_stop(status.fencing)

    def close(self) -> None:
        self._threads.shutdown()

    def _run(self, trial: TrialFolder, number: int) -> Outcome:
        try:
            job = self._submitit.submit(Job(str(trial.path.absolute()), number))
        except Exception as error:  # any error of sbatch; SLURM may have accepted the job
            time.sleep(RETRY_SECONDS)
            reason = " ".join(str(error).split())
            return Outcome("lost", f"not submitted: {reason}", has_begun=False)
        lease = LeaseWatch(trial.lease_path)
        while True:
            time.sleep(POLL_SECONDS)
            with contextlib.suppress(OSError):  # a shared file system may fail for a moment
                outcome = self._outcome(job, trial, number, lease)
                if outcome:
                    return outcome

    def _outcome(
        self, job: Any, trial: TrialFolder, number: int, lease: LeaseWatch
    ) -> Outcome | None:
        """Return how an attempt ended; None if it may still end."""
        has_result = job.paths.result_pickle.exists()
        is_running = _is_running(trial, number)
        if self._is_stopping and not (has_result or is_running):
            time.sleep(POLL_SECONDS)  # the job of an attempt that has just ended writes its result
            has_result = job.paths.result_pickle.exists()
        if self._is_killing or (self._is_stopping and not (has_result or is_running)):
            job.cancel(check=False)
            return Outcome("stopped", "its job was cancelled")

        is_over = job.done()  # calls sacct now and then, for all jobs
        state = str(job.state).upper().partition(" ")[0]
        if state in ("SUSPENDED", "RESIZING") and not has_result:  # ended, according to submitit
            job.watcher.clear()  # else submitit would not ask for the states of ended jobs again
            time.sleep(RETRY_SECONDS)
            return None

        kind = OUTCOMES.get(state)
        if has_result or (is_over and not kind):
            if job.exception() is None:  # waits for a slow file system
                return Outcome(**job.result())
            kind = "error" if job.paths.result_pickle.exists() else "lost"
        elif state == "UNKNOWN" and is_running and not lease.is_alive():  # without accounting
            kind = "lost" if _is_running(trial, number) else None  # it may have ended just now
        if not kind:
            return None

        message = f"job {job.job_id} ended in state {state}; see {trial.log_path}"
        return Outcome("stopped" if self._is_stopping else kind, message)


def _needs_of_a_trial(execution: Execution, request: JobRequest) -> dict[str, int]:
    """Return the cores and GPUs of a job that the request does not name, as options of sbatch."""
    devices = execution.devices // request.nodes  # per node
    threads = min(execution.threads, 8) if execution.device == "cuda" else execution.threads
    needs = {}
    if request.nodes > 1:
        needs["ntasks_per_node"] = 1
    if not any(option in request.options for option in CORE_OPTIONS):
        needs["cpus_per_task"] = threads * devices
    if execution.device == "cuda" and not any(name in request.options for name in GPU_OPTIONS):
        needs["gpus_per_node"] = devices
    return needs


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Raise SweepError if sbatch refuses a job with these options."""
    words = ["sbatch", "--test-only", "--wrap=true"]
    for key, value in options.items():
        word = "--" + key.replace("_", "-")
        words.append(word if value is True else f"{word}={value}")
    try:
        tried = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        raise SweepError(f"executor slurm needs sbatch, but {reason_of(error)}.") from error
    if tried.returncode:
        reason = " ".join(tried.stderr.split()) or f"exit code {tried.returncode}"
        raise SweepError(f"SLURM refuses such jobs: {reason}. Correct --slurm.")


def _is_running(trial: TrialFolder, number: int) -> bool:
    owner = read_owner(trial.lease_path)
    return owner.get("fencing") == number and not owner.get("ended")
