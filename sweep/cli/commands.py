"""The commands of `sweep`. Each imports what it needs when it is called, so that help is fast."""

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sweep.cli.options import SettingsCommand, echo, print_document, say
from sweep.config.numbers import format_bytes, format_seconds
from sweep.errors import SweepError
from sweep.signals import handle_unless_ignored
from sweep.trial.files import refuse_links, remove
from sweep.trial.lease import Lease, LeaseWatch, is_locked, read_owner

if TYPE_CHECKING:
    from sweep.memory.search import Measurement
    from sweep.plan.plan import PlannedTrial
    from sweep.trial.folder import SweepFolder

LOG = logging.getLogger(__name__)
CONFIRM_SECONDS = 3600  # longest estimate that runs without a confirmation
DESKTOP = {"DISPLAY", "WAYLAND_DISPLAY"}  # without one, a browser could take over the terminal


def sweep_folder(text: str | None = None) -> "SweepFolder":
    """Return a sweep's folder, by default that of results/ whose last trial was planned last."""
    from sweep.trial.folder import SweepFolder

    if text is None:
        plans = sorted(Path("results").glob("*/plan.json"), key=lambda path: path.stat().st_mtime)
        if not plans:
            raise SweepError("DIR must be given: results/ has no sweep. Or call `sweep run quick`.")
        text = str(plans[-1].parent)
        echo(f"Sweep folder: {text}", err=True)
    refuse_links(Path(text))
    return SweepFolder(Path(text))


def read_folder(context: click.Context, _: click.Parameter, text: str | None) -> Any:
    return None if context.resilient_parsing else sweep_folder(text)  # a shell completes the word


def out_folder(text: str) -> Path:
    from sweep.orchestration.planning import check_writable

    if not text:
        raise click.BadParameter(f"must be the path of a folder, got {text!r}")
    refuse_links(Path(text))
    check_writable(Path(text))
    return Path(text)


RATE = click.FloatRange(0, 1000, min_open=True)
number_option = partial(click.option, type=click.IntRange(1), metavar="N")
json_option = click.option("--json", is_flag=True, help="Print one JSON document.")
folder_argument = click.argument("folder", metavar="[DIR]", required=False, callback=read_folder)
verbose_option = click.option("--verbose", is_flag=True, help="Also print notes about internals.")


def common_options(out_help: str) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--out", type=out_folder, metavar="DIR", help=out_help)(command)
        return click.argument("experiment", required=False)(json_option(command))

    return decorate


@click.command(cls=SettingsCommand)
@common_options("Folder of the sweep; by default results/EXPERIMENT.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--quiet", is_flag=True, help="No plan, no progress.")
@verbose_option
@click.option("--only", multiple=True, metavar="ID", help="Run this trial.")
@click.option("--retry", type=click.Choice(["diverged"]), help="Also run diverged trials again.")
def run(
    experiment: str | None,
    out: Path | None,
    json: bool,
    yes: bool,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
    only: tuple[str, ...],
    retry: str | None,
    **settings: Any,
) -> int:
    """Plan, run every trial, write the report. Run the same command again to resume.

    EXPERIMENT is a shipped name (tinystories, tinystories-8m, quick, quadratic, gpt2, elman,
    grpo-words, grpo-chess) or a TOML file.
    """
    if quiet:
        logging.getLogger("sweep").setLevel("WARNING")
    LOG.info(f"Planning {experiment or 'the sweep'}")
    from sweep.cli.show import print_plan, print_results
    from sweep.orchestration.costs import estimate
    from sweep.orchestration.planning import make_plan, read_request
    from sweep.orchestration.runner import check_request, finished_summary, prepare, rows_to_run
    from sweep.orchestration.status import sweep_status
    from sweep.trial.status import Cause

    request = read_request(experiment, settings, out)
    folder, planned = request.folder, make_plan(request)
    if only:
        chosen = {_match(prefix, planned.requested, "only", "plan --json"): None for prefix in only}
        plan = planned.plan.model_copy(update={"trials": planned.plan.known_trials})
        planned = replace(planned, plan=plan, requested=tuple(chosen))
    check_request(planned)
    retried_causes = frozenset({Cause.DIVERGED} if retry else ())
    if dry_run:
        print_plan(estimate(planned), retried_causes, json, is_verbose=verbose)
        return 0
    summary = finished_summary(planned, retried_causes)
    if summary is None:
        if not quiet:  # preparing the data may take long
            logging.getLogger("sweep").setLevel("INFO")
        prepare(planned)
        planned = estimate(planned)
        if not quiet:
            print_plan(planned, retried_causes, to_stderr=True, is_verbose=verbose)
        if not yes:
            _confirm(rows_to_run(planned, retried_causes), "at least " * planned.adds_seeds)
        from sweep.api import run_planned  # slow

        summary = run_planned(planned, quiet, retried_causes)
    document = sweep_status(folder) | {"report": str(folder.path / "report.md")}
    with contextlib.suppress(BrokenPipeError, SystemExit):  # Ctrl-C of `… | tee log`
        print_results(document, folder, json)
        if summary.untracked:
            echo(summary.untracked, err=True)
        if summary.problem or summary.is_interrupted:
            end = f"Error: {summary.problem}" if summary.problem else "Interrupted."
            echo(f"{end} The same command resumes.", err=True)
    return summary.exit_code


