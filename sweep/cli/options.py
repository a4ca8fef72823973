"""Command-line options, generated from the settings.

Options are built when a command is used: `sweep --help` imports only click and this package.
"""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

if TYPE_CHECKING:
    from sweep.config.settings import Group, Setting
    from sweep.trial.folder import SweepFolder


def folder_path(text: str) -> Path:
    """Read the path of a folder, which need not exist."""
    if not text or Path(text).is_file():
        raise click.BadParameter(f"must be the path of a folder, got {text!r}")
    return Path(text)


def sweep_folder(text: str) -> "SweepFolder":
    """Read the path of a sweep's folder."""
    from sweep.trial.folder import SweepFolder

    return SweepFolder(folder_path(text))


class SettingsCommand(click.Command):
    """A command with one option per setting, listed in groups."""

    is_about_memory = False  # whether it takes only settings that change a step's memory

    @cached_property
    def _groups(self) -> "dict[click.Parameter, Group]":
        from sweep.config.execution import Execution, Services
        from sweep.config.experiment import Experiment
        from sweep.config.settings import settings_of

        return {
            build_option(setting): setting.flag.group
            for table in (Experiment, Execution, Services)
            for setting in settings_of(table)
            if setting.flag.concerns_memory or not self.is_about_memory
        }

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options of the settings, and then the command's own."""
        return [*self._groups, *super().get_params(ctx)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of options under its heading; the command's own are in the last."""
        from sweep.config.settings import Group

        for group in Group:
            options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
            members = [p for p in options if self._groups.get(p, Group.OUTPUT) == group]
            if records := list(filter(None, (param.get_help_record(ctx) for param in members))):
                with formatter.section(group):
                    formatter.write_dl(records)


class MemoryCommand(SettingsCommand):
    """A command with the settings that change how much memory a step takes."""

    is_about_memory = True


def build_option(setting: "Setting") -> click.Option:
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
    return click.Option(words, help=text, metavar=metavar)


json_option = click.option("--json", is_flag=True, help="Print one JSON document.")
folder_argument = click.argument("folder", type=sweep_folder, metavar="DIR")


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add EXPERIMENT, --out and --json."""
    text = "Folder; by default results/EXPERIMENT."
    command = click.option("--out", type=folder_path, metavar="DIR", help=text)(command)
    return click.argument("experiment", default="tinystories")(json_option(command))


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SOURCE and the tokenizer's options."""
    command = click.option("--vocabulary", default="10000", show_default=True)(command)
    kinds = click.Choice(["bpe", "bytes"])
    command = click.option("--tokenizer", type=kinds, default="bpe", show_default=True)(command)
    return click.argument("source", default="tinystories")(command)


def print_document(document: dict[str, Any], as_json: bool) -> None:
    """Print a document to stdout, as JSON or as an indented list."""
    if as_json:
        click.echo(json.dumps(document, indent=1))
    else:
        _print_mapping(document)


def _print_mapping(mapping: dict[str, Any], indent: str = "") -> None:
    for key, value in mapping.items():
        if isinstance(value, dict):
            click.echo(f"{indent}{key}:")
            _print_mapping(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            click.echo(f"{indent}{key}:")
            for item in value:
                _print_mapping(item, indent + "  ")
                click.echo()
        elif isinstance(value, list) and value and isinstance(value[0], str):
            click.echo("\n".join([f"{indent}{key}:", *(f"{indent}  {text}" for text in value)]))
        elif isinstance(value, list):
            click.echo(f"{indent}{key}: {', '.join(map(str, value)) or 'none'}")
        else:
            click.echo(f"{indent}{key}: {value}")
