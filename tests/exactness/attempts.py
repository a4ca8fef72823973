"""Plan a trial, and run an attempt that kills its own process, with SIGKILL, at some moment."""

import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.errors import WorkerDied
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import Request
from sweep.plan.retry import begin_attempt
from sweep.training import attempt_trial
from sweep.training.process import FreshProcess, ShouldStop
from sweep.trial.folder import SweepFolder, TrialFolder

ON_CPU = Execution(device="cpu")


def plan_trial(
    path: Path,
    experiment: str,
    settings: Mapping[str, object],
    asked: Execution = ON_CPU,
    **execution: object,
) -> TrialFolder:
    folder = SweepFolder(path)
    plan = make_plan(Request(load_experiment(experiment, dict(settings)), asked, folder)).plan
    chosen = plan.execution.model_copy(update=execution)
    save_plan(plan.model_copy(update={"execution": chosen}), folder)
    return folder.trials()[0]


def continued_from(trial: TrialFolder) -> list[int]:
    steps = re.findall(r"continues from step (\d+) of", trial.log_path.read_text())
    return [int(step) for step in steps]


def attempt(trial: TrialFolder, moment: str = "", nth: int = 1) -> int:
    """Run an attempt that dies at the nth `after a step` or of `MOMENTS`; return its exit code."""
    trial.write_status(begin_attempt(trial.read_status()))
    try:
        FreshProcess(_run, trial.path, moment, nth).result()
    except WorkerDied as error:
        return error.exit_code
    return 0


def _run(path: Path, moment: str, nth: int, _: ShouldStop) -> None:
    steps = 0

    def should_stop() -> None:  # polled after every step, before its checkpoint
        nonlocal steps
        steps += 1
        if (moment, nth) == ("after a step", steps):
            os.kill(os.getpid(), signal.SIGKILL)

    if moment in MOMENTS:
        _die_at(nth, *MOMENTS[moment])
    attempt_trial(path, None, should_stop)


def _die_at(nth: int, owner: Any, name: str, text: str, act: Callable[..., object]) -> None:
    """Replace a function so that the process acts and dies at its nth call with such a text."""
    real, calls = getattr(owner, name), 0

    def replacement(*arguments: Any) -> Any:
        nonlocal calls
        calls += text in str(arguments[1])
        if calls == nth:
            act(real, *arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(owner, name, replacement)


def _call(real: Callable[..., object], *arguments: object) -> None:
    real(*arguments)


def _skip(*_: object) -> None: ...


def _truncate(real: Callable[..., object], path: Path, target: Path) -> None:
    for file in path.iterdir():
        os.truncate(file, file.stat().st_size // 2)


def _damage(real: Callable[..., object], path: Path, target: Path) -> None:
    _truncate(real, path, target)
    real(path, target)


def _write_half(real: Callable[..., object], descriptor: int, data: bytes) -> None:
    real(descriptor, data[: len(data) // 2])


# The function that is called at a moment, a part of its second argument, and the last act.
MOMENTS: dict[str, tuple[Any, str, str, Callable[..., object]]] = {
    "in a checkpoint": (Path, "replace", "/checkpoint-", _truncate),
    "before a checkpoint's rename": (Path, "replace", "/checkpoint-", _skip),
    "after a checkpoint's rename": (Path, "replace", "/checkpoint-", _call),
    "damaging a checkpoint": (Path, "replace", "/checkpoint-", _damage),
    "in a log line": (os, "write", '"tokens": ', _write_half),
    "before the result": (Path, "replace", "/result.json", _skip),
    "after the result": (Path, "replace", "/result.json", _call),
}
