"""Write results/published/memory: forecasts of earlier systems, a proved probe, a soak test.

    python tests/benchmarks/memory_evidence.py results/published/memory

Everything runs on a CPU: forecasts need no device, and the probe enforces its limit.
"""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

from memory import trial_config

from sweep.memory.limit import USABLE_SHARE
from sweep.memory.probe import measure
from sweep.orchestration.memory import forecast_memory, probe_memory

HERE = Path(__file__).parent
GIB = 2**30
CARD = 16 * GIB  # memory of the GPU of the earlier batch-size sweep
LIMIT = 64 << 20
BATCHES = [2**power for power in range(10)]


def elman(published: Path) -> str:
    """Compare the E1 model's forecast with its published measurements."""
    with published.open() as file:
        rows = {int(row["batch_size"]): row for row in csv.DictReader(file)}
    measured = {size: row for size, row in rows.items() if row["status"] == "OK"}
    document = forecast_memory("elman", batches=list(measured))
    lines = [
        "| batch size | published GiB | forecast GiB | difference |",
        "| --: | --: | --: | --: |",
    ]
    for point in document["points"]:
        peak = point["peak_bytes"] / GIB
        published_peak = float(measured[point["batch_size"]]["peak_allocated_gib"])
        difference = peak - published_peak
        lines.append(
            f"| {point['batch_size']} | {published_peak:.2f} | {peak:.3f} | {difference:+.3f} |"
        )
    line, loop = document["line"], loop_slope()
    lines.append(
        f"\nLine: {line['fixed_bytes'] / GIB:.3f} GiB + {line['bytes_per_sequence'] / GIB:.4f} GiB "
        f"per sequence, largest residual {line['largest_residual_bytes']:,.0f} bytes. The same "
        f"cell as a plain loop with autograd: {loop:.4f} GiB per sequence."
    )
    return "\n".join(lines)


def loop_slope() -> float:
    """Return GiB per sequence of the cell as a plain loop, from two forecasts."""
    peaks = [
        forecast_memory(
            "elman", model="odd:plain_elman", vocabulary=256, context=512, batches=[size]
        )["points"][0]
        for size in (16, 32)
    ]
    return float((peaks[1]["peak_bytes"] - peaks[0]["peak_bytes"]) / 16 / GIB)


def earlier_sweep() -> str:
    """Forecast the earlier sweep's model at its batch sizes on its GPU."""
    cases: dict[str, dict[str, Any]] = {
        "fp32, in one": {"precision": "fp32", "loss_chunk_rows": 0},
        "bf16, in one": {"precision": "bf16", "loss_chunk_rows": 0},
        "fp32, chunked loss": {"precision": "fp32", "loss_chunk_rows": 1024},
        "bf16, chunked loss": {"precision": "bf16", "loss_chunk_rows": 1024},
        "fp32, microbatch × accumulation": {
            "precision": "fp32",
            "loss_chunk_rows": 0,
            "device": "cuda",
            "device_memory": CARD,
        },
    }
    lines = ["| batch size | " + " | ".join(cases) + " |", "| --: |" + " --: |" * len(cases)]
    documents = {
        name: forecast_memory("tinystories", batches=BATCHES, **settings)
        for name, settings in cases.items()
    }
    for index, batch in enumerate(BATCHES):
        cells = []
        for name, document in documents.items():
            point = document["points"][index]
            needed = max(point["peak_bytes"], point["evaluation_bytes"])
            fits = "fits" if needed <= USABLE_SHARE * CARD else "tight"
            fits = fits if needed <= CARD else "SPILLS"
            if name.endswith("accumulation"):
                fits += f", {point['microbatch_size']} × {batch // point['microbatch_size']}"
            cells.append(f"{point['peak_bytes'] / GIB:.2f} {fits}")
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    largest = documents["fp32, microbatch × accumulation"]["largest_microbatch_size"]
    fields: Any = {"model": "odd:handwritten", "vocabulary": 10_000, "context": 256}
    written = forecast_memory(
        "tinystories", batches=[256], precision="fp32", loss_chunk_rows=0, **fields
    )["points"][0]["peak_bytes"]
    lines.append(
        f"\nSizes are GiB of tensors. Tight means above {USABLE_SHARE:.0%} of the card: its "
        "context, its libraries and fragmentation may need the rest. The largest microbatch in "
        f"fp32 is {largest}.\n\nThe earlier sweep measured 28.49 GiB at 256, more than this model "
        "takes. With norm, softmax, attention and SwiGLU written by hand "
        "(tests/memory/odd.py), so that autograd keeps each intermediate tensor, it takes "
        f"{written / GIB:.2f} GiB. How that sweep's model was written is not known."
    )
    return "\n".join(lines)


