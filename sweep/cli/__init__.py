"""The command line. A command may return its exit code; `main` turns errors into messages."""

import signal
import sys

import click

from sweep.cli.commands import COMMANDS
from sweep.errors import SweepError


@click.group(
    commands=COMMANDS,
    context_settings={
        "auto_envvar_prefix": "SWEEP",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.version_option(package_name="batch-size-sweep", prog_name="sweep")
def sweep() -> None:
    """Measure which batch size to use.

    `sweep` trains the same model on the same tokens at each batch size, fairly, and reports
    quality, time and memory. Start with `sweep run quick`, or ask what a sweep costs:

        sweep plan --budget 327M --batches 1,8,32,64,128,256
    """


def main() -> None:
    # `sweep run` replaces this handler while trials run
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = sweep.main(standalone_mode=False, prog_name="sweep")
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has ended
        code = 0
    except (SweepError, OSError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        if isinstance(error, OSError):
            text += ". Check the path, its permissions and the free disk space."
        click.echo(f"Error: {' '.join(text.split())}", err=True)
        code = 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        code = 130
    sys.exit(code or 0)
