"""Run an attempt that kills its own process, with SIGKILL, at a chosen moment."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweep.plan.retry import begin_attempt
from sweep.trial.folder import TrialFolder


def attempt(trial: TrialFolder, moment: str = "", nth: int = 1) -> int | None:
    """Run an attempt in a fresh process; return its exit code.

    Args:
        trial: planned.
        moment: one of `MOMENTS`; empty: the attempt runs to its end.
        nth: occurrence of the moment within the attempt at which the process dies.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sweep.training.worker", "torch._dynamo"])
    process = context.Process(target=_run, args=(trial.path, moment, nth))
    process.start()
    process.join()
    return process.exitcode


def _run(path: Path, moment: str, nth: int) -> None:
    from sweep.training.process import attempt_trial

    trial, steps = TrialFolder(path), 0

    def should_stop() -> None:  # polled after every step, before its checkpoint
        nonlocal steps
        steps += 1
        if (moment, nth) == ("after a step", steps):
            _die()

    if moment in MOMENTS:
        owner, name, is_moment, act = MOMENTS[moment]
        _die_at(nth, owner, name, is_moment, act)
    trial.write_status(begin_attempt(trial.read_status()))
    attempt_trial(path, None, should_stop)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(
    nth: int, owner: Any, name: str, is_moment: Callable[..., bool], act: Callable[..., object]
) -> None:
    """Replace a function so that the process acts and dies at its nth call of a kind."""
    real, calls = getattr(owner, name), 0

    def replacement(*arguments: Any) -> Any:
        nonlocal calls
        calls += is_moment(*arguments)
        if calls == nth:
            act(real, *arguments)
            _die()
        return real(*arguments)

    setattr(owner, name, replacement)


def _is_checkpoint(path: Path, target: Path) -> bool:
    return target.name.startswith("checkpoint")


def _is_result(path: Path, target: Path) -> bool:
    return target.name == "result.json"


def _is_log_line(descriptor: int, data: bytes) -> bool:
    return b'"tokens"' in data and b'"time"' in data


def _call(real: Callable[..., object], *arguments: object) -> None:
    real(*arguments)


def _skip(*_: object) -> None:
    return None


def _truncate(real: Callable[..., object], path: Path, target: Path) -> None:
    for file in path.iterdir():
        os.truncate(file, file.stat().st_size // 2)


def _write_half(real: Callable[..., object], descriptor: int, data: bytes) -> None:
    real(descriptor, data[: len(data) // 2])


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool], Callable[..., object]]] = {
    "in a checkpoint": (Path, "replace", _is_checkpoint, _truncate),
    "before a checkpoint's rename": (Path, "replace", _is_checkpoint, _skip),
    "after a checkpoint's rename": (Path, "replace", _is_checkpoint, _call),
    "in a log line": (os, "write", _is_log_line, _write_half),
    "before the result": (Path, "replace", _is_result, _skip),
    "after the result": (Path, "replace", _is_result, _call),
}
