"""Count lexical tokens and code lines, and what is written densely.

    python -m tests.contracts.density              by unit, with the change since the last release
    python -m tests.contracts.density --densest    the ten functions with the most tokens per line
    python -m tests.contracts.density --root DIR   of another checkout

A code line has a token that is neither a comment nor part of a docstring. A function counts if it
has at least ten code lines.
"""

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAST_RELEASE = Path(__file__).with_name("last_release.toml")
LEAST_LINES = 10  # of a function that is listed
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
# Per 1,000 code lines, as STYLE.md counts them: what is written on one line instead of several.
HABITS = ("walrus", "tuple assignment", "and/or as a value", "nested comprehension", "bool factor")
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


def sources(root: Path) -> list[Path]:
    """Return all Python that ships."""
    return sorted([*(root / "sweep").rglob("*.py"), *(root / "experiments").rglob("*.py")])


def figures_of(path: Path) -> tuple[Figures, list[tuple[float, int, str]]]:
    """Return the figures of a file, and tokens per line, lines and name of its functions."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    docstrings = {line for node in ast.walk(tree) for line in docstring_lines(node)}
    starts: list[int] = []  # the line of each token
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.start[0] not in docstrings:
            starts.append(token.start[0])
            code_lines.update(range(token.start[0], token.end[0] + 1))

    lines = text.splitlines()
    characters = sum(len(lines[number - 1].strip()) for number in code_lines)
    figures = Figures(len(starts), len(code_lines), characters, habits_of(tree))
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = [n for n in starts if node.lineno <= n <= (node.end_lineno or node.lineno)]
            count = len(set(inside))
            if count >= LEAST_LINES:
                functions.append((len(inside) / count, count, node.name))
    return figures, functions


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
                counts["tuple assignment"] += 1
            case ast.BoolOp() if id(node) not in conditions:
                counts["and/or as a value"] += 1
            case ast.BinOp(op=ast.Mult()) if is_bool(node.left) or is_bool(node.right):
                counts["bool factor"] += 1
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                inner = (other for other in ast.walk(node) if other is not node)
                if len(node.generators) > 1 or any(isinstance(o, Comprehension) for o in inner):
                    counts["nested comprehension"] += 1
    return counts


def parts_of_conditions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in which `and` and `or` combine conditions."""
    tests: list[ast.AST] = []
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            tests = [test]
        case ast.Assert(test=test):
            tests = [test]
        case ast.comprehension(ifs=ifs):
            tests = [*ifs]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            tests = [operand]
    for test in tests:
        yield from ast.walk(test)


def is_bool(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare | ast.BoolOp) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


def by_unit(root: Path) -> dict[str, Figures]:
    units: dict[str, Figures] = {}
    for path in sources(root):
        parts = path.relative_to(root).parts
        unit = parts[1] if parts[0] == "sweep" and len(parts) > 2 else parts[0]
        units.setdefault(unit, Figures()).add(figures_of(path)[0])
    return units


def densest(root: Path) -> list[tuple[float, int, str]]:
    functions = []
    for path in sources(root):
        for density, lines, name in figures_of(path)[1]:
            functions.append((density, lines, f"{path.relative_to(root).as_posix()}:{name}"))
    return sorted(functions, reverse=True)[:10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--densest", action="store_true", help="list the ten densest functions")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to look at")
    options = parser.parse_args()
    write = sys.stdout.write
    if options.densest:
        for density, lines, name in densest(options.root):
            write(f"{density:5.1f} tokens per line, {lines:3} lines  {name}\n")
        return

    before = tomllib.loads(LAST_RELEASE.read_text("utf-8"))
    units = by_unit(options.root)
    total = Figures()
    for figures in units.values():
        total.add(figures)
    write(f"{'':16}{'tokens':>9}{'change':>9}{'lines':>8}{'change':>8}{'per line':>10}\n")
    for name, figures in [*sorted(units.items()), ("all", total)]:
        old = before.get(name, {"tokens": 0, "lines": 0})
        write(
            f"{name:16}{figures.tokens:9,}{figures.tokens - old['tokens']:+9,}"
            f"{figures.lines:8,}{figures.lines - old['lines']:+8,}"
            f"{figures.tokens_per_line:10.1f}\n"
        )
    write(f"characters per code line: {total.characters / total.lines:.1f}\n")
    for habit in HABITS:
        write(f"{habit}, per 1,000 lines: {1000 * total.habits[habit] / total.lines:.1f}\n")


if __name__ == "__main__":
    main()
