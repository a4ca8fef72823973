"""The declared result: what a file must hold, metrics that users name, and columns."""

import math

import pytest
from pydantic import ValidationError

from sweep.config.metrics import final_column
from sweep.trial.result import COLUMNS, FIELDS, Result, is_metric
from sweep.trial.status import Cause, State
from tests.fakes.results import result_of

ID = "0123456789ab"


def test_a_result_has_its_own_types():
    document = result_of(ID, state="FAILED", cause="diverged", final_valid_loss=None)
    result = Result.model_validate(document)
    assert (result.state, result.cause) == (State.FAILED, Cause.DIVERGED)
    assert result.as_document() == document


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": "0.1"},
        {"steps": 0},
        {"steps": 1.5},
        {"batch_size": None},
        {"attempts": True},
        {"state": "DONE"},
        {"cause": "unknown"},
        {"final_valid_accuracy": "high"},
        {"execution": "cpu"},
    ],
)
def test_a_value_of_another_type_is_refused(changes):
    with pytest.raises(ValidationError, match="1 validation error"):
        Result.model_validate(result_of(ID) | changes)


@pytest.mark.parametrize(
    "name", [name for name in FIELDS if Result.model_fields[name].is_required()]
)
def test_a_result_without_one_of_its_fields_is_refused(name):
    document = result_of(ID)
    del document[name]
    with pytest.raises(ValidationError, match=name):
        Result.model_validate(document)


def test_metrics_that_a_user_names_have_keys_of_their_own_in_files_and_tables():
    names = ("accuracy", "top-1/acc.5")
    document = result_of(ID) | {final_column(name): 0.5 for name in names}
    result = Result.model_validate(document)
    assert result.final_valid == dict.fromkeys(names, 0.5)
    assert result.as_document() == document
    columns = [final_column(name) for name in names]
    assert [name for name in result.as_row() if name not in COLUMNS] == columns
    assert [name for name in document if is_metric(name)] == columns


def test_a_complete_trial_has_a_loss_or_another_metric():
    document = result_of(ID, final_valid_loss=None)
    Result.model_validate(document | {"final_valid_accuracy": 0.5})
    for changes in ({}, {"final_valid_accuracy": None}):
        with pytest.raises(ValidationError, match="evaluated"):
            Result.model_validate(document | changes)


def test_keys_of_later_versions_are_ignored():
    document = result_of(ID)
    assert Result.model_validate(document | {"seconds_later": "?"}).as_document() == document


def test_numbers_that_are_not_finite_are_null():
    changes = {"initial_valid_loss": math.nan, "final_valid_accuracy": math.inf}
    result = Result.model_validate(result_of(ID) | changes)
    assert result.initial_valid_loss is None and result.final_valid == {"accuracy": None}


def test_every_field_has_a_meaning_and_a_type_that_a_table_can_hold():
    assert all(column.meaning for column in FIELDS.values())
    kinds = {name: column.kind for name, column in COLUMNS.items()}
    assert (kinds["steps"], kinds["warmup_steps"]) == ("int64", "int64")
    assert (kinds["epochs"], kinds["learning_rate"]) == ("float64", "float64")
    assert (kinds["state"], kinds["has_looks"], kinds["execution"]) == ("object",) * 3


def test_means_are_those_of_numbers():
    assert {COLUMNS[name].kind for name, column in COLUMNS.items() if column.is_mean} == {"float64"}