def proved_probe(out: Path) -> str:
    """Probe `quick` within a limit, soak it, and confirm the maximum by trying every size."""
    from sweep.report.report import write_memory

    within: dict[str, Any] = {"device": "cpu", "device_memory": LIMIT}
    document = probe_memory("quick", **within, batches=[8], soak=200)
    write_memory(document, out / "cpu-probe")
    largest = document["largest_microbatch_size"]
    execution = {"loss_chunk_rows": 1024, "evaluation_batch_size": largest + 3}
    plain = trial_config("quick", 1, "fp32", "cpu", is_compiled=False)
    config = plain.model_copy(update={"execution": plain.execution.model_copy(update=execution)})
    fits = [
        measure(config.on_one_device(size, size), LIMIT, 3, lambda: None).status == "OK"
        for size in range(1, largest + 4)
    ]
    confirmed = fits == [True] * largest + [False] * 3
    leaky = probe_memory(
        "quadratic", **within, workload={"kind": "odd:Leaky"}, batches=[4], largest=8, soak=200
    )["soak"]["leak"]
    low, high = leaky["interval"]
    has_leak = document["soak"]["leak"]["is_found"]
    return (
        "`sweep probe quick --device-memory 64MiB --soak 200` ([its page](cpu-probe/probe.md)): "
        f"{document['verdict']}, {document['search_points']} points measured. We measured every "
        f"size from 1 to {largest + 3}, which {'confirmed' if confirmed else 'REFUTED'} the "
        "result.\n\n"
        f"The soak of 200 steps found {'a leak' if has_leak else 'no leak'}. "
        f"With a planted leak of 4,096 bytes per step it found {leaky['bytes_per_step']:,.0f} "
        f"bytes per step (95 % interval {low:,.0f} to {high:,.0f})."
    )


def main() -> None:
    """Write README.md and the probe's page."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tests = HERE.parent / "memory"
    sys.path.append(str(tests))  # odd.py has the planted leak and the plain loop
    os.environ["PYTHONPATH"] = str(tests)
    parts = [
        "# Memory: forecast and measured\n\nWritten by `python tests/benchmarks/memory_evidence.py "
        "results/published/memory` on a machine without a GPU.",
        "## The E1 Elman model: forecast against its published measurements\n\nForward and "
        "backward, bfloat16, context 512, an RTX 6000 Ada.\n\n" + elman(tests / "elman-memory.csv"),
        "## The earlier batch-size sweep on its 16 GiB card\n\nIts model, eager, AdamW, context "
        "256 (an earlier sweep: 28.49 GiB at batch size 256, compiled).\n\n" + earlier_sweep(),
        "## A probe on a CPU, proved\n\n" + proved_probe(out),
    ]
    peers = out / "peers.json"
    if peers.exists():
        parts.append("## Other tools, same model and limit\n\n" + peers_table(peers))
    (out / "README.md").write_text("\n\n".join(parts) + "\n")


def peers_table(path: Path) -> str:
    """Return the results of peers_memory.py as a table."""
    document = json.loads(path.read_text())
    lines = [
        f"`quick` with the plain loss within {document['limit_bytes'] >> 20} MiB; the true "
        f"maximum, by trying every size, is {document['true_maximum']}.\n",
        "| finder | answer | the true maximum? | sizes tried | seconds |",
        "| :-- | --: | :-- | --: | --: |",
    ]
    for row in document["finders"]:
        answer = "yes" if row["is_true_maximum"] else "no"
        tried = len(row["sizes_tried"])
        lines.append(
            f"| {row['finder']} | {row['answer']} | {answer} | {tried} | {row['seconds']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
