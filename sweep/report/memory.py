"""Forecast and probe as people read them: tables in markdown, and the figure of a probe."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sweep.config.grpo import least_size
from sweep.config.numbers import format_bytes, format_count
from sweep.report import axes as look
from sweep.report import markdown as md
from sweep.trial.files import replacing

UNITS = {"GiB": 2.0**30, "MiB": 2.0**20}
STATUS_COLOURS = {"OK": "#009E73", "OUT_OF_MEMORY": "#B00020"}
OTHER_COLOUR = "#E69F00"


class Sizes:
    """Writes bytes in one unit for a whole page, so that rows compare."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        peaks = [point["peak_bytes"] or 0 for point in document["points"]]
        self.unit = "GiB" if max(peaks, default=0) >= 2**30 else "MiB"
        self._size = UNITS[self.unit]

    def __call__(self, size: float | None) -> str:
        digits = 3 if self.unit == "GiB" else 1
        return md.MISSING if size is None else f"{size / self._size:.{digits}f}"


def forecast_markdown(document: Mapping[str, Any]) -> str:
    """Write a forecast as a page."""
    names, sizes = list(document["points"][0]["by_category"]), Sizes(document)
    rows = [
        [
            str(point["batch_size"]),
            split_of(point, document["devices"]),
            *(sizes(point["by_category"][name]) for name in names),
            sizes(point["peak_bytes"]),
            sizes(point["evaluation_bytes"]),
            {True: "yes", False: "no", None: md.MISSING}[point["fits"]],
        ]
        for point in document["points"]
    ]
    split = "microbatch × devices × steps" if document["devices"] > 1 else "microbatch × steps"
    headers = ["batch size", split, *names, "peak", "evaluation", "fits"]
    parts = [heading("Memory forecast", document), md.table(headers, rows)]
    parts.append(f"All sizes in {sizes.unit}. They are of {document['basis']}.")
    if note := _gpu_note(document):
        parts.append(note)
    parts += [*_stages_of(document), *phases_of(document), *line_sentences(document)]
    return "\n\n".join(parts) + "\n"


def split_of(point: Mapping[str, Any], devices: int) -> str:
    """Write how a batch is split: microbatch size × devices × gradient accumulation steps."""
    several = f" × {devices}" if devices > 1 else ""
    return f"{point['microbatch_size']}{several} × {point['gradient_accumulation_steps']}"


def _stages_of(document: Mapping[str, Any]) -> list[str]:
    """Give what each ZeRO stage would take; nothing for one device."""
    if not (stages := document["stages"]):
        return []
    sizes, names = Sizes(document), list(stages[0]["by_category"])
    headers = ["ZeRO stage", *names, "peak", "at rest", "fits"]
    rows = [
        [
            f"{stage['zero']}{' (asked for)' if stage['zero'] == document['zero'] else ''}",
            *(sizes(stage["by_category"][name]) for name in names),
            sizes(stage["peak_bytes"]),
            sizes(stage["rest_bytes"]),
            {True: "yes", False: "no", None: md.MISSING}[stage["fits"]],
        ]
        for stage in stages
    ]
    title = f"One of {document['devices']} devices at batch size {stages[0]['batch_size']}:"
    return [title, md.table(headers, rows)]


def phases_of(document: Mapping[str, Any]) -> list[str]:
    """Give the peak, and where measured the seconds, of each phase of a step that has several."""
    points = [point for point in document["points"] if point.get("phases")]
    if not points:
        return []
    names, sizes = list(points[0]["phases"]), Sizes(document)
    is_timed = "phase_seconds" in points[0]
    headers = ["batch size", *(f"{name.replace('_', ' ')} peak" for name in names)]
    headers += [f"{name.replace('_', ' ')} s" for name in names] if is_timed else []
    rows = []
    for point in points:
        row = [str(point["batch_size"]), *(sizes(point["phases"][name]) for name in names)]
        row += [f"{point['phase_seconds'][name]:.3g}" for name in names] if is_timed else []
        rows.append(row)
    return ["By phase of a step:", md.table(headers, rows)]


