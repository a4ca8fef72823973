"""What every test stands on: a cache of its own, no telemetry, and a little real-looking text."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before any test module imports mlflow
# Before any imports torch: several train at a time on the same cores (docs/performance.md).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

REAL_TEXT = Path(__file__).parents[2] / "shared" / "data" / "tinystories"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, and say so, what needs a GPU where there is none."""
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if wanted:
        import torch

        for item in wanted if not torch.cuda.is_available() else ():
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
    """A folder with train.txt and valid.txt: the real sample where it is at hand, else made up."""
    if (REAL_TEXT / "train.txt").is_file() and (REAL_TEXT / "valid.txt").is_file():
        return REAL_TEXT
    folder = tmp_path_factory.mktemp("sample-text")
    for name, stories, seed in (("train.txt", 2000, 0), ("valid.txt", 100, 1)):
        (folder / name).write_text(_made_up_stories(stories, seed), encoding="utf-8")
    return folder


def _made_up_stories(count: int, seed: int) -> str:
    rng = random.Random(seed)
    names, verbs = ("Lily", "Tom", "Mia", "Ben", "Sue"), ("saw", "found", "liked", "lost", "made")
    sizes, things = ("big", "small", "red", "old", "shiny"), ("ball", "cat", "boat", "cake", "kite")
    stories = []
    for _ in range(count):
        sentences = (
            f"{rng.choice(names)} {rng.choice(verbs)} a {rng.choice(sizes)} {rng.choice(things)}."
            for _ in range(rng.randint(3, 12))
        )
        stories.append(" ".join(sentences))
    return "\n<|endoftext|>\n".join(stories) + "\n<|endoftext|>\n"
