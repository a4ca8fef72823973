"""Compare the estimated time of sweeps with the time that they take: docs/log/2026-11-estimates.md.

    python benchmarks/estimates.py ../shared/data/tinystories

Prints a row of a Markdown table for each sweep. Use an idle machine; it takes about five minutes.
"""

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SWEEPS = {  # by vocabulary, which a text is tokenized with; None: no text
    None: ("`quick`", ["quick"]),
    2048: (
        "`small`, 262,144 tokens, batch sizes 4, 16, 64",
        ["--model", "small", "--budget", "262144", "--batches", "4,16,64"],
    ),
    10_000: ("reference, 100 steps of batch size 8", ["--budget", "204800", "--batches", "8"]),
}
SWEEP = [sys.executable, "-m", "sweep"]


def measure(words: list[str], out: Path) -> tuple[float, float, float]:
    """Return the estimated seconds, those of the trials, and those of the whole command."""
    common = [*words, "--device", "cpu", "--json", "--out", str(out)]
    plan = json.loads(subprocess.check_output([*SWEEP, "plan", *common]))
    started = time.perf_counter()
    subprocess.run([*SWEEP, "run", *common, "--yes"], check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    with (out / "trials.csv").open() as file:
        trials = sum(float(row["seconds_total"]) for row in csv.DictReader(file))
    return sum(row["forecast_seconds"] for row in plan["trials"]), trials, wall


def main() -> None:
    data = str(Path(sys.argv[1]).absolute())
    for vocabulary, (name, words) in SWEEPS.items():
        if vocabulary:  # without tokens the plan cannot count the last evaluation
            prepare = ["data", "prepare", data, "--vocabulary", str(vocabulary)]
            subprocess.run([*SWEEP, *prepare], check=True, stdout=subprocess.DEVNULL)
            words = [*words, "--data", data]
        with tempfile.TemporaryDirectory() as folder:
            estimate, trials, wall = measure(words, Path(folder) / "sweep")
        numbers = f"{estimate:.1f} s | {trials:.1f} s | {wall:.1f} s | {wall / estimate:.2f}"
        print(f"| {name} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
