"""The commands that read a sweep, a table or this machine."""

import json
import os
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from sweep.config.numbers import format_bytes, parse_count
from sweep.errors import FolderInUse, SweepError
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import LeaseWatch, is_locked, read_owner, refuse_live_owner_elsewhere

STOP_SECONDS = 120.0  # for a step and a checkpoint


def status_command(path: Path, as_json: bool) -> int:
    """Print every trial's state."""
    from sweep.orchestration.status import sweep_status

    document = sweep_status(SweepFolder(path))
    if as_json:
        click.echo(json.dumps(document, indent=1))
    else:
        from sweep.cli.show import show_status

        show_status(document)
    return 0


def stop_command(path: Path) -> int:
    """Send SIGTERM to the process that runs the sweep, and wait for its end."""
    folder = SweepFolder(path)
    if not is_locked(folder.lock_path) and not _is_held_elsewhere(folder.lock_path):
        return _stop_attempts(folder)
    owner = read_owner(folder.lock_path)
    if owner.get("host") != socket.gethostname():
        raise SweepError(
            f"stop must be called on the machine that runs the sweep, "
            f"{owner.get('host', 'unknown')}, got {socket.gethostname()}."
        )
    os.kill(owner["pid"], signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while is_locked(folder.lock_path):
        if time.monotonic() > deadline:
            raise SweepError(f"process {owner['pid']} has not ended yet. Read its log.")
        time.sleep(0.1)
    click.echo("Stopped. The same `sweep run` resumes it.")
    return 0


def _is_held_elsewhere(lock: Path) -> bool:
    try:
        refuse_live_owner_elsewhere(lock)
    except FolderInUse:
        return True
    return False


def _stop_attempts(folder: SweepFolder) -> int:
    """Stop attempts that run without a command, such as SLURM jobs."""
    count = 0
    for trial in folder.trials():
        if is_locked(trial.runner_lock_path):
            pid = read_owner(trial.lease_path).get("pid", "?")
            raise SweepError(
                f"{folder.path} is not run by a command, but trial {trial.id} is run by process "
                f"{pid}. End that process."
            )
        if trial.result_path.exists() or not LeaseWatch(trial.lease_path).is_alive():
            continue
        if fencing := read_owner(trial.lease_path).get("fencing"):
            trial.ask_to_stop(fencing)
            count += 1
    message = f"Asked {count} attempts to checkpoint and end."
    click.echo(message if count else f"Nothing runs in {folder.path}.")
    return 0


def log_command(path: Path, trial: str) -> int:
    """Print a trial's log.txt."""
    from sweep.orchestration.status import find_trial

    log = find_trial(SweepFolder(path), trial).log_path
    if not log.exists():
        raise SweepError(f"trial {log.parent.name} must have started to have a log. Run it first.")
    click.echo(log.read_text(errors="replace"), nl=False)
    return 0


def clean_command(path: Path, weights: bool, is_confirmed: bool) -> int:
    """List the files that are not needed, ask, and remove them."""
    from sweep.orchestration.status import list_unneeded, remove

    folder = SweepFolder(path)
    unneeded = list_unneeded(folder, weights)
    for item in unneeded:
        click.echo(f"{format_bytes(item.size):>10}  {item.reason}: {item.path}")
    if not unneeded:
        click.echo("Nothing to remove.")
        return 0
    total = format_bytes(sum(item.size for item in unneeded))
    if not is_confirmed:
        if not os.isatty(0):
            raise SweepError(f"removing {len(unneeded)} files needs confirmation. Add --yes.")
        click.confirm(f"Remove {len(unneeded)} files, {total}?", abort=True)
    remove(folder, unneeded)
    click.echo(f"Removed {len(unneeded)} files, {total}.")
    return 0


def report_command(
    folder: Path | None,
    uri: str | None,
    experiment: str | None,
    run_id: str | None,
    out: Path | None,
    tracking_uri: str | None,
) -> int:
    """Write the report from a folder, which is mirrored too, or from an MLflow store alone."""
    from sweep.report.report import write_report, write_report_from_store
    from sweep.tracking.store import check_tracking_uri

    if (folder is None) == (uri is None):
        raise SweepError("report needs either a folder or --from-mlflow URI.")
    if uri is not None:
        if experiment is None:
            raise SweepError("--from-mlflow needs --experiment NAME.")
        click.echo(write_report_from_store(uri, experiment, run_id, out or Path(experiment)))
        return 0
    assert folder is not None
    if experiment is not None or run_id is not None:
        raise SweepError("--experiment and --run need --from-mlflow.")
    if tracking_uri is not None:
        check_tracking_uri(tracking_uri)
    sweep = SweepFolder(folder)
    sweep.require_plan()
    click.echo(write_report(folder, out))
    _mirror(sweep, tracking_uri)
    return 0


def _mirror(folder: SweepFolder, tracking_uri: str | None) -> None:
    """Bring the tracking store up to date, if the sweep has one or one is named."""
    is_tracked = tracking_uri is not None or folder.tracking_path.exists()
    if not is_tracked and not _has_bare_results(folder):
        return
    from sweep.plan.plan import load_plan
    from sweep.tracking.mirror import Mirror
    from sweep.trial.lease import Lease

    if is_locked(folder.lock_path):
        click.echo("A running command mirrors this sweep.", err=True)
        return
    plan = load_plan(folder)
    assert plan is not None
    with Lease(folder.lock_path):
        undelivered = Mirror(folder, plan, tracking_uri).deliver()
    if undelivered:
        click.echo(undelivered, err=True)


def _has_bare_results(folder: SweepFolder) -> bool:
    """Return True if a bare worker ended a trial that was never mirrored."""
    return any(
        trial.result_path.exists() and trial.read_status().mlflow_run_id is None
        for trial in folder.trials()
    )


def ui_command(path: Path, port: int) -> int:
    """Run MLflow's own server on the sweep's store until it is interrupted."""
    from sweep.tracking.store import ui_command as server_command

    folder = SweepFolder(path)
    folder.require_plan()
    command = server_command(folder, port)
    click.echo(f"http://127.0.0.1:{port}  (Ctrl-C ends it)", err=True)
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 0


def data_command(
    source: str, tokenizer: str, vocabulary: str, *, is_prepared: bool, as_json: bool
) -> int:
    """Prepare a data set, or describe it."""
    from sweep.config.trial import TokenizerSettings
    from sweep.data.sources import identify_data
    from sweep.data.tokens import describe_data, prepare_data

    size = parse_count(vocabulary, "vocabulary")
    settings = TokenizerSettings(kind=tokenizer, vocabulary=size)  # type: ignore[arg-type]
    if is_prepared:
        prepare_data(identify_data(source), source, settings, partial(click.echo, err=True))
    description = describe_data(source, settings)
    click.echo(json.dumps(description, indent=1) if as_json else _as_lines(description))
    return 0


def _as_lines(document: dict[str, object], indent: str = "") -> str:
    lines = []
    for key, value in document.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", _as_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {value}")
    return "\n".join(lines)


