"""Every command that README.md and docs/ show is run, or marked with the reason why not.

Pages show commands in blocks (```sh, or indented) and in code spans. Tests have two tiers:

- by default, each `sweep` command is parsed by the command line itself, and its settings are read;
  those of README.md are also planned, except under a mark; `make` targets and scripts must exist;
- slow: each command of a block is run, in a folder of its page, with few tokens and small models.

A block after `<!-- not executed: REASON -->` is not run. `docs/cli.md` is generated from the help.
Placeholders such as FOLDER stand for files of the tests, also `hf:` names, so that nothing is
downloaded. A block after `<!-- output of the command above -->` is compared with the output.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
import pytest
from markdown_it import MarkdownIt

from sweep.cli import sweep
from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.settings import settings_of
from sweep.orchestration.executors.build import installed_executors, services_table
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import read_request
from sweep.usercode.extensions import load_extensions
from tests.commands import SCRIPT
from tests.extension.packages import Package
from tests.hugging_face import STORIES, save_model
from tests.servers import MlflowServer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name != "cli.md"]
PROGRAM = re.compile(r"(sweep|python|make|pytest) ")
MARK = re.compile(r"<!-- not executed: (.+) -->")
OUTPUT = "<!-- output of the command above -->\n"
LANGUAGES = {"sh", "text", "python", "toml", "json"}
TABLES = (Experiment, Execution, services_table())
SETTINGS = {setting.name for table in TABLES for setting in settings_of(table)}
# Not run, in pages that show them without a mark.
REASONS = {
    "source": "changes the reader's shell",
    "make": "a target of its own, which builds an environment",
    "sweep ui": "serves until it is ended; tests/tracking/test_ui.py starts it",
}
COMMAND = (
    "python train.py --batch-size {batch_size} --lr {learning_rate} --steps {steps} --seed {seed} "
    "--log {log}"
)
# Without options, the script reads the values of its trial.
READS_SETTINGS = """
import os, sys

if len(sys.argv) == 1:
    import sweep

    trial = sweep.settings()
    for name in ("batch_size", "steps", "seed"):
        sys.argv += ["--" + name.replace("_", "-"), str(getattr(trial, name))]
    sys.argv += ["--lr", str(trial.learning_rate), "--log", os.environ["SWEEP_LOG"]]
"""
PROJECT = """
import torch

def load_images(device):
    images = torch.randn(80, 4, generator=torch.Generator().manual_seed(0), device=device)
    labels = (images.sum(1) > 0).long()
    return images[:64], labels[:64], images[64:], labels[64:]

def build_network():
    return torch.nn.Linear(4, 2)
"""
OPTIMIZER = "from torch.optim import SGD as Lion\n"


@dataclass(frozen=True)
class Command:
    page: Path
    line: int
    text: str
    is_block: bool
    reason: str = ""  # why it is not run
    output: str | None = None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands_of(page: Path) -> Iterator[Command]:
    """Yield the commands of a page's blocks and code spans."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))
    reason, last, is_output = "", None, False
    for token in tokens:
        if token.type == "html_block":
            mark = MARK.fullmatch(token.content.strip())
            reason, is_output = mark[1] if mark else "", token.content == OUTPUT
            continue
        line = (token.map or [0])[0] + 1
        if token.type == "fence" and is_output:
            assert last, f"{page.name}:{line}: no command above this output"
            last = replace(last, output=token.content)
        if last and token.type != "html_block":
            yield last
            last = None
        if token.type == "code_block" or (token.type == "fence" and token.info == "sh"):
            texts = token.content.replace("\\\n", " ").splitlines()
            if texts[0].startswith("$ "):  # a session: what follows is output
                texts = [text[2:] for text in texts if text.startswith("$ ")]
            texts = [text for text in texts if shlex.split(text, comments=True)]
            commands = [Command(page, line, text, True, reason) for text in texts]
            yield from commands[:-1]
            last = commands[-1]
        for child in token.children or ():
            if child.type == "code_inline" and PROGRAM.match(child.content):
                yield Command(page, line, child.content, False)
        if token.level == 0 and token.nesting <= 0:
            reason, is_output = "", False
    if last:
        yield last


COMMANDS = [command for page in PAGES for command in commands_of(page)]


def is_kept(command: Command) -> bool:
    """Return True unless the command is marked, or named in `REASONS`."""
    return not (command.reason or any(command.text.startswith(start) for start in REASONS))


