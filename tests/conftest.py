"""Fixtures of all tests: a separate cache, and no telemetry."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sweep.tracking import store
from sweep.trial.files import replacing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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


CHROMIUM_OPTIONS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture
def browser() -> "Iterator[Browser]":
    """Headless Chromium; the test is skipped without it."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not program:
        pytest.skip("chromium must be on the PATH, or the variable CHROMIUM must name it")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=CHROMIUM_OPTIONS.split())
        yield browser
        browser.close()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let programs that a test starts take SIGINT, even if this run of pytest ignores it."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.fixture(scope="session", autouse=True)
def sweep_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point the cache to a folder of this session, and hide the user's SWEEP_ variables."""
    cache = tmp_path_factory.mktemp("sweep-cache")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SWEEP_")]:
            patch.delenv(name)
        patch.setenv("SWEEP_CACHE", str(cache))
        yield cache


@pytest.fixture(scope="session", autouse=True)
def create_database(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Path], None]]:
    """Create MLflow's tables, which takes seconds, once for the sweeps that this process runs.

    Programs that a test starts create their own. The value is the function that creates them.
    """
    template = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create = store.create_database

    def copy_database(path: Path) -> None:
        if not template.exists():
            create(template)
        with replacing(path) as part:
            shutil.copyfile(template, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "create_database", copy_database)
        yield create
