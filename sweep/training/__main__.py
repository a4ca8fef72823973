"""Run one trial without an orchestrator: `python -m sweep.training TRIAL_FOLDER`.

The trial is retried by the same rules, each attempt in a fresh process. Its state.json stays as it
is; the next `sweep` command adopts its result.json.
"""

import argparse
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

from sweep.errors import FolderInUse, SweepError, cut, printable, shorten
from sweep.plan.retry import Outcome, begin_attempt, is_to_run, status_after
from sweep.signals import handle_unless_ignored
from sweep.training import attempt_trial
from sweep.training.function import call_function
from sweep.training.process import FreshProcess, outcome_of, serve
from sweep.trial.files import refuse_links
from sweep.trial.folder import TrialFolder
from sweep.trial.status import Cause, State, has_failed
from sweep.usercode.identity import describe_objects, names_of_user


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(cut(message)))


def main() -> int:
    """Run the trial to its end; 0 COMPLETE or diverged, 1 FAILED, 2 bad input, 130 stopped."""
    parser = Parser(prog="python -m sweep.training", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="the trial: results/SWEEP/trials/ID")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--call", help=argparse.SUPPRESS)  # the user's module:function
    parser.add_argument("--code-folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call is not None:
        call_function(options.call, options.code_folder)
        return 0
    if options.serve is not None:
        import sweep.training.attempt  # noqa: F401  the forked processes need it

        serve(options.serve)
        return 0
    if options.folder is None:
        parser.error("a trial folder is required")
    try:
        return _run_trial(TrialFolder(options.folder))
    except (SweepError, OSError) as error:
        print(printable(f"Error: {shorten(str(error))}"), file=sys.stderr)
        return 2


def _run_trial(folder: TrialFolder) -> int:
    """Run attempts until none is left; a signal makes the trial checkpoint and end, two kill it."""
    refuse_links(folder.path)
    config = folder.read_config()
    objects = names_of_user(config.science.user_code, config.code_path)
    if objects:
        described = describe_objects(objects, config.code_path)
        print(printable(f"This runs code: {described}"), flush=True)

    status = folder.read_status()
    folder.stop_path.unlink(missing_ok=True)  # meant for an earlier attempt
    stops: list[int] = []

    def stop(number: int, _: object) -> None:
        if stops:
            process.kill()
        else:
            process.stop()
        stops.append(number)

    failures = Counter[Cause]()
    outcome = Outcome("complete")
    is_retried = is_to_run(status)
    while is_retried and not stops:
        status = begin_attempt(status).changed(fencing=folder.read_status().fencing)
        process = FreshProcess(attempt_trial, folder.path, status, ends_itself=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            handle_unless_ignored(number, stop)
        outcome = outcome_of(process, folder)
        if outcome.kind == "superseded":
            raise FolderInUse(outcome.message)
        if stops and outcome.kind in ("preempted", "lost"):
            outcome = Outcome("stopped", outcome.message)
        status, is_retried = status_after(status, outcome, config, failures)

    line = f"trial {folder.id}: {status.state} {status.cause or ''} {status.message}"
    print(printable(f"{line.rstrip()}\nlog: {folder.log_path}"))
    if status.state is State.WAITING:
        return 1 if outcome.kind == "storage" else 130
    return int(has_failed(status.state, status.cause))


if __name__ == "__main__":
    sys.exit(main())