def _scoring(document: Mapping[str, Any]) -> list[str]:
    """Say whether a probe's steps of GRPO, and so completions/s, hold the scoring."""
    if "unscored_because" not in document:
        return []
    if why := document["unscored_because"]:
        return [f"Completions/s leave scoring out: {why.rstrip('.')}."]
    return ["Completions/s hold the scoring of what the start's weights sample."]


def _gpu_note(document: Mapping[str, Any]) -> str:
    """Say what of a GPU's memory is not the tensors'."""
    memory, usable = document["device_memory_bytes"], document["usable_bytes"]
    why = "context, libraries and fragmentation, which a forecast does not see"
    if memory is None:
        return f"A GPU needs about a tenth of its memory for {why}."
    if usable < memory:
        return f"Of the GPU's {format_bytes(memory)} a tenth is left for {why}."
    return (
        "Tensors are held against the whole limit, as on a CPU. A GPU needs about a tenth of its "
        f"memory for {why}: ask about one with `--device cuda`."
    )


def heading(title: str, document: Mapping[str, Any]) -> str:
    """Say what was asked."""
    limit, model = document["device_memory_bytes"], document["model"]
    within = f", within {format_bytes(limit)}" if limit else ""
    parameters = model["parameters"]
    size = f" ({parameters:,} parameters)" if parameters else ""
    return (
        f"# {title}: {document['experiment']}\n\nModel {model['name']}{size}, "
        f"{document['precision']}, optimizer {document['optimizer']}, "
        f"{document['tokens_per_sequence']} tokens a sequence{within}."
    )


def line_sentences(document: Mapping[str, Any]) -> list[str]:
    """Give the line with its fit, and the largest microbatch."""
    found, sizes = [], Sizes(document)
    if line := document["line"]:
        slope = line["bytes_per_sequence"] / UNITS[sizes.unit]
        found.append(
            f"Line: peak = {sizes(line['fixed_bytes'])} {sizes.unit} + "
            f"{slope:.4f} {sizes.unit} × microbatch size; R² "
            f"{line['r_squared']:.6f}, largest residual "
            f"{format_bytes(line['largest_residual_bytes'])}."
        )
    if (largest := document["largest_microbatch_size"]) is not None:
        found.append(f"Largest microbatch size: {largest or _none_fits(document)}.")
    return found


def _none_fits(document: Mapping[str, Any]) -> str:
    """Say that not even the least size fits; of a group, what was not looked at."""
    group = document["group_size"]
    multiple = document.get("multiple", group)
    parts = "; equal parts of one were not tried" if multiple == group > 1 else ""
    return f"not even {least_size(group, multiple)} fits{parts}"


def probe_markdown(document: Mapping[str, Any]) -> str:
    """Write a probe as a page."""
    sizes = Sizes(document)
    rows = [_probe_row(point, sizes) for point in document["points"]]
    headers = ["batch size", "microbatch", "status", "at rest", "peak", "reserved", "device"]
    headers += ["headroom", "retries", "s/step", "tokens/s", "steps"]
    if document["group_size"] > 1:
        headers.append("completions/s")
        for row, point in zip(rows, document["points"], strict=True):
            seconds = point["seconds_per_step"]
            row.append(f"{point['batch_size'] / seconds:.3g}" if seconds else md.MISSING)
    found = [
        heading("Memory probe", document),
        f"Verdict: **{document['verdict']}** ({document['search_points']} points looked at).",
        md.figure("memory", "Peak memory of whole training steps against microbatch size."),
        md.table(headers, rows),
        f"All sizes in {sizes.unit}; each point ran in a process of its own. The line and the "
        f"headroom are of {document['basis']}.",
        *phases_of(document),
        *_scoring(document),
        *line_sentences(document),
        recommendations(document),
    ]
    return "\n\n".join(found) + "\n"


