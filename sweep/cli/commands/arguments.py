"""Arguments and options that several commands share."""

import math
import os
import sys
import webbrowser
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sweep.cli.options import echo
from sweep.errors import SweepError
from sweep.trial.files import refuse_links

if TYPE_CHECKING:
    from sweep.trial.folder import SweepFolder

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
    from sweep.orchestration.planning import refuse_unwritable

    if not text:
        raise click.BadParameter(f"must be the path of a folder, got {text!r}")
    refuse_links(Path(text))
    refuse_unwritable(Path(text))
    return Path(text)


class FiniteRange(click.FloatRange):
    """A range of numbers above 0; NaN is in none."""

    def __init__(self, most: float) -> None:
        super().__init__(0, most, min_open=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"must be a number, got {value}", param, ctx)
        return number


number_option = partial(click.option, type=click.IntRange(1), metavar="N")
json_option = click.option("--json", is_flag=True, help="Print one JSON document.")
folder_argument = click.argument("folder", metavar="[DIR]", required=False, callback=read_folder)
verbose_option = click.option("--verbose", is_flag=True, help="Also print notes about internals.")


def common_options(out_help: str) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--out", type=out_folder, metavar="DIR", help=out_help)(command)
        return click.argument("experiment", required=False)(json_option(command))

    return decorate


def match_trial(prefix: str, ids: Iterable[str], name: str, list_command: str) -> str:
    """Return the one id that begins with these characters, which were given as `name`."""
    matches = [trial_id for trial_id in ids if trial_id.startswith(prefix)]
    if len(matches) != 1:
        problem = f"must match exactly one trial, got {prefix!r}, which matches {len(matches)}"
        raise SweepError(f"{name} {problem}. `sweep {list_command}` lists the ids.")
    return matches[0]


def open_page(address: str) -> None:
    """Print the address of a page, and open it on a desktop."""
    echo(address)
    if sys.platform == "darwin" or DESKTOP & os.environ.keys():
        webbrowser.open(address)
