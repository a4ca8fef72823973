"""Watch, stop, open and clean the folder of a sweep."""

import contextlib
import os
import shlex
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sweep.cli.commands.arguments import (
    folder_argument,
    json_option,
    match_trial,
    open_page,
    out_folder,
    sweep_folder,
)
from sweep.cli.options import echo, print_document
from sweep.config.numbers import format_bytes
from sweep.errors import SweepError
from sweep.trial.files import remove
from sweep.trial.lease import Lease, LeaseWatch, is_locked, read_owner

if TYPE_CHECKING:
    from sweep.trial.folder import SweepFolder


@click.command()
@folder_argument
@json_option
@click.option("--verify", is_flag=True, help="Also check every hash in the folder.")
@click.option("--watch", is_flag=True, help="Show the progress until the sweep ends.")
def status(folder: "SweepFolder", json: bool, verify: bool, watch: bool) -> None:
    """Print every trial's state and the time left."""
    from sweep.cli.show import print_status
    from sweep.orchestration.progress import Progress
    from sweep.orchestration.status import sweep_status
    from sweep.trial.damage import find_damage
    from sweep.trial.status import State

    if watch:
        with Progress(folder, None, is_quiet=False) as progress:
            while sweep_status(folder)["state"] == State.RUNNING:
                progress.update()
                time.sleep(1.0)
    document = sweep_status(folder)
    if verify:
        document["damage"] = find_damage(folder)
    if json:
        print_document(document)
    else:
        print_status(document)


@click.command()
@click.argument("parts", type=Path, metavar="DIR…", nargs=-1, required=True)
@click.option("--out", type=out_folder, metavar="DIR", required=True, help="The whole sweep.")
def merge(parts: tuple[Path, ...], out: Path) -> None:
    """Join the folders of parts that ran apart (`sweep run --shard I/N`) into one sweep.

    Also folders of one sweep with different batch sizes, seeds or rates. Nothing is trained again;
    a merge that was interrupted is repeated.
    """
    from sweep.orchestration.merging import merge_paths
    from sweep.plan.shard import remaining_command

    merged = merge_paths(parts, out)
    echo(f"{merged.copied} trials copied to {out}, {merged.present} were there.")
    command = remaining_command(merged.plan, str(out))
    if merged.plan.is_part:
        echo("Batch sizes of other parts are missing. Merge these parts too.")
        echo(f"Or train them here: {command}")
    elif merged.unfinished:
        echo(f"{merged.unfinished} trials have no result. To train these: {command}")
    else:
        echo(f"Report and answer: {command}")


@click.command()
@folder_argument
def stop(folder: "SweepFolder") -> None:
    """Stop a running sweep after a checkpoint; the same `sweep run` resumes it."""
    command = LeaseWatch(folder.lock_path)
    if command.is_alive():
        echo("Waiting until the command has its data or a checkpoint.", err=True)
        while command.is_alive():
            with contextlib.suppress(FileNotFoundError):  # it has removed its new folder
                folder.stop_path.touch()
            time.sleep(0.1)
        folder.stop_path.unlink(missing_ok=True)
        if not folder.plan_path.exists():
            return  # it was still preparing
    open_trials = (trial for trial in folder.trials() if not trial.find_result())
    alive = [trial for trial in open_trials if LeaseWatch(trial.lease_path).is_alive()]
    for trial in alive:  # attempts that run without a command, such as SLURM jobs
        trial.ask_to_stop(int(read_owner(trial.lease_path).get("fencing", 0)))
    asked = f" {len(alive)} attempts without a command were asked to stop." if alive else ""
    echo(f"No command runs this sweep.{asked} The same `sweep run` resumes it.")


@click.command("open")
@folder_argument
def open_report(folder: "SweepFolder") -> None:
    """Show the report of a sweep in the browser."""
    page = folder.path.absolute() / "report.html"
    if not page.exists():
        raise SweepError(f"{page} must exist. Write it with `sweep report {folder.path}`.")
    open_page(page.as_uri())


@click.command()
@click.argument("words", metavar="[DIR] ID", nargs=-1, required=True)
def log(words: tuple[str, ...]) -> None:
    """Print a trial's losses and times, then its log. The start of its id is enough."""
    from sweep.cli.show import print_metrics
    from sweep.plan.plan import parse_plan

    *folders, trial = words
    if len(folders) > 1 or Path(trial, "plan.json").exists():
        raise SweepError(f"log needs an ID, got {shlex.join(words)!r}. `sweep status` lists them.")
    folder = sweep_folder(*folders)
    plan = parse_plan(folder.require_plan(), str(folder.plan_path))
    ids = [str(row.id) for row in plan.known_trials]
    trial_id = match_trial(trial, ids, "ID", f"status {shlex.quote(str(folder.path))}")
    path = folder.trial(trial_id).log_path
    if not path.exists():
        raise SweepError(f"trial {trial_id} has no log, because it has not started.")
    print_metrics(folder.trial(trial_id).find_metrics(), plan.settings.token_unit)
    with path.open(errors="replace") as file:
        for line in iter(partial(file.readline, 1 << 20), ""):
            echo(line, nl=False)


@click.command()
@folder_argument
@click.option("--weights", is_flag=True, help="Also remove the weights of finished trials.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clean(folder: "SweepFolder", weights: bool, yes: bool) -> None:
    """Remove half-written files and the checkpoints of complete trials, after listing them."""
    from sweep.trial.status import State

    unneeded = dict.fromkeys(folder.half_written(), "half-written")
    for trial in folder.trials():
        state = trial.read_status().state
        if state is State.COMPLETE:  # tuning may still continue a pruned one
            for checkpoint in trial.checkpoints():
                unneeded[checkpoint.path] = "checkpoint of a finished trial"
            if weights and trial.weights_path.exists():
                unneeded[trial.weights_path] = "weights"
        if state is not State.RUNNING and not is_locked(trial.lease_path):
            unneeded |= dict.fromkeys(trial.path.glob(".*.part"), "half-written")
    total = 0
    for path, reason in unneeded.items():
        size = sum(part.stat().st_size for part in (path, *path.rglob("*")) if part.is_file())
        echo(f"{format_bytes(size):>10}  {reason}: {path}")
        total += size
    subject = f"{len(unneeded)} files, {format_bytes(total)}"
    if unneeded and not yes:
        if not os.isatty(0):
            raise SweepError(f"removing {subject}, needs confirmation. Add --yes.")
        click.confirm(f"Remove {subject}?", abort=True)
    with Lease(folder.lock_path):
        for path in unneeded:
            remove(path)
            if path.exists():
                raise SweepError(f"{path} cannot be removed. Check its permissions.")
    echo(f"Removed {subject}.")
