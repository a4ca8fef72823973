"""Run one trial without an orchestrator: `python -m sweep.training TRIAL_FOLDER`.

The bare worker is its own runner: it writes state.json, numbers its attempts and retries by the
same table, each attempt in a fresh process. `sweep report` mirrors the trial afterwards.
"""

import argparse
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from sweep.errors import FolderInUse, SweepError
from sweep.plan.retry import Outcome, status_after
from sweep.trial.folder import Cause, State, TrialFolder
from sweep.trial.lease import is_locked

EXIT_CODES = {
    "complete": 0,
    "diverged": 10,
    "stopped": 11,
    "preempted": 12,
    "out_of_memory": 13,
    "superseded": 14,
    "error": 15,
}


def main() -> int:
    """Run the trial to its end; 0 COMPLETE or diverged, 1 FAILED, 2 bad input, 130 stopped."""
    parser = argparse.ArgumentParser(prog="python -m sweep.training", description=__doc__)
    parser.add_argument("folder", type=Path, help="the trial's folder: results/SWEEP/trials/ID")
    parser.add_argument("--attempt", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attempt:
        return _attempt(arguments.folder)
    try:
        return _run(TrialFolder(arguments.folder))
    except SweepError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


def _attempt(path: Path) -> int:
    """Run one attempt in this process; the exit code tells the outcome."""
    asked: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("preempted"))
    signal.signal(signal.SIGINT, lambda *_: asked.append("stopped"))
    from sweep.training.worker import redirect_output, run_attempt  # takes a second

    redirect_output(TrialFolder(path))
    outcome = run_attempt(path, lambda: asked[0] if asked else None)
    if outcome.message:
        print(outcome.message, file=sys.stderr)
    return EXIT_CODES[outcome.kind]


def _run(folder: TrialFolder) -> int:
    config = folder.read_config()
    retries: Counter[Cause] = Counter()
    stopping: list[int] = []
    if is_locked(folder.lease_path):
        raise FolderInUse(f"{folder.path} is run by another worker. Wait for it.")
    if folder.read_status().state.is_finished and folder.read_result():
        print(f"trial {folder.id} is finished")
        return 0
    while True:
        status = folder.read_status()
        status = status.changed(
            state=State.RUNNING,
            cause=None,
            message="",
            attempts=status.attempts + 1,
            fencing=status.fencing + 1,
        )
        folder.write_status(status)
        command = [sys.executable, "-m", "sweep.training", str(folder.path), "--attempt"]
        child = subprocess.Popen(command)

        def stop(number: int, _: object, child: subprocess.Popen[bytes] = child) -> None:
            stopping.append(number)
            if number == signal.SIGTERM:  # Ctrl-C reaches the child by itself
                child.terminate()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        code = child.wait()
        kind = next((k for k, value in EXIT_CODES.items() if value == code), "lost")
        if kind == "superseded":
            raise FolderInUse(f"{folder.path} was taken over by a newer attempt.")
        microbatch = status.microbatch_size or config.microbatch_size
        per_device = config.science.batch_size // config.execution.devices
        if kind == "preempted" or (stopping and kind == "lost"):
            kind = "stopped"
        outcome = Outcome(kind, f"exit code {code}")
        status, again = status_after(status, outcome, microbatch, per_device, retries)
        folder.write_status(status)
        if not again:
            break
    print(f"trial {folder.id}: {status.state} {status.cause or ''} {status.message}".rstrip())
    print(f"log: {folder.log_path}")
    if status.state is State.WAITING:
        return 130
    return 0 if status.state is State.COMPLETE or status.cause is Cause.DIVERGED else 1


if __name__ == "__main__":
    sys.exit(main())
