"""Installed packages that extend `sweep`, made of files and without pip."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Package:
    """A distribution: the text of each module, and its entry points by group and name."""

    modules: dict[str, str]
    entry_points: dict[str, dict[str, str]]

    @classmethod
    def of_page(cls, name: str) -> "Package":
        """Return the package that a page of docs/ shows."""
        text = (ROOT / "docs" / name).read_text("utf-8")
        modules = dict(re.findall(r"`(\w+\.py)`:\n+```python\n(.*?)```", text, re.DOTALL))
        (table,) = re.findall(r"```toml\n(\[project\.entry-points.*?)```", text, re.DOTALL)
        return cls(modules, tomllib.loads(table)["project"]["entry-points"])

    def install(self, folder: Path) -> None:
        """Write it as pip installs it, into a folder on the path of Python."""
        for name, text in self.modules.items():
            (folder / name).write_text(text)
        information = folder / "my_package-1.0.dist-info"
        information.mkdir()
        metadata = "Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n"
        (information / "METADATA").write_text(metadata)
        lines = []
        for group, points in self.entry_points.items():
            lines.append(f"[{group}]")
            lines += [f"{name} = {value}" for name, value in points.items()]
        (information / "entry_points.txt").write_text("\n".join([*lines, ""]))


class Installation:
    """A folder of packages, and commands that find them and run in another folder."""

    def __init__(self, folder: Path) -> None:
        self.packages = folder / "packages"
        self.work = folder / "work"
        self.packages.mkdir()
        self.work.mkdir()

    def start(self, *words: str | Path, **variables: str) -> "subprocess.Popen[str]":
        path = os.pathsep.join([str(self.packages), str(ROOT)])
        return subprocess.Popen(
            [sys.executable, "-m", "sweep", *map(str, words)],
            cwd=self.work,
            env={**os.environ, "PYTHONPATH": path, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str | Path, **variables: str) -> str:
        """Return what a command that succeeds prints."""
        return "".join(self._end(*words, **variables))

    def read_json(self, *words: str | Path, **variables: str) -> Any:
        """Return the JSON that a command prints."""
        return json.loads(self._end(*words, "--json", **variables)[0])

    def _end(self, *words: str | Path, **variables: str) -> tuple[str, str]:
        process = self.start(*words, **variables)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        return output, errors

    def refusal(self, *words: str | Path, **variables: str) -> str:
        """Return the last line about a command that is refused, which prints nothing else."""
        process = self.start(*words, **variables)
        output, errors = process.communicate()
        assert process.returncode == 2 and "Traceback" not in errors, errors
        assert not output
        return errors.splitlines()[-1]
