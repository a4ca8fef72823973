"""Code of other packages, which they name by entry points."""

from importlib import metadata
from typing import Any

from sweep.errors import user_code


def load_extensions(group: str) -> dict[str, Any]:
    """Import the objects in a group of entry points; return them by name, sorted.

    Raises:
        SweepError: If one of them cannot be imported.
    """
    extensions = {}
    for entry_point in sorted(metadata.entry_points(group=group)):
        package = entry_point.dist.name if entry_point.dist else "an unknown package"
        with user_code(f"{entry_point.value} of {package} ({group}) must be importable"):
            extensions[entry_point.name] = entry_point.load()
    return extensions
