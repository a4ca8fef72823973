"""Functions in processes of their own, forked by a server that has imported torch.

The server, `python -m sweep.training --serve`, starts with the first `FreshProcess` and ends with
its parent. The user's own process forks nothing, so scripts and notebooks need no `__main__` guard.
A request is one end of a pipe. A process between server and worker adds the exit code.
"""

import atexit
import contextlib
import hashlib
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sweep.errors import SweepError, WorkerDied
from sweep.plan.retry import Outcome, ShouldStop
from sweep.trial.files import cache_dir
from sweep.trial.folder import TrialFolder, TrialStatus

FORK = multiprocessing.get_context("fork")

_lock = threading.Lock()
_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def worker_environment() -> dict[str, str]:
    """Return the environment variables of workers, without those that the user has set."""
    processor = platform.processor()  # each type has its own cache of compiled code
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        keys = ("model name", "flags", "CPU part", "Features")
        processor = "\n".join(sorted({line for line in lines if line.startswith(keys)}))
    name = hashlib.sha256(f"{platform.machine()} {processor}".encode()).hexdigest()[:12]
    settings = {
        "GOMP_SPINCOUNT": "3000",  # trainings that share cores wait less for each other
        "MALLOC_MMAP_THRESHOLD_": str(2**31 - 1),  # glibc keeps freed memory for the next step
        "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "inductor" / name),
    }
    return {name: value for name, value in settings.items() if name not in os.environ}


class FreshProcess:
    """Runs a module-level `function(*arguments, should_stop)` in a new process, starting at once.

    After this process has ended, `should_stop` answers if the function `ends_itself`; otherwise the
    new process is ended.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        ends_itself: bool = False,
    ) -> None:
        settings = {**worker_environment(), **os.environ, **(environment or {})}
        self._pipe, theirs = multiprocessing.Pipe()
        try:
            with theirs:
                _pass_to_server(theirs)
            self.pid = int(self._pipe.recv())
            self._pipe.send((settings, os.getcwd(), sys.path, ends_itself))
            self._pipe.send((function, arguments))
        except (OSError, EOFError) as error:
            raise WorkerDied(1, "the process that starts workers has ended") from error

    def stop(self) -> None:
        """Make `should_stop` answer `stopped`."""
        with contextlib.suppress(OSError):
            self._pipe.send("stop")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def result(self, timeout: float | None = None) -> Any:
        """Return the result; raise WorkerDied without one, or after `timeout` seconds."""
        is_late = not self._pipe.poll(timeout)
        if is_late:
            self.kill()
        answers: dict[str, Any] = {}
        with self._pipe, contextlib.suppress(EOFError, OSError):
            while "exit code" not in answers:
                answers.update(self._pipe.recv())
        if "result" in answers and not is_late:
            return answers["result"]
        message = f"not done after {timeout:g} s" if is_late else answers.get("error", "")
        raise WorkerDied(answers.get("exit code", 1), message, timed_out=is_late)


def _pass_to_server(pipe: Connection) -> None:
    global _server
    with _lock:
        if _server is None or _server[0].poll() is not None:
            control, theirs = socket.socketpair()
            root = str(Path(__file__).parents[2])
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "sweep.training", "--serve", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**worker_environment(), **os.environ, "PYTHONPATH": path},
                    process_group=0,  # Ctrl-C in the terminal does not reach it
                )
            for end in (process.wait, process.terminate, control.close):  # the last comes first
                atexit.register(end)  # workers see the end of this process themselves
            _server = process, control
        socket.send_fds(_server[1], [b"\0"], [pipe.fileno()])


def serve(descriptor: int) -> None:
    """Fork a process for each request until the parent has ended: the server's main loop."""
    import torch

    import sweep.training.worker  # noqa: F401

    torch.compiler.reset()  # imports the compiler's front end, which every optimizer needs
    control = socket.socket(fileno=descriptor)
    while handles := socket.recv_fds(control, 1, 1)[1]:
        with Connection(handles[0]) as pipe:
            FORK.Process(target=_supervise, args=(pipe, control)).start()


def _supervise(pipe: Connection, control: socket.socket) -> None:
    control.close()
    process = FORK.Process(target=_run, args=(pipe,))
    process.start()
    process.join()
    with contextlib.suppress(OSError):
        pipe.send({"exit code": process.exitcode})


def _run(pipe: Connection) -> None:
    stops: list[str] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
    signal.signal(signal.SIGTERM, lambda *_: stops.append("preempted"))

    def listen() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):  # the caller has ended
            if not ends_itself:
                os._exit(1)
        stops.append("stopped")

    try:
        pipe.send(os.getpid())
        environment, folder, sys.path[:], ends_itself = pipe.recv()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        function, arguments = pipe.recv()
        threading.Thread(target=listen, daemon=True).start()
        answer = {"result": function(*arguments, lambda: stops[0] if stops else None)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with contextlib.suppress(OSError):
        pipe.send(answer)


def run_job(function: Callable[..., Any], *arguments: object, seconds: float = 120.0) -> Any:
    """Return the result of a module-level function in a fresh process; raise only SweepError."""
    try:
        return FreshProcess(function, *arguments).result(timeout=seconds)
    except WorkerDied as error:
        raise SweepError(str(error).removeprefix("SweepError: ")) from error


def attempt_trial(path: Path, status: TrialStatus | None, should_stop: ShouldStop) -> Outcome:
    """Run an attempt of a trial in this process, with its output in log.txt."""
    from sweep.training.worker import run_attempt  # imports torch

    return run_attempt(path, should_stop, status, is_logged=True)


def run_cluster_attempt(path: Path, number: int, stops: list[str]) -> Outcome:
    """Run the attempt with this fencing number; signals and `ask_to_stop` append to `stops`."""
    folder = TrialFolder(path)
    if not folder.config_path.exists():
        problem = f"must be a folder that all machines share; {socket.gethostname()} cannot see it"
        return Outcome("error", f"{path} {problem}. Choose an --out on a shared file system.")

    def watch() -> None:
        while not folder.is_asked_to_stop(number):
            time.sleep(1.0)
        stops.append("stopped")

    os.environ.update(worker_environment())
    threading.Thread(target=watch, name="stop", daemon=True).start()
    status = folder.read_status().changed(fencing=number)
    return attempt_trial(path, status, lambda: stops[0] if stops else None)
