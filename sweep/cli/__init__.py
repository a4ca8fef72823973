"""The command line. `sweep --help` loads click and the standard library only.

Every command returns its exit code; this is the one place where errors become messages.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import click

from sweep.cli.options import (
    FOLDER,
    data_options,
    experiment_options,
    folder_argument,
    json_option,
    memory_options,
)
from sweep.errors import SweepError


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


@sweep.command()
@experiment_options
@click.option("--tracking-uri", help="MLflow store: http://…, sqlite:///…; in DIR by default.")
@click.option("--storage", metavar="URL", help="Optuna's store, postgresql://…; optuna.db in DIR.")
@click.option(
    "--executor",
    type=click.Choice(["local", "ray", "slurm"]),
    default="local",
    help="Where trials run: on this machine by default; docs/ray.md, docs/slurm.md.",
)
@click.option("--ray-address", metavar="HOST:PORT", help="A running Ray cluster; else a local one.")
@click.option("--slurm", metavar="KEY=VALUE,…", help="What to ask SLURM for: partition=gpu,time=4h")
@click.option("--only", multiple=True, metavar="ID", help="Run this trial only; repeatable.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--retry", type=click.Choice(["diverged"]), help="Also run diverged trials again.")
def run(experiment: str, **flags: Any) -> int:
    """Plan, run every trial, report. The same command again resumes.

    EXPERIMENT is a shipped name (tinystories, tinystories-8m, quick, quadratic, gpt2, elman,
    grpo-words, grpo-chess) or a TOML file.
    """
    from sweep.cli.running import run_command

    return run_command(experiment, flags)


@sweep.command()
@experiment_options
@click.option(
    "--cluster", metavar="nodes=N,gpus=G", help="Also place the trials on it: time, cost."
)
@click.option("--price", type=float, metavar="PRICE", help="With --cluster: of a device-hour.")
def plan(experiment: str, **flags: Any) -> int:
    """Print the plan with time and disk; trains nothing. With --out, writes it there."""
    from sweep.cli.running import plan_command

    return plan_command(experiment, flags)


@sweep.command()
@memory_options
def forecast(experiment: str, **flags: Any) -> int:
    """Predict memory per batch size, without the device; what fits into --device-memory."""
    from sweep.cli.memory import forecast_command

    return forecast_command(experiment, flags)


@sweep.command()
@memory_options
@click.option("--largest", metavar="N", help="Look no further than this size.")
@click.option("--multiple", metavar="N", help="Only multiples of N are legal sizes.")
@click.option("--soak", metavar="STEPS", help="Each choice gets through these; GRPO: 20; 0: none.")
def probe(experiment: str, **flags: Any) -> int:
    """Measure the largest microbatch that fits, each point in a fresh process, and prove it."""
    from sweep.cli.memory import probe_command

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
    """Print a trial's log; the start of its id is enough."""
    from sweep.cli.reading import log_command

    return log_command(folder, trial)


@sweep.command()
@folder_argument
@click.option("--weights", is_flag=True, help="The weights of finished trials too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clean(folder: Path, weights: bool, yes: bool) -> int:
    """List what a sweep no longer needs, then remove it."""
    from sweep.cli.reading import clean_command

    return clean_command(folder, weights, yes)


@sweep.command()
@click.argument("folder", type=FOLDER, metavar="[DIR]", required=False)
@click.option("--from-mlflow", metavar="URI", help="Read an MLflow store instead of a folder.")
@click.option("--experiment", metavar="NAME", help="Its experiment.")
@click.option("--run", "run_id", metavar="ID", help="Its parent run; the newest by default.")
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
    """Tell what is impossible or confounded in a table of somebody's sweep.

    The columns and what is looked for: docs/audit.md.
    """
    from sweep.cli.audit import audit_command

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
    """Describe SOURCE: identity, documents, bytes, tokens where it is prepared."""
    from sweep.cli.reading import data_command

    return data_command(source, tokenizer, vocabulary, is_prepared=False, as_json=as_json)


@sweep.command()
@json_option
def doctor(as_json: bool) -> int:
    """Tell what is installed, which devices there are, and what would not work."""
    from sweep.cli.reading import doctor_command

    return doctor_command(as_json)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line: the console script `sweep`."""
    signal.signal(signal.SIGTERM, _interrupt)  # `sweep run` has its own while trials run
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
        sys.stderr.close()  # whoever read our output has gone
        code = 0
    except OSError as error:
        where = f" {str(error.filename)!r}" if error.filename else ""
        why = f"{error.strerror or error}{where}"
        click.echo(f"Error: {why}. Check the path and its permissions.", err=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
