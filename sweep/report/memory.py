"""Pages of `sweep forecast` and `sweep probe`: Markdown from templates, and the probe's figure."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from sweep.config.numbers import format_bytes, format_count
from sweep.report.figures import GREY, legend_above, new_figure
from sweep.trial.files import replacing

UNITS = {"GiB": 2.0**30, "MiB": 2.0**20}
STATUS_COLOURS = {"OK": "#009E73", "OUT_OF_MEMORY": "#B00020"}
OTHER_COLOUR = "#E69F00"
MISSING = "–"


def markdown_of(document: Mapping[str, Any]) -> str:
    """Write the document of a forecast or a probe as a Markdown page."""
    unit = _unit(document)
    digits = 3 if unit == "GiB" else 1

    def size(value: float | None, digits: int = digits) -> str:
        return MISSING if value is None else f"{value / UNITS[unit]:.{digits}f}"

    def number(value: float | None) -> str:
        if value is None:
            return MISSING
        return f"{value:.3g}" if value < 1000 else format_count(value)

    environment = Environment(
        loader=PackageLoader("sweep.report"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    answers = {True: "yes", False: "no", None: MISSING}
    filters = {"size": size, "number": number, "bytes": format_bytes, "answer": answers.get}
    environment.filters |= filters
    template = environment.get_template(f"{_kind(document)}.md.j2")
    text = template.render(document=document, unit=unit)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _unit(document: Mapping[str, Any]) -> str:
    """Return one unit for the whole page, so that rows can be compared."""
    peaks = [point["peak_bytes"] or 0 for point in document["points"]]
    return "GiB" if max(peaks, default=0) >= 2**30 else "MiB"


def _kind(document: Mapping[str, Any]) -> str:
    return "probe" if "verdict" in document else "forecast"


def plot_memory(document: Mapping[str, Any]) -> Figure:
    """Plot measured peaks against microbatch size, with their line and the limit."""
    figure, (axis,) = new_figure(1)
    points = [p for p in document["points"] if p["batch_size"] == p["microbatch_size"]]
    unit = _unit(document)
    scale = UNITS[unit]
    limit = document["device_memory_bytes"] / scale
    edge = max([point["microbatch_size"] for point in points] + [1]) * 1.08
    if line := document["line"]:
        ends = [0.0, edge]
        heights = [(line["fixed_bytes"] + line["bytes_per_sequence"] * end) / scale for end in ends]
        axis.plot(ends, heights, color=GREY, linewidth=1.2, label="line through sizes that fit")
    for status in dict.fromkeys(point["status"] for point in points):
        chosen = [point for point in points if point["status"] == status]
        heights = [(point["held_bytes"] or limit * scale) / scale for point in chosen]
        sizes = [point["microbatch_size"] for point in chosen]
        marker, colour = ("o" if status == "OK" else "X"), STATUS_COLOURS.get(status, OTHER_COLOUR)
        axis.plot(sizes, heights, marker, color=colour, markersize=7, label=status, zorder=3)
    axis.axhline(limit, color="#B00020", linewidth=1.2, linestyle="--", label="limit")
    axis.set_xlim(0, edge)
    axis.set_ylim(0, 1.12 * limit)
    axis.set_xlabel("microbatch size [sequences]")
    axis.set_ylabel(f"peak memory [{unit}]")
    axis.set_title(document["verdict"], fontsize=10, loc="right", y=1.08)
    legend_above(axis)
    return figure


def write_memory(document: Mapping[str, Any], out: Path) -> Path:
    """Write the page, its JSON and its figure into a folder; return the page's path."""
    kind = _kind(document)
    out.mkdir(parents=True, exist_ok=True)
    if kind == "probe":
        (out / "figures").mkdir(exist_ok=True)
        with replacing(out / "figures" / "memory.png") as part:
            plot_memory(document).savefig(part, format="png", metadata={"Software": None})
    text = markdown_of(document)
    for suffix, content in (("json", json.dumps(document, indent=1) + "\n"), ("md", text)):
        with replacing(out / f"{kind}.{suffix}") as part:
            part.write_text(content, encoding="utf-8")
    return out / f"{kind}.md"
