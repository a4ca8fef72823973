"""Every setting is declared once, and the rest is derived from the declaration."""

import pytest

from sweep.config.experiment import Experiment
from sweep.config.settings import merge_settings, parse_settings, settings_of
from sweep.config.trial import Execution, Services
from sweep.errors import SweepError

ALL = [s for table in (Experiment, Execution, Services) for s in settings_of(table)]


def test_no_two_settings_share_a_name_and_all_have_a_help_text():
    assert len({setting.name for setting in ALL}) == len(ALL)
    assert all(setting.field.description for setting in ALL)


def test_settings_that_the_user_chose_are_told_from_defaults():
    fields = merge_settings(Execution, {}, {"device_memory": "1GiB"})
    execution = parse_settings(Execution, fields, "flags")
    assert execution.device_memory_bytes == 2**30 and execution.zero == 0
    assert execution.model_fields_set == {"device_memory_bytes"}


def test_a_wrong_value_is_refused_by_name():
    with pytest.raises(SweepError, match="zero"):
        parse_settings(Execution, {"zero": 4}, "flags")
