"""What people see: screens of 80 columns, default folders, progress, logs."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import ClassVar

import pytest

from sweep.orchestration import progress
from sweep.orchestration.progress import describe_trial
from sweep.orchestration.status import sweep_status
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import read_owner
from tests.analysis.fake_sweeps import write_fake_sweep

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\[\?25[lh]")
COMMAND = ("--budget", "4096", "--batches", "4,8", "--device", "cpu")


class Terminal:
    """A program in a pseudo-terminal of 80 columns."""

    started_programs: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, *words, columns=80):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "NO_COLOR")}
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sweep", *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environment | {"TERM": "xterm"},
        )
        self.started_programs.append(self.process)
        os.close(theirs)
        self.text = ""

    def read(self, until=""):
        """Read until the output has a text, by default to its end; return all without colors."""
        while not until or until not in self.text:
            try:
                part = os.read(self._ours, 4096)
            except OSError:  # the program has ended
                break
            self.text += ESCAPES.sub("", part.decode(errors="replace"))
        return self.text

    def lines(self):
        return [line.rstrip() for line in re.split(r"[\r\n]+", self.read())]


@pytest.fixture(autouse=True)
def no_program_outlives_its_test(interruptible):
    yield
    for process in Terminal.started_programs:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    Terminal.started_programs.clear()


@pytest.mark.parametrize(
    "words",
    [
        ("quick", "--lr", "tuned", "--optimizers", "adamw,muon"),
        pytest.param(
            ("tinystories", "--data=synthetic", "--budget=327M", "--batches=1,8,32,64,128,256"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("quick", "--batches", "4,6,10", "--lr", "tuned", "--seeds", "auto", "--verbose"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_fits_80_columns_with_uncut_headers_and_copyable_commands(tmp_path, words):
    terminal = Terminal("plan", *words, "--device", "cpu", "--out", tmp_path / "s")
    lines = terminal.lines()
    assert terminal.process.wait() == 0
    commands = [line for line in lines if line.startswith("  sweep run")]
    assert max(len(line) for line in lines if line not in commands) <= 80, lines
    (header,) = [line for line in lines if line.strip().startswith(("batch size  ", "optimizer "))]
    assert header.split()[-2:] == ["memory", "time"] and "…" not in header
    assert "tokens" in header and ("microbatch" in header) == ("--optimizers" not in words)
    rows = [line for line in lines if re.search(r"\d +\d[\d,]* +\d", line)]
    assert len(rows) >= 3 and not any("…" in re.sub(r"e-\d…\de-\d ", "", line) for line in rows)


def test_the_first_line_comes_before_slow_imports(tmp_path):
    terminal = Terminal("run", "quick", *COMMAND, "--dry-run", "--out", tmp_path / "s")
    text = terminal.read("…")
    modules = "import sys; import sweep.cli.commands; print('torch' in sys.modules)"
    assert text.startswith("Planning quick …") and terminal.process.poll() is None
    assert subprocess.check_output([sys.executable, "-c", modules], text=True) == "False\n"
    terminal.read()
    assert terminal.process.wait() == 0


def test_a_terminal_has_a_bar_and_a_line_for_each_trial_that_ended(tmp_path):
    terminal = Terminal(
        "run",
        "quadratic",
        "--budget",
        "40000",
        "--batches",
        "4,8",
        "--lr",
        "0.05",
        "--device",
        "cpu",
        "--yes",
        "--out",
        tmp_path / "s",
    )
    text = terminal.read()
    assert terminal.process.wait() == 0
    ended = re.findall(r"(\d) of 2 +batch size (\d) +lr 0.05 +seed 0 +\w", text)
    assert sorted(ended) == [("1", "4"), ("2", "8")] or sorted(ended) == [("1", "8"), ("2", "4")]
    assert (
        "━" in text and "100%" in text and "elapsed" in text and "best so far: batch size" in text
    )
    assert "Next, at least" in text and "Longer trainings: sweep run quadratic" in text


def test_ctrl_c_is_answered_at_once_and_the_same_command_resumes(tmp_path):
    words = (
        "run",
        "quick",
        "--budget",
        "200k",
        "--batches",
        "4",
        "--device",
        "cpu",
        "--yes",
        "--out",
        tmp_path / "s",
    )
    terminal = Terminal(*words)
    terminal.read("batch size 4     lr")
    os.killpg(terminal.process.pid, signal.SIGINT)
    text = terminal.read()
    assert terminal.process.wait() == 130
    assert "Saving. Press Ctrl-C again to abort." in text and "The same command resumes" in text
    assert SweepFolder(tmp_path / "s").trials()[0].read_status().state == "WAITING"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_plan_ends_the_command_without_a_traceback(tmp_path, number):
    terminal = Terminal("run", "quick", "--device", "cpu", "--yes", "--out", tmp_path / "s")
    terminal.read("Planning quick")
    terminal.process.send_signal(number)
    assert terminal.lines()[1:] == ["Interrupted. The same command resumes.", ""]
    # CPython ends `python -m` by SIGINT itself where the interrupt came inside exec(), as in a
    # dataclass that is being imported. A shell shows 130 for both.
    assert terminal.process.wait() in (130, -signal.SIGINT)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_says_that_it_aborts_a_trial_that_hangs(tmp_path):
    words = ("run", "quick", "--budget", "200k", "--batches", "4", "--device", "cpu", "--yes")
    terminal = Terminal(*words, "--out", tmp_path / "s")
    terminal.read("running:")
    (trial,) = SweepFolder(tmp_path / "s").trials()
    os.kill(read_owner(trial.lease_path)["pid"], signal.SIGSTOP)
    for answer in ("Saving. Press Ctrl-C again to abort.", "Aborting."):
        terminal.process.send_signal(signal.SIGINT)
        assert answer in terminal.read(answer)
    terminal.read()
    assert terminal.process.wait() == 130
    assert trial.read_status().state == "WAITING"


@pytest.fixture
def newest(call, tmp_path):
    """Two sweeps in results/; the second one is newer."""
    for name in ("old", "new"):
        write_fake_sweep(tmp_path / "results" / name, seeds=2, points=5)
    old = tmp_path / "results" / "old" / "plan.json"
    os.utime(old, (1, 1))
    return tmp_path / "results" / "new"


def test_the_newest_sweep_is_the_default_of_every_command(call, newest, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    assert json.loads(call("status", "--json")[1])["sweep"] == "new"
    assert "Sweep folder: results/new" in call.stderr
    assert call("open")[0] == 2 and "report.html must exist" in call.stderr
    code, text = call("report")
    assert (
        code == 0
        and (newest / "report.html").exists()
        and not (tmp_path / "results/old/report.md").exists()
    )
    assert call("open")[0] == 0 and opened == [(newest / "report.html").as_uri()]
    trial = SweepFolder(newest).trials()[0]
    trial.log_path.write_text("a line of the log\n")
    code, text = call("log", trial.id[:6])
    evaluations = [line for line in trial.read_metrics() if "valid/loss" in line]
    rows = [line.split() for line in text.splitlines()[1:-1]]
    assert code == 0 and text.endswith("a line of the log\n") and len(rows) == len(evaluations)
    assert [float(row[-1]) for row in rows] == pytest.approx(
        [e["valid/loss"] for e in evaluations], rel=1e-4
    )
    assert call("log", newest, trial.id)[1] == text
    code, text = call("status", "--watch")
    assert code == 0 and "100%, 10 of 10 trials" in call.stderr and "COMPLETE" in text


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("run", "quik"), "Did you mean 'quick'?"),
        (("plan", "quick", "--model", "smal"), "Did you mean 'small'?"),
        (
            ("run", "--command", "true {batch_sise} {steps} {learning_rate} {seed} {log}"),
            "Did you mean 'batch_size'?",
        ),
        (("rum",), "Did you mean 'run'?"),
    ],
)
def test_a_similar_name_is_proposed(refuse, words, hint):
    assert hint in refuse(*words)


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("sta", {"status"}),
        ("status --", {"--json", "--verify", "--watch", "--help"}),
        ("report --o", {"--out"}),
    ],
)
def test_completion_is_that_of_click_also_without_results(tmp_path, words, completions):
    environment = {
        **os.environ,
        "_SWEEP_COMPLETE": "bash_complete",
        "COMP_WORDS": f"sweep {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    script = [sys.executable, "-c", "from sweep.cli import main; main()"]
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert {*done.stdout.splitlines()} == {f"plain,{word}" for word in completions}
    assert (done.returncode, done.stderr) == (0, "")


HOSTILE = "a\x1b]0;PWN\x07[/nope]"


@pytest.fixture
def hostile(tmp_path):
    """A stranger's sweep of two optimizers, with a trial that ran out of memory."""
    folder = SweepFolder(tmp_path / "s")
    outcomes = {4: "COMPLETE", 8: "out_of_memory", 16: "RUNNING"}
    sweep = {"optimizers": "adamw,adafactor", "batches": "4,8,16", "points": 20}
    write_fake_sweep(folder.path, outcome=lambda row: outcomes[row.batch_size], **sweep)
    plan = folder.read_plan()
    for row in plan["trials"]:
        row["optimizer"] = row["optimizer"].replace("adamw", HOSTILE)
    write_json(folder.plan_path, plan)
    return folder


