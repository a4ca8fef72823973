"""The base of all settings. A field declares its flag, its unit and its help once."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, ValidationError

from sweep.config.numbers import parse_bytes, parse_count
from sweep.errors import SweepError, did_you_mean

Table = TypeVar("Table", bound="Settings")
REMEDIES = {"missing": "Add it."}  # keys: types of pydantic's errors
REMEDIES |= dict.fromkeys(("less_than", "less_than_equal"), "Lower it.")
REMEDIES |= dict.fromkeys(("greater_than", "greater_than_equal"), "Raise it.")


class Settings(BaseModel):
    """A table of settings: immutable, without unknown keys or infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Group(StrEnum):  # headings of `--help`, in order
    EVERYDAY = "Everyday options"
    MODEL = "Model and data"
    TUNING = "Tuning"
    MEMORY = "Memory"
    DEVICES = "Devices and machines"
    GRPO = "GRPO"
    OUTPUT = "Output and tracking"


@dataclass(frozen=True)
class Flag:
    """A field's option on the command line; the field's docstring is the help text."""

    group: Group = Group.EVERYDAY
    name: str | None = None  # without the dashes; None: the field's own
    metavar: str | None = None  # placeholder of the value
    commands: tuple[str, ...] = ("run", "plan", "forecast", "probe")  # commands with this flag


RunFlag = partial(Flag, commands=("run", "plan"))
DataFlag = partial(Flag, commands=(*Flag.commands, "data"))


@dataclass(frozen=True)
class FlaggedField:
    """A field that declares a flag, at its place in the tables."""

    name: str  # flag without dashes, such as tune_budget
    path: tuple[str, ...]  # path of the field, such as ("tuning", "budget")
    field: FieldInfo
    flag: Flag


def _fields_of(
    table: type[Settings], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, info in table.model_fields.items():
        yield (*path, name), info
        for nested in (info.annotation, *get_args(info.annotation)):
            if isinstance(nested, type) and issubclass(nested, Settings):
                yield from _fields_of(nested, (*path, name))


def settings_of(table: type[Settings]) -> Iterator[FlaggedField]:
    """Yield every field of a table, and of the tables in it, that declares a flag.

    A flag that several members of a union declare is one flag.
    """
    names = set()
    for path, info in _fields_of(table):
        for item in info.metadata:
            if not isinstance(item, Flag):
                continue
            name = path[-1] if item.name is None else item.name.replace("-", "_")
            if name not in names:
                names.add(name)
                yield FlaggedField(name, path, info, item)


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """Return the values that a `Literal[…]` allows, or the one in another type; else none."""
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            return get_args(part)
    return ()


def merge_settings(
    table: type[Settings], fields: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a table with values by the name of a flag or a field, unchecked.

    A value that is a table replaces the one in `fields`; flags then change single keys of it.
    """
    merged = dict(fields)
    paths = {setting.name: setting.path for setting in settings_of(table)}
    nested = []
    for name, value in values.items():
        path = paths.get(name, (name,))
        if isinstance(value, Mapping) and name in table.model_fields:  # not the flag of this name
            path = (name,)
        if len(path) == 1:
            merged[path[0]] = value
        else:
            nested.append((path, value))

    for (outer, key), value in nested:
        present = merged.get(outer)
        merged[outer] = {**present, key: value} if isinstance(present, dict) else {key: value}
    return merged


def parse_settings(table: type[Table], fields: Mapping[str, Any], subject: str) -> Table:
    """Build a table from its fields, or raise a sentence about the first wrong key."""
    try:
        return table.model_validate(fields)
    except ValidationError as error:
        mistakes = error.errors()
        first = next((e for e in mistakes if e["type"] == "extra_forbidden"), mistakes[0])
        raise SweepError(f"{subject}: {_describe_mistake(table, first)}") from error


def _describe_mistake(table: type[Settings], mistake: ErrorDetails) -> str:
    """Return a sentence about a mistake that pydantic found, with its remedy."""
    keys = {".".join(path): info for path, info in _fields_of(table)}
    key = ""
    tag = ""  # kind of the innermost table that is a member of a union
    is_known = False
    is_tag_next = False
    for part in map(str, mistake["loc"]):  # also indices
        if is_tag_next:
            tag = part
            is_tag_next = False
            continue
        longer = f"{key}.{part}".strip(".")
        is_known = longer in keys
        if is_known:
            key = longer
            is_tag_next = keys[key].discriminator is not None

    kind = mistake["type"]
    if kind == "extra_forbidden" and is_known:  # another member of the union has it
        return f"{key!r} does not apply to {tag!r}. Leave it out."
    if kind == "extra_forbidden":
        key = f"{key}.{mistake['loc'][-1]}".strip(".")
        hint = did_you_mean(key, keys) or "Remove it."
        return f"{key!r} is not a known key. {hint}"

    context = mistake.get("ctx", {})
    value = context.get("got", mistake["input"])
    got = f", got {value!r}" if isinstance(value, str | int | float) else ""
    names = context.get("names", ())
    if kind == "literal_error" and key in keys:
        names = [str(choice) for choice in choices_of(keys[key].annotation)]
    remedy = REMEDIES[kind] if kind in REMEDIES else did_you_mean(str(value), names)

    message = mistake["msg"].removeprefix("Value error, ").rstrip(".")
    message = re.sub(r"^\w+ should ", "must ", message.replace("Field required", "must be set"))
    if kind == "model_type":
        message = f"{key} must be a table"
    elif key:
        separator = " " if message.startswith("must ") else ": "
        message = f"{key}{separator}{message}"
    return f"{message}{got}. {remedy}".rstrip()


def one_of(*names: str) -> AfterValidator:
    """Accept these names, and the user's `module:object`."""

    def check(value: str) -> str:
        if value not in names and not all(value.partition(":")):
            known = f"{', '.join(names)} or your module:object"
            raise PydanticCustomError("name", "must be {known}", {"known": known, "names": names})
        return value

    return AfterValidator(check)


def _read_count(value: Any, info: ValidationInfo, least: int = 1) -> int:
    return parse_count(value, str(info.field_name), least)


def _read_bytes(value: Any, info: ValidationInfo) -> int:
    name = str(info.field_name).removesuffix("_bytes").replace("_", "-")
    return parse_bytes(value, name)


Count = Annotated[int, BeforeValidator(_read_count)]
Bytes = Annotated[int, BeforeValidator(_read_bytes)]
CountOrZero = Annotated[int, BeforeValidator(partial(_read_count, least=0))]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