def _match(prefix: str, ids: Iterable[str], name: str, list_command: str) -> str:
    matches = [trial_id for trial_id in ids if trial_id.startswith(prefix)]
    if len(matches) != 1:
        problem = f"must match exactly one trial, got {prefix!r}, which matches {len(matches)}"
        raise SweepError(f"{name} {problem}. `sweep {list_command}` lists the ids.")
    return matches[0]


def _confirm(to_run: "Sequence[PlannedTrial]", least: str) -> None:
    times = [row.forecast_seconds for row in to_run]
    seconds, question = sum(time or 0.0 for time in times), "The time that this takes is not known."
    if None not in times:
        if seconds <= CONFIRM_SECONDS:
            return
        question = f"This takes an estimated {least}{format_seconds(seconds)}."
    if not sys.stdin.isatty():
        raise SweepError(f"{question} Confirm with --yes.")
    click.confirm(f"{question} Run it?", abort=True, err=True)


@click.command(cls=SettingsCommand)
@common_options("Also write the plan to this folder; by default results/EXPERIMENT is only read.")
@click.option("--cluster", metavar="nodes=N,gpus=G", help="Also print the cost on this cluster.")
@click.option("--price", type=float, metavar="PRICE", help="Per device-hour; needs --cluster.")
@verbose_option
def plan(
    experiment: str | None,
    out: Path | None,
    json: bool,
    cluster: str | None,
    price: float | None,
    verbose: bool,
    **settings: Any,
) -> None:
    """Print the plan with memory, time, disk and cost, without training."""
    LOG.info(f"Planning {experiment or 'the sweep'}")
    from sweep.cli.show import print_plan
    from sweep.orchestration.costs import cost_on_cluster, estimate, parse_cluster
    from sweep.orchestration.planning import make_plan, read_request, save_plan
    from sweep.orchestration.runner import holding, rows_to_run

    request = read_request(experiment, settings, out)
    folder, cost = request.folder, None
    size = None if cluster is None else parse_cluster(cluster)
    if price is not None and not size:
        raise SweepError("--price needs --cluster. Add it, or leave --price out.")
    planned = estimate(make_plan(request, is_elsewhere=bool(size)))
    if size:
        to_run = planned.plan.model_copy(update={"trials": rows_to_run(planned)})
        cost = cost_on_cluster(to_run, *size, price)
    print_plan(planned, as_json=json, cost=cost, is_verbose=verbose)
    if out:
        with holding(folder):
            save_plan(planned.plan, folder)
        say(f"Written to {folder.plan_path}.", json)


@click.command(cls=SettingsCommand)
@common_options("Folder of the sweep; by default results/EXPERIMENT.")
@number_option("--steps", default=24, help="Train for N steps, or the budget if it is less.")
def check(experiment: str | None, out: Path | None, json: bool, **settings: Any) -> None:
    """Check a --command: the same losses again, with half the microbatch, after a kill?

    Takes the options of `sweep run`. The report of a sweep in the same folder shows the results.
    """
    from sweep.analysis.checks import checks_of_command
    from sweep.orchestration.check import check_command
    from sweep.orchestration.planning import read_request

    steps, show = settings.pop("steps"), partial(echo, err=True)
    document = check_command(read_request(experiment, settings, out), show, steps)
    if json:
        print_document(document)
        return
    for row in checks_of_command(document, ""):
        echo(f"{row.status}: {row.code}. {row.evidence} {row.remedy}".rstrip())
    echo("\n".join(f"NOT CHECKED: {sentence}" for sentence in document["not_checked"]))


@click.command(cls=SettingsCommand)
@common_options("Also write the page to this folder.")
def forecast(experiment: str, out: Path | None, json: bool, **settings: Any) -> None:
    """Predict the memory of each batch size, and the largest microbatch that fits a device."""
    LOG.info(f"Forecasting the memory of {experiment or 'tinystories'}")
    from sweep.orchestration.memory import forecast_memory

    _print_memory(forecast_memory(experiment, **settings), out, json)


