"""A database of Optuna that is damaged, locked or absent: the tuned sweep ends as a whole one."""

import random
import shutil
from threading import Timer

import optuna
import pytest

from sweep.orchestration.tuning import named_trials
from sweep.trial.folder import SweepFolder
from tests.faults.damage import WRONG_BYTES, damage, lock_database
from tests.orchestration.test_tuning import losses_of, reported_rates, rows_of, tune_in

CASES = ["locked", *WRONG_BYTES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A sweep that is interrupted while it tunes, and what an undisturbed one gives."""
    whole = tune_in(tmp_path_factory.mktemp("whole") / "sweep")
    rows = [*rows_of(whole, "tune"), *rows_of(whole, "final")]
    cut = tune_in(tmp_path_factory.mktemp("cut") / "sweep", stop_at=8)
    return cut.folder.path, reported_rates(whole), losses_of(whole, rows)


@pytest.mark.fault("database of studies damaged, locked or absent")
@pytest.mark.slow
@pytest.mark.parametrize("fault", CASES)
def test_a_database_of_studies_decides_nothing(folders, tmp_path, caplog, count, fault):
    cut, rates, losses = folders
    folder = SweepFolder(tmp_path / "sweep")
    shutil.copytree(cut, folder.path)
    path = folder.path / "optuna.db"
    if fault == "locked":
        connection = lock_database(path)
        Timer(8, connection.close).start()
    else:
        damage(path, fault, random.Random(fault))
    again = tune_in(folder.path)
    assert again.exit_code == 0 and reported_rates(again) == rates
    assert losses_of(again, [*rows_of(again, "tune"), *rows_of(again, "final")]) == losses
    if fault in ("locked", "truncated", "zeros", "junk"):
        assert ("locked" if fault == "locked" else "damaged") in caplog.text
    storage = f"sqlite:///{path}"
    names = optuna.get_all_study_names(storage)
    studies = [optuna.load_study(study_name=name, storage=storage) for name in names]
    stored = [trial_id for study in studies for trial_id in named_trials(study)]
    planned = sorted(row.id for row in rows_of(again, "tune"))
    if fault.startswith("flip"):  # a changed text is not noticed, and decides nothing
        assert set(planned) <= {*stored}
    else:
        assert sorted(stored) == planned
    count("recovered")
