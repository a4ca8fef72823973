"""The command line. A command may return its exit code; `main` turns errors into messages."""

import contextlib
import logging
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from sweep.cli.commands import COMMANDS
from sweep.cli.options import say
from sweep.errors import (
    MOST_CHARACTERS,
    SweepError,
    cut,
    describe_error,
    printable,
    shorten,
    without_secrets,
)
from sweep.signals import handle_unless_ignored
from sweep.trial.files import storage_problem


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


class Messages(logging.Handler):
    """Print what the package logs, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # closed, or interrupted while it prints
            text = shorten(printable(record.getMessage()))
            if record.levelno == logging.INFO:  # work begins
                text += " …"
            print(text, file=sys.stderr)  # above a bar


def main() -> None:
    streams: Any = sys.stdout, sys.stderr
    for file in streams:  # a character that the terminal lacks becomes a question mark
        file.reconfigure(errors="replace")

    logger = logging.getLogger("sweep")
    logger.handlers = [Messages()]
    logger.propagate = False
    logger.setLevel("INFO" if sys.stderr.isatty() else "WARNING")  # what begins, on a terminal

    # `sweep run` replaces this handler while trials run
    handle_unless_ignored(signal.SIGTERM, signal.default_int_handler)
    try:
        code = sweep.main(standalone_mode=False, prog_name="sweep")
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = 2
    except BrokenPipeError:
        code = 0  # the reader of our output has ended
    except (click.Abort, KeyboardInterrupt):
        message = "Interrupted."
        if sys.argv[1:2] == ["run"]:
            message += " The same command resumes."
        click.echo(message, err=True)
        code = 130
    except Exception as error:
        text, code = _explain(error)
        line = " ".join(without_secrets(text).split())
        say(f"Error: {_without_long_inputs(line)}", to_stderr=True)

    for file in streams:
        try:
            file.flush()
        except OSError:  # else Python tries again when it exits, and changes the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    sys.exit(code or 0)


def _without_long_inputs(line: str) -> str:
    """Cut the long inputs of a message: words of the command line, variables, and quoted texts."""
    inputs = {*os.environ.values()}
    words = {"."}
    for word in sys.argv:
        words |= {word, *word.partition("=")}
    inputs |= words

    folders = {word for word in words if os.path.isdir(word)}
    folders |= {os.path.realpath(folder) for folder in folders}
    for folder in folders:
        inputs.update(_paths_below(folder, line))

    for value in sorted(inputs, key=len, reverse=True):
        text = " ".join(value.split())
        if len(text) > MOST_CHARACTERS:
            line = line.replace(text, cut(text))
    return shorten(line)


def _paths_below(folder: str, line: str) -> Iterator[str]:
    """Yield the paths in a folder that a message contains, whose spaces hide where they end."""
    for parent, folders, files in os.walk(folder):
        paths = {name: os.path.normpath(os.path.join(parent, name)) for name in folders + files}
        named = {name: path for name, path in paths.items() if " ".join(path.split()) in line}
        folders[:] = [name for name in folders if name in named]
        yield from named.values()


def _explain(error: Exception) -> tuple[str, int]:
    """Return one sentence about an error, and the exit code."""
    if isinstance(error, click.ClickException):
        # Only click repeats a list of inputs, in parentheses.
        return re.sub(r"\(.*\)", lambda words: cut(words[0]), error.format_message()), 2
    problem = storage_problem(error, Path("the output"))
    if problem:
        return f"{problem} The same command resumes.", 1
    if isinstance(error, OSError):
        return f"{error}. Check the path, its permissions and the free disk space.", 2
    if isinstance(error, SweepError):
        return str(error), 2

    sentence = without_secrets(describe_error(error))
    text = f"{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"
    report = Path(tempfile.mkdtemp(prefix="sweep-bug-")) / "report.txt"
    report.write_text(without_secrets(text), "utf-8", "backslashreplace")
    return f"this is a bug in sweep ({sentence}). Please report it with {report}.", 1
