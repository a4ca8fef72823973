"""Policies, executors and checks of other packages, which register them as entry points."""

import functools
from importlib import metadata
from typing import Any

from sweep.errors import user_code


@functools.cache
def load_extensions(group: str) -> tuple[Any, ...]:
    """Load the objects that installed packages register in a group, such as sweep.policies."""
    loaded = []
    for entry in metadata.entry_points(group=group):
        with user_code(f"the entry point {entry.name!r} of {group} must be importable"):
            loaded.append(entry.load())
    return tuple(loaded)
