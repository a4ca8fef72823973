"""What the kernel leaves this process's cgroups of memory, and whom it killed for want of it.

Both hierarchies, v2 and v1: a container's root, and nested groups as batch systems make them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")


class Layout(NamedTuple):
    """Names in one hierarchy."""

    limit: str
    used: str
    reclaimable: str  # key of memory.stat
    events: str


V2 = Layout("memory.max", "memory.current", "inactive_file", "memory.events")
V1 = Layout(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"
)


def oom_kills(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many processes of this cgroup the kernel killed for memory; 0 where unknown."""
    for folder, layout in _groups(root, own):
        count = _keyed(folder / layout.events).get("oom_kill")
        if count is not None:
            return count
    return 0


def available_in_cgroups(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the bytes that may still be taken; None without a limit. Page cache counts as free."""
    left = []
    for folder, layout in _groups(root, own):
        try:
            limit = int((folder / layout.limit).read_text())
            used = int((folder / layout.used).read_text())
        except (OSError, ValueError):  # "max": none
            continue
        left.append(limit - used + _keyed(folder / "memory.stat").get(layout.reclaimable, 0))
    return max(0, min(left)) if left else None


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, Layout]]:
    """Yield this process's group and all around it, the innermost first."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, layout = (root / "memory", V1) if controllers else (root, V2)
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield folder, layout


def _keyed(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}
