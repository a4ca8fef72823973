"""A SLURM of one machine: `sbatch`, `srun`, `sacct`, `scancel` and `scontrol`, to put on PATH.

Jobs are processes. The table of their states is kept in this process, as slurmctld keeps it, and
the commands are clients of it. They understand what submitit says, and refuse the rest. What a
cluster does of its own accord, such as taking a node away, is asked for by methods.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Listener
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
PARTITIONS = ("cpu", "gpu")
TELL = ["-o", "JobID,State,NodeList", "--parsable2"]
DEEDS = {  # of scontrol: the state that follows, and what the job is sent
    "requeue": ("REQUEUED", signal.SIGTERM),
    "suspend": ("SUSPENDED", signal.SIGSTOP),
    "resume": ("RUNNING", signal.SIGCONT),
}


@dataclass
class Job:
    """A job, or one task of an array."""

    name: str  # 1000, or 1000_2
    script: Path
    flags: dict[str, str]
    environment: dict[str, str]
    state: str = "PENDING"
    lives: int = 0
    batch: subprocess.Popen[bytes] | None = None  # runs the script
    step: int | None = None  # process of srun, which leads a group

    def signal(self, number: int) -> None:
        """Send a signal to the step, which is what runs the attempt."""
        if self.step:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.step, number)

    def kill(self) -> None:
        """Send SIGKILL to all of it."""
        self.signal(signal.SIGKILL)
        if self.batch:
            self.batch.kill()


@dataclass
class LittleSlurm:
    """The cluster: a context manager, behind which no process of a job is left."""

    folder: Path  # to be made, for the commands
    nodes: int = 4  # jobs that run at a time
    requeues: bool = True  # JobRequeue in slurm.conf
    accounts: bool = True  # without accounting sacct knows nothing
    refuses: int = 0  # so many submissions, as a controller that is too busy
    jobs: dict[str, Job] = field(default_factory=dict)
    submitted: list[dict[str, str]] = field(default_factory=list)  # the flags of each sbatch
    asked: list[list[str]] = field(default_factory=list)  # the jobs of each sacct

    def __enter__(self) -> "LittleSlurm":
        self._lock, self._threads = threading.RLock(), [threading.Thread(target=self._serve)]
        self._listener = Listener()
        self.folder.mkdir()
        for name in COMMANDS:
            words = shlex.join([sys.executable, __file__, str(self._listener.address), name])
            (self.folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
            (self.folder / name).chmod(0o755)
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.resize(0)
        for job in self.jobs.values():
            job.kill()
        with Client(self._listener.address) as client:
            client.send(None)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def resize(self, nodes: int) -> None:
        """Change how many jobs may run at a time; those that run stay."""
        with self._lock:
            self.nodes = nodes
            self._start_waiting()

    def give_notice(self, name: str) -> None:
        """Send the signal that a job asked for, as SLURM does before it ends the job."""
        job = self.jobs[name]
        job.signal(signal.Signals["SIG" + job.flags["signal"].partition("@")[0]])

    def end(self, name: str, state: str) -> None:
        """End a job at once, in the state that SLURM then gives it: TIMEOUT, NODE_FAIL, …"""
        with self._lock:
            self.jobs[name].state = state
            self.jobs[name].kill()

    def _serve(self) -> None:
        while True:
            with self._listener.accept() as client, contextlib.suppress(EOFError, OSError):
                if (request := client.recv()) is None:
                    return
                with self._lock:
                    client.send(self._answer(*request))

    def _answer(self, command: str, words: list[str], *caller: object) -> tuple[int, str]:
        try:
            return 0, getattr(self, f"_{command}")(words, *caller)
        except Exception as error:
            return 1, f"{command}: error: {error}\n"

    def _sbatch(self, words: list[str], environment: dict[str, str], _: int) -> str:
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("Socket timed out on send/recv operation")
        main, text = 1000 * (1 + len(self.submitted)), Path(words[0]).read_text()
        lines = [line for line in text.splitlines() if line.startswith("#SBATCH --")]
        pairs = [shlex.split(line)[1].removeprefix("--").partition("=") for line in lines]
        flags = {flag: value for flag, _, value in pairs}
        if flags.get("partition", PARTITIONS[0]) not in PARTITIONS:
            raise RuntimeError("invalid partition specified: " + flags["partition"])
        self.submitted.append(flags)
        script = self.folder / f"{main}.sh"
        script.write_text(text)
        first, _, last = flags.get("array", "0-0").partition("%")[0].partition("-")
        for task in range(int(first), int(last) + 1):
            name, own = str(main), {"SLURM_JOB_ID": str(main + task)}
            if "array" in flags:
                name = f"{main}_{task}"
                own |= {"SLURM_ARRAY_JOB_ID": str(main), "SLURM_ARRAY_TASK_ID": str(task)}
            self.jobs[name] = Job(name, script, flags, environment | own)
        self._start_waiting()
        return f"Submitted batch job {main}\n"

    def _start_waiting(self) -> None:
        waiting = [job for job in self.jobs.values() if job.state == "PENDING"]
        free = self.nodes - sum(job.batch is not None for job in self.jobs.values())
        for job in waiting[: max(0, free)]:
            job.state, job.lives = "RUNNING", job.lives + 1
            job.batch = subprocess.Popen(["bash", job.script], env=job.environment)
            self._threads.append(threading.Thread(target=self._await_end, args=(job, job.batch)))
            self._threads[-1].start()

    def _await_end(self, job: Job, batch: subprocess.Popen[bytes]) -> None:
        code = batch.wait()
        with self._lock:
            job.kill()
            job.batch = job.step = None
            ended = "FAILED" if code else "COMPLETED"
            job.state = {"RUNNING": ended, "REQUEUED": "PENDING"}.get(job.state, job.state)
            self._start_waiting()

    def _srun(self, words: list[str], environment: dict[str, str], pid: int) -> str:
        number = environment["SLURM_JOB_ID"]
        (job,) = (one for one in self.jobs.values() if one.environment["SLURM_JOB_ID"] == number)
        if job.state != "RUNNING":
            raise RuntimeError(f"Job {job.name} has ended")  # meanwhile
        job.step = pid
        return job.name  # which stands in the names of its files

    def _sacct(self, words: list[str], *_: object) -> str:
        if words[:3] != TELL or set(words[3::2]) != {"-j"}:
            raise RuntimeError(f"unrecognized options {words}")
        if not self.accounts:
            raise RuntimeError("Slurm accounting storage is disabled")
        self.asked.append(words[4::2])
        rows = ["JobID|State|NodeList"]
        for main in words[4::2]:
            jobs = self._find(main)
            new = [job for job in jobs if job.state == "PENDING" and not job.lives]
            if new and "array" in new[0].flags:  # in one row
                tasks = ",".join(job.name.partition("_")[2] for job in new)
                rows.append(f"{main}_[{tasks}]|PENDING|None assigned")
                jobs = [job for job in jobs if job not in new]
            for job in jobs:
                rows.append(f"{job.name}|{job.state}|localhost")
                rows.append(f"{job.name}.batch|{job.state.partition(' ')[0]}|localhost")
        return "\n".join(rows) + "\n"

    def _scancel(self, words: list[str], *_: object) -> str:
        for job in self._find(words[0]):
            if job.state in ("PENDING", "RUNNING", "SUSPENDED"):
                self.end(job.name, f"CANCELLED by {os.getuid()}")
        return ""

    def _scontrol(self, words: list[str], *_: object) -> str:
        deed, (job,) = words[0], self._find(words[1])
        if job.batch is None or (deed == "requeue" and not self.requeues):
            raise RuntimeError(f"{job.name}: Requested operation is presently disabled")
        job.state, number = DEEDS[deed]
        job.signal(number)
        return ""

    def _find(self, asked: str) -> list[Job]:
        """Return the job of an id, or all of an array's."""
        return [job for name, job in self.jobs.items() if asked in (name, name.partition("_")[0])]


def call(address: str, command: str, *words: str) -> int:
    """Be one of the commands; return its exit code."""
    if command == "srun":
        os.setpgid(0, 0)  # so that signals to the step do not reach the script
    with Client(address) as slurm:
        slurm.send((command, list(words), dict(os.environ), os.getpid()))
        code, text = slurm.recv()
    if command == "srun" and not code:
        _, _, out, _, err, *body = words
        for number, path in ((1, out), (2, err)):
            for mark, name in (("%A_%a", text), ("%j", text), ("%t", "0")):
                path = path.replace(mark, name)
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.execvp(body[0], body)
    (sys.stderr if code else sys.stdout).write(text)
    return code


if __name__ == "__main__":
    sys.exit(call(*sys.argv[1:]))
