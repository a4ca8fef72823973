"""Command-line options, generated from the settings. Loads click and the standard library only."""

from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click

EVERYDAY = "Everyday options"


class FolderPath(click.Path):
    """A path that is not empty, as `--out "$UNSET"` would be."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("must be the path of a folder, got an empty one", param, ctx)
        return super().convert(value, param, ctx)


FOLDER = FolderPath(path_type=Path)


class GroupedOption(click.Option):
    """An option that `--help` lists under a heading."""

    def __init__(self, *arguments: Any, group: str = EVERYDAY, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


class SettingsCommand(click.Command):
    """A command with one option per setting of the experiment, the execution and the services.

    The options are built when the command is used, so that `sweep --help` does not import the
    settings.

    Args:
        for_memory: only options that change how much memory a step takes.
    """

    def __init__(self, *arguments: Any, for_memory: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._for_memory = for_memory
        self._from_settings: list[click.Parameter] | None = None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options of the settings, and then the command's own."""
        if self._from_settings is None:
            self._from_settings = _options_from_settings(self._for_memory)
        own = super().get_params(ctx)
        arguments = [param for param in own if isinstance(param, click.Argument)]
        return [*arguments, *self._from_settings, *(p for p in own if p not in arguments)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the everyday options first, and then the other groups."""
        from sweep.config.settings import GROUPS

        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and isinstance(param, click.Option):
                groups[getattr(param, "group", EVERYDAY)].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _options_from_settings(for_memory: bool) -> list[click.Parameter]:
    from sweep.config.execution import Execution, Services
    from sweep.config.experiment import Experiment
    from sweep.config.settings import settings_of

    settings = [s for table in (Experiment, Execution, Services) for s in settings_of(table)]
    return [
        GroupedOption(
            [f"--{setting.name.replace('_', '-')}"],
            group=setting.flag.group,
            help=setting.flag.help,
            **_kind_of(setting.annotation, setting.flag.metavar or setting.path[-1].upper()),
        )
        for setting in settings
        if setting.flag.concerns_memory or not for_memory
    ]


def _kind_of(annotation: Any, metavar: str) -> dict[str, Any]:
    """Return click's description of a field's type; pydantic parses everything but choices."""
    if annotation is bool:
        return {"is_flag": True, "default": None}
    is_union = get_origin(annotation) in (Union, UnionType)
    for part in get_args(annotation) if is_union else (annotation,):
        if get_origin(part) is Literal:
            return {"type": click.Choice(get_args(part))}
    return {"metavar": metavar}


def common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add EXPERIMENT, --out and --json."""
    for option in (
        click.option("--json", is_flag=True, help="Print one JSON document."),
        click.option(
            "--out", type=FOLDER, metavar="DIR", help="Folder; by default results/EXPERIMENT."
        ),
        click.argument("experiment", default="tinystories"),
    ):
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
folder_argument = click.argument("folder", type=FOLDER, metavar="DIR")


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SOURCE and the tokenizer's options."""
    command = click.option("--vocabulary", default="10000", show_default=True)(command)
    kinds = click.Choice(["bpe", "bytes"])
    command = click.option("--tokenizer", type=kinds, default="bpe", show_default=True)(command)
    return click.argument("source", default="tinystories")(command)
