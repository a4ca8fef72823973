"""The ablation of a GRPO step as people read it: tables in markdown."""

from collections.abc import Mapping
from typing import Any

from sweep.config.numbers import format_bytes
from sweep.report import markdown as md
from sweep.report.memory import Sizes, heading

PHASES = ("generate", "log_probs", "update")
TITLES = {
    "undone": "Without what saves memory, one thing at a time",
    "option": "With an option",
    "size": "Over sizes and types",
}


def ablation_markdown(document: Mapping[str, Any]) -> str:
    """Write an ablation as a page."""
    points = [row["measured"] or row["forecast"] for row in document["rows"]]
    sizes = Sizes({"points": [point for point in points if point]})
    base = document["rows"][0]
    parts = [
        heading("GRPO memory, one thing changed at a time", document),
        f"{document['batch_size']} completions, measured in fresh processes ({document['basis']}); "
        f"beside each, after a slash, the forecast. All sizes in {sizes.unit}, peaks by phase of a "
        "step; the last columns compare with the first row. What takes the same batch was timed in "
        "turns with it: the ratio is the median of the turns, with the least and the most.",
    ]
    if document["reference_added"]:
        parts.append(
            "The experiment keeps no reference (kl = 0). The step looked at has one, so that its "
            "pass can be told; a row does without."
        )
    for kind, title in TITLES.items():
        rows = [base, *(row for row in document["rows"] if row["kind"] == kind)]
        parts += [f"## {title}", _table(rows, base, sizes)]
    if failed := [row for row in document["rows"] if row["message"]]:
        parts.append(md.bullets(f"{row['name']}: {row['message']}" for row in failed))
    parts += ["## What was claimed without a measurement", _claims(document)]
    return "\n\n".join(parts) + "\n"


def _table(rows: list[Mapping[str, Any]], base: Mapping[str, Any], sizes: Sizes) -> str:
    headers = ["", "status", *(phase.replace("_", " ") for phase in PHASES), "peak", "rest"]
    headers += ["s/step", "peak, difference", "time, ratio"]
    return md.table(headers, [_cells(row, base, sizes) for row in rows])


def _cells(row: Mapping[str, Any], base: Mapping[str, Any], sizes: Sizes) -> list[str]:
    measured, forecast = row["measured"] or {}, row["forecast"] or {}
    phases = [
        _pair(measured.get("phases", {}).get(name), forecast.get("phases", {}).get(name), sizes)
        for name in PHASES
    ]
    seconds, ratios = measured.get("seconds_per_step"), row["time_ratios"]
    peak, other = row["peak_bytes"], base["peak_bytes"]
    difference = md.MISSING
    if peak is not None and other is not None and row is not base:
        difference = f"{100 * (peak / other - 1):+.1f} %"
    return [
        row["name"],
        row["status"],
        *phases,
        _pair(peak, forecast.get("peak_bytes"), sizes),
        sizes(measured.get("rest_bytes")),
        f"{seconds:.3g}" if seconds else md.MISSING,
        difference,
        f"{row['time_ratio']:.2f} [{min(ratios):.2f}, {max(ratios):.2f}]" if ratios else md.MISSING,
    ]


def _pair(measured: int | None, forecast: int | None, sizes: Sizes) -> str:
    return f"{sizes(measured)} / {sizes(forecast)}"


def _bounds(low: float, high: float | None) -> str:
    if high is None:
        return f"≥ {low:g}"
    return f"{low:g}" if low == high else f"{low:.3g} to {high:.3g}"


def _claims(document: Mapping[str, Any]) -> str:
    rows = []
    for one in document["claims"]:
        claimed = _bounds(*one["claimed"]) if one["claimed"] else md.MISSING
        found = md.MISSING if one["measured"] is None else f"{one['measured']:.3g}"
        verdict = f"{one['verdict']}: {one['lacking']}" if one["lacking"] else one["verdict"]
        rows.append([one["claim"], claimed, found, one["unit"], verdict])
    table = md.table(["claim", "claimed", "measured", "", "verdict"], rows)
    limit = format_bytes(document["device_memory_bytes"])
    return (
        f"{table}\n\nTrue within a tenth of what is claimed, for this model, these sizes and this "
        f"device ({document['device']}, {limit}). Where no number was claimed, ≥ 0.05 of the peak "
        "counts."
    )
