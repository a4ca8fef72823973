"""Trials on several devices: what they are compared with, and what disturbs them."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Run the trial on so many devices at a stage, once for all tests; it is not to be changed."""
    from tests.training.several_devices import complete, planned  # more than a bare worker has

    path, known = tmp_path_factory.mktemp("undisturbed"), {}

    def run(devices, zero):
        name = f"{devices}-{zero}"
        if name not in known:
            known[name] = complete(planned(path / name, devices, zero))
        return known[name]

    return run


@pytest.fixture(scope="session")
def alone(undisturbed):
    """The trial on one device."""
    trial = undisturbed(1, 0)
    assert 0 < trial.read_result()["clipped_step_fraction"] < 1
    return trial


@pytest.fixture
def meddling(tmp_path, monkeypatch):
    """Make what lies here importable, in workers too: `meddling:Name`, `tied:Tied`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("MEDDLING_FOLDER", str(tmp_path))
