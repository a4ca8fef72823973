"""Functions in processes forked by a server that has imported torch; memory limits of cgroups.

The server, `python -m sweep.training --serve`, starts with the first `Worker` and ends with its
parent. The user's own process forks nothing, so scripts and notebooks need no `__main__` guard.
A request is one end of a pipe. A process between server and worker adds the exit code.
"""

import atexit
import contextlib
import gc
import hashlib
import math
import multiprocessing
import os
import pickle
import platform
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sweep import errors
from sweep.plan.retry import Outcome, judge_death
from sweep.trial.files import cache_dir, require_cache
from sweep.trial.folder import TrialFolder

FORK = multiprocessing.get_context("fork")
ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# File names by version: limit, use, kills, and the key of reclaimable bytes in memory.stat.
V2 = ("memory.max", "memory.current", "memory.events", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
POLL_SECONDS = 0.2  # for an answer
ShouldStop = Callable[[], str | None]  # a worker polls it; an answer says how to end

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
        "TORCHINDUCTOR_CACHE_DIR": str(require_cache() / "inductor" / name),
    }
    return {name: value for name, value in settings.items() if name not in os.environ}


def safe_path() -> list[str]:
    """Return sys.path with the current folder last, so that its files hide no library."""
    current = os.getcwd()
    if current == str(Path(__file__).parents[2]):  # another copy of this package may be installed
        return sys.path
    others = [path for path in sys.path if path not in ("", current)]
    return others if len(others) == len(sys.path) else [*others, current]


