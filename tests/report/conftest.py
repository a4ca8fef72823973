"""The fake sweeps of tests/analysis, for the tests of the report."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAKES = runpy.run_path(str(Path(__file__).parents[1] / "analysis" / "fake_sweeps.py"))


@pytest.fixture(scope="session")
def write_fake_sweep() -> Callable[..., Any]:
    """Return the function that writes a sweep folder with made-up curves."""
    return FAKES["write_fake_sweep"]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def mixed_sweep(tmp_path_factory: pytest.TempPathFactory, write_fake_sweep: Any) -> Path:
    """Two policies and three seeds, with diverged, failed, waiting and running trials."""
    ends = {(4, 2): "WAITING", (8, 1): "RUNNING", (32, 0): "out_of_memory", (64, 0): "diverged"}

    def outcome(row: Any) -> str:
        return ends.get((row.batch_size, row.seed if row.policy == "fixed" else -1), "COMPLETE")

    path: Path = tmp_path_factory.mktemp("mixed") / "mixed"
    write_fake_sweep(path, lrs=("1e-3", "sqrt"), seeds=3, outcome=outcome)
    return path
