"""Count lexical tokens and code lines, and what is written densely.

    python -m tests.contracts.density              by unit and by habit, next to the last release
    python -m tests.contracts.density --densest    the ten functions with the most tokens per line
    python -m tests.contracts.density --record v2  write last_release.toml, from a commit or a tag

A code line has a token that is neither a comment nor part of a docstring. A function counts if it
has at least ten code lines. An f-string is one token, as in Python 3.11; later ones divide it.
"""

import argparse
import ast
import io
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.contracts.sources import ROOT, Code

LAST_RELEASE = Path(__file__).with_name("last_release.toml")
LEAST_LINES = 10  # of a function that is listed
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
HABITS = ("walrus", "a, b = x, y", "or value", "and value", "nested comp.", "bool arith.")
# Tokens and characters per line, and the habits per 1,000 lines, from the project's page on style.
# Its column of `and` and `or` as values counts `or`. Counted as here, httpx 0.28.1, submitit 1.5.4
# (with its tests) and nanodo have these figures.
ANCHORS: dict[str, tuple[float | None, ...]] = {
    "httpx": (6.2, 28, 0, 0.7, 5.2, None, 0.2, None),
    "torchtitan": (6.0, 31, 0.3, 0.9, 2.0, None, 0.8, None),
    "nanodo": (6.6, 30, 0, 0.9, 0.9, None, 1.8, None),
    "submitit": (7.9, 36, 0, 1.7, 1.4, None, 1.1, None),
    "nanochat": (7.9, 43, 0, 7.4, 1.8, None, 0.3, None),
}
ARITHMETIC = ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Mod | ast.Pow
BOOLEAN_NAME = re.compile(r"(is|has|can|was|needs|adds)_")
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass
class Figures:
    tokens: int = 0
    lines: int = 0
    characters: int = 0
    habits: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Figures") -> None:
        self.tokens += other.tokens
        self.lines += other.lines
        self.characters += other.characters
        self.habits += other.habits

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / self.lines if self.lines else 0.0

    def row(self) -> list[float]:
        """Return tokens and characters per line, and each habit per 1,000 lines."""
        habits = [1000 * self.habits[habit] / self.lines for habit in HABITS]
        return [self.tokens_per_line, self.characters / self.lines, *habits]


def figures_of(text: str) -> Figures:
    """Return the figures of a file."""
    tree = ast.parse(text)
    tokens = code_tokens(text, tree)
    numbers = lines_of(tokens)
    lines = text.splitlines()
    characters = sum(len(lines[number - 1].strip()) for number in numbers)
    return Figures(len(tokens), len(numbers), characters, habits_of(tree))


def functions_of(text: str) -> dict[str, Figures]:
    """Return tokens and lines of a file's functions with enough lines, by their qualified names."""
    tree = ast.parse(text)
    tokens = code_tokens(text, tree)
    functions = {}
    for name, node in named_functions(tree):
        last = node.end_lineno or node.lineno
        own = [token for token in tokens if node.lineno <= token.start[0] <= last]
        count = len(lines_of(own))
        if count >= LEAST_LINES:
            functions[name] = Figures(len(own), count)
    return functions


