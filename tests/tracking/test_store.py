"""Addresses and passwords, the cost of importing, a new database, and MLflow's UI."""

import os
import subprocess
import sys
import urllib.request

import pytest

from sweep.errors import SweepError
from sweep.tracking.store import (
    check_tracking_uri,
    connect,
    hide_passwords,
    prepare_environment,
    ui_command,
    with_driver,
    without_password,
)
from sweep.trial.files import write_json
from tests.servers import is_healthy


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("postgresql://u:secret@host:5432/db", "postgresql://u@host:5432/db"),
        ("postgresql://:secret@host/db", "postgresql://@host/db"),
        ("postgresql://u:se%40cret@host/db?sslmode=disable", "postgresql://u@host/db?sslmode=disable"),
        ("postgresql://host/db?user=u&password=secret", "postgresql://host/db?user=u"),
        ("postgresql://host/db?password=secret&user=u", "postgresql://host/db?user=u"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db"),
        ("http://u:secret@host:5000", "http://u@host:5000"),
        ("postgresql://u@host/db", "postgresql://u@host/db"),
        ("sqlite:////home/a:b@c/x.db", "sqlite:////home/a:b@c/x.db"),
        ("mlruns", "mlruns"),
    ],
)  # fmt: skip
def test_an_address_is_shown_without_its_password(address, expected):
    assert without_password(address) == expected


@pytest.mark.parametrize("password", ["sec@ret", "sec/ret", "sec?ret", "sec#ret"])
def test_an_ambiguous_password_is_refused_and_not_shown(password):
    with pytest.raises(SweepError, match="percent-encoded") as refused:
        without_password(f"postgresql://u:{password}@host/db")
    assert "ret" not in str(refused.value)


def test_passwords_in_an_error_of_a_server_are_hidden():
    text = "request to http://u:secret@host:5000/api and postgresql://v:secret@[::1]/db failed"
    assert hide_passwords(text) == (
        "request to http://u@host:5000/api and postgresql://v@[::1]/db failed"
    )


def test_the_driver_of_postgresql_is_added_or_missing_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", pytest)  # find_spec looks no further
    address = "://u:p@host/db?x=postgresql://"
    assert with_driver("postgresql" + address) == "postgresql+psycopg" + address
    for other in ("postgresql+psycopg2://h/db", "sqlite:///x.db", "http://host", "mysql://host/db"):
        assert with_driver(other) == other
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SweepError, match=r"\.\[postgres\]"):
        with_driver("postgresql://u:secret@host/db")


def test_addresses_become_absolute_and_canonical(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_tracking_uri("sqlite:///m.db") == f"sqlite:///{tmp_path}/m.db"
    assert check_tracking_uri("http://host:5000/") == "http://host:5000"
    assert check_tracking_uri("postgresql+psycopg://u@h/db") == "postgresql+psycopg://u@h/db"


@pytest.mark.parametrize("uri", ["mlruns", "./mlflow.db", "file:///mlruns", "", "http://"])
def test_an_address_without_a_store_is_refused(uri):
    with pytest.raises(SweepError, match="tracking URI must be a server or a database"):
        check_tracking_uri(uri)


def test_recognising_a_mirrored_sweep_imports_no_mlflow(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "import sweep.tracking.mirror, sweep.tracking.restore, sweep.tracking.store\n"
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


def test_a_new_database_has_its_tables_and_leaves_no_other_file(tmp_path):
    client = connect(f"sqlite:///{tmp_path}/mlflow.db")
    assert [experiment.name for experiment in client.search_experiments()] == ["Default"]
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_the_ui_needs_a_store_of_its_own_and_serves_on_loopback(sweep):
    command = ui_command(sweep.folder, 5000)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    (sweep.folder.path / "mlflow.db").unlink()
    with pytest.raises(SweepError, match="must have an MLflow store"):
        ui_command(sweep.folder, 5000)
    record = {"tracking_uri": "http://host:5000", "is_default": False, "sweep_uid": "1"}
    write_json(sweep.folder.tracking_path, record)
    with pytest.raises(SweepError, match="Open http://host:5000 in a browser"):
        ui_command(sweep.folder, 5000)


@pytest.mark.slow
def test_the_ui_serves_the_sweep_on_loopback(sweep, down):
    sweep.train(0, 3)
    sweep.sync()
    try:
        down.launch(ui_command(sweep.folder, down.port), lambda: is_healthy(down.uri))
        with urllib.request.urlopen(down.uri) as page:
            assert b"<html" in page.read()
    finally:
        down.die()
