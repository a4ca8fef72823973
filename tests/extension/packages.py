"""Installed packages that extend `sweep`, made of files and without pip."""

import re
import tomllib
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "executors.md"
GROUP = "sweep.executors"


def write_package(folder: Path, modules: dict[str, str], executors: dict[str, str]) -> None:
    """Write a distribution that is installed if its folder is on the path of Python.

    Args:
        folder: where packages are looked for.
        modules: text by the name of a file.
        executors: object by the name of an entry point.
    """
    for name, text in modules.items():
        (folder / name).write_text(text)
    information = folder / "my_cluster-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-cluster\nVersion: 1.0\n")
    points = [f"{name} = {value}" for name, value in executors.items()]
    (information / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points, ""]))


def launcher_modules() -> dict[str, str]:
    """Return the files of Python that docs/executors.md shows, by name."""
    text = PAGE.read_text("utf-8")
    return dict(re.findall(r"`(\w+\.py)`:\n+```python\n(.*?)```", text, re.DOTALL))


def write_launcher(folder: Path) -> None:
    """Write the package that docs/executors.md shows."""
    (table,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    executors = tomllib.loads(table)["project"]["entry-points"][GROUP]
    write_package(folder, launcher_modules(), executors)
