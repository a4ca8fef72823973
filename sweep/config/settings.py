"""The base of all settings. A field declares its flag, its unit and its help once."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from sweep.config.numbers import parse_bytes, parse_count
from sweep.errors import SweepError

EVERYDAY, MODEL, TUNING, MEMORY, DEVICES, GRPO, OUTPUT = (
    "Everyday options",
    "Model and data",
    "Tuning",
    "Memory",
    "Devices and machines",
    "GRPO",
    "Output and tracking",
)
GROUPS = (EVERYDAY, MODEL, TUNING, MEMORY, DEVICES, GRPO, OUTPUT)


Table = TypeVar("Table", bound="Settings")


class Settings(BaseModel):
    """Base of all settings: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Flag:
    """How a field appears on the command line and in the documentation.

    Attributes:
        help: one sentence.
        group: heading under which `--help` lists it.
        name: without the dashes; the field's own name by default.
        metavar: placeholder of the value.
        concerns_memory: whether `forecast` and `probe` take it too.
    """

    help: str
    group: str = EVERYDAY
    name: str | None = None
    metavar: str | None = None
    concerns_memory: bool = True


@dataclass(frozen=True)
class Setting:
    """One field that the command line can set.

    Attributes:
        name: of the flag as an identifier, such as `tune_budget`.
        path: of the field in its table, such as `("tuning", "budget")`.
        annotation: type of the field.
        flag: the declaration.
    """

    name: str
    path: tuple[str, ...]
    annotation: Any
    flag: Flag


def settings_of(table: type[Settings], path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Yield every field of a table, and of the tables in it, that declares a flag."""
    for field, info in table.model_fields.items():
        here = (*path, field)
        for item in info.metadata:
            if isinstance(item, Flag):
                name = (item.name or field).replace("-", "_")
                yield Setting(name, here, info.annotation, item)
        for nested in (info.annotation, *get_args(info.annotation)):
            if isinstance(nested, type) and issubclass(nested, Settings):
                yield from settings_of(nested, here)


def _read_count(value: Any, info: ValidationInfo) -> int:
    return parse_count(value, str(info.field_name))


def _read_count_or_zero(value: Any, info: ValidationInfo) -> int:
    return 0 if str(value).strip() == "0" else _read_count(value, info)


def _read_bytes(value: Any, info: ValidationInfo) -> int:
    return parse_bytes(value, str(info.field_name).removesuffix("_bytes"))


Count = Annotated[int, BeforeValidator(_read_count)]
CountOrZero = Annotated[int, BeforeValidator(_read_count_or_zero)]
Bytes = Annotated[int, BeforeValidator(_read_bytes)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]


def describe_error(error: ValidationError, subject: str, table: type[Settings]) -> SweepError:
    """Return the first mistake as one sentence that names the key, the value and the remedy."""
    mistakes = error.errors()
    first = next((e for e in mistakes if e["type"] == "extra_forbidden"), mistakes[0])
    keys, tables = _locate(table, [str(part) for part in first["loc"]])
    if first["type"] == "extra_forbidden":
        candidates = sorted({key for t in tables for key in t.model_fields})
        close = difflib.get_close_matches(keys[-1], candidates, 1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known keys: {', '.join(candidates)}."
        return SweepError(f"{subject}: {'.'.join(keys)!r} is not a known key. {hint}")
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    value = first.get("input")
    got = f", got {value!r}" if isinstance(value, str | int | float) else ""
    key = f"{'.'.join(keys)}: " if keys else ""
    return SweepError(f"{subject}: {key}{message}{got}. Correct it.")


def _locate(table: type[Settings], path: list[str]) -> tuple[list[str], list[type[Settings]]]:
    """Return the keys of an error's path without the tags of unions, and the last key's tables."""
    keys: list[str] = []
    tables, inner = [table], [table]
    for key in path:
        fields = [t.model_fields[key] for t in inner if key in t.model_fields]
        if not fields and key != path[-1]:
            continue  # the tag of a union
        keys.append(key)
        nested = [part for f in fields for part in (f.annotation, *get_args(f.annotation))]
        tables = inner
        inner = [t for t in nested if isinstance(t, type) and issubclass(t, Settings)]
    return keys, tables


def parse_settings(table: type[Table], values: dict[str, Any], subject: str) -> Table:
    """Build a table of settings from values by the name of a flag; None leaves a field alone.

    Raises:
        SweepError: naming the setting, the value and the remedy.
    """
    fields = {s.name: s.path[0] for s in settings_of(table)}
    given = {fields.get(name, name): v for name, v in values.items() if v is not None}
    try:
        return table.model_validate(given)
    except ValidationError as error:
        raise describe_error(error, subject, table) from error
