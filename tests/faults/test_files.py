"""Wrong bytes in every kind of file: the numbers stay the same, or an error names the file.

The kinds are those of the tables in sweep.trial.folder, so that a new one cannot be forgotten.
"""

import random
import shutil
from fnmatch import fnmatch

import pytest

from sweep.errors import SweepError
from sweep.orchestration.executors.build import find_executor
from sweep.plan.plan import load_plan
from sweep.tracking.mirror import Mirror
from sweep.trial.damage import SWEEP_FILES, TRIAL_FILES, find_damage
from tests.faults.damage import WRONG_BYTES, damage, hash_files, parameters

OTHER = "another trial's"

# The files that a sweep has in each state; stop.json and a tokenizer are in neither.
HELD = {
    "interrupted": ("config.json", "state.json", "lease.json", "metrics.jsonl", "checkpoint-*"),
    "finished": ("config.json", "state.json", "lease.json", "metrics.jsonl", "result.json"),
}
HELD["interrupted"] += ("log.txt", "plan.json")
HELD["finished"] += ("log.txt", "valid_losses.npy", "weights.safetensors")
HELD["finished"] += ("plan.json", "timing.json", "tracking.json", "mlflow.db")


def kind_of(path, folder):
    """Return the pattern of a file in the tables; None if it has none."""
    parts = path.relative_to(folder).parts
    table, names = (TRIAL_FILES, parts[2:3]) if parts[0] == "trials" else (SWEEP_FILES, parts)
    matches = (p for p in table if fnmatch(names[0] + "/*" * (len(names) > 1), p))
    return next(matches, None)


@pytest.mark.fault("unknown kind of file")
@pytest.mark.parametrize("state", ["planned", *HELD])
def test_every_file_is_of_a_known_kind(scene, state):
    folder = scene.enter(state).path
    assert [
        path for path in folder.rglob("*") if path.is_file() and not kind_of(path, folder)
    ] == []


def cases():
    for state, kinds in HELD.items():
        for kind in kinds:
            for fault in (*WRONG_BYTES, OTHER):
                is_possible = fault != OTHER or kind in TRIAL_FILES
                is_kept = (kind, fault) == ("weights.safetensors", "absent")  # need not be kept
                if is_possible and not is_kept:
                    yield state, kind, fault


TIMES = "timing.json"  # other machines write none
SHORT = random.Random(0).sample([case for case in cases() if case[1] != TIMES], 12)


@pytest.mark.fault("unknown kind of file")
def test_every_kind_of_file_that_is_read_is_damaged_here(scene):
    tables = (TRIAL_FILES | SWEEP_FILES).items()
    checked, damaged = {kind for kind, check in tables if check}, {*HELD["finished"]}
    damaged |= {*HELD["interrupted"]}
    present = set()
    for state in HELD:
        folder = scene.enter(state).path
        present |= {kind_of(path, folder) for path in folder.rglob("*") if path.is_file()}
    assert present & checked <= damaged
    absent = {"stop.json", "tokenizer.json", "check.json"}  # from these sweeps
    if find_executor(scene.services.executor).is_elsewhere:
        absent.add(TIMES)
    assert checked - present == absent


@pytest.mark.fault("wrong bytes in a file")
@pytest.mark.parametrize(("state", "kind", "fault"), parameters(cases(), SHORT))
def test_wrong_bytes_change_no_number(scene, count, state, kind, fault):
    rng = random.Random(f"{state} {kind} {fault}")
    folder = scene.enter(state)
    first, second = folder.trials()
    base = folder.path if kind in SWEEP_FILES else first.path
    paths = [
        path for path in base.rglob("*") if path.is_file() and kind_of(path, folder.path) == kind
    ]
    path = rng.choice(sorted(paths))
    if fault == OTHER:
        name = path.relative_to(first.path)
        if kind == "checkpoint-*":
            name = next(second.path.glob(f"checkpoint-*/{path.name}")).relative_to(second.path)
        shutil.copy(second.path / name, path)
    else:
        damage(path, fault, rng)
    before = hash_files(folder.path)
    try:
        assert scene.run() == 0
    except (SweepError, OSError) as refusal:
        assert str(path) in str(refusal), refusal
        assert hash_files(folder.path) == before
        count("refused")
        return
    named = find_damage(folder)
    if state == "finished" and named:
        assert all(str(path) in sentence for sentence in named)
        shutil.copy(scene.kept(state, path), path)
    if kind == "mlflow.db":  # only a pass of the mirror opens it
        assert Mirror(folder, load_plan(folder), None).deliver() == ""
    # A number that changed in the store is not noticed there, and is nowhere read.
    scene.judge(has_points=(kind, fault[:4]) != ("mlflow.db", "flip"))
    count("noticed" if named else "recovered")
