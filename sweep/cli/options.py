"""Command-line options, generated from the settings. Loads click and the standard library only."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

if TYPE_CHECKING:
    from sweep.config.settings import Setting


class FolderPath(click.Path):
    """A path that is not empty, as `--out "$UNSET"` would be."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("must be the path of a folder, got an empty one", param, ctx)
        return super().convert(value, param, ctx)


class SweepFolderPath(FolderPath):
    """The folder of a sweep."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from sweep.trial.folder import SweepFolder

        return SweepFolder(super().convert(value, param, ctx))


class SettingsCommand(click.Command):
    """A command with one option per setting, listed in groups.

    The options are built when the command is used, so that `sweep --help` does not import the
    settings.
    """

    only_memory = False

    @cached_property
    def _groups(self) -> dict[click.Parameter, str]:
        """The options of the settings, with the headings that `--help` lists them under."""
        from sweep.config.execution import Execution, Services
        from sweep.config.experiment import Experiment
        from sweep.config.settings import settings_of

        settings = [s for table in (Experiment, Execution, Services) for s in settings_of(table)]
        return {
            _build_option(setting): setting.flag.group
            for setting in settings
            if setting.flag.concerns_memory or not self.only_memory
        }

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options of the settings, and then the command's own."""
        return [*self._groups, *super().get_params(ctx)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the everyday options first, and then the other groups."""
        from sweep.config.settings import DEVICES, EVERYDAY, GROUPS, OUTPUT

        own = {"quiet": OUTPUT, "only": OUTPUT, "retry": OUTPUT}
        own |= {"cluster": DEVICES, "price": DEVICES}
        records: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and isinstance(param, click.Option):
                group = self._groups.get(param) or own.get(str(param.name), EVERYDAY)
                records[group].append(record)
        for group, rows in records.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)


class MemoryCommand(SettingsCommand):
    """A command with the settings that change how much memory a step takes."""

    only_memory = True


def _build_option(setting: "Setting") -> click.Option:
    """Return the option of a setting; pydantic parses every value but choices and switches."""
    name, text, annotation = f"--{setting.name}", setting.flag.help, setting.annotation
    words = [name.replace("_", "-")]
    if annotation is bool:
        return click.Option(words, help=text, is_flag=True, default=None)
    inner = () if get_origin(annotation) is tuple else get_args(annotation)
    for part in (annotation, *inner):  # of a type, or of a type or None
        if get_origin(part) is Literal:
            return click.Option(words, help=text, type=click.Choice(get_args(part)))
    metavar = setting.flag.metavar or setting.path[-1].rpartition("_")[2].upper()
    return click.Option(words, help=text, metavar=metavar)


FOLDER = FolderPath(path_type=Path)
json_option = click.option("--json", is_flag=True, help="Print one JSON document.")
SWEEP_FOLDER = SweepFolderPath(path_type=Path)
folder_argument = click.argument("folder", type=SWEEP_FOLDER, metavar="DIR")


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add EXPERIMENT, --out and --json."""
    command = json_option(command)
    text = "Folder; by default results/EXPERIMENT."
    command = click.option("--out", type=FOLDER, metavar="DIR", help=text)(command)
    return click.argument("experiment", default="tinystories")(command)


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SOURCE and the tokenizer's options."""
    command = click.option("--vocabulary", default="10000", show_default=True)(command)
    kinds = click.Choice(["bpe", "bytes"])
    command = click.option("--tokenizer", type=kinds, default="bpe", show_default=True)(command)
    return click.argument("source", default="tinystories")(command)


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document to stdout."""
    click.echo(json.dumps(document, indent=1))
