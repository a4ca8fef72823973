"""Trials on several devices: references to compare with, and workloads that cause faults."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Run the trial on some devices at a stage, once for all tests, which must not change it."""
    from tests.training.several_devices import complete, planned  # more than a bare worker has

    path, trials = tmp_path_factory.mktemp("undisturbed"), {}

    def run(devices, zero):
        name = f"{devices}-{zero}"
        if name not in trials:
            trials[name] = complete(planned(path / name, devices, zero))
        return trials[name]

    return run


@pytest.fixture(scope="session")
def alone(undisturbed):
    trial = undisturbed(1, 0)
    assert 0 < trial.read_result().clipped_step_fraction < 1
    return trial


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """Make this folder importable, in workers too: `custom:Name`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("FAULTS_FOLDER", str(tmp_path))
