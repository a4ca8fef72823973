"""Addresses and passwords, a new database, MLflow's UI, and folders restored from a store."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sweep.analysis.results import load_sweep
from sweep.config.arms import Arm
from sweep.errors import SweepError, without_secrets
from sweep.tracking.addresses import (
    check_tracking_uri,
    mlflow_address,
    sqlite_address,
    sqlite_path,
    with_driver,
    without_password,
)
from sweep.tracking.store import (
    connect,
    default_tracking_uri,
    prepare_environment,
    recorded_uri,
    restore_sweep,
)
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.status import Cause, State
from sweep.trial.timing import write_timing
from tests.fakes.times import timing_of
from tests.servers import load_stored_sweep


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("postgresql://u:secret@host:5432/db", "postgresql://u@host:5432/db"),
        ("postgresql://:secret@host/db", "postgresql://host/db"),
        ("postgresql://u:se%40cret@host/db?sslmode=disable", "postgresql://u@host/db?sslmode=disable"),
        ("postgresql://host/db?user=u&password=secret", "postgresql://host/db?user=u"),
        ("postgresql://host/db?password=secret&user=u", "postgresql://host/db?user=u"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db"),
        ("http://u:secret@host:5000", "http://host:5000"),
        ("https://a-token@host", "https://host"),
        ("https://host/api?access_token=secret&x=1", "https://host/api"),
        ("https://host/api?user=secret", "https://host/api"),
        ("https://host/api?jwt=secret#token=secret", "https://host/api"),
        ("https://host/api;token=secret", "https://host/api"),
        ("mssql://host/db?odbc_connect=PWD%3Dsecret&driver=x", "mssql://host/db?driver=x"),
        ("postgresql://u@host/db", "postgresql://u@host/db"),
        ("sqlite:////home/a:b@c/x.db", "sqlite:////home/a:b@c/x.db"),
        ("mlruns", "mlruns"),
    ],
)  # fmt: skip
def test_an_address_is_shown_without_its_password(address, expected):
    assert without_password(address) == expected


@pytest.mark.parametrize("character", "@/?#'\"<> ")
@pytest.mark.parametrize("address", ["postgresql://u:{}@host/db", "http://{}@host"])
def test_an_ambiguous_password_is_refused_and_not_shown(address, character):
    with pytest.raises(SweepError, match="percent-encoded") as refused:
        without_password(address.format(f"sec{character}ret"))
    assert "ret" not in str(refused.value)


def test_a_long_word_is_searched_for_addresses_in_linear_time():
    assert without_secrets("9" * 1_000_000) == "9" * 1_000_000  # hours if quadratic


def test_passwords_in_an_error_of_a_server_are_hidden():
    text = "request to http://u:secret@host:5000/api and postgresql://v:secret@[::1]/db failed"
    assert without_secrets(text) == text.replace("u:secret@", "").replace(":secret", "")


def test_the_driver_of_postgresql_is_added_or_missing_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", pytest)  # find_spec looks no further
    address = "://u:p@host/db?x=postgresql://"
    assert with_driver("postgresql" + address) == "postgresql+psycopg" + address
    for other in ("postgresql+psycopg2://h/db", "sqlite:///x.db", "http://host", "mysql://host/db"):
        assert with_driver(other) == other
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SweepError, match=r"batch-size-sweep\[postgres\]"):
        with_driver("postgresql://u:secret@host/db")


def test_addresses_become_absolute_and_canonical_or_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_tracking_uri("sqlite:///m.db") == f"sqlite:///{tmp_path}/m.db"
    assert check_tracking_uri("http://host:5000/") == "http://host:5000"
    assert check_tracking_uri("postgresql+psycopg://u@h/db") == "postgresql+psycopg://u@h/db"
    for uri in ("mlruns", "./mlflow.db", "file:///mlruns", "", "http://"):
        with pytest.raises(SweepError, match="tracking URI must be a server or a database"):
            check_tracking_uri(uri)


@pytest.mark.parametrize("name", ["a%2Fb", "a?b", "a#b;c@d&e", "{x} [y]", "100%", "ü'\"$"])
def test_the_address_of_a_file_leads_back_to_it(tmp_path, name):
    path = tmp_path / name / "mlflow.db"
    address = sqlite_address(path)
    assert sqlite_path(address) == sqlite_path(mlflow_address(address)) == path
    assert check_tracking_uri(address) == address
    assert default_tracking_uri(SweepFolder(tmp_path / name)) == address


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////x/a?b.db",
        "sqlite:///file:x.db?uri=true",
        "sqlite:///:memory:",
        "sqlite://host/x.db",
        "sqlite+other:////x.db",
    ],
)
def test_an_address_that_does_more_than_to_name_a_file_is_refused(uri):
    with pytest.raises(SweepError):
        check_tracking_uri(uri)
    assert check_tracking_uri("sqlite:////x/a.db?timeout=9") == "sqlite:////x/a.db?timeout=9"
    assert sqlite_path("sqlite:////x/a.db?timeout=9") == Path("/x/a.db")


def test_a_recorded_store_is_used_only_if_it_is_the_users(tmp_path, monkeypatch):
    folder = SweepFolder(tmp_path)
    record = {"is_default": False, "tracking_uri": "http://host:5000", "mirrored_sha256": ""}
    for other in ("", "databricks", "http://host:5001", "http://host:5000.example.org"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
        with pytest.raises(SweepError, match="--tracking-uri http://host:5000 "):
            recorded_uri(folder, record)
    for own in ("http://host:5000", "http://host:5000/", "http://user:secret@host:5000"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
        assert recorded_uri(folder, record) == own.rstrip("/")
    own = {"is_default": True, "tracking_uri": "http://host:5000", "mirrored_sha256": ""}
    assert recorded_uri(folder, own) == default_tracking_uri(folder)


def test_recognising_a_mirrored_sweep_imports_no_mlflow(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "import sweep.tracking.mirror, sweep.tracking.store\n"
        "from sweep.trial.folder import SweepFolder\n"
        f"assert not sweep.tracking.store.is_mirrored(SweepFolder(Path({str(tmp_path)!r})), None)\n"
        "assert not {'mlflow', 'torch', 'pandas', 'sqlalchemy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("chosen", [None, "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY"])
def test_telemetry_is_off_unless_the_user_chose(chosen, monkeypatch):
    values = dict.fromkeys(("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY"))
    monkeypatch.setattr(os, "environ", {chosen: "false"} if chosen else {})
    prepare_environment()
    values[chosen or "MLFLOW_DISABLE_TELEMETRY"] = "false" if chosen else "true"
    assert {name: os.environ.get(name) for name in values} == values


def test_a_new_database_has_its_tables_and_leaves_no_other_file(tmp_path, create_database):
    create_database(tmp_path / "mlflow.db")
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    assert [experiment.name for experiment in client.search_experiments()] == ["Default"]
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_the_folder_comes_back_as_it_was(sweep, tmp_path):
    sweep.train(0, 30)
    sweep.set_state(1, State.RUNNING)
    sweep.write_lines(1, 5)
    uid = sweep.plan.sweep_uid
    write_timing(sweep.folder, timing_of({Arm(None, 4): [0.1]}, sweep_uid=uid))
    sweep.sync()
    uri = default_tracking_uri(sweep.folder)
    sweep.folder.path.rename(tmp_path / "elsewhere")
    (tmp_path / "words sweep").mkdir()
    for name in ("mlflow.db", "mlartifacts"):
        (tmp_path / "elsewhere" / name).rename(tmp_path / "words sweep" / name)
    original = type(sweep.folder)(tmp_path / "elsewhere")
    (tmp_path / "restored").mkdir()
    restored = restore_sweep(uri, "words", None, tmp_path / "restored")
    assert restored.path == tmp_path / "restored" / "words sweep"
    assert restored.read_plan() == original.read_plan()
    assert restored.timing_path.read_bytes() == original.timing_path.read_bytes()
    for name in ("result.json", "metrics.jsonl", "valid_losses.npy"):
        path = restored.trial(sweep.ids[0]).path / name
        assert path.read_bytes() == (original.trial(sweep.ids[0]).path / name).read_bytes()
    states = [restored.trial(trial_id).read_status().state for trial_id in sweep.ids]
    assert states == [State.COMPLETE, State.RUNNING, State.WAITING]
    assert not restored.trial(sweep.ids[1]).metrics_path.exists()  # it has not finished
    stored = load_sweep(restored.path)
    expected = load_sweep(original.path).trials
    expected.loc[1, ["steps", "tokens"]] = math.nan  # the last line of its curve has them
    assert stored.trials.equals(expected) and not stored.warnings


def test_the_result_of_an_earlier_attempt_is_not_restored(sweep):
    sweep.set_state(0, State.RUNNING)
    sweep.finish(0, State.FAILED, cause=Cause.ERROR)
    sweep.sync()
    sweep.trial(0).result_path.unlink()
    sweep.set_state(0, State.FAILED, cause=Cause.LOST, message="killed", attempts=2)
    sweep.sync()
    stored = load_stored_sweep(default_tracking_uri(sweep.folder), "words").trials.iloc[0]
    assert (stored["cause"], stored["attempts"], stored["message"]) == ("lost", 2, "killed")
    assert stored["final_valid_loss"] != stored["final_valid_loss"]  # not a number


def test_the_newest_sweep_is_restored_unless_one_is_named(sweep, tmp_path):
    uri = default_tracking_uri(sweep.folder)
    sweep.train(0, 2)
    sweep.sync(uri)
    folder = SweepFolder(tmp_path / "other")
    shutil.copytree(sweep.folder.path / "trials", folder.path / "trials")
    plan = sweep.plan.model_copy(update={"sweep_uid": "other"})
    write_json(folder.plan_path, plan.model_dump(mode="json"))
    other = replace(sweep, folder=folder, plan=plan)
    other.sync(uri)
    assert load_stored_sweep(uri, "words").name == "other"
    first = sweep.runs()["parent"].info.run_id
    assert load_stored_sweep(uri, "words", first).name == "words sweep"
    with pytest.raises(SweepError, match=f"got abc. Parent runs: .*{first}"):
        load_stored_sweep(uri, "words", "abc")


def test_a_store_that_cannot_be_read_is_refused_in_one_sentence(sweep, tmp_path):
    uri = default_tracking_uri(sweep.folder)
    sweep.train(0, 2)
    sweep.sync()
    for address, experiment, sentence in (
        (uri, "wrods", r"\(Default, words\), got 'wrods'"),
        (uri, "Default", "Parent runs: none"),
        (f"sqlite:///{tmp_path}/none.db", "words", "existing MLflow database"),
        ("http://127.0.0.1:9", "words", "cannot be read: API request to .* Check the address"),
    ):
        with pytest.raises(SweepError, match=sentence):
            load_stored_sweep(address, experiment)
    assert not (tmp_path / "none.db").exists()


def test_nothing_is_written_outside_the_folder(sweep, tmp_path):
    sweep.train(0, 2)
    sweep.sync()
    uri, run_id = default_tracking_uri(sweep.folder), sweep.runs()["parent"].info.run_id
    connect(uri).set_tag(run_id, "sweep.name", "../../outside")
    (tmp_path / "a").mkdir()
    assert restore_sweep(uri, "words", None, tmp_path / "a").path.parent == tmp_path / "a"
    connect(uri).set_tag(sweep.run(0).info.run_id, "sweep.trial_id", "../../../out")
    (tmp_path / "b").mkdir()
    restore_sweep(uri, "words", None, tmp_path / "b")
    assert not list(tmp_path.glob("**/out*"))
