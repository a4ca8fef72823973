"""Memory limits and out-of-memory kills of this process's cgroups (version 2)."""

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def oom_kills(root: Path = ROOT, own: Path = OWN) -> int:
    """Return how many processes of this cgroup the kernel killed for memory; 0 if unknown."""
    counts = (_pairs(group / "memory.events").get("oom_kill") for group in _groups(root, own))
    return next((count for count in counts if count is not None), 0)


def available_in_cgroups(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the bytes that may still be allocated; page cache counts as free. None: no limit."""
    available = []
    for group in _groups(root, own):
        try:
            limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
            free = int(limit) - int(used)
        except (OSError, ValueError):  # "max": no limit
            continue
        available.append(free + _pairs(group / "memory.stat").get("inactive_file", 0))
    return max(0, min(available)) if available else None


def _groups(root: Path, own: Path) -> Iterator[Path]:
    """Yield this process's group and all that contain it, innermost first."""
    for line in own.read_text().splitlines() if own.exists() else ():
        if line.startswith("0::"):
            group = root / line.removeprefix("0::/")
            yield from (path for path in (group, *group.parents) if path.is_relative_to(root))


def _pairs(path: Path) -> dict[str, int]:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) == 2}
    except (OSError, ValueError):
        return {}
