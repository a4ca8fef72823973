"""What the figures of density count, on small pieces of code."""

import ast
import subprocess
import sys
import tomllib

import pytest

from tests.contracts.density import (
    ANCHORS,
    HABITS,
    LAST_RELEASE,
    Figures,
    by_unit,
    figures_of,
    functions_of,
    habits_of,
    measure_commit,
    place_now,
    python_version,
    total_of,
)
from tests.contracts.sources import ROOT, Code

CODE = '''"""A docstring
in two lines."""
# A comment, and a blank line

def f(a):  # another
    """One more."""
    text = """lines of a text
    that is no docstring"""
    return (
        a + 1
    )

class A:
    field: int
    """What it is."""
'''


def test_tokens_and_lines_are_those_of_code_without_comments_and_docstrings():
    figures = figures_of(CODE)
    # def f ( a ) : | text = """…""" | return ( | a + 1 | ) | class A : | field : int
    assert figures.tokens == 6 + 3 + 2 + 3 + 1 + 3 + 3
    assert figures.lines == 1 + 2 + 1 + 1 + 1 + 1 + 1
    lines = ["def f(a):  # another", 'text = """lines of a text', 'that is no docstring"""']
    lines += ["return (", "a + 1", ")", "class A:", "field: int"]
    assert figures.characters == sum(map(len, lines))
    assert figures.tokens_per_line == 21 / 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if (n := 1):\n    pass", {"walrus": 1}),
        ("a, b = 1, 2", {"a, b = x, y": 1}),
        ("a, b = f()\na = 1, 2", {}),
        ("x = a or b", {"or value": 1}),
        ("f(a and b)", {"and value": 1}),
        ("def f():\n    return a and (b or c)", {"and value": 1, "or value": 1}),
        ("if a and not (b or c) or d:\n    pass\nelif a or b:\n    pass", {}),
        ("while a or b:\n    assert c and d\nx = 1 if a or b else 2\ny = not (a or b)", {}),
        ("x = [n for n in a if n or b]", {}),
        ("match a:\n    case 1 if b or c:\n        pass", {}),
        ("if f(a or b):\n    pass", {"or value": 1}),
        ("x = [n for m in a for n in m]", {"nested comp.": 1}),
        ("x = {n: [m for m in n] for n in a}", {"nested comp.": 1}),
        ("x = [n for n in a if any(m for m in n)]", {"nested comp.": 1}),
        ("x = [n for n in a]\ny = f(m for m in b)", {}),
        ("x = 's' * (n > 1)", {"bool arith.": 1}),
        ("x = 1 + (not a)", {"bool arith.": 1}),
        ("x = n - plan.is_tuned", {"bool arith.": 1}),
        ("x += a > b", {"bool arith.": 1}),
        ("x = 2 * (a > b or c > d)", {"bool arith.": 1, "or value": 1}),
        ("x = 2 * (a or b)", {"or value": 1}),
        ("x = (a > b) & (c > d)\ny = issue * 2", {}),
    ],
)
def test_a_habit_is_counted(text, expected):
    tree = ast.parse(text)
    before = ast.dump(tree)
    assert +habits_of(tree) == expected
    assert ast.dump(tree) == before


def test_the_functions_with_ten_lines_are_listed_with_their_classes():
    body = "\n".join(f"        x = {number}" for number in range(9))
    text = f"class A:\n    def f(self):\n{body}\n    def g(self):\n        pass\n"
    assert functions_of(text) == {"A.f": Figures(tokens=6 + 9 * 3, lines=10)}


def test_a_function_that_moved_is_found_by_its_name():
    functions = {name: Figures() for name in ("a.py:f", "b.py:f", "b.py:A.g")}
    assert place_now(functions, "a.py:f") == "a.py:f"
    assert place_now(functions, "c.py:A.g") == "b.py:A.g"
    assert place_now(functions, "c.py:f") is None
    assert place_now(functions, "c.py:g") is None


def test_units_are_folders_of_sweep_its_own_files_and_experiments(tmp_path):
    for file in ("sweep/a.py", "sweep/plan/b.py", "sweep/plan/c/d.py", "experiments/e/f.py"):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    units = by_unit(Code(tmp_path))
    assert {name: figures.lines for name, figures in units.items()} == {
        "sweep": 1,
        "plan": 2,
        "experiments": 1,
    }
    assert total_of(units).row()[:2] == [3.0, 5.0]


def test_the_figures_of_the_last_release_are_those_of_its_commit():
    release = tomllib.loads(LAST_RELEASE.read_text("utf-8"))
    commit = release["commit"]
    known = subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, capture_output=True)
    if known.returncode or release["python"] != python_version():
        pytest.skip("needs the history of the repository, and the Python that counted")
    assert measure_commit(commit) == release


def test_the_figures_are_printed_by_unit_and_beside_the_anchors():
    def printed(*options: str) -> str:
        command = [sys.executable, "-m", "tests.contracts.density", *options]
        return subprocess.check_output(command, cwd=ROOT, text=True)

    by_name = {line.split("  ")[0].strip(): line for line in printed().splitlines()}
    units = {file.split("/")[1] for file in Code().texts if file.count("/") > 1}
    assert units - {"elman", "examples", "studies"} <= by_name.keys()
    assert {"all", "now", *ANCHORS} <= by_name.keys()
    assert all(len(row) == len(HABITS) + 2 for row in ANCHORS.values())
    assert len(printed("--densest").splitlines()) == 2 + 2 * 10
