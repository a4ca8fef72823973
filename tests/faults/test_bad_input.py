"""Nonsense in flags, experiment files, tables and sealed files: one sentence, nothing written.

The cases are generated from the declared settings. All run in this process.
"""

import copy
import json
import random
import sys
from pathlib import Path

import pytest

from sweep.cli import main
from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.settings import settings_of
from sweep.orchestration.executors.build import services_table
from sweep.resources import sha256_of_file
from sweep.tracking.store import read_record
from sweep.trial.files import read_json, seal, write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import Lease
from tests.analysis.fake_sweeps import write_fake_sweep

ROOT = Path(__file__).parents[2]
NONSENSE = (
    *("", " ", "-", "--", "=", ",", ",,", "..", "1..", "..8", "1..3", "8..1", "1,1", "1,2,x"),
    *("0", "-1", "1.5", "1e18", "1e19", "1e400", "1e-400", "-0", "nan", "inf", "-inf", "NaN"),
    *("9" * 400, "0x10", "1_0", "1e", "1K", "5 GB", "KiB", "-5MiB", "½", "٣", "1\u0000", "\ud800"),
    *("x" * 5000, "a:b", ":", "a:", ":b", "os:system", "json:no_such", "..:x", "1:2", "none"),
    *("true", "null", "[]", "{}", "[[1]]", "'", '"', "../..", "/", "/dev/null", "~", "$HOME", "*"),
    *("sqrt", "linear", "linear:", "sqrt:x@y", "sqrt:1@0", "tuned:1", "auto", "cuda:-1", "cpu:x"),
    *("http://", "sqlite://", "sqlite:///", "postgresql://x:y@", "hf:", "hf:a", "hf:a/b@c d"),
    *(",".join(map(str, range(1, 100_000))), "\x1b[2J", "\u202e", "💥", "a\nb", "%s", "{0}"),
)
FLAGS = [s.name for table in (Experiment, Execution, services_table()) for s in settings_of(table)]
VALUES = [None, True, -1, 0, 1.5, 1e308, 10**30, 10**400, "", "x", [], {}, [[]], {"a": 1}]
VALUES += ["../../x", "/dev/null", "\x1b[2J", "\ud800", "http://u:p@h", "sqlite:////x.db"]
SHORT = 60  # cases of each kind


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Run a command that must succeed, or refuse in one sentence and write nothing."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))

    def call_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output, words = capfd.readouterr(), [str(word)[:200] for word in arguments]
        assert ended.value.code in (0, 2), (words, output.err[-2000:])
        assert "Traceback" not in output.err + output.out, (words, output.err[-2000:])
        if ended.value.code == 2:
            lines = [x for x in output.err.splitlines() if not x.startswith("This runs your code")]
            assert len(lines) == 1 and lines[0].startswith("Error: "), (words, output.err[-2000:])
            assert len(lines[0]) < 2500, (words, len(lines[0]))
            assert list(work.iterdir()) == [], words
        assert "\x1b" not in output.out + output.err, words
        return ended.value.code

    return call_here


both = pytest.mark.parametrize("size", ["some", pytest.param("all", marks=pytest.mark.slow)])


def choose(cases, size):
    return cases if size == "all" else random.Random(0).sample(cases, min(SHORT, len(cases)))


@pytest.mark.fault("nonsense in flags")
@both
def test_nonsense_in_flags_is_accepted_or_refused_in_one_sentence(call, count, size):
    cases = [(flag, value) for flag in FLAGS for value in NONSENSE if "\0" not in value]
    refused = 0
    for flag, value in choose(cases, size):
        words = ["plan", "quadratic", "--batches", "4", "--budget", "400", "--device", "cpu"]
        refused += call(*words, f"--{flag.replace('_', '-')}={value}") == 2
    count("refused", refused)
    count("recovered", len(choose(cases, size)) - refused)


