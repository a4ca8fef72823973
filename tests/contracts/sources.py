"""The Python of a checkout that ships, as syntax trees."""

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Code:
    """The files of sweep/ and experiments/, by their path in the checkout."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        paths = [*root.glob("sweep/**/*.py"), *root.glob("experiments/**/*.py")]
        self.texts = {
            path.relative_to(root).as_posix(): path.read_text("utf-8") for path in sorted(paths)
        }

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {file: ast.parse(text, file) for file, text in self.texts.items()}

    @cached_property
    def files_of_sweep(self) -> list[str]:
        return [file for file in self.texts if file.startswith("sweep/")]

    @cached_property
    def modules(self) -> dict[str, str]:
        """The files by the names of their modules."""
        return {module_of(file): file for file in self.texts}

    def nodes(self, file: str) -> Iterator[ast.AST]:
        return ast.walk(self.trees[file])


def module_of(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
