"""Generated pages are up to date, and links between pages work."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sweep

ROOT = Path(__file__).parents[1]
PATTERNS = ("*.md", "docs/*.md", "studies/**/*.md", "results/published/**/README.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_up_to_date(generate):
    program = "import generate; print(generate.cli_page(), end='')"
    # In a fresh process: click keeps the help option of a command's first use.
    page = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT / "docs", text=True)
    assert generate.PAGE.read_text() == page, "run `make docs`"


def test_the_results_in_the_readme_are_up_to_date(generate):
    assert generate.README.read_text() == generate.readme_with_results(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_work(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_public_names_exist_and_are_sorted():
    assert sweep.__all__ == sorted(sweep.__all__)
    for name in sweep.__all__:
        assert getattr(sweep, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = sweep.nonsense
