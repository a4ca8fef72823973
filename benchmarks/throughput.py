"""Steps per second beside what one would run instead: `make bench`, or on a GPU `make bench-gpu`.

    python benchmarks/throughput.py [--models quick,small] [--batches 1,8,32] [--rounds 25]

For each model and batch size every contender (contenders.py) is started and warmed up; then they
take turns, a slice of a second each, round after round, so that all see the same machine. A
ratio is the median over rounds of seconds a step, a contender's over sweep's, with the 95 %
interval of a bootstrap over rounds. Losses of the first steps are held against the plain loop's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from contenders import CONTENDERS, MATRIX, WARM_UP, benchmarked
from ratios import ratio
from record import record

HERE = Path(__file__).parent
SLICE_SECONDS = 1.0  # longer ones differ by more: the machine changes meanwhile
MOST_STEPS = 400  # of a slice


class Contender:
    """A process that takes steps when it is told to."""

    def __init__(self, name: str, model: str, batch: int, device: str, precision: str) -> None:
        self.name, self.seconds = name, list[float]()  # per step, a round each
        command = [sys.executable, str(HERE / "contenders.py"), name, model, str(batch)]
        self._process = subprocess.Popen(
            [*command, device, precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )
        answer = self._answer()
        self.warm_up_seconds, self.losses = answer["seconds"], answer["losses"]
        trial = self.order(2)
        self.steps = max(1, min(MOST_STEPS, round(SLICE_SECONDS / (trial / 2))))

    def order(self, steps: int) -> float:
        """Have steps taken; return their seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def take_turn(self) -> None:
        """Take a slice of steps."""
        self.seconds.append(self.order(self.steps) / self.steps)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                return dict(json.loads(line))
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}")

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def compete(
    model: str, batch: int, device: str, precision: str, rounds: int, names: list[str]
) -> dict[str, Any]:
    """Let contenders train one model at one batch size; return rates and ratios."""
    running: list[Contender] = []
    failed: dict[str, str] = {}
    try:
        for name in names:
            try:
                running.append(Contender(name, model, batch, device, precision))
            except (RuntimeError, BrokenPipeError) as error:
                failed[name] = str(error)
        for turn in range(rounds):
            for place in range(len(running)):
                running[(place + turn) % len(running)].take_turn()
    finally:
        for one in running:
            one.end()
    found = {one.name: one for one in running}
    own = found["sweep"]
    config = benchmarked(model, batch, device, precision, False)
    tokens = batch * config.tokens_per_sequence
    flops = (config.science.model.flops_per_token or 0) * tokens
    rows = {
        one.name: {
            "seconds_per_step": statistics.median(one.seconds),
            "tokens_per_second": tokens / statistics.median(one.seconds),
            "over_sweep": ratio(one.seconds, own.seconds),
            "warm_up_seconds": one.warm_up_seconds,
        }
        for one in running
        if one.name != "matrix product"
    }
    document: dict[str, Any] = {"contenders": rows, "failed": failed, "rounds": rounds}
    if "matrix product" in found:
        product = [2 * MATRIX**3 / seconds for seconds in found["matrix product"].seconds]
        steps = [flops / seconds for seconds in own.seconds]
        document["matrix_product_flops_per_second"] = statistics.median(product)
        document["share_of_matrix_product_rate"] = ratio(steps, product)
    if "plain loop" in found:
        differences = np.abs(np.subtract(own.losses, found["plain loop"].losses))
        document["largest_loss_difference"] = float(differences.max())
        document["steps_compared"] = WARM_UP
    return document


def table(results: dict[str, Any]) -> str:
    """Write the ratios as markdown."""
    lines = [
        "| model | batch size | steps/s of sweep | share of matrix-product rate | "
        + " | ".join(n for n in CONTENDERS if n not in ("sweep", "matrix product"))
        + " |"
    ]
    lines.append("| --- " * (lines[0].count("|") - 1) + "|")
    for key, found in results.items():
        model, batch = key.split()
        rows, share = found["contenders"], found.get("share_of_matrix_product_rate")
        cells = [model, batch, f"{1 / rows['sweep']['seconds_per_step']:.3g}"]
        cells.append(f"{share['ratio']:.0%}" if share else "")
        for name in CONTENDERS:
            if name in ("sweep", "matrix product"):
                continue
            one = rows.get(name, {}).get("over_sweep")
            cells.append(
                f"{one['ratio']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" if one else "–"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for; record it, or write it to --out; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="reference,small,quick")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for model in arguments.models.split(","):
        for batch in arguments.batches.split(","):
            names = arguments.contenders.split(",")
            results[f"{model} {batch}"] = compete(
                model, int(batch), arguments.device, arguments.precision, arguments.rounds, names
            )
            print(json.dumps(results[f"{model} {batch}"]), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            else:
                key = f"throughput {arguments.precision}"
                record({key: results}, arguments.device)
    print(table(results))


if __name__ == "__main__":
    main()
