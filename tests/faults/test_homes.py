"""Folders that libraries trip over: names that are no plain addresses, no home, and no locks."""

import json
import os
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from sweep.analysis.results import load_sweep
from sweep.tracking.store import connect, recorded_uri, ui_command
from sweep.trial.damage import find_damage
from sweep.trial.files import read_json
from sweep.trial.folder import SweepFolder
from tests.faults.damage import parameters
from tests.faults.test_strangers import sweep
from tests.servers import Service, is_healthy, load_stored_sweep

RUN = (
    "run",
    "quadratic",
    "--budget",
    "2k",
    "--batches",
    "2,4",
    "--device",
    "cpu",
    "--yes",
    "--quiet",
)
TUNED = ("--lr", "tuned", "--tune-centre", "0.05", "--seeds", "1")
NAMES = ("feature%2Fbranch/r", "what?x=1 &#;@", "a{SCHEMA_VERSION}b%", "{ü} 100%[]'~$+")
NO_HOME = {"HOME": "/proc/none", "XDG_CACHE_HOME": ""}
INJECT = Path(__file__).parent / "inject"


@pytest.mark.fault("name that another program reads")
@pytest.mark.parametrize("name", parameters(NAMES, ()))
def test_a_sweep_lies_in_its_folder_whatever_its_name(tmp_path, count, name):
    code, _, stderr = sweep(*RUN, *TUNED, "--out", name, folder=tmp_path)
    assert code == 0, stderr
    folder = SweepFolder(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]
    assert [path.name for path in (tmp_path / name).parent.iterdir()].count(folder.path.name) == 1
    for base, table in (("mlflow.db", "runs"), ("optuna.db", "trials")):
        database = sqlite3.connect(f"{(folder.path / base).as_uri()}?mode=ro", uri=True)
        assert database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] >= 2
        database.close()
    artifacts = [path.name for path in (folder.path / "mlartifacts").rglob("config.json")]
    assert len(artifacts) == len(folder.trials())
    assert sweep(*RUN, *TUNED, "--out", name, folder=tmp_path)[0] == 0  # there is nothing to do
    assert sweep("report", name, folder=tmp_path)[::2] == (0, "")
    uri = recorded_uri(folder, read_json(folder.tracking_path))
    stored = load_stored_sweep(uri, "quadratic").trials
    assert stored.equals(load_sweep(folder.path).trials)
    service = Service(tmp_path)
    try:
        command = ui_command(folder, uri, service.port)
        service.launch(command, lambda: is_healthy(f"{service.uri}/health"))
        names = {stored.name for stored in connect(service.uri).search_experiments()}
        assert "quadratic" in names
    finally:
        service.die()
    (tmp_path / "log").unlink()
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]
    count("recovered")


@pytest.mark.fault("wrong bytes in a file")
@pytest.mark.slow
def test_a_trial_whose_curve_is_lost_is_trained_again_by_the_remedy(tmp_path, count):
    assert sweep(*RUN, "--out", "s", folder=tmp_path)[0] == 0
    folder = SweepFolder(tmp_path / "s")
    trial = folder.trials()[0]
    before = trial.read_result().final_valid_loss
    trial.metrics_path.write_text("lost")
    (folder.path / "tracking.json").unlink()
    sentences = find_damage(folder)
    (path,) = re.findall(r"remove (\S+) and run it again", sentences[0])
    assert Path(path) == trial.path.relative_to(tmp_path) or Path(path) == trial.path
    shutil.rmtree(trial.path)
    assert sweep(*RUN, "--out", "s", folder=tmp_path)[0] == 0
    assert trial.read_result().final_valid_loss == before
    assert find_damage(folder) == []
    count("recovered")


@pytest.mark.fault("home that cannot be written")
@pytest.mark.parametrize("words", [RUN, ("data", "prepare", "synthetic")])
def test_without_a_home_a_command_names_the_cache(tmp_path, count, words):
    code, _, stderr = sweep(*words, folder=tmp_path, SWEEP_CACHE="", **NO_HOME)
    assert code == 2 and "SWEEP_CACHE" in stderr and stderr.count("\n") == 1, stderr
    assert [*tmp_path.iterdir()] == []
    count("refused")


@pytest.mark.fault("home that cannot be written")
def test_the_doctor_names_a_cache_that_cannot_be_written(tmp_path, count):
    document = sweep("doctor", "--json", folder=tmp_path, SWEEP_CACHE="", **NO_HOME)[1]
    assert any("SWEEP_CACHE" in problem for problem in json.loads(document)["problems"])
    count("noticed")


@pytest.mark.fault("home that cannot be written")
@pytest.mark.slow
def test_a_cache_is_all_that_a_machine_without_a_home_needs(tmp_path, count):
    (tmp_path / "texts.csv").write_text("text\n" + "".join(f"document {n}\n" for n in range(99)))
    home = {"SWEEP_CACHE": str(tmp_path / "cache"), **NO_HOME}
    for words in (RUN, ("data", "prepare", "texts.csv", "--tokenizer", "bytes")):
        code, _, stderr = sweep(*words, folder=tmp_path, **home)
        assert code == 0, stderr
    count("recovered")


@pytest.mark.fault("file system without locks")
@pytest.mark.slow
@pytest.mark.parametrize("action", ["ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_refused_in_one_sentence(tmp_path, count, action):
    fault = {
        "process": "command",
        "event": "fcntl.flock",
        "path": r"sweep\.lock",
        "lasts": True,
        "action": action,
        "hits": str(tmp_path / "hits"),
        "number": 1,
    }
    path = os.pathsep.join([str(INJECT), str(Path(__file__).parents[2])])
    words = (*RUN, "--out", "s")
    environment = {"FAULT": json.dumps(fault), "PYTHONPATH": path}
    code, _, stderr = sweep(*words, folder=tmp_path, **environment)
    assert code == 2 and "locks (flock)" in stderr and stderr.count("\n") == 1, stderr
    assert (tmp_path / "hits").exists() and not (tmp_path / "s").exists()
    assert sweep(*words, folder=tmp_path)[0] == 0
    count("refused")