@click.command(cls=SettingsCommand)
@common_options("Also write the page to this folder.")
@number_option("--largest", help="Do not try sizes above this one.")
@number_option("--multiple", default=1, help="Only try multiples of N.")
@number_option("--soak", type=click.IntRange(0), help="Steps to find leaks: 20 for GRPO, else 0.")
def probe(experiment: str, out: Path | None, json: bool, **settings: Any) -> None:
    """Measure the largest microbatch that fits, and prove it in fresh processes."""
    LOG.info(f"Measuring the memory of {experiment or 'tinystories'}")
    from sweep.orchestration.memory import probe_memory

    _print_memory(probe_memory(experiment, on_point=_show_point, **settings), out, json)


def _show_point(point: "Measurement") -> None:
    peak = "" if point.peak_bytes is None else f", peak {format_bytes(point.peak_bytes)}"
    sizes = f"batch size {point.batch_size} in microbatches of {point.microbatch_size}"
    echo(f"{sizes}: {point.status}{peak} {point.message}".rstrip(), err=True)


def _print_memory(document: dict[str, Any], out: Path | None, json: bool) -> None:
    from sweep.report.report import markdown_of, write_memory

    if json:
        print_document(document)
    else:
        echo(markdown_of(document), nl=False)
    if out is not None:
        echo(f"\nWritten to {write_memory(document, out)}.", err=json)


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
    from sweep.trial.folder import find_damage
    from sweep.trial.status import State

    if watch:
        with Progress(folder, None, is_quiet=False) as progress:
            while sweep_status(folder)["state"] == State.RUNNING:
                progress.update()
                time.sleep(1.0)
    document = sweep_status(folder)
    if verify:
        document["damage"] = find_damage(folder)
    (print_document if json else print_status)(document)


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
    _open_page(page.as_uri())


def _open_page(address: str) -> None:
    """Print the address of a page, and open it on a desktop."""
    echo(address)
    if sys.platform == "darwin" or DESKTOP & os.environ.keys():
        webbrowser.open(address)


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
    trial_id = _match(trial, ids, "ID", f"status {shlex.quote(str(folder.path))}")
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


@click.command(cls=SettingsCommand)
@click.argument("folder", type=sweep_folder, metavar="[DIR]", required=False)
@click.option("--from-mlflow", metavar="URI", help="Read an MLflow store instead of a folder.")
@click.option("--experiment", metavar="NAME", help="The experiment in that store.")
@click.option("--run", metavar="ID", help="The parent run; by default the newest.")
@click.option("--out", type=out_folder, metavar="DIR", help="Write to this folder instead of DIR.")
def report(
    folder: "SweepFolder | None",
    from_mlflow: str | None,
    experiment: str | None,
    run: str | None,
    out: Path | None,
    tracking_uri: str | None,
) -> None:
    """Write report.md, report.html, trials.csv and figures, from DIR or from MLflow alone."""
    LOG.info("Writing the report")
    from sweep.plan.plan import parse_plan
    from sweep.report.report import write_report
    from sweep.tracking.addresses import check_tracking_uri
    from sweep.tracking.mirror import Mirror
    from sweep.tracking.store import read_record, recorded_uri, restore_sweep

    if folder is None and from_mlflow and experiment:
        with tempfile.TemporaryDirectory() as parent:
            restored = restore_sweep(from_mlflow, experiment, run, Path(parent))
            echo(str(write_report(restored.path, out or experiment)))
        return
    if from_mlflow or experiment or run:
        raise SweepError("report needs either DIR or --from-mlflow URI with --experiment NAME.")
    folder = folder or sweep_folder()
    if tracking_uri is not None:
        check_tracking_uri(tracking_uri)
    elif out is None:
        recorded_uri(folder, read_record(folder))
    echo(str(write_report(folder.path, out)))
    if out:
        return
    if not os.access(folder.path, os.W_OK):
        message = "The folder is read-only, so its MLflow store stays as it is."
    elif is_locked(folder.lock_path):
        message = "A running command mirrors this sweep."
    else:
        with Lease(folder.lock_path):  # bare workers and outages leave gaps in the store
            plan = parse_plan(folder.require_plan(), str(folder.plan_path))
            message = Mirror(folder, plan, tracking_uri).deliver()
    if message:
        echo(message, err=True)


@click.command()
@click.argument("table", type=Path, metavar="FILE.csv|.md|DIR")
@click.option("--lr", type=RATE, metavar="RATE", help="The rate, if the table does not give it.")
@json_option
def audit(table: Path, lr: float | None, json: bool) -> None:
    """Check a published table of batch-size results for impossible or confounded entries.

    It needs a column batch_size. Learning rate, steps, tokens, loss, hours and others are checked
    if the headers name them.
    """
    LOG.info("Reading the table")
    from sweep.analysis.audit import audit as audit_tables

    document = audit_tables(table, lr)
    if not json:  # the notes have the first of them
        for part in document["tables"]:
            del part["left_out"]
    print_document(document, json)


