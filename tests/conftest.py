"""Fixtures of all tests: a separate cache, no telemetry, and a sample of stories."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before any test module imports mlflow
# Before torch is imported: several trainings share the cores (docs/performance.md).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

REAL_TEXT = Path(__file__).parents[2] / "shared" / "data" / "tinystories"


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


@pytest.fixture(scope="session")
def sample_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with train.txt and valid.txt: TinyStories if present, else synthetic text."""
    if (REAL_TEXT / "train.txt").is_file() and (REAL_TEXT / "valid.txt").is_file():
        return REAL_TEXT
    folder = tmp_path_factory.mktemp("sample-text")
    for name, stories, seed in (("train.txt", 2000, 0), ("valid.txt", 100, 1)):
        (folder / name).write_text(_synthetic_stories(stories, seed), encoding="utf-8")
    return folder


def _synthetic_stories(count: int, seed: int) -> str:
    rng = random.Random(seed)
    words = (
        ("Lily", "Tom", "Mia", "Ben", "Sue"),
        ("saw", "found", "liked", "lost", "made"),
        ("a big", "a small", "a red", "an old", "a shiny"),
        ("ball.", "cat.", "boat.", "cake.", "kite."),
    )
    stories = [
        " ".join(rng.choice(kind) for _ in range(rng.randint(3, 12)) for kind in words)
        for _ in range(count)
    ]
    return "\n<|endoftext|>\n".join(stories) + "\n<|endoftext|>\n"
