"""Compare the estimated time of sweeps with the time that they take: docs/log/2026-11-estimates.md.

    python tests/benchmarks/estimates.py ../shared/data/tinystories

Prints a row of a Markdown table for each sweep. Use an idle machine; it takes about five minutes.
"""

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SWEEPS = {  # the last two train on a text
    "`quick`": ["quick"],
    "`small`, 262,144 tokens, batch sizes 4, 16, 64": [
        *("--model", "small", "--budget", "262144", "--batches", "4,16,64"),
    ],
    "reference, 100 steps of batch size 8": ["--budget", "204800", "--batches", "8"],
}


def measure(words: list[str], out: Path) -> tuple[float, float, float]:
    """Return the estimated seconds, those of the trials, and those from the plan to the end."""
    command = [sys.executable, "-m", "sweep", "run", *words, "--device", "cpu", "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--yes"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    started = next(time.perf_counter() for line in process.stderr if line.startswith("Total:"))
    process.stderr.read()
    assert process.wait() == 0
    wall = time.perf_counter() - started
    with (out / "trials.csv").open() as file:
        trials = sum(float(row["seconds_total"]) for row in csv.DictReader(file))
    planned = json.loads((out / "plan.json").read_text())["trials"]
    return sum(row["forecast_seconds"] for row in planned), trials, wall


def main() -> None:
    data = ["--data", str(Path(sys.argv[1]).absolute())]
    for name, words in SWEEPS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [*words, *(data if words[0] != "quick" else [])]
            estimate, trials, wall = measure(words, Path(folder) / "sweep")
        numbers = f"{estimate:.1f} s | {trials:.1f} s | {wall:.1f} s | {wall / estimate:.2f}"
        print(f"| {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