def mutate(document, rng):
    """Replace, remove, add or nest a random part of a document."""
    document = copy.deepcopy(document)
    parent, key = document, rng.choice(sorted(document))
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.7:
        parent = parent[key]
        key = rng.choice(sorted(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    value = rng.choice(VALUES)
    match rng.randrange(4):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent["unknown"] = value
        case 2:
            parent[key] = [parent[key]]
        case _:
            parent[key] = value
    return document


@pytest.mark.fault("nonsense in experiment files")
@both
def test_nonsense_in_experiment_files_is_accepted_or_refused_in_one_sentence(
    call, count, tmp_path, size
):
    rng, path, refused = random.Random(1), tmp_path / "mine.toml", 0
    texts = [file.read_text() for file in sorted((ROOT / "experiments").glob("*.toml"))]
    number = 600 if size == "all" else SHORT // 6
    for _ in range(number):
        data = bytearray(rng.choice(texts).encode())
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            piece = rng.choice([b"", b"[", b"]]", b'"', b"=", b"\n", b"\xff", b"0", b"-", b"x = {"])
            data[at : at + rng.randrange(3)] = piece
        path.write_bytes(data)
        refused += call("forecast", path, "--batches", "4", "--microbatch", "4") == 2
    for text in ("x = " + "[" * 5000, "x = " + "{a=" * 5000, "a" * 2**21, "\0", "[[[[", ""):
        path.write_text(text)
        refused += call("plan", path) == 2
    count("refused", refused)
    count("recovered", number + 6 - refused)


@pytest.mark.fault("nonsense in tables")
@both
def test_nonsense_in_tables_is_accepted_or_refused_in_one_sentence(call, count, tmp_path, size):
    rng, refused = random.Random(2), 0
    tables = [file.read_text() for file in sorted(ROOT.glob("results/published/*/trials.csv"))]
    tables = ["\n".join(text.splitlines()[:12]) for text in tables]
    number = 500 if size == "all" else SHORT // 2
    for _ in range(number):
        cells = [line.split(",") for line in rng.choice(tables).splitlines()]
        for _ in range(rng.randrange(1, 6)):
            row = rng.choice(cells)
            row[rng.randrange(len(row))] = rng.choice(NONSENSE)[:5000].replace("\ud800", "")
        path = tmp_path / rng.choice(["table.csv", "table.md"])
        path.write_text("\n".join(",".join(row) for row in cells))
        refused += call(rng.choice(["audit", "answer"]), path) == 2
    count("refused", refused)
    count("recovered", number - refused)


@pytest.mark.fault("nonsense in sealed files")
@both
def test_nonsense_in_sealed_files_is_accepted_or_refused_in_one_sentence(
    call, count, tmp_path, size
):
    """A stranger can seal anything."""
    rng, refused = random.Random(3), 0
    folder = SweepFolder(tmp_path / "stranger")
    ends = {4: "COMPLETE", 8: "RUNNING"}
    write_fake_sweep(folder.path, batches="4,8", seeds=1, outcome=lambda row: ends[row.batch_size])
    write_json(folder.tracking_path, read_record(folder))
    for trial in folder.trials():
        with Lease(trial.lease_path):
            trial.ask_to_stop(1)
        checkpoint = trial.path / f"checkpoint-1-{trial.metrics_path.stat().st_size}"
        checkpoint.mkdir()
        (checkpoint / "weights").touch()
        length, sha256 = trial.metrics_path.stat().st_size, sha256_of_file(trial.metrics_path)
        trial.seal_checkpoint(checkpoint, 1, length, sha256)
    paths = sorted(path for path in folder.path.rglob("*.json*"))
    commands = [("status", "--json"), ("status", "--verify"), ("clean",), ("answer",)]
    commands += [("report", "--out", tmp_path / "out"), ("stop",)]
    number = 2000 if size == "all" else SHORT // 2
    for _ in range(number):
        path = rng.choice(paths)
        kept = path.read_bytes()
        if path.suffix == ".jsonl":
            lines = kept.splitlines()
            index = rng.randrange(len(lines))
            lines[index] = json.dumps(mutate(json.loads(lines[index]), rng)).encode()
            path.write_bytes(b"\n".join(lines) + b"\n")
        else:
            path.write_text(json.dumps(seal(mutate(read_json(path), rng))))
        command, *options = rng.choice(commands)
        refused += call(command, folder.path, *options) == 2
        path.write_bytes(kept)
    count("refused", refused)
    count("recovered", number - refused)
