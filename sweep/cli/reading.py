"""The commands that read a sweep, a table or this machine."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sweep.cli.options import (
    folder_argument,
    json_option,
    out_folder,
    print_document,
    sweep_folder,
)
from sweep.config.numbers import format_bytes
from sweep.errors import SweepError

if TYPE_CHECKING:
    from sweep.trial.folder import SweepFolder


@click.command()
@folder_argument
@json_option
def status(folder: "SweepFolder", json: bool) -> None:
    """Print every trial's state and the time left."""
    from sweep.cli.show import print_status
    from sweep.orchestration.status import sweep_status

    print_status(sweep_status(folder), json)


@click.command()
@folder_argument
def stop(folder: "SweepFolder") -> None:
    """Stop a running sweep after a checkpoint; the same `sweep run` resumes it."""
    from sweep.trial.lease import LeaseWatch, is_locked, read_owner, refuse_live_owner_elsewhere

    owner = read_owner(folder.lock_path)
    if is_locked(folder.lock_path):
        if owner.get("host") != socket.gethostname():  # a network file system shows its lock here
            raise SweepError(f"stop must be called on {owner.get('host')}, which runs the sweep.")
        os.kill(owner["pid"], signal.SIGTERM)
        while is_locked(folder.lock_path):
            time.sleep(0.1)
        click.echo("Stopped. The same `sweep run` resumes it.")
        return
    refuse_live_owner_elsewhere(folder.lock_path)
    count = 0
    for trial in folder.trials():  # attempts that run without a command, such as SLURM jobs
        fencing = read_owner(trial.lease_path).get("fencing")
        is_alive = not trial.result_path.exists() and LeaseWatch(trial.lease_path).is_alive()
        if fencing and is_alive:
            trial.ask_to_stop(int(fencing))
            count += 1
    click.echo(f"Asked {count} attempts to checkpoint and end.")


@click.command()
@folder_argument
@click.argument("trial", metavar="ID")
def log(folder: "SweepFolder", trial: str) -> None:
    """Print a trial's log. The start of its id is enough."""
    trials = [planned for planned in folder.trials() if planned.id.startswith(trial)]
    if len(trials) != 1:
        raise SweepError(
            f"a trial id must match one trial of {folder.path}, got {trial!r}, which matches "
            f"{len(trials)}. `sweep status {folder.path}` lists the ids."
        )
    path = trials[0].log_path
    if not path.exists():
        raise SweepError(f"trial {path.parent.name} must have started to have a log. Run it first.")
    click.echo(path.read_text(errors="replace"), nl=False)