def test_every_block_has_a_language_and_every_mark_a_block():
    for page in PAGES:
        text = page.read_text("utf-8")
        tokens = MarkdownIt("commonmark").enable("table").parse(text)
        assert {t.info for t in tokens if t.type == "fence"} <= LANGUAGES, page.name
        marked = {command.line for command in commands_of(page) if command.reason}
        assert len(marked) == len(MARK.findall(text)), page.name
        compared = [command for command in commands_of(page) if command.output is not None]
        assert len(compared) == text.count(OUTPUT), page.name


@pytest.mark.parametrize("text", sorted({c.text for c in COMMANDS if c.words[0] == "make"}))
def test_every_make_target_exists(text):
    done = subprocess.run(["make", "--dry-run", *shlex.split(text, comments=True)[1:]], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_script_and_test_file_exists():
    for command in COMMANDS:
        for word in command.words:
            if re.match(r"(experiments|tests)/[\w/.-]+$", word):
                assert (ROOT / word).exists(), f"{command.page.name}: {word}"


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The reader's files: text, a table, a pretrained model, and a finished sweep."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "notes").mkdir()
    stories = [f"{story} It was day {day}." for day in range(60) for story in STORIES]
    text = "\n<|endoftext|>\n".join(stories)
    for path in ("notes/train.txt", "notes/valid.txt", "my_text.txt"):
        (folder / path).write_text(text)
    rows = [json.dumps({"text": story}) for story in stories]
    (folder / "stories.jsonl").write_text("\n".join(rows))
    config = save_model("llama", folder / "pretrained") / "config.json"
    longer = json.loads(config.read_text()) | {"max_position_embeddings": 128}
    config.write_text(json.dumps(longer))
    (folder / "question.toml").write_text('budget = "4096"\nbatches = [4, 8]\ndata = "synthetic"\n'
                                          'model = "quick"\n')  # fmt: skip
    # GRPO starts from its trials, which need the model of grpo-words.
    run = ["run", "--model", "small", "--data", "notes", "--batches", "4,8", "--budget", "8192"]
    done = call(folder, [*run, "--out", "finished", "--yes", "--quiet"])
    assert done.returncode == 0, done.stderr
    return folder


def call(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    program = [sys.executable, "-m", "sweep", *words]
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)


def fill(text: str, files: Path, folder: Path, server: str = "http://127.0.0.1") -> list[str]:
    """Return the words of a command with files of the tests in place of the reader's."""
    text = text.split(" [--")[0]  # optional arguments
    trial = next((files / "finished" / "trials").iterdir())
    table = files / "finished" / "trials.csv"
    for name, value in {
        "results/SWEEP/trials/ID": trial,
        "DIR/trials/ID": trial,
        "--init DIR": f"--init {trial}",
        "--out DIR": "--out planned",
        "--out /shared": f"--out {folder}",
        "results/published": ROOT / "results" / "published",
        "stories.parquet": files / "stories.jsonl",  # as little to install as possible
        "hf:roneneldan/TinyStories": files / "notes",
        "--data hf:OWNER/NAME": f"--data {files / 'notes'}",
        "hf:OWNER/NAME": files / "pretrained",
        "http://127.0.0.1:5000": server,
        "--from-mlflow URI --experiment NAME": f"--from-mlflow sqlite:///{files}/finished/mlflow.db"
        " --experiment tinystories",
        '"python train.py …"': shlex.quote(COMMAND),
        '"…"': shlex.quote(COMMAND),
        "notes/": files / "notes",
        "my_text.txt": files / "my_text.txt",
        "FILE.toml": files / "question.toml",
        "FILE.csv": table,
    }.items():
        text = text.replace(name, str(value))
    values = {"FOLDER": files / "notes", "DIR": files / "finished", "ID": trial.name,
              "LOSS": 3.5, "SOURCE": files / "notes", "N": 1}  # fmt: skip
    words = [str(values.get(word, word)) for word in shlex.split(text, comments=True)]
    if "…" in words:  # further options, or in place of the experiment
        index = words.index("…")
        words[index : index + 1] = ["quick"] * (index == 2)
    return words


def parse(words: list[str]) -> click.Context:
    name, command, rest = sweep.resolve_command(click.Context(sweep), words)
    assert name and command
    return command.make_context(name, rest)


def prepare(page: Path, files: Path, folder: Path) -> None:
    """Write the files that commands need, among them the code that pages show."""
    for name, text in {
        "train.py": READS_SETTINGS + SCRIPT,
        "my_project.py": PROJECT,
        "my_optimizer.py": OPTIMIZER,
        "smoothing.txt": "0.1",
    }.items():
        (folder / name).write_text(text)
    shown = r"`(\w+\.py)`:\n+```python\n(.*?)```"
    for name, text in re.findall(shown, (ROOT / "docs/custom.md").read_text("utf-8"), re.DOTALL):
        (folder / name).write_text(text)
    if page.stem == "executors":
        Package.of_page("executors.md").install(folder)
    if page.stem == "report":
        shutil.copytree(files / "finished", folder / "results" / "quick")


@pytest.fixture
def workspace(request, files, tmp_path, monkeypatch):
    prepare(request.param, files, tmp_path)
    for cached in (load_extensions, installed_executors):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return request.param


WITH_SWEEP = [page for page in PAGES if any(c.page == page for c in COMMANDS)]
by_page = pytest.mark.parametrize("workspace", WITH_SWEEP, indirect=True, ids=lambda p: p.stem)


@by_page
def test_every_sweep_command_is_accepted(workspace, files, tmp_path):
    newest = tmp_path / "results" / "newest" / "plan.json"  # the default of DIR
    newest.parent.mkdir(parents=True, exist_ok=True)
    newest.touch()
    for command in COMMANDS:
        if command.page != workspace or command.words[0] != "sweep":
            continue
        shown = f"{workspace.name}:{command.line}: {command.text}"
        words = fill(command.text, files, tmp_path)[1:]
        if words[0].startswith("-"):  # sweep --help
            continue
        try:
            params = parse(words).params
        except click.exceptions.Exit:  # --help
            continue
        except click.MissingParameter:
            assert not command.is_block, shown  # a span may name a command alone
            continue
        except click.ClickException as error:
            raise AssertionError(f"{shown}: {error.format_message()}") from error
        if words[0] not in ("run", "plan", "check") or not (command.is_block and is_kept(command)):
            continue
        chosen = {name: value for name, value in params.items() if name in SETTINGS}
        out = tmp_path / f"out-{command.line}-{len(words)}"
        request = read_request(params["experiment"], chosen, out)
        if workspace.stem != "README":
            continue
        planned = make_plan(request, is_elsewhere=bool(params.get("cluster")))
        assert planned.plan.trials, shown


def shrink(words: list[str], files: Path) -> list[str]:
    """Return a command with a small model, few tokens and few trials."""
    name, *rest = words
    is_grpo = any(word.startswith("grpo") for word in rest)
    small = {"--budget": "4096", "--batches": "4,8", "--max-seeds": "3", "--largest": "4"}
    small |= {"--budget": "6144", "--batches": "16"} if is_grpo else {}
    needed = {"run": ["--budget", "--batches"], "check": [], "probe": ["--largest"]}
    if name not in needed:
        return words
    for index, word in enumerate(rest):
        if index and (flag := rest[index - 1]) in small:
            rest[index] = small[flag]
        elif index and rest[index - 1] == "--model" and word == "small":
            rest[index] = "quick"
    if name == "run":
        rest += ["--yes", "--quiet"]
        rest += ["--max-seeds", "3"] if "auto" in rest else []
        if "tinystories" in rest:
            rest += ["--data", str(files / "notes"), "--model", "quick"]
    return [name, *rest, *(w for f in needed[name] if f not in rest for w in (f, small[f]))]


@pytest.fixture
def server(workspace, tmp_path):
    """Start an MLflow server for the page that has one."""
    server = MlflowServer(tmp_path)
    if workspace.stem == "tracking":
        server.start()
    yield server.uri
    server.die()


@pytest.mark.slow
@by_page
def test_every_command_of_a_block_runs(workspace, files, server, tmp_path):
    for command in COMMANDS:
        if command.page != workspace or not (command.is_block and is_kept(command)):
            continue
        words = fill(command.text, files, tmp_path, server)
        if words[0] == "sweep":
            done = call(tmp_path, shrink(words[1:], files))
        else:
            done = subprocess.run(command.text, shell=True, capture_output=True, text=True)
        assert done.returncode == 0, f"{command.text}\n{shrink(words[1:], files)}\n{done.stderr}"


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.output], ids=lambda c: f"{c.page.stem}:{c.line}"
)
def test_the_output_of_a_command_is_the_one_that_the_page_shows(command, files, tmp_path):
    done = call(tmp_path, fill(command.text, files, tmp_path)[1:])
    assert done.stdout == command.output
