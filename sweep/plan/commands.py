"""The words of `sweep run`, as plans record them for people to repeat."""

from collections.abc import Mapping, Sequence
from typing import Any

from sweep.config.experiment import Experiment
from sweep.config.settings import Settings, settings_of
from sweep.config.trial import Execution, Services

TABLES: tuple[type[Settings], ...] = (Experiment, Execution, Services)
SETTINGS = {setting.name: setting for table in TABLES for setting in settings_of(table)}


def typed_command(experiment: str | None, flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a `sweep run`; flags that are None or False are left out."""
    words = ["sweep", "run", *([experiment] if experiment else [])]
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            values = value if isinstance(value, list | tuple) else [value]
            words.append(",".join(map(str, values)))
    return tuple(words)


def parse_command(words: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """Return the experiment and the flags of a recorded `sweep run`."""
    rest = list(words[2:])
    experiment = rest.pop(0) if rest and not rest[0].startswith("--") else None
    flags = dict[str, Any]()
    while rest:
        name = rest.pop(0).removeprefix("--").replace("-", "_")
        is_switch = name in SETTINGS and SETTINGS[name].field.annotation is bool
        flags[name] = True if is_switch or not rest else rest.pop(0)
    return experiment, flags
