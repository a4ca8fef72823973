"""The command line. `sweep --help` imports only click and the standard library.

Every command returns its exit code. `main` turns errors into messages and exit codes.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import click

from sweep.cli.options import (
    FOLDER,
    GroupedOption,
    SettingsCommand,
    common_options,
    data_options,
    folder_argument,
    json_option,
)
from sweep.errors import SweepError

DEVICES, OUTPUT = "Devices and machines", "Output and tracking"


@click.group(
    context_settings={
        "auto_envvar_prefix": "SWEEP",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    }
)
@click.version_option(package_name="batch-size-sweep", prog_name="sweep")
def sweep() -> None:
    """Which batch size should I use? Answered by a measurement.

    Trains the same model on the same tokens at each batch size, fairly, and reports quality,
    time and memory. Start with `sweep run quick`, or ask what the reference costs:

        sweep plan --budget 327M --batches 1,8,32,64,128,256
    """


@sweep.command(cls=SettingsCommand)
@common_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option(
    "--quiet", cls=GroupedOption, group=OUTPUT, is_flag=True, help="No plan, no progress."
)
@click.option(
    "--only", cls=GroupedOption, group=OUTPUT, multiple=True, metavar="ID", help="Run this trial."
)
@click.option(
    "--retry",
    cls=GroupedOption,
    group=OUTPUT,
    type=click.Choice(["diverged"]),
    help="Also run diverged trials again.",
)
def run(experiment: str, **flags: Any) -> int:
    """Plan, run every trial, write the report. The same command again resumes.

    EXPERIMENT is a shipped name (tinystories, tinystories-8m, quick, quadratic, gpt2, elman,
    grpo-words, grpo-chess) or a TOML file.
    """
    from sweep.cli.running import run_command

    return run_command(experiment, flags)


@sweep.command(cls=SettingsCommand)
@common_options
@click.option("--yes", is_flag=True, hidden=True)  # so that a `run` can be planned as typed
@click.option("--quiet", is_flag=True, hidden=True)
@click.option(
    "--cluster",
    cls=GroupedOption,
    group=DEVICES,
    metavar="nodes=N,gpus=G",
    help="Also print makespan, device-hours and price on this cluster.",
)
@click.option(
    "--price",
    cls=GroupedOption,
    group=DEVICES,
    type=float,
    metavar="PRICE",
    help="With --cluster: price of one device-hour.",
)
def plan(experiment: str, **flags: Any) -> int:
    """Print the plan with memory, time, disk and cost; trains nothing. --out writes it there."""
    from sweep.cli.running import plan_command

    return plan_command(experiment, flags)


@sweep.command(cls=SettingsCommand, for_memory=True)
@common_options
def forecast(experiment: str, **flags: Any) -> int:
    """Predict memory per batch size without the device, and the largest that fits."""
    from sweep.cli.running import forecast_command

    return forecast_command(experiment, flags)


@sweep.command(cls=SettingsCommand, for_memory=True)
@common_options
@click.option("--largest", metavar="N", help="Do not try sizes above this one.")
@click.option("--multiple", metavar="N", help="Only try multiples of N.")
@click.option("--soak", metavar="STEPS", help="Run each choice for this many steps; 0: none.")
def probe(experiment: str, **flags: Any) -> int:
    """Measure the largest microbatch that fits, and prove it in fresh processes."""
    from sweep.cli.running import probe_command

    return probe_command(experiment, flags)


@sweep.command()
@folder_argument
@json_option
def status(folder: Path, as_json: bool) -> int:
    """Print every trial's state and the time left."""
    from sweep.cli.reading import status_command

    return status_command(folder, as_json)


@sweep.command()
@folder_argument
def stop(folder: Path) -> int:
    """Let a running sweep checkpoint and end; the same `sweep run` resumes it."""
    from sweep.cli.reading import stop_command

    return stop_command(folder)


@sweep.command()
@folder_argument
@click.argument("trial", metavar="ID")
def log(folder: Path, trial: str) -> int:
    """Print a trial's log. The start of its id is enough."""
    from sweep.cli.reading import log_command

    return log_command(folder, trial)


@sweep.command()
@folder_argument
@click.option("--weights", is_flag=True, help="Also the weights of finished trials.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clean(folder: Path, weights: bool, yes: bool) -> int:
    """List what a sweep no longer needs, then remove it."""
    from sweep.cli.reading import clean_command

    return clean_command(folder, weights, yes)


@sweep.command()
@click.argument("folder", type=FOLDER, metavar="[DIR]", required=False)
@click.option("--from-mlflow", metavar="URI", help="Read an MLflow store instead of a folder.")
@click.option("--experiment", metavar="NAME", help="The experiment in that store.")
@click.option("--run", "run_id", metavar="ID", help="The parent run; by default the newest.")
@click.option("--out", type=FOLDER, help="Folder to write to.")
@click.option("--tracking-uri", help="Also mirror DIR to this MLflow store.")
def report(
    folder: Path | None,
    from_mlflow: str | None,
    experiment: str | None,
    run_id: str | None,
    out: Path | None,
    tracking_uri: str | None,
) -> int:
    """Write report.md, report.html, trials.csv and figures, from DIR or from MLflow alone."""
    from sweep.cli.reading import report_command

    return report_command(folder, from_mlflow, experiment, run_id, out, tracking_uri)


@sweep.command()
@click.argument("table", type=FOLDER, metavar="FILE.csv|.md|DIR")
@json_option
def audit(table: Path, as_json: bool) -> int:
    """Check a published table of batch-size results for impossible or confounded entries.

    docs/audit.md lists the columns and the checks.
    """
    from sweep.cli.reading import audit_command

    return audit_command(table, as_json)


@sweep.command()
@folder_argument
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=5000,
    show_default=True,
    help="On the loopback interface.",
)
def ui(folder: Path, port: int) -> int:
    """Open MLflow's UI on this sweep's store, on this machine only."""
    from sweep.cli.reading import ui_command

    return ui_command(folder, port)


@sweep.group()
def data() -> None:
    """Download, tokenize and describe data sets."""


@data.command("prepare")
@data_options
def data_prepare(source: str, tokenizer: str, vocabulary: str) -> int:
    """Download and tokenize SOURCE (tinystories, synthetic, or a path) into the cache."""
    from sweep.cli.reading import data_command

    return data_command(source, tokenizer, vocabulary, is_prepared=True, as_json=False)


@data.command("info")
@data_options
@json_option
def data_info(source: str, tokenizer: str, vocabulary: str, as_json: bool) -> int:
    """Describe SOURCE: identity, documents, bytes, and tokens once it is prepared."""
    from sweep.cli.reading import data_command

    return data_command(source, tokenizer, vocabulary, is_prepared=False, as_json=as_json)


@sweep.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine: what is installed, which devices exist, what is missing."""
    from sweep.cli.reading import doctor_command

    return doctor_command(as_json)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line: the console script `sweep`."""
    signal.signal(signal.SIGTERM, _interrupt)  # `sweep run` replaces this while trials run
    try:
        code = sweep.main(standalone_mode=False, prog_name="sweep")
    except SweepError as error:
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        code = 2
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = 2
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message().rstrip('.')}. See `sweep --help`.", err=True)
        code = 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has ended
        code = 0
    except OSError as error:
        where = f" {str(error.filename)!r}" if error.filename else ""
        why = f"{error.strerror or error}{where}"
        click.echo(f"Error: {why}. Check the path and its permissions.", err=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
