"""The commands that read a sweep, a table or this machine."""

import os
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sweep.cli.options import (
    FOLDER,
    SWEEP_FOLDER,
    data_options,
    folder_argument,
    json_option,
    print_json,
)
from sweep.errors import SweepError

if TYPE_CHECKING:
    from sweep.config.trial import TokenizerSettings
    from sweep.trial.folder import SweepFolder

STOP_SECONDS = 120.0  # for a step and a checkpoint


@click.command()
@folder_argument
@json_option
def status(folder: "SweepFolder", json: bool) -> int:
    """Print every trial's state and the time left."""
    from sweep.orchestration.status import sweep_status

    document = sweep_status(folder)
    if json:
        print_json(document)
    else:
        from sweep.cli.show import print_status

        print_status(document)
    return 0


@click.command()
@folder_argument
def stop(folder: "SweepFolder") -> int:
    """Let a running sweep checkpoint and end; the same `sweep run` resumes it."""
    from sweep.trial.lease import is_locked, read_owner, refuse_live_owner_elsewhere

    if not is_locked(folder.lock_path):
        refuse_live_owner_elsewhere(folder.lock_path)
        return _stop_attempts(folder)
    owner = read_owner(folder.lock_path)
    if owner.get("host") != socket.gethostname():  # a network file system shows its lock here
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


def _stop_attempts(folder: "SweepFolder") -> int:
    """Stop attempts that run without a command, such as SLURM jobs."""
    from sweep.trial.lease import LeaseWatch, read_owner

    count = 0
    for trial in folder.trials():
        owner = read_owner(trial.lease_path)
        is_alive = not trial.result_path.exists() and LeaseWatch(trial.lease_path).is_alive()
        if is_alive and (fencing := owner.get("fencing")):
            trial.ask_to_stop(fencing)
            count += 1
    message = f"Asked {count} attempts to checkpoint and end."
    click.echo(message if count else f"Nothing runs in {folder.path}.")
    return 0


@click.command()
@folder_argument
@click.argument("trial", metavar="ID")
def log(folder: "SweepFolder", trial: str) -> int:
    """Print a trial's log. The start of its id is enough."""
    from sweep.orchestration.status import find_trial

    found = find_trial(folder, trial)
    if not found.log_path.exists():
        raise SweepError(f"trial {found.id} must have started to have a log. Run it first.")
    click.echo(found.log_path.read_text(errors="replace"), nl=False)
    return 0


