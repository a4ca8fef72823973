"""Nonsense gets one sentence with the remedy, exit code 2, no traceback, and nothing written."""

import os
import sys

import pytest

from sweep.cli import main
from sweep.trial.files import write_json


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command line in an empty folder; return exit code, stdout and stderr."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def call_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return ended.value.code, output.out, output.err

    return call_here


def assert_refused(result, says, work):
    code, out, err = result
    assert code == 2 and out == ""
    assert err.startswith("Error: ") and err.count("\n") == 1, err
    assert says in err
    assert list(work.iterdir()) == []


FLAGS = [
    ("--budget", "x", "budget must be"),
    ("--budget", "-1", "budget must be"),
    ("--budget", "0", "budget must be"),
    ("--budget", "63", "at least one step"),
    ("--budget", "1e30", "at most 1e18"),
    ("--batches", "4,4", "each batch size once"),
    ("--batches", "0", "batch size must be"),
    ("--batches", "-4", "batch size must be"),
    ("--batches", "four", "batch size must be"),
    ("--batches", "", "batch size must be"),
    ("--batches", "3..9", "powers of two"),
    ("--model", "huge", "model must be one of"),
    ("--model", "no.such:Model", "cannot be imported"),
    ("--workload", "sorting", "workload"),
    ("--workload", "os:nothing", "no 'nothing'"),
    ("--lr", "-1", "lr must be"),
    ("--lr", "nan", "lr must be"),
    ("--lr", "sqrt:1@", "lr must be"),
    ("--seeds", "0", "seeds must be"),
    ("--seeds", "some", "seeds must be"),
    ("--context", "0", "context must be"),
    ("--context", "1.5", "context must be"),
    ("--vocabulary", "-3", "vocabulary must be"),
    ("--vocabulary", "100", "vocabulary must be at least"),
    ("--tokenizer", "words", "tokenizer"),
    ("--precision", "fp8", "precision"),
    ("--device", "tpu", "device must be"),
    ("--device", "cuda:99", "device must be"),
    ("--microbatch", "3", "microbatch_size must divide"),
    ("--microbatch", "0", "microbatch must be"),
    ("--data", "no/such/file.txt", "no/such/file.txt"),
    ("--data", "nosuchname", "nosuchname"),
    ("--keep", "everything", "keep"),
    ("--executor", "cloud", "executor"),
    ("--tracking-uri", "ftp://x", "tracking"),
    ("--tracking-uri", "mlruns", "tracking"),
    ("--retry", "all", "retry"),
    ("--only", "zzz", "only must name one trial"),
    ("--nonsense", "1", "nonsense"),
    ("--budget", "1e999999M", "budget must be"),
    ("--model", ".x:y", "cannot be imported"),
    ("--workload", ".x:y", "cannot be imported"),
]


@pytest.mark.parametrize(("flag", "value", "says"), FLAGS)
def test_every_flag_refuses_nonsense(call, tmp_path, flag, value, says):
    assert_refused(call("run", "quick", flag, value), says, tmp_path / "work")


def test_plan_refuses_as_run_does(call, tmp_path):
    assert_refused(call("plan", "quick", "--budget", "x"), "budget must be", tmp_path / "work")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"a\x00b" * 100, "UTF-8"),
        (b"\xff\xfe" * 100, "UTF-8"),
        (b"too short", "65"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_texts_that_cannot_be_trained_on(call, tmp_path, content, says, command):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert_refused(call(command, "quick", "--data", path), says, tmp_path / "work")


def test_a_text_shorter_than_one_window_of_tokens(call, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"story {i} is short\n<|endoftext|>\n" for i in range(4)))
    assert_refused(call("run", "quick", "--data", path, "--quiet"), "65 tokens", tmp_path / "work")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("bugdet = 1", "'bugdet' is not a known key"),
        ("budget = [", "TOML"),
        ("\x00", "TOML"),
        ("model = 5", "model must be"),
        ("batches = 1.5\nbudget = 100", "batches must be"),
        ("schedule = 3\nbatches = 8\nbudget = '1M'", "schedule"),
    ],
)
def test_experiment_files_that_are_none(call, tmp_path, content, says):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    assert_refused(call("run", path), says, tmp_path / "work")


def test_an_unknown_experiment_is_answered_with_the_known_ones(call, tmp_path):
    assert_refused(call("run", "quik"), "quick", tmp_path / "work")


def test_an_out_that_is_a_file(call, tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file"
    assert_refused(call("run", "quick", "--out", out), "must be a folder", tmp_path / "work")
    inside = out / "sweep"
    assert_refused(call("run", "quick", "--out", inside), "can be written", tmp_path / "work")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_out_that_cannot_be_written(call, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert_refused(call("run", "quick", "--out", closed / "x"), "written", tmp_path / "work")


@pytest.mark.parametrize("content", ["{", "", '{"format_version": 1, "trials": []}', "\x00\x01"])
@pytest.mark.parametrize("command", [("run", "quick", "--out"), ("status",), ("report",)])
def test_a_corrupt_plan(call, tmp_path, content, command):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "plan.json").write_text(content)
    assert_refused(call(*command, folder), "plan.json", tmp_path / "work")
    assert [file.name for file in folder.iterdir()] == ["plan.json"]


def test_a_plan_that_is_sealed_but_is_none(call, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    write_json(folder / "plan.json", {"trials": "none"})
    for command in (("run", "quick", "--out"), ("status",), ("report",)):
        assert_refused(call(*command, folder), "plan.json", tmp_path / "work")


@pytest.mark.parametrize("command", ["status", "stop", "report", "clean", "ui"])
def test_folders_that_hold_no_sweep(call, tmp_path, command):
    assert_refused(call(command, tmp_path / "nothing"), "plan.json", tmp_path / "work")


def test_more_than_an_hour_needs_a_yes_and_names_quick(call, tmp_path):
    result = call("run", "quick", "--budget", "10G", "--quiet")
    assert_refused(result, "--yes", tmp_path / "work")
    assert "sweep run quick" in result[2]


def test_a_disk_that_is_too_small(call, tmp_path, monkeypatch):
    from sweep.orchestration import planning

    class Usage:
        free = 1000

    monkeypatch.setattr(planning.shutil, "disk_usage", lambda _: Usage)
    result = call("run", "quick", "--quiet")
    assert_refused(result, "the disk must have", tmp_path / "work")


@pytest.mark.parametrize("arguments", [("report",), ("report", "--from-mlflow", "sqlite:///x.db")])
def test_reports_need_a_source(call, tmp_path, arguments):
    assert_refused(call(*arguments), "--from-mlflow", tmp_path / "work")