def _probe_row(point: Mapping[str, Any], sizes: Sizes) -> list[str]:
    retries, seconds, rate = (
        point[name] for name in ("allocator_retries", "seconds_per_step", "tokens_per_second")
    )
    return [
        *(str(point["batch_size"]), str(point["microbatch_size"]), point["status"]),
        *(sizes(point[f"{name}_bytes"]) for name in ("rest", "peak", "reserved", "device")),
        sizes(point["headroom_bytes"]),
        md.MISSING if retries is None else str(retries),
        md.MISSING if seconds is None else f"{seconds:.3g}",
        md.MISSING if rate is None else format_count(rate),
        str(point["optimizer_steps"] or md.MISSING),
    ]


def recommendations(document: Mapping[str, Any]) -> str:
    """Name the three choices, each with what proved it."""
    if not document["recommendations"]:
        return f"Nothing can be recommended: {_none_fits(document)}."
    with_steps, sizes = document["accumulated"], Sizes(document)
    items = [
        f"{one['name'].capitalize()} (at most {100 * one['share']:.0f} % of the limit): microbatch "
        f"size {one['microbatch_size']}, headroom {sizes(one['headroom_bytes'])} {sizes.unit}; "
        f"measured {one['status']}. {_soak_sentence(one['soak'])}"
        for one in document["recommendations"]
    ]
    if with_steps:
        items.append(
            f"Any larger batch size: `--microbatch {with_steps['microbatch_size']}` with gradient "
            f"accumulation; batch size {with_steps['batch_size']} measured "
            f"{with_steps['status']}, peak {sizes(with_steps['peak_bytes'])} {sizes.unit}."
        )
    return md.bullets(items)


def _soak_sentence(soak: Mapping[str, Any] | None) -> str:
    if soak is None:
        return "No longer run proved it: ask for `--soak 100`."
    leak = soak["leak"]
    if leak is None:
        return f"Soak: {soak['point']['status']} {soak['point']['message']}"
    low, high = leak["interval"]
    verdict = "memory LEAKS" if leak["is_found"] else "no leak was found"
    return (
        f"Soak of {leak['steps']} steps: {verdict}; memory at rest grew by "
        f"{leak['bytes_per_step']:,.0f} bytes a step (95 % interval {low:,.0f} to {high:,.0f})."
    )


def plot_memory(document: Mapping[str, Any]) -> Figure:
    """Draw measured peaks, their line, the limit and the verdict."""
    figure, (axis,) = look.new_figure(1)
    points = [p for p in document["points"] if p["batch_size"] == p["microbatch_size"]]
    unit = Sizes(document).unit
    scale = UNITS[unit]
    limit = document["device_memory_bytes"] / scale
    edge = max([point["microbatch_size"] for point in points] + [1]) * 1.08
    if line := document["line"]:
        ends = [0.0, edge]
        heights = [(line["fixed_bytes"] + line["bytes_per_sequence"] * end) / scale for end in ends]
        axis.plot(ends, heights, color=look.GREY, linewidth=1.2, label="line through what fits")
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
    look.legend_above(axis)
    return figure


def kind_of(document: Mapping[str, Any]) -> str:
    """Return what a document is of: forecast, probe or ablation."""
    return "ablation" if "claims" in document else "probe" if "verdict" in document else "forecast"


def markdown_of(document: Mapping[str, Any]) -> str:
    """Write a forecast, a probe or an ablation as a page."""
    from sweep.report.ablation import ablation_markdown

    pages = {"probe": probe_markdown, "forecast": forecast_markdown, "ablation": ablation_markdown}
    return pages[kind_of(document)](document)


def write_memory(document: Mapping[str, Any], out: Path) -> Path:
    """Write a forecast, a probe or an ablation into a folder; return the page's path."""
    name = kind_of(document)
    out.mkdir(parents=True, exist_ok=True)
    if name == "probe":
        (out / "figures").mkdir(exist_ok=True)
        with replacing(out / "figures" / "memory.png") as part:
            plot_memory(document).savefig(part, format="png", metadata={"Software": None})
    text = markdown_of(document)
    for suffix, content in (("json", json.dumps(document, indent=1) + "\n"), ("md", text)):
        with replacing(out / f"{name}.{suffix}") as part:
            part.write_text(content, encoding="utf-8")
    return out / f"{name}.md"
