"""The command line. `sweep --help` imports only click and the standard library.

Every command returns its exit code. `main` turns errors into messages and exit codes.
"""

import signal
import sys

import click

from sweep.cli.reading import audit, clean, data, doctor, log, report, status, stop, ui
from sweep.cli.running import forecast, plan, probe, run
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


for command in (run, plan, forecast, probe, status, stop, log, clean, report, audit, ui, data):
    sweep.add_command(command)
sweep.add_command(doctor)


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
        path = f" {str(error.filename)!r}" if error.filename else ""
        reason = f"{error.strerror or error}{path}"
        click.echo(f"Error: {reason}. Check the path and its permissions.", err=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