def doctor_command(as_json: bool) -> int:
    """Print what is installed and what would not work."""
    from sweep.orchestration.doctor import examine

    document = examine()
    if as_json:
        click.echo(json.dumps(document, indent=1))
        return 0
    problems, devices = document.pop("problems"), document.pop("devices")
    click.echo(_as_lines(document))
    for device in devices:
        click.echo("device: " + ", ".join(f"{key} {value}" for key, value in device.items()))
    for problem in problems:
        click.echo(f"note: {problem}")
    if not problems:
        click.echo("Nothing is missing.")
    return 0


def audit_command(path: Path, as_json: bool) -> int:
    """Print the failed checks of a table."""
    from sweep.analysis.audit import audit

    document = audit(path)
    click.echo(json.dumps(document, indent=1) if as_json else _as_text(document))
    return 0


def _as_text(document: dict[str, Any]) -> str:
    count = len(document["findings"])
    lines = [f"{count or 'No'} finding{'' if count == 1 else 's'}."]
    for finding in document["findings"]:
        batches = ", ".join(str(batch) for batch in finding["rows"])
        lines += ["", f"{finding['code']}  (batch size {batches})"]
        lines += [f"  {finding['message']}", f"  Remedy: {finding['remedy']}"]
    if document["not_checked"]:
        lines += ["", "Not checked because a column is missing:"]
    for check in document["not_checked"]:
        lines.append(f"  {check['code']}: {', '.join(check['missing_columns'])}")
    return "\n".join([*lines, *([""] if document["notes"] else []), *document["notes"]])
