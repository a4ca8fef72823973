"""Run one trial without an orchestrator: `python -m sweep.training TRIAL_FOLDER`.

This worker is its own runner: it writes state.json, numbers its attempts and retries by the same
table, each attempt in a fresh process. `sweep report` mirrors the trial afterwards.
"""

import argparse
import signal
import sys
from collections import Counter
from pathlib import Path

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
        return _run_trial(TrialFolder(options.folder))
    except SweepError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}. Check the path."
    print(f"Error: {message}", file=sys.stderr)
    return 2


def _run_trial(folder: TrialFolder) -> int:
    """Run attempts until none is left. Ctrl-C and SIGTERM make the trial save a checkpoint and end;
    a second one kills it.
    """
    config, sweep = folder.read_config(), SweepFolder(folder.path.absolute().parents[1])
    stops: list[int] = []

    def stop(number: int, _: object) -> None:
        stops.append(number)
        (process.stop if len(stops) == 1 else process.kill)()

    with Lease(folder.runner_lock_path):
        if is_locked(folder.lease_path) or is_locked(sweep.lock_path):
            raise FolderInUse(f"`sweep run` is running {folder.path} or its sweep. Wait for it.")
        status = folder.read_status()
        if status.state is State.PRUNED or (status.state.is_finished and folder.read_result()):
            print(f"trial {folder.id} is finished")
            return 0
        retries, is_to_run = Counter[Cause](), True
        while is_to_run:
            status = begin_attempt(folder.read_status())
            folder.write_status(status)
            killed_before = oom_kills()
            process = FreshProcess(attempt_trial, folder.path, ends_itself=True)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, stop)
            try:
                outcome: Outcome = process.result()
            except WorkerDied as error:
                memory_ran_out = oom_kills() > killed_before
                outcome = judge_death(error.exit_code, memory_ran_out, folder.log_path)
            if outcome.kind == "superseded":
                raise FolderInUse(f"{folder.path} was taken over by a newer attempt.")
            if stops and outcome.kind in ("preempted", "lost"):
                outcome = Outcome("stopped", outcome.message)
            status, is_to_run = status_after(status, outcome, config, retries)
            folder.write_status(status)
    print(f"trial {folder.id}: {status.state} {status.cause or ''} {status.message}".rstrip())
    print(f"log: {folder.log_path}")
    if status.state is State.WAITING:
        return 130
    return 0 if status.state is State.COMPLETE or status.cause is Cause.DIVERGED else 1


if __name__ == "__main__":
    sys.exit(main())
