"""A function in a process of its own: a device nobody has touched, a death that kills nobody else.

The process comes from a fork server that has imported torch once (spawned where there is none).
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from sweep.config.objects import load_object
from sweep.errors import WorkerDied

PRELOADED = ("sweep.training.fork_server",)
ATTEMPT = "sweep.training.worker:run_logged_attempt"  # called with a trial's folder
ShouldStop = Callable[[], str | None]  # asked now and then; an answer says how to end


class FreshProcess:
    """Starts `function(*arguments, should_stop)` at once; its result is waited for.

    Args:
        function: a module-level function, pickled by reference (or, until every caller is
            converted, its name as `module:function`).
        arguments: to be pickled.
        environment: variables that differ from this process's.
        ends_itself: whether the function asks `should_stop`, and so ends by itself once this
            process is gone; else it is ended then.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        ends_itself: bool = False,
    ) -> None:
        context = _context()
        self._pipe, theirs = context.Pipe()
        settings = {**os.environ, **(environment or {})}  # the fork server may be older than they
        inside = (function, arguments, theirs, settings, ends_itself)
        self._process = context.Process(target=_run, args=inside)
        with _no_main_module():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        return int(self._process.pid)

    def stop(self) -> None:
        """Let `should_stop` answer `stopped`."""
        with contextlib.suppress(OSError):
            self._pipe.send("stop")

    def kill(self) -> None:
        """End the process at once, with SIGKILL."""
        self._process.kill()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for what the function returns; after `timeout` seconds kill it.

        Raises:
            WorkerDied: if the function raised, or the process ended without a word.
        """
        is_over = bool(wait([self._pipe, self._process.sentinel], timeout))
        found: list[Any] = []
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll(0):
                found.append(self._pipe.recv())
        if not is_over:
            self.kill()
        self._process.join()
        self._pipe.close()
        if not is_over:
            why = f"not done after {timeout:g} s"
            raise WorkerDied(self._process.exitcode or 0, why, timed_out=True)
        if not found:
            raise WorkerDied(self._process.exitcode or 0)
        if isinstance(found[0], _Raised):
            raise WorkerDied(self._process.exitcode or 0, found[0].message)
        return found[0]


@dataclass(frozen=True)
class _Raised:
    message: str


def import_inductor_ahead() -> None:
    """Let the fork server import what compiling needs, 0.9 s, for the processes that follow.

    Only a server that was started here is asked; it imports while it has nobody to fork.
    """
    _context()
    if _server is not None and _server == _server_pid():
        with contextlib.suppress(ProcessLookupError):
            os.kill(_server, signal.SIGUSR1)


_server: int | None = None  # the process that listens to SIGUSR1


def _server_pid() -> int | None:
    found: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return found


@functools.cache
def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # The server ignores Ctrl-C once it has imported torch; until then it would show a traceback.
    # SIGUSR1 waits likewise until there is somebody to handle it.
    global _server
    resource_tracker.ensure_running()  # which unblocks signals
    others = _server_pid()  # which the user's program started before, without our imports
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    _server = None if others else _server_pid()
    return context


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script again in the process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _run(
    function: Callable[..., Any] | str,
    arguments: tuple[object, ...],
    pipe: Connection,
    environment: dict[str, str],
    ends_itself: bool,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    asked: list[str] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # which the fork server listens to
    signal.signal(signal.SIGTERM, lambda *_: asked.append("preempted"))

    def listen() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):  # the parent is gone
            if not ends_itself:
                os._exit(1)
        asked.append("stopped")

    threading.Thread(target=listen, daemon=True).start()
    found: object
    try:
        body = load_object(function) if isinstance(function, str) else function
        found = body(*arguments, lambda: asked[0] if asked else None)
    except Exception as error:
        found = _Raised(f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):
        pipe.send(found)
