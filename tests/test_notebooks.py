"""The notebooks run from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.analysis.fake_sweeps import write_fake_sweep

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_fake_sweep(tmp_path / "fake", seeds=2)
    return tmp_path / "fake"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # Jupyter warns about its own sockets
def test_notebook_runs(
    path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_FOLDER", str(folder))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    before = {item: item.stat().st_mtime_ns for item in folder.rglob("*")}
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    assert {item: item.stat().st_mtime_ns for item in folder.rglob("*")} == before


def test_committed_notebooks_hold_no_outputs() -> None:
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs") and cell.get("execution_count") is None
