"""A cache of its own for every test of data, and text to fill it with."""

import sys
from pathlib import Path

import pytest

STORIES = [
    f"Story {i} is about a cat that had {i * 7} hats.\nIt met the dog number {i % 13}. “Hello!”"
    for i in range(200)
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SWEEP_CACHE", str(folder))
    return folder


@pytest.fixture
def stories() -> list[str]:
    return list(STORIES)


@pytest.fixture
def story_file(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text("".join(f"{story}\n<|endoftext|>\n" for story in STORIES), encoding="utf-8")
    return path


@pytest.fixture
def python() -> list[str]:
    """The start of a command that runs a script in a fresh interpreter with warnings as errors."""
    return [sys.executable, "-W", "error", "-c"]