@click.command()
@folder_argument
@click.option("--weights", is_flag=True, help="Also the weights of finished trials.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clean(folder: "SweepFolder", weights: bool, yes: bool) -> int:
    """List what a sweep no longer needs, then remove it."""
    from sweep.trial.files import remove
    from sweep.trial.folder import State
    from sweep.trial.lease import Lease

    unneeded = dict.fromkeys(folder.path.glob(".*.part"), "half-written")
    for trial in folder.trials():
        if trial.read_status().state in (State.COMPLETE, State.PRUNED):
            for checkpoint in trial.checkpoints():
                unneeded[checkpoint.path] = "checkpoint of a finished trial"
            if weights and trial.weights_path.exists():
                unneeded[trial.weights_path] = "weights"
        unneeded |= dict.fromkeys(trial.path.glob(".*.part"), "half-written")
    total = 0
    for path, reason in unneeded.items():
        size = sum(part.stat().st_size for part in (path, *path.rglob("*")) if part.is_file())
        click.echo(f"{format_bytes(size):>10}  {reason}: {path}")
        total += size
    subject = f"{len(unneeded)} files, {format_bytes(total)}"
    if unneeded and not yes:
        if not os.isatty(0):
            raise SweepError(f"removing {subject}, needs confirmation. Add --yes.")
        click.confirm(f"Remove {subject}?", abort=True)
    with Lease(folder.lock_path):
        for path in unneeded:
            remove(path)
    click.echo(f"Removed {subject}.")
    return 0


@click.command()
@click.argument("folder", type=sweep_folder, metavar="[DIR]", required=False)
@click.option("--from-mlflow", metavar="URI", help="Read an MLflow store instead of a folder.")
@click.option("--experiment", metavar="NAME", help="The experiment in that store.")
@click.option("--run", metavar="ID", help="The parent run; by default the newest.")
@click.option("--out", type=out_folder, metavar="DIR", help="Folder to write to.")
@click.option("--tracking-uri", metavar="URI", help="Also mirror DIR to this MLflow store.")
def report(
    folder: "SweepFolder | None",
    from_mlflow: str | None,
    experiment: str | None,
    run: str | None,
    out: Path | None,
    tracking_uri: str | None,
) -> None:
    """Write report.md, report.html, trials.csv and figures, from DIR or from MLflow alone."""
    from sweep.analysis.frames import load_stored_sweep, load_sweep
    from sweep.report.report import write_report_of
    from sweep.tracking.mirror import Mirror
    from sweep.tracking.store import check_tracking_uri
    from sweep.trial.lease import Lease, is_locked

    if folder is None and from_mlflow and experiment:
        stored = load_stored_sweep(from_mlflow, experiment, run)
        click.echo(write_report_of(stored, out or Path(experiment)))
        return
    if folder is None or from_mlflow or experiment or run:
        raise SweepError("report needs a folder, or --from-mlflow URI with --experiment NAME.")
    if tracking_uri is not None:
        check_tracking_uri(tracking_uri)
    sweep = load_sweep(folder.path)
    click.echo(write_report_of(sweep, out or folder.path))
    if is_locked(folder.lock_path):
        click.echo("A running command mirrors this sweep.", err=True)
        return
    with Lease(folder.lock_path):  # bare workers and outages leave gaps in the store
        undelivered = Mirror(folder, sweep.plan, tracking_uri).deliver()
    if undelivered:
        click.echo(undelivered, err=True)


@click.command()
@click.argument("table", type=Path, metavar="FILE.csv|.md|DIR")
@json_option
def audit(table: Path, json: bool) -> None:
    """Check a published table of batch-size results for impossible or confounded entries.

    docs/audit.md lists the columns and the checks.
    """
    from sweep.analysis.audit import audit as audit_tables

    print_document(audit_tables(table), json)


@click.command()
@folder_argument
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
def ui(folder: "SweepFolder", port: int) -> int:
    """Open MLflow's UI on this sweep's store, on this machine only."""
    from sweep.tracking.store import ui_command

    folder.require_plan()
    click.echo(f"http://127.0.0.1:{port}  (Ctrl-C ends it)", err=True)
    return subprocess.run(ui_command(folder, port), check=False).returncode


@click.command()
@click.argument("action", type=click.Choice(["prepare", "info"]))
@click.argument("source", default="tinystories")
@click.option("--tokenizer", type=click.Choice(["bpe", "bytes"]), default="bpe", show_default=True)
@click.option("--vocabulary", default="10000", show_default=True)
@json_option
def data(action: str, source: str, tokenizer: str, vocabulary: str, json: bool) -> None:
    """Describe SOURCE (tinystories, synthetic, hf:OWNER/NAME, or a path).

    prepare: download and tokenize it into the cache first. info: tokens only if it is prepared.
    """
    from sweep.config.trial import TokenizerSettings
    from sweep.data.sources import identify_data
    from sweep.data.tokens import describe_data, prepare_data

    settings = TokenizerSettings.model_validate({"kind": tokenizer, "vocabulary": vocabulary})
    if action == "prepare":
        prepare_data(identify_data(source), source, settings, partial(click.echo, err=True))
    print_document(describe_data(source, settings), json)


@click.command()
@json_option
def doctor(json: bool) -> None:
    """Check this machine: what is installed, which devices exist, what is missing."""
    import importlib.metadata  # slow
    import platform

    from sweep.trial.files import cache_dir

    lines = ["batch-size-sweep", "torch"]
    required: dict[str, dict[str, str | None]] = {"": {}}  # versions by extra and package
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines += importlib.metadata.requires("batch-size-sweep") or ()
    for line in lines:
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"](\w+)", line)
        versions = required.setdefault(extra[1] if extra else "", {})
        versions[name] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    packages = required.pop("")
    problems = [
        f"{name} is not installed: run `make install` in the project's folder"
        for name, version in packages.items()
        if version is None
    ]
    devices = _devices(problems) if packages["torch"] else []
    cache = cache_dir()
    parent = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        problems.append(f"the cache {cache} is not writable: set SWEEP_CACHE to another folder")
    document = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "extras": {extra: all(versions.values()) for extra, versions in required.items()},
        "devices": devices,
        "cache": {"path": str(cache), "free_bytes": shutil.disk_usage(parent).free},
        "problems": problems,
    }
    print_document(document, json)


def _devices(problems: list[str]) -> list[dict[str, Any]]:
    """List the devices of this machine; add to its problems."""
    import torch

    from sweep.training.device import available_cores, device_name, has_compiler

    name, load = device_name(torch.device("cpu")), os.getloadavg()[0]
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": name, "cores": available_cores()}]
    if load >= 1:
        problems.append(f"other processes used {load:.1f} cores in the last minute and slow trials")
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpu = {"device": f"cuda:{index}", "name": torch.cuda.get_device_name(index)}
        devices.append({**gpu, "memory_bytes": total, "free_bytes": free})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU"})
    elif len(devices) == 1:
        problems.append("no CUDA device is visible: trials run on the CPU")
    for kind in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        if not has_compiler(kind):
            problems.append(f"no compiler for {kind}: steps run eagerly; install a C++ compiler")
    return devices
