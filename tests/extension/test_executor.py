"""An executor of another package: its flags, a sweep that it runs, and packages with mistakes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sweep.orchestration.executors.build import installed_executors
from sweep.orchestration.planning import read_request
from sweep.plan.commands import parse_command
from sweep.trial.folder import State, SweepFolder
from tests.extension.packages import launcher_modules, write_launcher, write_package
from tests.orchestration.clusters import assert_same, wait_until

ROOT = Path(__file__).parents[2]
QUICK = ("quick", "--batches", "4,8", "--budget", "4096", "--device", "cpu")
# Notes each program that it starts, and becomes that program.
LAUNCH = f"""#!{sys.executable}
import os, sys
with open(os.path.join(os.path.dirname(__file__), "launched.txt"), "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
os.execv(sys.argv[1], sys.argv[1:])
"""
NOTING = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\n"
OTHER = """
from my_launcher import Executor, LauncherExecutor, RunFlag, Settings
from typing import Annotated

class Nameless(Executor):
    pass

class Same(LauncherExecutor):
    name = "same"

class Ray(LauncherExecutor):
    name = "ray"

class Takes(LauncherExecutor):
    name = "takes"

    class Table(Settings, use_attribute_docstrings=True):
        budget: Annotated[int, RunFlag()] = 1
        '''A name that the experiment has.'''

    settings = Table
"""


class Installation:
    """A folder of packages, and programs that find them and run in another folder."""

    def __init__(self, folder: Path) -> None:
        self.packages = folder / "packages"
        self.work = folder / "work"
        self.packages.mkdir()
        self.work.mkdir()
        self.launch = folder / "launch"
        self.launch.write_text(LAUNCH)
        self.launch.chmod(0o755)

    def start(self, *words: str, **variables: str) -> "subprocess.Popen[str]":
        path = os.pathsep.join([str(self.packages), str(ROOT)])
        return subprocess.Popen(
            [sys.executable, "-m", "sweep", *words],
            cwd=self.work,
            env={**os.environ, "PYTHONPATH": path, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **variables: str) -> str:
        """Return what a command that succeeds prints."""
        process = self.start(*words, **variables)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        return output + errors

    def refusal(self, *words: str, **variables: str) -> str:
        """Return the last line about a command that is refused."""
        process = self.start(*words, **variables)
        _, errors = process.communicate()
        assert process.returncode == 2 and "Traceback" not in errors, errors
        return errors.splitlines()[-1]

    @property
    def launched(self) -> list[str]:
        path = self.launch.with_name("launched.txt")
        return path.read_text().splitlines() if path.exists() else []

    @property
    def is_imported(self) -> bool:
        return (self.packages / "imported").exists()


@pytest.fixture
def installation(tmp_path):
    return Installation(tmp_path)


@pytest.fixture
def launcher(installation):
    """Install the package of docs/executors.md, whose import leaves a file."""
    write_launcher(installation.packages)
    path = installation.packages / "my_launcher.py"
    path.write_text(f"{path.read_text()}\n{NOTING}")
    return installation


def test_its_flags_are_in_the_help_with_those_of_the_shipped_executors(launcher):
    text = " ".join(launcher.run("run", "--help").split())
    devices = text.partition("Devices and machines:")[2].partition("GRPO:")[0]
    assert "--executor [local|ray|slurm|launcher]" in devices
    assert "--slurm" in devices and "--launcher-jobs N" in devices
    assert "Command that starts a program on another machine" in devices
    assert "--launcher" not in launcher.run("forecast", "--help")
    assert "--launcher" not in launcher.run("run", "--help", PYTHONPATH=str(ROOT))


def test_a_sweep_ends_with_the_losses_of_the_local_executor(launcher):
    launcher.run("run", *QUICK, "--yes", "--out", "here")
    launcher.run("status", "here")
    launcher.run("report", "here")
    assert not launcher.is_imported, "no command has named an executor of another package"

    options = {"executor": "launcher", "launcher": str(launcher.launch), "launcher_jobs": "2"}
    flags = [w for name, v in options.items() for w in (f"--{name.replace('_', '-')}", v)]
    launcher.run("run", *QUICK, "--yes", *flags, "--out", "there")
    here, there = (SweepFolder(launcher.work / name) for name in ("here", "there"))
    assert {trial.read_status().state for trial in there.trials()} == {State.COMPLETE}
    ids = sorted(trial.id for trial in there.trials())
    assert len(ids) == 2 and sorted(Path(w.split()[-2]).name for w in launcher.launched) == ids
    assert_same(there, here)

    (command,) = json.loads(there.plan_path.read_text())["commands"]
    assert parse_command(command)[1].items() >= options.items()


@pytest.mark.slow
def test_a_stopped_sweep_leaves_checkpoints_and_resumes(launcher, interruptible):
    words = ("run", "quick", "--batches", "4", "--device", "cpu", "--yes", "--out", "out")
    words += ("--executor", "launcher", "--launcher", str(launcher.launch))
    first = launcher.start(*words)
    folder = SweepFolder(launcher.work / "out")
    wait_until(folder.plan_path.exists)
    (trial,) = folder.trials()
    wait_until(trial.find_metrics)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate()
    assert first.returncode == 130, errors
    assert trial.read_status().state is State.WAITING and trial.checkpoints()
    launcher.run(*words)
    assert trial.read_status().state is State.COMPLETE and len(launcher.launched) == 2


def test_variables_and_python_can_choose_it(launcher, monkeypatch):
    variables = {"SWEEP_RUN_EXECUTOR": "launcher", "SWEEP_RUN_LAUNCHER": "ssh node1"}
    assert "SWEEP_" not in launcher.run("run", *QUICK, "--dry-run", **variables)
    assert "SWEEP_" not in launcher.run("data", "info", **variables)
    text = launcher.run("forecast", "quick", "--batches", "4", **variables)
    assert "does not read SWEEP_RUN_EXECUTOR, SWEEP_RUN_LAUNCHER." in text

    monkeypatch.syspath_prepend(str(launcher.packages))
    installed_executors.cache_clear()
    request = read_request("quick", {"executor": "launcher", "launcher": "ssh node1"})
    installed_executors.cache_clear()
    assert request.command[2:] == ("quick", "--executor", "launcher", "--launcher", "ssh node1")
    assert request.services.executor == "launcher"


def test_its_flags_are_refused_without_it_and_their_values_are_checked(launcher):
    message = launcher.refusal("run", *QUICK, "--launcher", "ssh node1", "--out", "out")
    assert "launcher needs the executor launcher, got local. Add --executor launcher" in message
    message = launcher.refusal("run", *QUICK, "--executor", "launcher", "--out", "out")
    assert "launcher must be a command" in message
    assert "'local', 'ray', 'slurm', 'launcher'" in launcher.refusal("run", "--executor", "moon")
    assert not (launcher.work / "out").exists()


def test_its_package_is_imported_if_a_command_lists_the_executors(launcher):
    launcher.run("--help")
    launcher.run("status", "--help")
    assert not launcher.is_imported
    launcher.run("plan", "--help")
    assert launcher.is_imported


@pytest.mark.parametrize(
    ("executors", "says"),
    [
        ({"gone": "no_such_module:Gone"}, "'gone' of the package my-cluster must be importable"),
        ({"path": "pathlib:Path"}, "'path' of the package my-cluster must be a class"),
        ({"none": "other:Nameless"}, "'none' of the package my-cluster must be a class"),
        ({"other": "other:Same"}, "'other' of the package my-cluster must be a class"),
        ({"takes": "other:Takes"}, "each flag must have a name of its own, but 2 .* 'budget'"),
        ({"ray": "other:Ray"}, "each executor must have a name of its own, but 2 .* 'ray'"),
    ],
)
def test_a_package_with_a_mistake_is_refused_in_one_sentence(installation, executors, says):
    modules = {**launcher_modules(), "other.py": OTHER}
    write_package(installation.packages, modules, executors)
    assert re.search(says, installation.refusal("run", "quick", "--executor", "moon"))