@click.command()
@click.argument("table", type=Path, metavar="FILE.csv|DIR")
@click.option("--metric", default="final_valid_loss", show_default=True, metavar="COLUMN")
@click.option("--direction", type=click.Choice(["minimize", "maximize"]), default="minimize")
@click.option("--tolerance", type=float, help="Good enough: so far from the best; see `run`.")
@json_option
def answer(table: Path, metric: str, direction: str, tolerance: float | None, json: bool) -> None:
    """Recommend a batch size from a table of trials or a sweep folder.

    The columns stage, policy, batch_size, seed, learning_rate, state and the metric are needed.
    Headers are read as `sweep audit` reads them.
    """
    LOG.info("Reading the trials")
    from sweep.analysis.results import answer_of
    from sweep.cli.show import print_next

    made = answer_of(table, metric, direction, tolerance)
    for note in made.notes:
        echo(note, err=True)
    if json:
        print_document(made.answer.as_json() if made.answer else None)
    else:
        echo("\n".join(made.sentences))
        print_next(made.answer)


@click.command(cls=SettingsCommand)
@folder_argument
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
@click.option("--no-open", is_flag=True, help="Only print the address; open no browser.")
def ui(folder: "SweepFolder", port: int, no_open: bool, tracking_uri: str | None) -> int:
    """Open MLflow's UI on the comparison of this sweep's batch sizes, on this machine only."""
    LOG.info("Starting MLflow")
    from sweep.plan.plan import parse_plan
    from sweep.tracking import store
    from sweep.tracking.addresses import check_tracking_uri

    plan = parse_plan(folder.require_plan(), str(folder.plan_path))
    if tracking_uri is None:
        uri = store.recorded_uri(folder, store.read_record(folder))
    else:
        uri = check_tracking_uri(tracking_uri)
    address = f"http://127.0.0.1:{port}"
    if uri.startswith("http"):
        echo(store.page_address(uri, uri, plan))
        return 0
    command = store.ui_command(folder, uri, port)
    if store.server_version(address):
        raise SweepError(f"port must be free, {port} is in use. Choose another --port.")
    handle_unless_ignored(signal.SIGHUP, signal.default_int_handler)  # the terminal is closed
    with tempfile.TemporaryDirectory() as empty:  # the server imports from its current folder first
        server = subprocess.Popen(command, cwd=empty, start_new_session=True, stdout=2)
        try:
            while server.poll() is None and not store.server_version(address):
                time.sleep(0.2)
            if server.poll() is None:
                (echo if no_open else _open_page)(store.page_address(address, uri, plan))
                echo("Ctrl-C ends the server.", err=True)
            code = server.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    if code > 0:
        remedy = "Choose another --port, or repair the store with `sweep report`."
        raise SweepError(f"MLflow's server ended with exit code {code}. {remedy}")
    return code


@click.command(cls=SettingsCommand)
@click.argument("action", type=click.Choice(["prepare", "info"]))
@click.argument("source", default="tinystories")
@json_option
def data(action: str, source: str, json: bool, **settings: Any) -> None:
    """Prepare or describe SOURCE (tinystories, synthetic, hf:OWNER/NAME, or a path).

    prepare: download and tokenize it into the cache. info: token counts only if it is prepared.
    """
    from sweep.config.load import load_experiment
    from sweep.config.trial import tokenizer_of
    from sweep.data.describe import data_lines, describe_data, summarize_data
    from sweep.data.sources import identify_data
    from sweep.data.tokens import prepare_data

    experiment = load_experiment(overrides={"data": source, **settings})
    tokenizer, column = tokenizer_of(experiment), experiment.text_column
    assert tokenizer, "the experiment has data"
    if action == "prepare":
        prepare_data(identify_data(source, column), source, tokenizer, partial(echo, err=True))
    document = describe_data(source, tokenizer, column)
    for line in data_lines(summarize_data(document["identity"], source, tokenizer)):
        say(line, to_stderr=True)
    print_document(document, json)


@click.command()
@json_option
def doctor(json: bool) -> None:
    """Check this machine: what is installed, which devices exist, what is missing."""
    LOG.info("Examining this machine")
    from sweep.cli.doctor import examine_machine, print_machine

    (print_document if json else print_machine)(examine_machine())


COMMANDS = (
    *(run, plan, check, forecast, probe, status, stop, log, clean, report, open_report, answer),
    *(audit, ui, data, doctor),
)
