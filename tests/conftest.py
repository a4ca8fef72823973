"""Fixtures of all tests: a separate cache, and no telemetry."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before any test module imports mlflow
# Before torch is imported: several trainings share the cores (docs/performance.md).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU on a machine without one."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests:
        import torch

        for item in gpu_tests if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def sweep_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point the cache to a folder of this session, and hide the user's SWEEP_ variables."""
    cache = tmp_path_factory.mktemp("sweep-cache")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SWEEP_")]:
            patch.delenv(name)
        patch.setenv("SWEEP_CACHE", str(cache))
        yield cache
