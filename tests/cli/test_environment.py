"""Options read SWEEP_<COMMAND>_<FLAG>, with the same effect as on the command line."""

import click
import pytest

from sweep.cli import sweep

ARGUMENTS = {"audit": ["x"], "clean": ["x"], "log": ["x", "y"], "status": ["x"], "ui": ["x"]}
ARGUMENTS["data"] = ["info"]
OPTIONS = [
    (name, option)
    for name, command in sweep.commands.items()
    for option in command.get_params(click.Context(command))
    if isinstance(option, click.Option) and option.expose_value and option.name != "help"
]


def flags_of(command, *arguments):
    """Return the flags that a command gets."""
    words, prefix = [*ARGUMENTS.get(command, []), *arguments], f"SWEEP_{command.upper()}"
    context = sweep.commands[command].make_context(command, words, auto_envvar_prefix=prefix)
    return {name: value for name, value in context.params.items() if name != "folder"}


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_a_variable_does_what_the_flag_does(monkeypatch, command, option):
    value = option.type.choices[-1] if isinstance(option.type, click.Choice) else "7"
    value, without = "1" if option.is_flag else str(value), flags_of(command)
    by_flag = flags_of(command, option.opts[0], *([] if option.is_flag else [value]))
    words = option.opts[0].strip("-").replace("-", "_").upper()
    monkeypatch.setenv(f"SWEEP_{command.upper()}_{words}", value)
    assert flags_of(command) == by_flag != without
