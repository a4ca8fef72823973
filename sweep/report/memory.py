"""The pages of `sweep forecast` and `sweep probe`, and the probe's figure."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sweep.report.figures import DIVERGED_COLOR, GREY, new_figure, save_figure, with_legend
from sweep.report.report import render
from sweep.trial.files import replacing

STYLES = {"OK": ("o", "#009E73"), "OUT_OF_MEMORY": ("X", DIVERGED_COLOR)}


def markdown_of(document: Mapping[str, Any]) -> str:
    unit, scale = _unit_of(document)

    def size(number_of_bytes: float | None, digits: int = 3 if unit == "GiB" else 1) -> str | None:
        return None if number_of_bytes is None else f"{number_of_bytes / scale:.{digits}f}"

    return render(f"{_kind_of(document)}.md.j2", document=document, unit=unit, size=size)


def write_memory(document: Mapping[str, Any], out: Path) -> Path:
    """Write the page, its JSON and a probe's figure into a folder; return the page's path."""
    kind = _kind_of(document)
    (out / "figures" if kind == "probe" else out).mkdir(parents=True, exist_ok=True)
    if kind == "probe":
        save_figure(plot_memory(document), out / "figures" / "memory.png")
    contents = {"json": json.dumps(document, indent=1) + "\n", "md": markdown_of(document)}
    for suffix, content in contents.items():
        with replacing(out / f"{kind}.{suffix}") as part:
            part.write_text(content, encoding="utf-8")
    return out / f"{kind}.md"


def plot_memory(document: Mapping[str, Any]) -> Figure:
    figure, (axis,) = new_figure()
    points = [p for p in document["points"] if p["batch_size"] == p["microbatch_size"]]
    unit, scale = _unit_of(document)
    limit = document["device_memory_bytes"] / scale
    edge = 1.08 * max((point["microbatch_size"] for point in points), default=1)
    if line := document["line"]:
        start = (0, line["fixed_bytes"] / scale)
        slope = line["bytes_per_sequence"] / scale
        axis.axline(start, slope=slope, color=GREY, label="line through sizes that fit")
    for point in points:
        status = point["status"]
        height = (point["held_bytes"] or limit * scale) / scale
        marker, color = STYLES.get(status, ("X", "#E69F00"))
        style: dict[str, Any] = {"color": color, "label": status, "markersize": 7, "zorder": 3}
        axis.plot(point["microbatch_size"], height, marker, **style)
    axis.axhline(limit, color=DIVERGED_COLOR, linewidth=1.2, linestyle="--", label="limit")
    axis.set(xlim=(0, edge), ylim=(0, 1.12 * limit), xlabel="microbatch size [sequences]")
    axis.set_ylabel(f"peak memory [{unit}]")
    axis.set_title(document["verdict"], fontsize=10, loc="right")
    return with_legend(figure)


def _kind_of(document: Mapping[str, Any]) -> str:
    return "probe" if "verdict" in document else "forecast"


def _unit_of(document: Mapping[str, Any]) -> tuple[str, float]:
    """Return one unit for the whole page, so that rows can be compared, and its bytes."""
    peaks = [point["peak_bytes"] or 0 for point in document["points"]]
    return ("GiB", 2.0**30) if max(peaks, default=0) >= 2**30 else ("MiB", 2.0**20)
