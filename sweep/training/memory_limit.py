"""Memory limits and out-of-memory kills of this process's cgroups, in versions 2 and 1."""

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# File names by version: limit, use, kills, and the key of reclaimable bytes in memory.stat.
V2 = ("memory.max", "memory.current", "memory.events", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")


def oom_kills(root: Path = ROOT, own: Path = OWN) -> int:
    """Return how many processes of this cgroup the kernel killed for memory; 0 if unknown."""
    counts = (_pairs(group / names[2]).get("oom_kill") for group, names in _groups(root, own))
    return next((count for count in counts if count is not None), 0)


def available_in_cgroups(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the bytes that may still be allocated; page cache counts as free. None: no limit."""
    available = []
    for group, (limit, used, _, reclaimable) in _groups(root, own):
        try:
            free = int((group / limit).read_text()) - int((group / used).read_text())
        except (OSError, ValueError):  # "max": no limit
            continue
        available.append(free + _pairs(group / "memory.stat").get(reclaimable, 0))
    return max(0, min(available)) if available else None


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield this process's group and all that contain it, innermost first, with file names."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (root / "memory", V1) if controllers else (root, V2)
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield folder, names


def _pairs(path: Path) -> dict[str, int]:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) == 2}
    except (OSError, ValueError):
        return {}
