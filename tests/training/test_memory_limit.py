"""Limits of memory as the kernel's files state them, in both hierarchies."""

import pytest

from sweep.training.memory_limit import available_in_cgroups, oom_kills

GIB = 2**30


@pytest.fixture
def machine(tmp_path):
    """Return a root of cgroup files and this process's own line, to be filled in."""
    (tmp_path / "fs").mkdir()

    def make(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return tmp_path / "fs", tmp_path / "own"

    return make


def test_the_tightest_of_nested_groups_counts_and_page_cache_is_free(machine):
    places = machine(
        "0::/job/step\n",
        {
            "job/memory.max": 4 * GIB,
            "job/memory.current": 3 * GIB,
            "job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "job/step/memory.max": "max",
            "job/step/memory.current": GIB,
            "memory.max": 64 * GIB,
            "memory.current": GIB,
            "job/step/memory.events": "low 0\noom_kill 3\n",
        },
    )
    assert available_in_cgroups(*places) == 2 * GIB
    assert oom_kills(*places) == 3


def test_the_older_hierarchy_is_read_too(machine):
    places = machine(
        "5:cpu,cpuacct:/a\n4:memory:/a\n",
        {
            "memory/a/memory.limit_in_bytes": 2 * GIB,
            "memory/a/memory.usage_in_bytes": GIB,
            "memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        },
    )
    assert available_in_cgroups(*places) == GIB
    assert oom_kills(*places) == 1


def test_without_a_limit_none_is_made_up(machine):
    places = machine("0::/\n", {"memory.max": "max", "memory.current": 5})
    assert available_in_cgroups(*places) is None and oom_kills(*places) == 0
    assert available_in_cgroups(places[0], places[1] / "absent") is None
