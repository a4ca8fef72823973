"""The words of `sweep run`, as plans record them for people to repeat."""

from collections.abc import Mapping, Sequence
from typing import Any


def typed_command(experiment: str | None, flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a `sweep run`; flags that are None or False are left out.

    A word that starts with two dashes is a flag, and a flag before another flag is a switch.
    """
    words = ["sweep", "run"]
    if experiment:
        words.append(experiment)
    for name, value in flags.items():
        if value is None or value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
            continue
        values = value if isinstance(value, list | tuple) else [value]
        text = ",".join(map(str, values))
        words += [f"{flag}={text}"] if text.startswith("--") else [flag, text]
    return tuple(words)


def parse_command(words: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Return the experiment and the flags of the words that `typed_command` has written."""
    rest = list(words[2:])
    experiment = rest.pop(0) if rest and not rest[0].startswith("--") else None
    flags = dict[str, Any]()
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if equals:
            flags[name] = value
        elif rest and not rest[0].startswith("--"):
            flags[name] = rest.pop(0)
        else:
            flags[name] = True
    return experiment, flags
