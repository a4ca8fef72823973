"""Measure each memory saving of a GRPO step, and judge the published claims of a guide.

    python -m experiments.studies.grpo_memory.ablation --data FOLDER --out RESULTS

Every row differs from the base in one setting. It is forecast, and measured in a fresh process.
"""

import argparse
import csv
import importlib.util
import json
import math
import statistics
from pathlib import Path
from typing import Any

import sweep

BASE = "base"
BATCH = 16  # completions per step
GROUP = 8  # completions per prompt
GRPO: dict[str, Any] = {"group_size": GROUP, "prompt_tokens": 24, "new_tokens": 72, "kl": 0.02}
MODEL: dict[str, Any] = {"kind": "transformer", "name": "small", "vocabulary": 2048, "context": 128}
MODEL |= {"d_model": 128, "layers": 4, "heads": 4, "d_ff": 256}
LOGITS_BYTES = 4 * BATCH * GRPO["new_tokens"] * MODEL["vocabulary"]  # float32 logits of a step
HALVES = (
    "half the group size",
    "prompt and completion half as long",
    "half the layers",
    "microbatches of one group",
    "half the width",
)
TOLERANCE = 0.1  # relative to the claimed number, within which a claim counts as true
PHASES = ("generate", "log_probs", "update")
TITLES = {
    "undone": "With one memory saving removed",
    "option": "With an option",
    "size": "Over sizes and types",
}
UNDONE = {
    "plain logits, names kept": "PlainLogits",
    "plain logits, names deleted": "DeletedLogits",
    "logits of sampling kept": "SamplingLogits",
    "attention without its fused kernel": "PlainAttention",
    "tensors of a step kept": "KeptTensors",
    "no garbage collector": "WithoutCollector",
    "old log-probabilities computed": "OldLogProbs",
    "no key-value cache": "WithoutCache",
    "reference's pass with its graph": "ReferenceWithGraph",
}