@click.command()
@folder_argument
@click.option("--weights", is_flag=True, help="Also the weights of finished trials.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clean(folder: "SweepFolder", weights: bool, yes: bool) -> int:
    """List what a sweep no longer needs, then remove it."""
    from sweep.config.numbers import format_bytes
    from sweep.orchestration.status import list_unneeded, remove

    unneeded = list_unneeded(folder, weights)
    for item in unneeded:
        click.echo(f"{format_bytes(item.size):>10}  {item.reason}: {item.path}")
    if not unneeded:
        click.echo("Nothing to remove.")
        return 0
    total = format_bytes(sum(item.size for item in unneeded))
    if not yes:
        if not os.isatty(0):
            raise SweepError(f"removing {len(unneeded)} files needs confirmation. Add --yes.")
        click.confirm(f"Remove {len(unneeded)} files, {total}?", abort=True)
    remove(folder, unneeded)
    click.echo(f"Removed {len(unneeded)} files, {total}.")
    return 0


@click.command()
@click.argument("folder", type=SWEEP_FOLDER, metavar="[DIR]", required=False)
@click.option("--from-mlflow", metavar="URI", help="Read an MLflow store instead of a folder.")
@click.option("--experiment", metavar="NAME", help="The experiment in that store.")
@click.option("--run", metavar="ID", help="The parent run; by default the newest.")
@click.option("--out", type=FOLDER, help="Folder to write to.")
@click.option("--tracking-uri", help="Also mirror DIR to this MLflow store.")
def report(
    folder: "SweepFolder | None",
    from_mlflow: str | None,
    experiment: str | None,
    run: str | None,
    out: Path | None,
    tracking_uri: str | None,
) -> int:
    """Write report.md, report.html, trials.csv and figures, from DIR or from MLflow alone."""
    from sweep.analysis.frames import load_stored_sweep
    from sweep.report.report import write_report, write_report_of
    from sweep.tracking.store import check_tracking_uri

    if folder is None:
        if from_mlflow is None or experiment is None:
            raise SweepError("report needs a folder, or --from-mlflow URI with --experiment NAME.")
        stored = load_stored_sweep(from_mlflow, experiment, run)
        click.echo(write_report_of(stored, out or Path(experiment)))
        return 0
    if from_mlflow or experiment or run:
        raise SweepError(
            "--experiment and --run need --from-mlflow, which takes the place of a folder. "
            "Leave the folder out."
        )
    if tracking_uri is not None:
        check_tracking_uri(tracking_uri)
    folder.require_plan()
    click.echo(write_report(folder.path, out))
    _mirror(folder, tracking_uri)
    return 0


def _mirror(folder: "SweepFolder", tracking_uri: str | None) -> None:
    """Bring the sweep's tracking store up to date: bare workers and outages leave gaps."""
    from sweep.plan.plan import load_plan
    from sweep.tracking.mirror import Mirror
    from sweep.trial.lease import Lease, is_locked

    if is_locked(folder.lock_path):
        click.echo("A running command mirrors this sweep.", err=True)
        return
    plan = load_plan(folder)
    assert plan is not None
    with Lease(folder.lock_path):
        undelivered = Mirror(folder, plan, tracking_uri).deliver()
    if undelivered:
        click.echo(undelivered, err=True)


@click.command()
@click.argument("table", type=FOLDER, metavar="FILE.csv|.md|DIR")
@json_option
def audit(table: Path, json: bool) -> int:
    """Check a published table of batch-size results for impossible or confounded entries.

    docs/audit.md lists the columns and the checks.
    """
    from sweep.analysis.audit import audit as audit_tables

    document = audit_tables(table)
    if json:
        print_json(document)
        return 0
    count = len(document["findings"])
    click.echo(f"{count or 'No'} finding{'' if count == 1 else 's'}.")
    for finding in document["findings"]:
        batches = ", ".join(str(batch) for batch in finding["rows"])
        click.echo(f"\n{finding['code']}  (batch size {batches})\n  {finding['message']}")
        click.echo(f"  Remedy: {finding['remedy']}")
    if document["not_checked"]:
        click.echo("\nNot checked because a column is missing:")
    for check in document["not_checked"]:
        click.echo(f"  {check['code']}: {', '.join(check['missing_columns'])}")
    if document["notes"]:
        click.echo("\n" + "\n".join(document["notes"]))
    return 0


@click.command()
@folder_argument
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=5000,
    show_default=True,
    help="On the loopback interface.",
)
def ui(folder: "SweepFolder", port: int) -> int:
    """Open MLflow's UI on this sweep's store, on this machine only."""
    from sweep.tracking.store import ui_command

    folder.require_plan()
    command = ui_command(folder, port)
    click.echo(f"http://127.0.0.1:{port}  (Ctrl-C ends it)", err=True)
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 0


@click.group()
def data() -> None:
    """Download, tokenize and describe data sets."""


@data.command()
@data_options
def prepare(source: str, tokenizer: str, vocabulary: str) -> int:
    """Download and tokenize SOURCE (tinystories, synthetic, or a path) into the cache."""
    from sweep.data.sources import identify_data
    from sweep.data.tokens import describe_data, prepare_data

    settings = _tokenizer_settings(tokenizer, vocabulary)
    prepare_data(identify_data(source), source, settings, partial(click.echo, err=True))
    _print_document(describe_data(source, settings))
    return 0


@data.command()
@data_options
@json_option
def info(source: str, tokenizer: str, vocabulary: str, json: bool) -> int:
    """Describe SOURCE: identity, documents, bytes, and tokens once it is prepared."""
    from sweep.data.tokens import describe_data

    description = describe_data(source, _tokenizer_settings(tokenizer, vocabulary))
    (print_json if json else _print_document)(description)
    return 0


def _tokenizer_settings(tokenizer: str, vocabulary: str) -> "TokenizerSettings":
    from sweep.config.numbers import parse_count
    from sweep.config.settings import parse_settings
    from sweep.config.trial import TokenizerSettings

    fields = {"kind": tokenizer, "vocabulary": parse_count(vocabulary, "vocabulary")}
    return parse_settings(TokenizerSettings, fields, "tokenizer")


def _print_document(document: dict[str, Any], indent: str = "") -> None:
    for key, value in document.items():
        if isinstance(value, dict):
            click.echo(f"{indent}{key}:")
            _print_document(value, indent + "  ")
        else:
            click.echo(f"{indent}{key}: {value}")


@click.command()
@json_option
def doctor(json: bool) -> int:
    """Check this machine: what is installed, which devices exist, what is missing."""
    from sweep.orchestration.doctor import examine

    document = examine()
    if json:
        print_json(document)
        return 0
    problems, devices = document.pop("problems"), document.pop("devices")
    _print_document(document)
    for device in devices:
        click.echo("device: " + ", ".join(f"{key} {value}" for key, value in device.items()))
    for problem in problems or ["Nothing is missing."]:
        click.echo(f"note: {problem}")
    return 0
