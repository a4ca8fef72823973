"""A sweep of 2,000 trials needs no more memory and descriptors at its end than at its start."""

import time
from contextlib import suppress

import psutil
import pytest

from sweep.trial.damage import find_damage
from tests.orchestration.clusters import IMPORTED, Command, plan_trials, states

TRIALS = 2000
SPARE_BYTES = 64 * 2**20  # what the command remembers of 1,000 trials
SPARE_FILES = 8  # those of a trial at a moment


def measure(pid):
    """Return resident bytes and open descriptors of a process and of its children."""
    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    sizes = [(process.memory_info().rss, process.num_fds()) for process in family]
    return tuple(map(sum, zip(*sizes, strict=True)))


@pytest.mark.fault("2,000 trials")
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_and_descriptors_stay_flat(tmp_path, monkeypatch, count):
    monkeypatch.setenv("PYTHONPATH", IMPORTED)
    fields = {"batches": [4, 8], "budget": 80, "seeds": TRIALS // 2}
    run = Command(plan_trials(tmp_path, "quadratic", **fields), "--device", "cpu")
    run.start()
    quarters = [[(0, 0)] for _ in range(5)]  # by the share of the trials that have finished
    while run.process.poll() is None:
        finished = len(list(run.folder.path.glob("trials/*/result.json")))
        with suppress(psutil.Error):  # a process ended meanwhile
            quarters[4 * finished // TRIALS].append(measure(run.process.pid))
        time.sleep(1.0)
    assert run.wait() == 0
    assert len(run.folder.trials()) == TRIALS and len(states(run.folder)) == 1
    assert find_damage(run.folder) == []
    peaks = [tuple(map(max, zip(*quarter, strict=True))) for quarter in quarters]
    print("bytes and descriptors in each quarter, and while the report is written:", peaks)
    (early, files), (late, more_files) = peaks[1], peaks[3]
    assert min(early, late) > 0
    assert late - early < SPARE_BYTES and more_files - files <= SPARE_FILES
    count("recovered", TRIALS)
