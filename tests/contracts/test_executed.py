"""What small sweeps execute is what imports reach, in the command and in training."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import COMMAND, SCRIPT
from tests.contracts.imports import reachable
from tests.contracts.sources import ROOT, Code, module_of

# Python imports it when it starts. The hook is inherited by forks, and environment by programs.
RECORDER = """
import os
import sys

def record(event, arguments):
    if event == "exec" and arguments[0].co_name == "<module>":
        with open(os.environ["EXECUTED"], "a") as file:
            file.write(arguments[0].co_filename + "\\n")

sys.addaudithook(record)
"""
# Run several commands in one process, because importing takes most of the time.
COMMANDS = """
import json, sys
from sweep.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["sweep", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, words
"""
MODEL = """
question = "What is executed?"
model = "quick"
vocabulary = 256
tokenizer = "bytes"
data = "text.txt"
budget = 1024
lr = 1e-3
"""
EXPERIMENTS = {
    "pretrain": f"{MODEL}batches = [4]",
    "grpo": f"""{MODEL}batches = [8]
[workload]
kind = "grpo"
task = "words"
group_size = 4
prompt_tokens = 24
new_tokens = 8
""",
}
OPTIONS = ("--device", "cpu", "--yes")
SMALL = ("--budget", "64", "--batches", "4", *OPTIONS)
RUNS = (
    ("run", "pretrain.toml", "--out", "pretrain", *OPTIONS),
    ("run", "grpo.toml", "--out", "grpo", *OPTIONS),
    ("run", "quadratic", "--out", "quadratic", *SMALL),
    ("run", "--command", COMMAND, "--out", "command", *SMALL),
)


def executed(root: Path, folder: Path, words: tuple[str, ...]) -> set[str]:
    """Return the modules of a checkout that Python, run in a folder, and its processes execute."""
    (folder / "recorder").mkdir(exist_ok=True)
    (folder / "recorder" / "sitecustomize.py").write_text(RECORDER)
    record = folder / "recorder" / "executed"
    record.unlink(missing_ok=True)
    path = os.pathsep.join([str(folder / "recorder"), str(root)])
    environment = {**os.environ, "PYTHONPATH": path, "EXECUTED": str(record)}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = {Path(line) for line in record.read_text().splitlines()}
    return {
        module_of(file.relative_to(root).as_posix())
        for file in files
        if file.suffix == ".py" and {root / "sweep", root / "experiments"} & {*file.parents}
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("executed")
    stories = [f"Story {number}: a cat saw a dog and ran home." for number in range(400)]
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(stories))
    (folder / "train.py").write_text(SCRIPT)
    for name, text in EXPERIMENTS.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def of_sweeps(folder: Path) -> set[str]:
    """The modules that the sweeps of all kinds execute, from plan to report."""
    return executed(ROOT, folder, ("-c", COMMANDS, json.dumps(RUNS)))


def test_sweeps_execute_only_what_the_command_and_training_reach_by_imports(
    of_sweeps: set[str],
) -> None:
    entries = ("sweep.__main__", "sweep.training.__main__")
    assert of_sweeps - reachable(Code(), *entries) == set()
    some = {"sweep.cli.commands", "sweep.training.loop", "sweep.report.report", "sweep.memory"}
    assert some <= of_sweeps


@pytest.mark.parametrize("kind", ["pretrain", pytest.param("command", marks=pytest.mark.slow)])
def test_a_training_executes_only_what_its_own_entry_reaches(
    of_sweeps: set[str], folder: Path, kind: str
) -> None:
    (trial,) = (folder / kind / "trials").iterdir()
    alone = folder / f"{kind}-alone" / "trials" / trial.name
    alone.mkdir(parents=True)
    shutil.copy(trial / "config.json", alone)
    modules = executed(ROOT, folder, ("-m", "sweep.training", str(alone)))
    assert (alone / "result.json").exists()
    assert {"sweep.training.__main__", "sweep.training.record"} <= modules
    assert modules - reachable(Code(), "sweep.training.__main__") == set()


def test_a_module_that_a_text_names_is_found(tmp_path: Path) -> None:
    package = tmp_path / "checkout" / "sweep"
    package.mkdir(parents=True)
    for name in ("__init__", "known", "hidden"):
        (package / f"{name}.py").touch()
    program = "import os, importlib\nfrom sweep import known\n"
    program += "if not os.fork():\n    importlib.import_module('sweep.hid' + 'den')\n"
    (package / "__main__.py").write_text(program + "else:\n    os.wait()\n")
    root = tmp_path / "checkout"
    modules = executed(root, tmp_path, ("-m", "sweep"))
    assert modules == {"sweep", "sweep.__main__", "sweep.known", "sweep.hidden"}
    assert modules - reachable(Code(root), "sweep.__main__") == {"sweep.hidden"}
