"""The keywords of the Python functions are the settings, and take what the settings take."""

import typing
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from types import NoneType, UnionType

import pytest

import sweep
from sweep.config.execution import Execution, Services
from sweep.config.experiment import Experiment
from sweep.config.settings import settings_of
from sweep.orchestration.executors.build import EXECUTORS, AllOverrides
from sweep.orchestration.memory import forecast_memory, probe_memory

TABLES = (Experiment, Execution, Services, *(executor.settings for executor in EXECUTORS))
ANNOTATIONS = {
    **{name: field.annotation for name, field in Experiment.model_fields.items()},
    **{setting.name: setting.field.annotation for t in TABLES for setting in settings_of(t)},
    # They take more than their annotations say: functions and classes are named by module:object.
    "lr": str | float,
    "answer": typing.Literal["which", "order"] | dict,  # a flag, and the table that holds it
    "model": str | Callable[..., typing.Any] | dict,
    "train": str | Callable[..., typing.Any],
    "workload": str | Callable[..., typing.Any] | dict,
}
TYPES = typing.get_type_hints(AllOverrides)
SCALARS = {int: {int, str}, float: {float, str}, str: {str}, bool: {bool}}  # a number may be a text


def accepted_types(annotation):
    """Return the types that a setting takes: texts for numbers and lists, mappings for tables."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return accepted_types(typing.get_args(annotation)[0])
    if origin in (typing.Union, UnionType):
        return set().union(*map(accepted_types, typing.get_args(annotation)))
    if origin in (typing.Literal, Callable):
        return {annotation}
    if origin is tuple:
        inner = accepted_types(typing.get_args(annotation)[0])
        return {str, Sequence[reduce(or_, inner)]}
    if annotation is NoneType:
        return set()
    return SCALARS.get(annotation, {Mapping[str, typing.Any]})


def test_each_setting_has_a_type_except_the_name_of_the_file():
    assert TYPES.keys() == ANNOTATIONS.keys() - {"name"}


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_setting_has_the_types_that_it_takes_and_none(name):
    assert {*typing.get_args(TYPES[name])} == {*accepted_types(ANNOTATIONS[name]), NoneType}


def test_the_functions_that_take_settings_are_typed_by_them():
    for function in (sweep.run_sweep, sweep.plan_sweep, forecast_memory, probe_memory):
        assert typing.get_type_hints(function)["settings"] == typing.Unpack[AllOverrides]
