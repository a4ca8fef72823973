"""Generated pages agree with what they are generated from, and links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

import sweep

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/published/*.md")])


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_what_the_commands_say(generate):
    assert generate.PAGE.read_text() == generate.cli_page(), "run `make docs`"


def test_the_readme_shows_the_published_sweep_as_it_is(generate):
    assert generate.README.read_text() == generate.readme_with_results(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_public_names_exist_and_are_sorted():
    assert sweep.__all__ == sorted(sweep.__all__)
    for name in sweep.__all__:
        assert getattr(sweep, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = sweep.nonsense