class Worker:
    """A process that calls module-level functions, `function(*arguments, should_stop)`, in turn."""

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        ends_itself: bool = False,  # if the caller dies, `should_stop` answers; otherwise killed
    ) -> None:
        settings = {**worker_environment(), **os.environ}
        if environment is not None:
            settings |= environment
        self.calls = 0
        self._is_closing = False
        self._is_told_to_end = False  # the process, by a signal during its last call
        self._killed_before = oom_kills()
        self._pipe, theirs = multiprocessing.Pipe()
        try:
            with theirs:
                _pass_to_server(theirs)
            self.pid = int(self._pipe.recv())
            self._pipe.send((settings, os.getcwd(), safe_path(), ends_itself))
        except (OSError, EOFError) as error:
            raise errors.WorkerDied(1, "the process that starts workers has ended") from error

    def submit(self, function: Callable[..., Any], *arguments: object) -> None:
        """Call a function once the last call has returned; `result` waits for it."""
        self.calls += 1
        self._killed_before = oom_kills()
        with contextlib.suppress(OSError):  # `result` tells how the process ended
            self._pipe.send(pickle.dumps((function, arguments)))

    def stop(self, word: str = "stopped") -> None:
        """Make `should_stop` answer with this word, also in later calls."""
        with contextlib.suppress(OSError):
            self._pipe.send(word)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process after its calls; `result` then waits until it has ended."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    def has_ended(self) -> bool:
        """Return True if the process takes no further call, because it has ended or is about to."""
        if self._is_told_to_end or self._pipe.closed:
            return True
        return self._pipe.poll()  # without a call it sends only its exit code

    def end(self) -> None:
        """End a process that has returned from all its calls, and wait for it."""
        self.close()
        if not self._pipe.closed:
            with contextlib.suppress(errors.WorkerDied):
                self.result()

    def result(self, timeout: float | None = None) -> Any:
        """Return the result; raise WorkerDied without one, or after `timeout` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        # Python runs handlers of signals between calls; Ray's interrupt none.
        is_late = not self._pipe.poll(POLL_SECONDS)
        while is_late and time.monotonic() < end:
            is_late = not self._pipe.poll(POLL_SECONDS)
        if is_late:
            self.kill()

        answers: dict[str, Any] = {}
        with contextlib.suppress(EOFError, OSError):
            while "exit code" not in answers:
                answers.update(self._pipe.recv())
                self._is_told_to_end = answers.get("ends", False)
                if "result" in answers and not (is_late or self._is_closing):
                    return answers["result"]
        self._pipe.close()
        if "result" in answers and not is_late:
            return answers["result"]

        message = f"not done after {timeout:g} s" if is_late else answers.get("error", "")
        oom_killed = oom_kills() > self._killed_before
        raise errors.WorkerDied(answers.get("exit code", 1), message, is_late, oom_killed)


class FreshProcess(Worker):
    """A process for one call, which starts at once."""

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        ends_itself: bool = False,
    ) -> None:
        super().__init__(environment, ends_itself)
        self.submit(function, *arguments)
        self.close()


def _pass_to_server(pipe: Connection) -> None:
    global _server
    with _lock:
        if _server is None or _server[0].poll() is not None:
            control, theirs = socket.socketpair()
            path = str(Path(__file__).parents[2])
            user_path = os.environ.get("PYTHONPATH")
            if user_path:
                path += os.pathsep + user_path
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "sweep.training", "--serve", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what user code prints is not a result
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
    preload()
    gc.collect()
    gc.freeze()  # collections of the forked processes skip these objects, which takes 0.4 s
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM's notice, which is for the job
    while handles := socket.recv_fds(control, 1, 1)[1]:
        with Connection(handles[0]) as pipe:
            FORK.Process(target=_supervise, args=(pipe, control)).start()


def preload() -> None:
    """Import the compiler's front end, which takes a second and which every optimizer needs.

    Nothing that the server imports or calls may touch the CUDA driver, because a forked process
    could not use it then. `torch.compiler.reset()` does touch it; building an optimizer does not.
    """
    import torch

    torch.optim.SGD([torch.zeros(1)], lr=0.0)


def _supervise(pipe: Connection, control: socket.socket) -> None:
    control.close()
    process = FORK.Process(target=_run, args=(pipe,))
    process.start()
    process.join()
    assert process.pid
    with contextlib.suppress(OSError):  # the group may be empty
        os.killpg(process.pid, signal.SIGKILL)  # children of the user's code
    with contextlib.suppress(OSError):
        pipe.send({"exit code": process.exitcode})


def _run(pipe: Connection) -> None:
    stops: list[str] = []
    is_idle = False  # between two calls
    is_told_to_end = False
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the process ends

    def listen() -> None:
        try:
            while True:
                message = pipe.recv()
                if isinstance(message, str):
                    stops.append(message)
                else:
                    calls.put(message)
        except (EOFError, OSError):  # the caller has ended
            if not ends_itself:
                os._exit(1)
            stops.append("stopped")
            calls.put(None)

    def end(*_: object) -> None:
        nonlocal is_told_to_end
        if is_idle:
            os._exit(0)
        is_told_to_end = True
        stops.append("preempted")

    os.setpgid(0, 0)  # a group, so that `_supervise` can end the children too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
    signal.signal(signal.SIGTERM, end)
    try:
        pipe.send(os.getpid())
        environment, folder, sys.path[:], ends_itself = pipe.recv()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        threading.Thread(target=listen, daemon=True).start()
        for call in iter(calls.get, None):
            is_idle = False
            function, arguments = pickle.loads(call)
            result = function(*arguments, lambda: stops[0] if stops else None)
            _flush_output()
            pipe.send({"result": result, "ends": is_told_to_end})
            is_idle = True
            if is_told_to_end:
                break
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send({"error": errors.describe_error(error) + _log_user_error(error)})
    _flush_output()
    os._exit(0)  # without waiting for threads of the user's code


def _flush_output() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()


def _log_user_error(error: BaseException) -> str:
    """Write the traceback of an error in user code to a log; return a sentence about it."""
    log = cache_dir() / "user-code.log"
    if not any(map(errors.user_location, errors.causes_of(error))):
        return ""
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(errors.without_secrets("".join(traceback.format_exception(error))))
        return f" The traceback is in {log}."
    return ""


def outcome_of(process: Worker, folder: TrialFolder) -> Outcome:
    """Wait for the process of an attempt; judge its death."""
    try:
        return process.result()  # type: ignore[no-any-return]
    except errors.WorkerDied as error:
        return judge_death(error.exit_code, error.oom_killed, folder.log_path)


def run_job(function: Callable[..., Any], *arguments: object, seconds: float | None = None) -> Any:
    """Return the result of a module-level function in a fresh process; raise only SweepError.

    Give a limit of `seconds` only if the caller can do without the result: on a busy machine any
    job may take longer, and the user can end a command.
    """
    try:
        return FreshProcess(_call, function, arguments).result(timeout=seconds)
    except errors.WorkerDied as error:
        raise errors.SweepError(str(error)) from error


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], should_stop: object) -> Any:
    return function(*arguments)


def oom_kills(root: Path = ROOT, groups_file: Path = OWN_GROUPS) -> int:
    """Return how many processes of this cgroup the kernel killed for memory; 0 if unknown."""
    for group, (_, _, kills, _) in _groups(root, groups_file):
        count = _pairs(group / kills).get("oom_kill")
        if count is not None:
            return count
    return 0


def available_in_cgroups(root: Path = ROOT, groups_file: Path = OWN_GROUPS) -> int | None:
    """Return the bytes that may still be allocated; page cache counts as free. None: no limit."""
    available = []
    for group, (limit, used, _, reclaimable) in _groups(root, groups_file):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            free = int((group / limit).read_text()) - int((group / used).read_text())
            available.append(free + _pairs(group / "memory.stat").get(reclaimable, 0))
    return max(0, min(available)) if available else None


def _groups(root: Path, groups_file: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield this process's group and all that contain it, innermost first, with file names."""
    lines = groups_file.read_text().splitlines() if groups_file.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top = root
            names = V2
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = V1
        else:
            continue

        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield folder, names


def _pairs(path: Path) -> dict[str, int]:
    pairs = {}
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 2:
                pairs[words[0]] = int(words[1])
    except (OSError, ValueError):
        return {}
    return pairs
