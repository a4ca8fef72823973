"""Fake sweeps for the tests of this folder."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKES = runpy.run_path(str(Path(__file__).with_name("fake_sweeps.py")))


@pytest.fixture(scope="session")
def write_fake_sweep() -> Callable[..., Any]:
    """Return the function that writes a sweep folder with made-up curves."""
    return FAKES["write_fake_sweep"]  # type: ignore[no-any-return]
