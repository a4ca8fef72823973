"""Addresses, long documents, the cost of importing, and the command of the real UI."""

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from sweep.errors import SweepError
from sweep.tracking.record import Record
from sweep.tracking.store import check_tracking_uri, document_tags, read_document, ui_command


def test_addresses_are_made_absolute_and_tidy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_tracking_uri("sqlite:///m.db") == f"sqlite:///{tmp_path}/m.db"
    assert check_tracking_uri("http://host:5000/") == "http://host:5000"
    assert check_tracking_uri("postgresql+psycopg://u@h/db") == "postgresql+psycopg://u@h/db"


@pytest.mark.parametrize("uri", ["mlruns", "./mlflow.db", "file:///mlruns", "", "http://"])
def test_what_is_no_address_is_refused(uri):
    with pytest.raises(SweepError, match="tracking URI must be a server or a database"):
        check_tracking_uri(uri)


def test_a_long_document_survives_tags_also_after_a_longer_one():
    long, short = {"plan": ["é" * 50] * 1000}, {"plan": ["x" * 50] * 200}
    tags = document_tags("doc", long)
    assert max(len(value) for value in tags.values()) < 8000
    assert read_document(tags, "doc") == long
    assert read_document(tags | document_tags("doc", short), "doc") == short


def test_importing_tracking_imports_no_mlflow_and_asking_for_a_finished_sweep_neither(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "import sweep.tracking.mirror, sweep.tracking.reader, sweep.tracking.record\n"
        "from sweep.trial.folder import SweepFolder\n"
        f"assert not sweep.tracking.record.is_mirrored(SweepFolder(Path({str(tmp_path)!r})))\n"
        "assert not {'mlflow', 'torch', 'pandas', 'sqlalchemy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("chosen", [None, "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY"])
def test_telemetry_is_off_unless_the_user_chose(chosen):
    names = ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    if chosen:
        environment[chosen] = "false"
    code = (
        "import os, sweep.tracking.store as s; s.prepare_environment()\n"
        "print(os.environ.get('MLFLOW_DISABLE_TELEMETRY'), os.environ.get('DO_NOT_TRACK'))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    expected = {
        None: b"true None",
        "DO_NOT_TRACK": b"None false",
        "MLFLOW_DISABLE_TELEMETRY": b"false None",
    }
    assert done.stdout.strip() == expected[chosen]


def test_the_ui_needs_a_store_of_its_own(sweep):
    (sweep.folder.path / "mlflow.db").unlink()
    with pytest.raises(SweepError, match="must hold an MLflow store, and has none"):
        ui_command(sweep.folder, 5000)
    Record(tracking_uri="http://host:5000", is_default=False).save(sweep.folder)
    with pytest.raises(SweepError, match="Open http://host:5000 in a browser"):
        ui_command(sweep.folder, 5000)


def test_the_ui_serves_the_sweep_on_loopback(sweep, free_port, until):
    sweep.train(0, 3)
    sweep.sync()
    command = ui_command(sweep.folder, free_port)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    uri = f"http://127.0.0.1:{free_port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(uri, timeout=2) as page:
                return b"<html" in page.read()
        except OSError:
            return False

    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(answers)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