def test_a_strangers_texts_are_shown_as_they_are_and_ids_and_states_are_whole(hostile):
    for options in ((), ("--watch",)):
        terminal = Terminal("status", hostile.path, *options)
        text, lines = terminal.read(), terminal.lines()
        assert terminal.process.wait() == 0 and "\x1b]" not in text and "\x07" not in text
        assert "a\N{REPLACEMENT CHARACTER}]0;PWN" in text and "[/nope]" in "".join(text.split())
        assert max(map(len, lines)) <= 80 and "…" not in text and "elapsed" not in text
        for trial in hostile.trials():
            (line,) = [line for line in lines if line.startswith(trial.id)]
            assert str(trial.read_status().state).replace("RUNNING", "WAITING") in line.split()
        assert "out_of_memory" in text.split()
    assert "4 of 6 trials have ended" in text


def test_trials_are_described_in_columns_of_equal_width(tmp_path):
    plan = write_fake_sweep(tmp_path / "s", optimizers="sgd,adafactor", batches="4,1024")
    rows = sweep_status(SweepFolder(tmp_path / "s"))["trials"]
    assert len(rows) == len(plan.trials)
    texts = [describe_trial(p, row, "loss", 9) for row in rows for p in ("running:", "3 of 4")]
    assert len({text.index("batch size") for text in texts}) == 1
    assert len({text.index("loss") for text in texts}) == 1


