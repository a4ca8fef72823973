"""The pages of `sweep forecast` and `sweep probe`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.report.report import render
from sweep.trial.files import replacing


def markdown_of(document: Mapping[str, Any]) -> str:
    peaks = [point["peak_bytes"] or 0 for point in document["points"]]
    # one unit for the whole page, so that rows can be compared
    unit, scale = ("GiB", 2.0**30) if max(peaks, default=0) >= 2**30 else ("MiB", 2.0**20)

    def size(number_of_bytes: float | None, digits: int = 3 if unit == "GiB" else 1) -> str | None:
        return None if number_of_bytes is None else f"{number_of_bytes / scale:.{digits}f}"

    return render(f"{_kind_of(document)}.md.j2", document=document, unit=unit, size=size)


def write_memory(document: Mapping[str, Any], out: Path) -> Path:
    """Write the page and its JSON into a folder; return the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    contents = {"json": json.dumps(document, indent=1) + "\n", "md": markdown_of(document)}
    for suffix, content in contents.items():
        with replacing(page := out / f"{_kind_of(document)}.{suffix}") as part:
            part.write_text(content, encoding="utf-8")
    return page


def _kind_of(document: Mapping[str, Any]) -> str:
    return "probe" if "verdict" in document else "forecast"
