"""Run one trial without an orchestrator: `python -m sweep.training TRIAL_FOLDER`.

This worker is its own runner: it writes state.json, numbers its attempts and retries by the same
table, each attempt in a fresh process. `sweep report` mirrors the trial afterwards.
"""

import argparse
import signal
import sys
from collections import Counter
from pathlib import Path

from sweep.config.trial import TrialConfig
from sweep.errors import FolderInUse, SweepError, WorkerDied
from sweep.plan.retry import Outcome, begin_attempt, judge_death, status_after
from sweep.training.memory_limit import oom_kills
from sweep.training.process import FreshProcess, attempt_trial, serve
from sweep.trial.folder import Cause, State, SweepFolder, TrialFolder
from sweep.trial.lease import Lease, is_locked


def main() -> int:
    """Run the trial to its end; 0 COMPLETE or diverged, 1 FAILED, 2 bad input, 130 stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m sweep.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, help="the trial: results/SWEEP/trials/ID")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    if options.folder is None:
        parser.error("a trial folder is required")
    try:
        folder = TrialFolder(options.folder)
        config = folder.read_config()
        with Lease(folder.runner_lock_path):
            return _run_trial(folder, config)
    except SweepError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"Error: {error.filename}: {error.strerror}. Check the path.", file=sys.stderr)
        return 2


def _run_trial(folder: TrialFolder, config: TrialConfig) -> int:
    sweep = SweepFolder(folder.path.absolute().parents[1])
    if is_locked(folder.lease_path) or is_locked(sweep.lock_path):
        raise FolderInUse(f"{folder.path} is run by `sweep run`, or its sweep is. Wait for it.")
    status = folder.read_status()
    if status.state is State.PRUNED or (status.state.is_finished and folder.read_result()):
        print(f"trial {folder.id} is finished")
        return 0
    retries, stopping, is_to_run = Counter[Cause](), list[int](), True
    while is_to_run:
        status = begin_attempt(folder.read_status())
        folder.write_status(status)
        outcome = _attempt(folder, stopping)
        if outcome.kind == "superseded":
            raise FolderInUse(f"{folder.path} was taken over by a newer attempt.")
        status, is_to_run = status_after(status, outcome, config, retries)
        folder.write_status(status)
    print(f"trial {folder.id}: {status.state} {status.cause or ''} {status.message}".rstrip())
    print(f"log: {folder.log_path}")
    if status.state is State.WAITING:
        return 130
    return 0 if status.state is State.COMPLETE or status.cause is Cause.DIVERGED else 1


def _attempt(folder: TrialFolder, stopping: list[int]) -> Outcome:
    """Run one attempt. Ctrl-C and SIGTERM let it checkpoint; a second one kills it."""
    killed_before = oom_kills()
    process = FreshProcess(attempt_trial, folder.path, ends_itself=True)

    def stop(number: int, _: object) -> None:
        if stopping:
            process.kill()
        stopping.append(number)
        process.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        outcome: Outcome = process.result()
    except WorkerDied as error:
        outcome = judge_death(error.exit_code, oom_kills() > killed_before, folder.log_path)
    if stopping and outcome.kind in ("preempted", "lost"):
        return Outcome("stopped", outcome.message)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