def test_the_time_left_counts_trials_whose_rate_is_not_known_yet(tmp_path, monkeypatch, capsys):
    """Four trials, of which two await their rates: 40 % of the work took 200 s."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    row = {"state": "WAITING", "cause": None, "tokens": 0, "planned_tokens": 100, "value": None}
    row |= {"optimizer": None, "batch_size": 4, "seed": 0, "stage": "tune", "learning_rate": 1e-3}
    rows = [row | {"id": name, "eta_seconds": 10.0} for name in ("a", "b")]
    document = {"trials": rows, "metric": "final_valid_loss", "best": None}
    monkeypatch.setattr(progress, "sweep_status", lambda folder: document)
    display = progress.Progress(SweepFolder(tmp_path), None, is_quiet=False, finals=2)
    display.update()
    now[0] = 200.0
    rows[0].update(state="COMPLETE", tokens=100)
    rows[1].update(state="RUNNING", tokens=60, eta_seconds=4.0)
    display.update()
    assert "40%, 1 of at least 4 trials have ended, at least 5 min left" in capsys.readouterr().err
    rows += [{**rows[0], "id": str(number), "stage": "tune"} for number in range(4)]
    now[0] = 300.0  # tuning added trials: the reports are still to come
    display.update()
    assert "70%, 5 of at least 8 trials have ended" in capsys.readouterr().err
    rows[1].update(state="COMPLETE", tokens=100)
    rows += [{**rows[0], "id": name, "stage": "final"} for name in "cd"]
    now[0] = 400.0
    with display:
        pass
    assert capsys.readouterr().err == "100%, 8 of 8 trials have ended\n"


def test_a_running_trial_shows_its_newest_evaluation(tmp_path):
    write_fake_sweep(tmp_path / "s", batches="4", outcome=lambda row: "RUNNING", points=20)
    (trial,) = SweepFolder(tmp_path / "s").trials()
    lines = trial.read_metrics()
    for count in (len(lines), 1):
        text = "".join(json.dumps(line) + "\n" for line in lines[:count])
        trial.metrics_path.write_text(text)
        (row,) = sweep_status(SweepFolder(tmp_path / "s"))["trials"]
        evaluated = [line["valid/loss"] for line in lines[:count] if "valid/loss" in line]
        assert row["loss"] == row["value"] == (evaluated[-1] if evaluated else None)
    assert not evaluated and row["tokens"] > 0


def test_a_log_has_an_empty_cell_for_a_value_that_is_null(call, tmp_path):
    write_fake_sweep(tmp_path / "s", batches="4", points=20, outcome=lambda row: "RUNNING")
    (trial,) = SweepFolder(tmp_path / "s").trials()
    lines = trial.read_metrics()
    assert "valid/loss" in lines[-1]
    lines[-1]["valid/loss"] = None
    trial.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trial.log_path.touch()
    code, text = call("log", "s", trial.id)
    header, *rows = [line.split() for line in text.splitlines()]
    assert code == 0 and header == ["tokens", "time", "train/loss", "valid/loss"]
    assert len(rows[-1]) == len(rows[-2]) - 1


def test_a_log_without_an_id_points_to_status(call, tmp_path):
    write_fake_sweep(tmp_path / "s", batches="4", points=5)
    for words in (("log", "s"), ("log", "s", "zzz")):
        assert call(*words)[0] == 2
        assert "`sweep status" in call.stderr and "sweep plan" not in call.stderr


def test_a_plan_says_which_settings_it_does_not_follow(call, tmp_path):
    path = tmp_path / "mine.toml"
    settings = ["budget = 5120", "batches = [4, 16]", "workload = 'quadratic'", "lr = 0.1"]
    path.write_text("\n".join([*settings, "[schedule]", "warmup_min_steps = 100"]))
    command = ("plan", path, "--device", "cpu", "--microbatch", "8")
    text = " ".join(call(*command)[1].split())
    assert "Warmup: 32 of 320 steps at batch size 16" in text and "of 1,280" not in text
    assert "Microbatch: less than 8 at batch size 4" in text
    flags = ("--model", "small", "--data", "synthetic", "--lr", "1e-3", "--device", "cpu")
    text = " ".join(call("plan", "tinystories", *flags)[1].split())
    assert "vocabulary 2,048 in place of the experiment's 10,000" in text
    text = " ".join(call(*command, "--lr", "sqrt:0.1@8")[1].split())
    assert "fixed rates only" in text