def named_functions(
    node: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.removesuffix("."), child
        yield from named_functions(child, inner)


def code_tokens(text: str, tree: ast.AST) -> list[tokenize.TokenInfo]:
    docstrings = {line for node in ast.walk(tree) for line in docstring_lines(node)}
    return [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in NO_CODE and token.start[0] not in docstrings
    ]


def lines_of(tokens: list[tokenize.TokenInfo]) -> set[int]:
    return {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}


def docstring_lines(node: ast.AST) -> range:
    """Return the lines of the string expressions of a body: docstrings, also of attributes."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if not is_text or not isinstance(node.value.value, str):
        return range(0)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def habits_of(tree: ast.AST) -> Counter[str]:
    counts: Counter[str] = Counter()
    conditions = {id(part) for node in ast.walk(tree) for part in parts_of_conditions(node)}
    for node in ast.walk(tree):
        match node:
            case ast.NamedExpr():
                counts["walrus"] += 1
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
                counts["a, b = x, y"] += 1
            case ast.BoolOp(op=ast.Or()) if id(node) not in conditions:
                counts["or value"] += 1
            case ast.BoolOp(op=ast.And()) if id(node) not in conditions:
                counts["and value"] += 1
            case ast.BinOp(left=left, op=operator, right=right):
                if isinstance(operator, ARITHMETIC) and (is_bool(left) or is_bool(right)):
                    counts["bool arith."] += 1
            case ast.AugAssign(op=operator, value=value):
                if isinstance(operator, ARITHMETIC) and is_bool(value):
                    counts["bool arith."] += 1
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inner = (other for other in ast.walk(node) if other is not node)
                if len(node.generators) > 1 or any(isinstance(o, Comprehension) for o in inner):
                    counts["nested comp."] += 1
    return counts


def parts_of_conditions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in which `and`, `or` and `not` combine the conditions of a statement."""
    tests: list[ast.expr] = []
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            tests = [test]
        case ast.Assert(test=test) | ast.match_case(guard=ast.expr() as test):
            tests = [test]
        case ast.comprehension(ifs=ifs):
            tests = [*ifs]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            tests = [operand]
    while tests:
        test = tests.pop()
        if isinstance(test, ast.BoolOp):
            yield test
            tests += test.values
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            tests.append(test.operand)


def is_bool(node: ast.AST) -> bool:
    """Return True for a comparison, a negation, and a name such as is_open."""
    match node:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return BOOLEAN_NAME.match(name) is not None
        case ast.BoolOp(values=values):
            return all(map(is_bool, values))
    return False


def by_unit(code: Code) -> dict[str, Figures]:
    units: dict[str, Figures] = {}
    for file, text in code.texts.items():
        parts = file.split("/")
        unit = parts[1] if parts[0] == "sweep" and len(parts) > 2 else parts[0]
        units.setdefault(unit, Figures()).add(figures_of(text))
    return dict(sorted(units.items()))


def total_of(units: dict[str, Figures]) -> Figures:
    total = Figures()
    for figures in units.values():
        total.add(figures)
    return total


def all_functions(code: Code) -> dict[str, Figures]:
    """Return the functions by file:name, those with the most tokens per line first."""
    functions = {
        f"{file}:{name}": figures
        for file, text in code.texts.items()
        for name, figures in functions_of(text).items()
    }
    return dict(sorted(functions.items(), key=lambda item: -item[1].tokens_per_line))


def place_now(functions: dict[str, Figures], name: str) -> str | None:
    """Return where a function is now: in its file, or in the only file with its name."""
    if name in functions:
        return name
    _, _, own_name = name.partition(":")
    places = [place for place in functions if place.endswith(f":{own_name}")]
    return places[0] if len(places) == 1 else None


def measure_commit(commit: str) -> dict[str, Any]:
    """Return the figures of a commit of this repository, as last_release.toml holds them."""
    git = ["git", "-C", str(ROOT)]
    archive = subprocess.check_output([*git, "archive", commit, "sweep", "experiments"])
    digest = subprocess.check_output([*git, "rev-parse", f"{commit}^{{commit}}"], text=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        code = Code(Path(folder))
    units = by_unit(code)
    total = total_of(units)
    densest = [*all_functions(code).items()][:10]
    (version,) = re.findall(r'__version__ = "(.+)"', code.texts["sweep/version.py"])
    return {
        "version": version,
        "commit": digest.strip(),
        "python": python_version(),
        "characters": total.characters,
        "units": {name: [figures.tokens, figures.lines] for name, figures in units.items()},
        "habits": {habit: total.habits[habit] for habit in HABITS},
        "densest": {name: [figures.tokens, figures.lines] for name, figures in densest},
    }


def record(commit: str) -> None:
    figures = measure_commit(commit)
    lines = ["# Tokens and lines of the last release: python -m tests.contracts.density --record"]
    for key, value in figures.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", *(f'"{name}" = {count}' for name, count in value.items())]
        else:
            lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}")
    LAST_RELEASE.write_text("\n".join([*lines, ""]), "utf-8")


def python_version() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def print_units(release: dict[str, Any]) -> None:
    units = by_unit(Code())
    total = total_of(units)
    before = {name: Figures(*counts) for name, counts in release["units"].items()}
    earlier = total_of(before)
    earlier.characters = release["characters"]
    earlier.habits = Counter(release["habits"])

    print(f"{'':16}{'tokens':>9}{'change':>9}{'lines':>8}{'change':>8}{'per line':>10}")
    names = sorted({*units, *before})
    rows = [(name, units.get(name, Figures()), before.get(name, Figures())) for name in names]
    for name, now, old in [*rows, ("all", total, earlier)]:
        print(
            f"{name:16}{now.tokens:9,}{now.tokens - old.tokens:+9,}"
            f"{now.lines:8,}{now.lines - old.lines:+8,}{now.tokens_per_line:10.1f}"
        )

    print("\nPer line: tokens and characters. Per 1,000 lines: the others.")
    print(f"{'':16}" + "".join(f"{title:>14}" for title in ("tokens", "characters", *HABITS)))
    anchors = ANCHORS.items()
    for name, row in [("now", total.row()), (release["version"], earlier.row()), *anchors]:
        cells = ["–" if value is None else f"{value:.1f}" for value in row]
        print(f"{name:16}" + "".join(f"{cell:>14}" for cell in cells))
    if release["python"] != python_version():
        print(f"Version {release['version']} was counted by Python {release['python']}.")


def print_densest(release: dict[str, Any]) -> None:
    functions = all_functions(Code())
    print(f"The densest functions of version {release['version']}, then and now:")
    for name, (tokens, lines) in release["densest"].items():
        place = place_now(functions, name)
        now = "is gone, shorter or renamed"
        if place is not None:
            figures = functions[place]
            now = f"{figures.tokens_per_line:4.1f} in {figures.lines:3} lines"
        print(f"  {tokens / lines:4.1f} in {lines:3} lines  {now}  {place or name}")
    print("The densest functions now:")
    for name, figures in [*functions.items()][:10]:
        print(f"  {figures.tokens_per_line:4.1f} in {figures.lines:3} lines  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--densest", action="store_true", help="list the ten densest functions")
    parser.add_argument("--record", metavar="COMMIT", help="write the figures of a release")
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return
    release = tomllib.loads(LAST_RELEASE.read_text("utf-8"))
    if options.densest:
        print_densest(release)
    else:
        print_units(release)


if __name__ == "__main__":
    sys.exit(main())
