"""An executor of another package: its flags, a sweep that it runs, and packages with mistakes."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from sweep.orchestration.executors.build import installed_executors
from sweep.orchestration.request import read_request
from sweep.plan.commands import parse_command
from sweep.trial.folder import SweepFolder
from sweep.trial.status import State
from sweep.usercode.extensions import load_extensions
from tests.extension.packages import ROOT, Installation, Package
from tests.orchestration.clusters import assert_same, wait_until

PACKAGE = Package.of_page("executors.md")
SMALL = ("quadratic", "--batches", "4,8", "--budget", "1024", "--device", "cpu")
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


class Launcher(Installation):
    """The package of docs/executors.md, whose import leaves a file, and a launching program."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        PACKAGE.install(self.packages)
        path = self.packages / "my_launcher.py"
        path.write_text(f"{path.read_text()}\n{NOTING}")
        self.launch = folder / "launch"
        self.launch.write_text(LAUNCH)
        self.launch.chmod(0o755)

    @property
    def launched(self) -> list[str]:
        path = self.launch.with_name("launched.txt")
        return path.read_text().splitlines() if path.exists() else []

    @property
    def is_imported(self) -> bool:
        return (self.packages / "imported").exists()


@pytest.fixture
def launcher(tmp_path):
    return Launcher(tmp_path)


def test_its_flags_are_in_the_help_with_those_of_the_shipped_executors(launcher):
    text = " ".join(launcher.run("run", "--help").split())
    devices = text.partition("Devices and machines:")[2].partition("GRPO:")[0]
    assert "--executor [local|ray|slurm|launcher]" in devices
    assert "--slurm" in devices and "--launcher-jobs N" in devices
    assert "Command that starts a program on another machine" in devices
    assert "--launcher" not in launcher.run("forecast", "--help")
    assert "--launcher" not in launcher.run("run", "--help", PYTHONPATH=str(ROOT))


def test_a_sweep_ends_with_the_losses_of_the_local_executor(launcher):
    launcher.run("run", *SMALL, "--yes", "--out", "here")
    launcher.run("status", "here")
    launcher.run("answer", "here")
    assert not launcher.is_imported, "no command has named an executor of another package"

    options = {"executor": "launcher", "launcher": str(launcher.launch), "launcher_jobs": "2"}
    flags = [w for name, v in options.items() for w in (f"--{name.replace('_', '-')}", v)]
    launcher.run("run", *SMALL, "--yes", *flags, "--out", "there")
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
    assert "SWEEP_" not in launcher.run("run", *SMALL, "--dry-run", **variables)
    assert "SWEEP_" not in launcher.run("data", "info", **variables)
    text = launcher.run("forecast", "quadratic", "--batches", "4", **variables)
    assert "does not read SWEEP_RUN_EXECUTOR, SWEEP_RUN_LAUNCHER." in text

    monkeypatch.syspath_prepend(str(launcher.packages))
    for cached in (load_extensions, installed_executors):
        cached.cache_clear()
    request = read_request("quick", {"executor": "launcher", "launcher": "ssh node1"})
    for cached in (load_extensions, installed_executors):
        cached.cache_clear()
    assert request.command[2:] == ("quick", "--executor", "launcher", "--launcher", "ssh node1")
    assert request.services.executor == "launcher"


def test_its_flags_are_refused_without_it_and_their_values_are_checked(launcher):
    message = launcher.refusal("run", *SMALL, "--launcher", "ssh node1", "--out", "out")
    assert "launcher needs the executor launcher, got local. Add --executor launcher" in message
    message = launcher.refusal("run", *SMALL, "--executor", "launcher", "--out", "out")
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
        ({"gone": "no_such_module:Gone"}, "'gone' of the package my-package .* must be importable"),
        ({"path": "pathlib:Path"}, "'path' of the package my-package .* must be a class"),
        ({"none": "other:Nameless"}, "'none' of the package my-package .* must be a class"),
        ({"other": "other:Same"}, "'other' of the package my-package .* must be a class"),
        ({"takes": "other:Takes"}, "each flag must have a name of its own, but 2 .* 'budget'"),
        (
            {"ray": "other:Ray"},
            "each name in sweep.executors must be unique, but 'ray' of the package my-package",
        ),
    ],
)
def test_a_package_with_a_mistake_is_refused_in_one_sentence(installation, executors, says):
    modules = {**PACKAGE.modules, "other.py": OTHER}
    Package(modules, {"sweep.executors": executors}).install(installation.packages)
    assert re.search(says, installation.refusal("run", "quick", "--executor", "moon"))
