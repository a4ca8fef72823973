"""Memory limits and out-of-memory kills of this process's cgroups, in versions 2 and 1."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Layout(NamedTuple):
    """File names of one cgroup version."""

    limit: str
    used: str
    reclaimable: str  # key of memory.stat
    events: str


V2 = Layout("memory.max", "memory.current", "inactive_file", "memory.events")
V1 = Layout(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"
)


def oom_kills(root: Path = ROOT, own: Path = OWN) -> int:
    """Return how many processes of this cgroup the kernel killed for memory; 0 if unknown."""
    for folder, layout in _groups(root, own):
        if (count := _pairs(folder / layout.events).get("oom_kill")) is not None:
            return count
    return 0


def available_in_cgroups(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the bytes that may still be allocated; page cache counts as free. None: no limit."""
    available = []
    for folder, layout in _groups(root, own):
        try:
            limit = int((folder / layout.limit).read_text())
            used = int((folder / layout.used).read_text())
        except (OSError, ValueError):  # "max": no limit
            continue
        reclaimable = _pairs(folder / "memory.stat").get(layout.reclaimable, 0)
        available.append(limit - used + reclaimable)
    return max(0, min(available)) if available else None


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, Layout]]:
    """Yield this process's group and all that contain it, innermost first."""
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


def _pairs(path: Path) -> dict[str, int]:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) == 2}
    except (OSError, ValueError):
        return {}
