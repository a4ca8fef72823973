"""Command-line options: those of settings are generated; others are in the first or last group."""

import json
import logging
import os
import sys
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any, get_origin

import click

from sweep.errors import cut, did_you_mean, printable

if TYPE_CHECKING:
    from rich.console import Console

    from sweep.config.settings import FlaggedField, Group
    from sweep.orchestration.executors.base import Executor

LOG = logging.getLogger(__name__)
PLANNING = ("plan", "check", "forecast", "probe")  # commands about what `sweep run` would do
READING_RUN = (*PLANNING, "data")  # commands that read variables of `sweep run` for settings
EVERYDAY = (
    *("out", "yes", "dry_run", "largest", "multiple", "soak", "cluster", "price", "threads"),
    "seconds",
)


class SettingsCommand(click.Command):
    """A command with an option for each setting that declares it, listed in groups.

    The object of its context, `ctx.obj`, is the executors that the options know; None: the shipped
    ones.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse with the options of the shipped executors or, if that fails, of all executors."""
        try:
            return super().make_context(info_name, [*args], parent, **extra)
        except click.UsageError:
            from sweep.orchestration.executors.build import EXECUTORS, installed_executors

            executors = installed_executors()
            if executors == EXECUTORS:
                raise
            return super().make_context(info_name, args, parent, obj=executors, **extra)

    def _groups(self, ctx: click.Context) -> "dict[click.Parameter, Group]":
        from sweep.orchestration.executors.build import EXECUTORS

        return build_options(str(self.name), ctx.obj or EXECUTORS)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self._groups(ctx), *super().get_params(ctx)]

    def invoke(self, ctx: click.Context) -> Any:
        for sentence in self._unread_variables(ctx):
            LOG.warning(sentence)
        return super().invoke(ctx)

    def _unread_variables(self, ctx: click.Context) -> list[str]:
        """Return sentences about environment variables that look like flags and are not read."""
        assert ctx.parent is not None and isinstance(ctx.parent.command, click.Group)
        name = str(self.name)
        run = ctx.parent.command.commands["run"]
        settings = {variable_of("run", param) for param in self._groups(ctx)}
        own = {variable_of(name, param) for param in self.get_params(ctx)}
        read = own | settings if name in READING_RUN else own

        prefixes = (variable_prefix("run"), variable_prefix(name))
        variables = {variable for variable in os.environ if variable.startswith(prefixes)}
        of_run = {variable_of("run", param) for param in run.get_params(ctx)}
        if variables - of_run - own:  # perhaps of another package's executor
            _know_all_executors(ctx)
            of_run = {variable_of("run", param) for param in run.get_params(ctx)}

        # Other commands share few settings with `sweep run`, and the rest does not concern them.
        expected = of_run if name in PLANNING else settings & of_run
        sentences = []
        ignored = sorted(expected.intersection(os.environ) - read)
        if ignored:
            sentences.append(f"`sweep {name}` does not read {', '.join(ignored)}.")
        for variable in sorted(variables - of_run - own):
            hint = did_you_mean(variable, of_run | own) or "Correct it, or unset it."
            sentences.append(f"{printable(cut(variable))} is the variable of no flag. {hint}")
        return sentences

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from sweep.config.settings import Group

        _know_all_executors(ctx)
        groups = self._groups(ctx)
        records = defaultdict(list)
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                other = Group.EVERYDAY if param.name in EVERYDAY else Group.OUTPUT
                records[groups.get(param, other)].append(record)

        for group in Group:
            if group in records:
                with formatter.section(group):
                    formatter.write_dl(records[group])


def _know_all_executors(ctx: click.Context) -> None:
    """Give the command of a context the options of all executors."""
    from sweep.orchestration.executors.build import installed_executors

    ctx.obj = installed_executors()


@cache
def build_options(
    command: str, executors: "tuple[type[Executor], ...]"
) -> "dict[click.Parameter, Group]":
    """Return the options of a command's settings, and their groups."""
    from sweep.config.execution import Execution
    from sweep.config.experiment import Experiment
    from sweep.config.settings import settings_of
    from sweep.orchestration.executors.build import services_table

    name = "run" if command == "check" else command
    options: dict[click.Parameter, Group] = {}
    for table in (Experiment, Execution, services_table(executors)):
        for setting in settings_of(table):
            if name in setting.flag.commands:
                options[build_option(setting, command)] = setting.flag.group
    return options


def variable_prefix(command: str) -> str:
    return f"SWEEP_{command.upper()}_"


def variable_of(command: str, param: click.Parameter) -> str:
    """Return the environment variable of a command's option, as click names it."""
    return f"{variable_prefix(command)}{str(param.name).upper()}"


def build_option(setting: "FlaggedField", command: str) -> click.Option:
    """Return the option of a setting; pydantic parses every value but choices and switches.

    It also reads an environment variable of the command and, if it is about a planned sweep, that
    of `sweep run`.
    """
    from sweep.config.settings import choices_of

    words = [f"--{setting.name.replace('_', '-')}"]
    commands = (command, "run") if command in READING_RUN else (command,)
    variables = [f"{variable_prefix(name)}{setting.name.upper()}" for name in commands]
    text = setting.field.description
    annotation = setting.field.annotation

    if annotation is bool:
        return click.Option(words, help=text, is_flag=True, default=None, envvar=variables)

    choices = choices_of(annotation)
    if choices and get_origin(annotation) is not tuple:  # a tuple allows several values
        return click.Option(words, help=text, type=click.Choice(choices), envvar=variables)

    metavar = setting.flag.metavar
    if metavar is None:
        metavar = setting.path[-1].rpartition("_")[2].upper()
    if metavar.startswith("KEY=VALUE"):
        return click.Option(
            words,
            help=text,
            metavar=metavar,
            multiple=True,
            callback=_join_values,
            envvar=variables,
        )
    return click.Option(words, help=text, metavar=metavar, envvar=variables)


def _join_values(
    context: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> str | None:
    text = ",".join(values)
    return text if text else None


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
