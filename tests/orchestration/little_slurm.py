"""A fake SLURM: commands to put on PATH that accept what submitit passes, and a controller."""

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

import psutil

ACTIONS = {  # of scontrol: the next state, and the signal that the job receives
    "requeue": ("REQUEUED", signal.SIGTERM),
    "suspend": ("SUSPENDED", signal.SIGSTOP),
    "resume": ("RUNNING", signal.SIGCONT),
}


@dataclass
class Job:
    id: str
    flags: dict[str, str]
    environment: dict[str, str]
    state: str = "PENDING"
    starts: int = 0
    batch: subprocess.Popen[bytes] | None = None  # runs the script
    step: int | None = None  # process of srun, which leads a process group

    def signal(self, number: int) -> None:
        """As SLURM's cgroups do: a notice is for the task, anything stronger for its children too.

        The first of them starts a session of its own, so `killpg` would not reach it.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            tasks = [psutil.Process(self.step)] if self.step else []
            if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT):
                tasks += [child for task in tasks for child in task.children(recursive=True)]
            for task in tasks:
                task.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.batch:
            self.batch.kill()


@dataclass
class LittleSlurm:
    """The cluster: a context manager that leaves no process of a job behind."""

    folder: Path  # created for the commands
    nodes: int = 4  # number of jobs that run at the same time
    requeues: bool = True  # JobRequeue in slurm.conf
    accounts: bool = True  # sacct fails without accounting
    refusals: int = 0  # number of submissions to refuse, like a busy controller
    jobs: dict[str, Job] = field(default_factory=dict)
    sacct_calls: int = 0

    def __enter__(self) -> "LittleSlurm":
        self._lock, self._threads = threading.RLock(), [threading.Thread(target=self._serve)]
        self._listener = Listener()
        self.folder.mkdir()
        for name in ("sbatch", "srun", "sacct", "scancel", "scontrol"):
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
        with self._lock:
            self.nodes = nodes
            self._start_pending()

    def give_notice(self, name: str) -> None:
        """Send the signal that a job requested, as SLURM does before it ends the job."""
        job = self.jobs[name]
        job.signal(signal.Signals["SIG" + job.flags["signal"].partition("@")[0]])

    def end(self, name: str, state: str) -> None:
        """End a job at once, in a state of SLURM: TIMEOUT, NODE_FAIL, …"""
        with self._lock:
            self.jobs[name].state = state
            self.jobs[name].kill()

    def _serve(self) -> None:
        while True:
            with self._listener.accept() as client, contextlib.suppress(EOFError, OSError):
                if (request := client.recv()) is None:
                    return
                command, *arguments = request
                with self._lock:
                    try:
                        client.send((0, getattr(self, f"_{command}")(*arguments)))
                    except Exception as error:
                        client.send((1, f"{command}: error: {error}\n"))

    def _sbatch(self, words: list[str], environment: dict[str, str], _: int) -> str:
        if words[0] == "--test-only":
            return ""
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("Socket timed out on send/recv operation")
        text = Path(words[0]).read_text()
        lines = [line for line in text.splitlines() if line.startswith("#SBATCH --")]
        pairs = [shlex.split(line)[1].removeprefix("--").partition("=") for line in lines]
        flags = {flag: value for flag, _, value in pairs}
        name = str(1000 + len(self.jobs))
        (self.folder / f"{name}.sh").write_text(text)
        self.jobs[name] = Job(name, flags, {**environment, "SLURM_JOB_ID": name})
        self._start_pending()
        return f"Submitted batch job {name}\n"

    def _start_pending(self) -> None:
        pending = [job for job in self.jobs.values() if job.state == "PENDING"]
        free = self.nodes - sum(job.batch is not None for job in self.jobs.values())
        for job in pending[: max(0, free)]:
            job.state, job.starts = "RUNNING", job.starts + 1
            script = ["bash", self.folder / f"{job.id}.sh"]
            job.batch = subprocess.Popen(script, env=job.environment)
            self._threads.append(threading.Thread(target=self._await_end, args=(job, job.batch)))
            self._threads[-1].start()

    def _await_end(self, job: Job, batch: subprocess.Popen[bytes]) -> None:
        code = batch.wait()
        with self._lock:
            job.kill()
            job.batch = job.step = None
            ended = "FAILED" if code else "COMPLETED"
            job.state = {"RUNNING": ended, "REQUEUED": "PENDING"}.get(job.state, job.state)
            self._start_pending()

    def _srun(self, words: list[str], environment: dict[str, str], pid: int) -> str:
        job = self.jobs[environment["SLURM_JOB_ID"]]
        if job.state != "RUNNING":
            raise RuntimeError(f"Job {job.id} has ended")
        job.step = pid
        return job.id

    def _sacct(self, words: list[str], *_: object) -> str:
        options = ["-o", "JobID,State,NodeList", "--parsable2"]
        if words[:3] != options or set(words[3::2]) != {"-j"}:
            raise RuntimeError(f"unrecognized options {words}")
        if not self.accounts:
            raise RuntimeError("Slurm accounting storage is disabled")
        self.sacct_calls += 1
        rows = ["JobID|State|NodeList"]
        for job in (self.jobs[name] for name in words[4::2]):
            rows.append(f"{job.id}|{job.state}|localhost")
            rows.append(f"{job.id}.batch|{job.state.partition(' ')[0]}|localhost")
        return "\n".join(rows) + "\n"

    def _scancel(self, words: list[str], *_: object) -> str:
        if self.jobs[words[0]].state in ("PENDING", "RUNNING", "SUSPENDED"):
            self.end(words[0], f"CANCELLED by {os.getuid()}")
        return ""

    def _scontrol(self, words: list[str], *_: object) -> str:
        action, job = words[0], self.jobs[words[1]]
        if job.batch is None or (action == "requeue" and not self.requeues):
            raise RuntimeError(f"{job.id}: Requested operation is presently disabled")
        job.state, number = ACTIONS[action]
        job.signal(number)
        return ""


def call(address: str, command: str, *words: str) -> int:
    if command == "srun":
        os.setpgid(0, 0)  # so that signals to the step do not reach the script
    with Client(address) as slurm:
        slurm.send((command, list(words), dict(os.environ), os.getpid()))
        code, text = slurm.recv()
    if command == "srun" and not code:
        _, _, out, _, err, *body = words
        for number, path in ((1, out), (2, err)):
            path = path.replace("%j", text).replace("%t", "0")
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.execvp(body[0], body)
    (sys.stderr if code else sys.stdout).write(text)
    return code


if __name__ == "__main__":
    sys.exit(call(*sys.argv[1:]))
