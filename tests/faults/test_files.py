"""Every kind of file with wrong bytes: training ends with the same numbers, or says what is wrong.

The kinds are those of the tables in sweep.trial.folder, so that a new one cannot be forgotten.
"""

import random
import shutil
from fnmatch import fnmatch

import pytest

from sweep.errors import SweepError
from sweep.trial.files import sha256_of_file
from sweep.trial.folder import SWEEP_FILES, TRIAL_FILES
from sweep.trial.verify import find_damage
from tests.faults.judge import Scene, flip

FAULTS = [f"flip {number}" for number in range(20)]
FAULTS += ["truncated", "zeros", "junk", "empty", "another trial's", "absent", "a folder"]
STATES = ("interrupted", "finished")
HARMLESS = {"log.txt", "lease.json", "sweep.lock"}  # and what `sweep report` writes again


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("files"))


def kind_of(path, folder):
    """Return the pattern of a file in the tables; None if it has none."""
    parts = path.relative_to(folder).parts
    table, names = (TRIAL_FILES, parts[2:3]) if parts[0] == "trials" else (SWEEP_FILES, parts)
    matches = (p for p in table if fnmatch(names[0] + "/*" * (len(names) > 1), p))
    return next(matches, None)


@pytest.mark.parametrize("state", ["planned", *STATES])
def test_every_file_is_of_a_known_kind(scene, state):
    folder = scene.enter(state).path
    assert [
        path for path in folder.rglob("*") if path.is_file() and not kind_of(path, folder)
    ] == []


def damage(path, fault, rng):
    other = path.read_bytes()
    if fault == "another trial's":
        return  # done by the caller
    path.unlink()
    if fault.startswith("flip"):
        path.write_bytes(other)
        flip(path, rng.randrange(8 * len(other)))
    elif fault == "truncated":
        path.write_bytes(other[: rng.randrange(len(other))])
    elif fault in ("zeros", "empty"):
        path.write_bytes(bytes(len(other) if fault == "zeros" else 0))
    elif fault == "junk":
        path.write_bytes(rng.randbytes(300))
    elif fault == "a folder":
        path.mkdir()


def tree(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "sweep.lock")
    return {path: sha256_of_file(path) for path in files}


def cases():
    for state in STATES:
        for kind in ("plan.json", "tracking.json", "mlflow.db", *TRIAL_FILES):
            if kind in ("stop.json", "tokenizer.json"):
                continue
            if (
                kind
                in (
                    "tracking.json",
                    "mlflow.db",
                    "result.json",
                    "valid_losses.npy",
                    "weights.safetensors",
                )
                and state == "interrupted"
            ):
                continue
            if kind == "checkpoint-*" and state == "finished":
                continue
            for fault in FAULTS:
                if fault == "another trial's" and kind not in TRIAL_FILES:
                    continue
                yield state, kind, fault


SHORT = random.Random(0).sample(list(cases()), 12)


@pytest.mark.fault("wrong bytes in a file")
@pytest.mark.parametrize(
    ("state", "kind", "fault"),
    [pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow) for case in cases()],
)
def test_wrong_bytes_change_no_number(scene, count, state, kind, fault):
    rng = random.Random(f"{state} {kind} {fault}")
    folder = scene.enter(state)
    first, second = folder.trials()
    base = folder.path if kind in SWEEP_FILES else first.path
    paths = [
        path for path in base.rglob("*") if path.is_file() and kind_of(path, folder.path) == kind
    ]
    path = rng.choice(sorted(paths))
    if fault == "another trial's":
        name = path.relative_to(first.path)
        if kind == "checkpoint-*":
            name = next(second.path.glob(f"checkpoint-*/{path.name}")).relative_to(second.path)
        shutil.copy(second.path / name, path)
    damage(path, fault, rng)
    before = tree(folder.path)
    try:
        assert scene.run() == 0
    except (SweepError, OSError) as refusal:
        assert str(path) in str(refusal), refusal
        assert tree(folder.path) == before
        count("refused")
        return
    named = find_damage(folder)
    if state == "finished" and named:
        assert all(str(path) in sentence for sentence in named)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.copy(scene.kept(state, path), path)
    scene.judge()
    count("noticed" if named else "recovered")