def settings_of_rows(data: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the settings of each row by kind and name."""
    base: dict[str, Any] = {"experiment": "grpo-words", "data": data, "precision": "fp32"}
    base |= {"batches": [BATCH], "microbatch": BATCH, "generation_batch_size": BATCH}
    base |= {"model": MODEL, "workload": GRPO}
    supervised: dict[str, Any] = {"experiment": "tinystories", "data": data, "precision": "fp32"}
    supervised |= {"model": "small", "context": GRPO["prompt_tokens"] + GRPO["new_tokens"]}

    def sized(batch: int, **grpo: Any) -> dict[str, Any]:
        lengths = {**GRPO, **grpo}
        context = max(MODEL["context"], lengths["prompt_tokens"] + lengths["new_tokens"])
        model = {**MODEL, "context": context}
        return {"batches": [batch], "microbatch": batch, "workload": lengths, "model": model}

    def without(name: str, **grpo: Any) -> dict[str, Any]:
        variant = f"experiments.studies.grpo_memory.variants:{name}"
        return {"workload": {"kind": variant, "grpo_settings": {**GRPO, **grpo}}}

    def smaller(**sizes: int) -> dict[str, Any]:
        return {"model": {**MODEL, **sizes}}

    changes: dict[str, dict[str, dict[str, Any]]] = {
        "base": {BASE: {}},
        "undone": {name: without(variant) for name, variant in UNDONE.items()},
        "option": {
            "activation checkpointing": {"activation_checkpointing": True},
            "a group sampled at once": {"generation_batch_size": GROUP},
            "microbatches of one group": {"microbatch": GROUP},
            "no reference (kl = 0)": {"workload": {**GRPO, "kl": 0.0}},
        },
        "size": {
            "one group alone": sized(GROUP),
            "twice the prompts in two microbatches": {"batches": [2 * BATCH]},
            "twice the group size": sized(2 * BATCH, group_size=2 * GROUP),
            "half the group size": sized(BATCH // 2, group_size=GROUP // 2),
            "half the completion": sized(BATCH, new_tokens=36),
            "twice the completion": sized(BATCH, new_tokens=144),
            "twice the completion, attention without its fused kernel": {
                **sized(BATCH, new_tokens=144),
                **without("PlainAttention", new_tokens=144),
            },
            "prompt and completion half as long": sized(BATCH, prompt_tokens=12, new_tokens=36),
            "bf16": {"precision": "bf16"},
            "bf16-pure": {"precision": "bf16-pure"},
            "half the layers": smaller(layers=2),
            "half the width": smaller(d_model=64, d_ff=128),
            "half the heads": smaller(heads=2),
        },
    }
    rows = {}
    for kind, named in changes.items():
        for name, changed in named.items():
            rows[kind, name] = {**base, **changed}
    for count, name in ((BATCH, "as many"), (BATCH // 2, "half as many")):
        split = {"batches": [count], "microbatch": count}
        rows["size", f"supervised step on {name} sequences"] = {**supervised, **split}
    return rows


def measure_row(kind: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Forecast and measure one configuration."""
    [forecast] = sweep.forecast_memory(**settings)["points"]
    [point] = sweep.probe_memory(**settings)["points"]
    assert point["status"] == "OK", f"{name}: {point['status']} {point['message']}"
    peak = max(point["phases"].values(), default=point["peak_bytes"])
    keys = ("rest_bytes", "phases", "seconds_per_step")
    predicted = {key: forecast[key] for key in ("peak_bytes", "phases")}
    row = {"name": name, "kind": kind, "peak_bytes": peak, "forecast": predicted}
    return row | {key: point[key] for key in keys}


def time_in_turns(settings: dict[str, Any], base: dict[str, Any], turns: int) -> list[float]:
    """Return seconds per step divided by the base's, measured alternately."""

    def seconds(configuration: dict[str, Any]) -> float:
        return float(sweep.probe_memory(**configuration)["points"][0]["seconds_per_step"])

    ratios = []
    for turn in range(turns):
        pair = (settings, base) if turn % 2 else (base, settings)
        times = [seconds(configuration) for configuration in pair]
        ratios.append(times[0] / times[1] if turn % 2 else times[1] / times[0])
    return ratios


def judge(claim: dict[str, str], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare a claim with its rows."""
    row = rows.get(claim["row"])
    base = rows.get(claim["base"])
    values = measure_claim(claim["kind"], row, base, rows)
    if not values:
        return {**claim, "measured": None, "verdict": "not measured"}

    low = float(claim["low"]) if claim["low"] else math.nan
    high = float(claim["high"]) if claim["high"] else math.inf
    is_low = [value < low * (1 - TOLERANCE) for value in values]
    is_high = [value > high * (1 + TOLERANCE) for value in values]
    if not any(is_low) and not any(is_high):
        verdict = "true"
    elif all(is_low) or all(is_high):
        verdict = "false"
    else:
        verdict = "not resolved"
    return {**claim, "measured": statistics.median(values), "verdict": verdict}


def measure_claim(kind: str, row: Any, base: Any, rows: dict[str, dict[str, Any]]) -> list[float]:
    """Return the measured numbers for a claim of this kind; none if it cannot be measured."""
    if kind == "learning":
        return []
    if kind == "time":
        return [ratio - 1 for ratio in row["time_ratios"]]
    if kind == "packages":
        return [] if importlib.util.find_spec("flash_attn") else [0.0]
    if kind == "update":
        return [row["phases"]["update"] / base["phases"]["update"]]
    if kind == "rest":
        return [(row["rest_bytes"] - base["rest_bytes"]) / base["peak_bytes"]]

    whole = rows[BASE]["peak_bytes"]
    group = rows["one group alone"]["peak_bytes"]
    if kind == "prompts":  # from a line through the peaks of one and of two groups
        supervised = rows["supervised step on as many sequences"]["peak_bytes"]
        completions = BATCH + (supervised - whole) * (BATCH - GROUP) / (whole - group)
        return [BATCH * GROUP / completions]
    if kind == "halves":
        least = min(rows[name]["peak_bytes"] for name in HALVES)
        return [(whole - group) / (whole - least)]

    peak = row["peak_bytes"]
    other = base["peak_bytes"]
    if kind == "times":
        return [peak / other]
    if kind == "times-1":
        return [peak / other - 1]
    if kind == "saved":
        return [1 - peak / other]
    return [(peak - other) / LOGITS_BYTES]


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Write a Markdown table."""
    lines = [headers, [":--"] + ["--:"] * (len(headers) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(document: dict[str, Any]) -> str:
    """Write the document as Markdown."""
    rows = {row["name"]: row for row in document["rows"]}
    base = rows[BASE]

    def mib(size: float | None) -> str:
        return "–" if size is None else f"{size / 2**20:.1f}"

    def cells(row: dict[str, Any]) -> list[str]:
        predicted = row["forecast"]
        pairs = [(row["phases"].get(p), predicted["phases"].get(p)) for p in PHASES]
        pairs.append((row["peak_bytes"], predicted["peak_bytes"]))
        time = "–"
        ratios = row["time_ratios"]
        if ratios:
            time = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        relative = row["peak_bytes"] / base["peak_bytes"] - 1
        change = f"{100 * relative:+.1f} %"
        texts = [f"{mib(measured)} / {mib(forecast)}" for measured, forecast in pairs]
        return [row["name"], *texts, mib(row["rest_bytes"]), change, time]

    headers = ["row", *(p.replace("_", " ") for p in PHASES)]
    headers += ["peak", "at rest", "change of peak", "time ratio"]
    parts = [
        f"# GRPO memory, one thing changed at a time\n\n{BATCH} completions on the model "
        f"{MODEL['name']}, eager steps in fresh processes on a CPU that count every live tensor. "
        "Sizes in MiB: measured / forecast, by phase of a step. The last two columns compare with "
        "the base; times are the median of all turns, with the least and the greatest. Written by "
        "`python -m experiments.studies.grpo_memory.ablation`; see "
        "experiments/studies/grpo_memory/README.md."
    ]
    if not any(row["time_ratios"] for row in rows.values()):
        parts.append("No times were taken, because the machine was busy.")
    for kind, title in TITLES.items():
        chosen = [row for row in rows.values() if row["kind"] in ("base", kind)]
        parts += [f"## {title}", table(headers, [cells(row) for row in chosen])]

    claims = []
    for claim in document["claims"]:
        high = claim["high"] if claim["high"] else "more"
        bounds = "–"
        if claim["low"]:
            bounds = " to ".join(dict.fromkeys((claim["low"], high)))
        measured = "–" if claim["measured"] is None else f"{claim['measured']:.3g}"
        claims.append([claim["claim"], bounds, measured, claim["unit"], claim["verdict"]])
    headers = ["claim", "claimed", "measured", "unit", "verdict"]
    parts += ["## Claims of an older guide", table(headers, claims)]
    parts.append(f"A claim is true within {100 * TOLERANCE:.0f} % of its number, for these sizes.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure all rows, judge the claims, and write ablation.json and ablation.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="text file or folder of TinyStories")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=3, help="0 on a busy machine: no times")
    arguments = parser.parse_args()

    settings = settings_of_rows(arguments.data)
    rows = []
    for (kind, name), settings_of_row in settings.items():
        row = measure_row(kind, name, settings_of_row)
        turns = arguments.turns if kind in ("undone", "option") else 0
        row["time_ratios"] = time_in_turns(settings_of_row, settings["base", BASE], turns)
        print(f"{name}: {row['peak_bytes'] / 2**20:.1f} MiB", flush=True)
        rows.append(row)

    with (Path(__file__).parent / "claims.csv").open(encoding="utf-8") as file:
        claims = list(csv.DictReader(file, delimiter=";"))
    by_name = {row["name"]: row for row in rows}
    document = {"rows": rows, "claims": [judge(claim, by_name) for claim in claims]}

    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ablation.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.out / "ablation.md").write_text(page(document), encoding="utf-8")


if __name__ == "__main__":
    main()
