"""Generated pages are up to date, pages say what the code says, the site builds, notebooks run."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import sweep
from sweep.analysis.checks import DEFINITIONS
from sweep.config.load import load_experiment

ROOT = Path(__file__).parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "experiments/**/README.md", "results/published/**/README.md")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate():
    return load_script("generate")


def test_the_command_line_page_is_up_to_date(generate):
    program = "import generate; print(generate.cli_page(), end='')"
    # In a fresh process: click keeps the help option of a command's first use.
    page = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT / "docs", text=True)
    assert generate.PAGE.read_text() == page, "run `make docs`"


def test_the_page_of_settings_is_up_to_date(generate):
    assert generate.SETTINGS.read_text() == generate.settings_page(), "run `make docs`"


def test_the_columns_of_trials_csv_are_up_to_date(generate):
    assert generate.RESULTS.read_text() == generate.results_page(), "run `make docs`"


@pytest.mark.parametrize("name", ["audit", "critical-batch-size", "script"])
def test_the_tables_of_checks_are_up_to_date(generate, name):
    (page,) = [path for path in generate.SUBJECTS if path.stem == name]
    assert page.read_text() == generate.checks_page(page), "run `make docs`"


def test_every_shipped_check_is_in_one_table_of_checks(generate):
    texts = [page.read_text() for page in generate.SUBJECTS]
    rows = [row for text in texts for row in re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)]
    shipped = [check.code for check in DEFINITIONS.values() if check.is_shipped]
    assert sorted(code for code in rows if code in shipped) == sorted(shipped)


def test_the_results_in_the_readme_are_up_to_date(generate):
    assert generate.README.read_text() == generate.readme_with_results(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_work(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def templates(path):
    """Return the texts of a file's strings, with … in place of values."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            yield "".join(parts)


def test_every_message_of_troubleshooting_is_one_of_the_code():
    page = re.sub(r"\n  +", " ", (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"))
    cells = re.findall(r"^\| .*?(``?)([^`].*?)\1 \|", page, re.MULTILINE)
    points = re.findall(r"^- (``?)([^`].*?)\1", page, re.MULTILINE)
    messages = [text for _, text in cells + points if " " in text]
    assert len(messages) > 40
    texts = {text for path in (ROOT / "sweep").rglob("*.py") for text in templates(path)}
    missing = []
    for message in messages:
        parts = [part for part in re.split(r"[….]*…[….]*", message) if part.strip(" .()")]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        missing += [message] * (not any(pattern.search(text) for text in texts))
    assert missing == []


def test_every_check_that_a_page_names_exists():
    texts = [page.read_text("utf-8") for page in PAGES if "published" not in page.parts]
    named = {name for text in texts for name in re.findall(r"[Cc]heck `(\w+)`", text)}
    assert named and named <= DEFINITIONS.keys()


def test_every_experiment_of_a_page_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for page in PAGES:
        for index, text in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)):
            fields = tomllib.loads(text)
            if "budget" in fields:
                (tmp_path / f"{page.stem}-{index}.toml").write_text(text)
                load_experiment(f"{page.stem}-{index}.toml")


@pytest.mark.filterwarnings("default")
def test_the_site_builds_without_warnings_and_loads_nothing_from_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    config = ROOT / "docs" / "site" / "mkdocs.yml"
    done = subprocess.run([*command, "-f", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.glob("*.html"))
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {page.stem for page in pages}
    for page in pages:
        sources = re.findall(r"<(?:script|img|iframe)[^>]* src=[\"']?([^\"' >]+)", page.read_text())
        links = re.findall(r"<link[^>]* href=[\"']?([^\"' >]+)", page.read_text())
        for target in {*sources, *links}:
            assert target.startswith("data:") or (tmp_path / target.lstrip("/")).exists(), target


def test_public_names_exist_and_are_sorted():
    assert sweep.__all__ == sorted(sweep.__all__)
    callbacks = {"LightningCallback", "TrainerCallback"}  # of libraries that may be missing
    assert callbacks < {*sweep.__all__}
    for name in {*sweep.__all__} - callbacks:
        assert getattr(sweep, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = sweep.nonsense


def shown(notebook):
    """Return the kinds and the texts of each cell's outputs; pictures may differ in a pixel."""
    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    return [
        [
            (output.get("text") or output["data"].get("text/plain"), sorted(output.get("data", {})))
            for output in of_cell
        ]
        for of_cell in outputs
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # Jupyter warns about its own sockets
def test_a_notebook_gives_its_stored_outputs_and_uses_the_public_interface(
    path, tmp_path, monkeypatch
):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    stored = shown(notebook)
    assert sum("image/png" in kinds for cell in stored for _, kinds in cell) == 4
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert not re.search(r"(from|import) sweep\.", code)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert shown(notebook) == stored
