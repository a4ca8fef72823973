"""Command-line options: those of settings are generated; others are in the first or last group."""

import json
import sys
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from sweep.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from sweep.config.settings import FlaggedField, Group

EVERYDAY = ("out", "yes", "dry_run", "largest", "multiple", "soak", "cluster", "price")


class SettingsCommand(click.Command):
    """A command with an option for each setting that declares it, listed in groups."""

    @cached_property
    def _groups(self) -> "dict[click.Parameter, Group]":
        from sweep.config.experiment import Experiment
        from sweep.config.settings import settings_of
        from sweep.config.trial import Execution, Services

        name = "run" if self.name == "check" else self.name
        return {
            build_option(setting): setting.flag.group
            for table in (Experiment, Execution, Services)
            for setting in settings_of(table)
            if name in setting.flag.commands
        }

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self._groups, *super().get_params(ctx)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from sweep.config.settings import Group

        records = defaultdict(list)
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                other = Group.EVERYDAY if param.name in EVERYDAY else Group.OUTPUT
                records[self._groups.get(param, other)].append(record)
        for group in filter(records.get, Group):
            with formatter.section(group):
                formatter.write_dl(records[group])


def build_option(setting: "FlaggedField") -> click.Option:
    """Return the option of a setting; pydantic parses every value but choices and switches."""
    words = [f"--{setting.name.replace('_', '-')}"]
    text, annotation = setting.field.description, setting.field.annotation
    if annotation is bool:
        return click.Option(words, help=text, is_flag=True, default=None)
    inner = () if get_origin(annotation) is tuple else get_args(annotation)
    for part in (annotation, *inner):  # also for `Literal[…] | None`
        if get_origin(part) is Literal:
            return click.Option(words, help=text, type=click.Choice(get_args(part)))
    metavar = setting.flag.metavar or setting.path[-1].rpartition("_")[2].upper()
    if metavar.startswith("KEY=VALUE"):
        join: Any = lambda context, param, values: ",".join(values) or None  # noqa: E731
        return click.Option(words, help=text, metavar=metavar, multiple=True, callback=join)
    return click.Option(words, help=text, metavar=metavar)


def echo(text: str, err: bool = False, nl: bool = True) -> None:
    """Print text without control characters."""
    click.echo(printable(text), err=err, nl=nl)


def build_console(to_stderr: bool = False) -> "Console":
    from rich.console import Console

    is_terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    return Console(stderr=to_stderr, width=None if is_terminal else 140, highlight=False)


def say(text: str, to_stderr: bool = False) -> None:
    """Print sentences without control characters, wrapped between words on a terminal."""
    console = build_console(to_stderr)
    console.print(printable(text), markup=False, soft_wrap=not console.is_terminal)


def print_document(document: dict[str, Any] | None, as_json: bool = True) -> None:
    """Print a document as JSON or, for people, as YAML."""
    if as_json:
        echo(json.dumps(document, indent=1))
        return
    import yaml

    echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1000), nl=False)
