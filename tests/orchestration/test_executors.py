"""The choice of an executor, and settings that do not go with it."""

import pytest

from sweep.config.execution import Execution, Services
from sweep.config.settings import settings_of
from sweep.errors import SweepError
from sweep.orchestration.executors.build import (
    EXECUTORS,
    build_executor,
    executors_of,
    find_executor,
    refuse_unusable_services,
    services_table,
)
from sweep.orchestration.request import read_request
from sweep.trial.folder import SweepFolder

ELSEWHERE = [executor for executor in EXECUTORS if executor.is_elsewhere]
OTHERS = [  # an executor, and a setting of another one
    pytest.param(executor, setting, other, id=f"{executor.name}-{setting.name}")
    for executor in EXECUTORS
    for other in EXECUTORS
    for setting in settings_of(other.settings)
    if executor is not other
]


@pytest.mark.parametrize(("executor", "setting", "other"), OTHERS)
def test_a_setting_of_another_executor_is_refused(executor, setting, other):
    services = services_table()(executor=executor.name, **{setting.path[0]: "x"})
    expected = f"{setting.name} needs the executor {other.name}, got {executor.name}"
    with pytest.raises(SweepError, match=expected):
        refuse_unusable_services(services)


@pytest.mark.parametrize("executor", ELSEWHERE, ids=lambda executor: executor.name)
def test_a_device_with_a_number_is_refused_on_other_machines(executor, tmp_path):
    services = services_table()(executor=executor.name)
    with pytest.raises(SweepError, match="Leave the number out"):
        build_executor(services, Execution(device="cuda:1"), SweepFolder(tmp_path))


@pytest.mark.parametrize(("name", "hint"), [("rya", " Did you mean 'ray'?"), (5, "")])
def test_another_name_is_refused_with_the_names_of_all(name, hint):
    with pytest.raises(SweepError) as caught:
        read_request("quick", {"executor": name})
    expected = f"settings: executor must be 'local', 'ray' or 'slurm', got {name!r}.{hint}"
    assert str(caught.value) == expected


def test_by_default_trials_run_on_the_machine_of_the_command():
    assert not find_executor(Services().executor).is_elsewhere


def test_the_settings_of_a_command_have_those_of_all_executors():
    names = [setting.name for setting in settings_of(services_table())]
    others = [s.name for executor in EXECUTORS for s in settings_of(executor.settings)]
    assert names == [*(setting.name for setting in settings_of(Services)), *others]
    values = {"budget": 1, "optimizer": {}, "executor": "ray", "slurm": "x"}
    assert executors_of(values) == EXECUTORS
