"""Compare steps per second with other trainers: `make bench`, or on a GPU `make bench-gpu`.

    python tests/benchmarks/throughput.py [--models quick,small] [--batches 1,8,32] [--rounds 25]

For each model and batch size, every contender (contenders.py) is started and warmed up. Then they
take turns of one second each, round after round, so that all of them see the same machine. A ratio
is a contender's seconds per step over sweep's: the median over rounds, with the 95 % interval of a
bootstrap over rounds. The benchmark fails if the losses of the first steps differ from those of the
plain loop.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from contenders import CONTENDERS, GRAPH_BOUNDS, WARM_UP, benchmarked, matrix_size
from ratios import ratio
from record import RESULTS, record

HERE = Path(__file__).parent
TURN_SECONDS = 1.0  # in longer turns the machine's speed changes more
MOST_STEPS = 400  # per turn
PATIENCE = 300.0  # seconds
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}  # nats, over the WARM_UP steps


class Contender:
    """A process that takes steps on command.

    Its name may end with environment variables: `sweep GOMP_SPINCOUNT=1000`.
    """

    def __init__(self, name: str, model: str, batch: int, device: str, precision: str) -> None:
        self.name, self.seconds = name, list[float]()  # seconds per step, one for each round
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        words = name.split()
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        which = " ".join(word for word in words if "=" not in word)
        command = [sys.executable, str(HERE / "contenders.py"), which, model, str(batch)]
        paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [*command, device, precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def warm_up(self) -> None:
        """Wait for the end of its first steps."""
        answer = self._answer()
        self.warm_up_seconds, self.losses = answer["seconds"], answer["losses"]

    def choose_steps(self) -> None:
        """Time two steps to choose the number of steps per turn."""
        seconds = self._take(2) / 2
        self.steps = max(1, min(MOST_STEPS, round(TURN_SECONDS / seconds)))

    def take_turn(self) -> None:
        """Take the steps of one turn."""
        self.seconds.append(self._take(self.steps) / self.steps)

    def _take(self, steps: int) -> float:
        """Take some steps; return their seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process ended; `_answer` raises the reason
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        guard = threading.Timer(PATIENCE, self._process.kill)
        guard.start()
        try:
            for line in self._process.stdout:
                if line.startswith('{"seconds"'):
                    return dict(json.loads(line))
        finally:
            guard.cancel()
        code = self._process.wait()
        self._stderr.seek(0)
        last_line = self._stderr.read().strip().splitlines()[-1:]
        raise RuntimeError(" ".join([f"ended with {code}:", *last_line]))

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def take_turns(
    names: list[str], rounds: int, model: str, batch: int, device: str, precision: str
) -> tuple[list[Contender], dict[str, str]]:
    """Start contenders and let them take turns.

    Returns:
        The contenders that completed all turns, and the errors of the others by name.
    """
    one_by_one = device == "cpu"  # on a machine with a GPU they warm up at the same time
    started: list[Contender] = []
    failed: dict[str, str] = {}

    def attempt(contender: Contender, act: Callable[[Contender], None]) -> None:
        if contender.name not in failed:
            try:
                act(contender)
            except RuntimeError as error:
                failed[contender.name] = str(error)

    try:
        for name in names:
            started.append(Contender(name, model, batch, device, precision))
            if one_by_one:
                attempt(started[-1], Contender.warm_up)
        for contender in started:
            if not one_by_one:
                attempt(contender, Contender.warm_up)
        for contender in started:
            attempt(contender, Contender.choose_steps)
        for turn in range(rounds):
            for index in range(len(started)):
                attempt(started[(index + turn) % len(started)], Contender.take_turn)
    finally:
        for contender in started:
            contender.end()
    return [contender for contender in started if contender.name not in failed], failed


def compete(
    model: str, batch: int, device: str, precision: str, rounds: int, names: list[str]
) -> dict[str, Any]:
    """Let contenders train one model at one batch size; return rates and ratios."""
    running, failed = take_turns(names, rounds, model, batch, device, precision)
    by_name = {contender.name: contender for contender in running}
    document: dict[str, Any] = {"contenders": {}, "failed": failed, "rounds": rounds}
    config = benchmarked(model, batch, device, precision, False)
    tokens = batch * config.tokens_per_sequence
    product = by_name.pop("matrix product", None)
    own = by_name.get("sweep")
    for name, contender in by_name.items():
        seconds = statistics.median(contender.seconds)
        document["contenders"][name] = {
            "seconds_per_step": seconds,
            "tokens_per_second": tokens / seconds,
            "over_sweep": own and ratio(contender.seconds, own.seconds),
            "warm_up_seconds": contender.warm_up_seconds,
        }
    if product:
        done = [2 * matrix_size(device) ** 3 / seconds for seconds in product.seconds]
        document["matrix_product_flops_per_second"] = statistics.median(done)
        from sweep.memory.forecast import forecast_flops  # imports torch

        flops = forecast_flops(config) * tokens
        if own:
            reached = [flops / seconds for seconds in own.seconds]
            document["share_of_matrix_product_rate"] = ratio(reached, done)
    if plain := by_name.get("plain loop"):
        document["largest_loss_differences"] = {  # nats
            name: float(np.abs(np.subtract(contender.losses, plain.losses)).max())
            for name, contender in by_name.items()
            if contender.losses and contender is not plain
        }
        document["steps_compared"] = WARM_UP
    return document


def unequal(results: dict[str, Any], precision: str) -> list[str]:
    """Describe contenders whose losses differ from the plain loop's, and failures."""
    differing = [
        f"{key}: losses of {name} differ by up to {difference:.2g} nats"
        for key, result in results.items()
        for name, difference in result.get("largest_loss_differences", {}).items()
        if not difference <= LOSS_TOLERANCE[precision]
    ]
    return differing + [
        f"{key}: {name} {result['failed'][name]}"
        for key, result in results.items()
        for name in ("sweep", "plain loop")
        if name in result["failed"]
    ]


def table(results: dict[str, Any], names: list[str]) -> str:
    """Return the ratios as a Markdown table."""
    others = [name for name in names if name not in ("sweep", "matrix product")]
    lines = [
        "| model | batch size | steps/s of sweep | share of matrix-product rate | "
        + " | ".join(others)
        + " |"
    ]
    lines.append("| --- " * (lines[0].count("|") - 1) + "|")
    for key, result in results.items():
        model, batch = key.split()
        rows, share = result["contenders"], result.get("share_of_matrix_product_rate")
        own = rows.get("sweep")
        cells = [model, batch, f"{1 / own['seconds_per_step']:.3g}" if own else "–"]
        cells.append(f"{share['ratio']:.0%}" if share else "")
        for name in others:
            over = rows.get(name, {}).get("over_sweep")
            cells.append(
                f"{over['ratio']:.2f} [{over['low']:.2f}, {over['high']:.2f}]" if over else "–"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compare the contenders, record the results, print a table; fail if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="reference,small,quick")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=25)
    default = [name for name in CONTENDERS if name not in GRAPH_BOUNDS]
    parser.add_argument("--contenders", default=",".join(default))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    names = arguments.contenders.split(",")
    for model in arguments.models.split(","):
        for batch in arguments.batches.split(","):
            result = compete(
                model, int(batch), arguments.device, arguments.precision, arguments.rounds, names
            )
            print(json.dumps(result), flush=True)
            results[f"{model} {batch}"] = result
            key = f"throughput {arguments.precision} {model} {batch}"
            record({key: result}, arguments.device, arguments.out)
    print(table(results, names))
    if differing := unequal(results, arguments.precision):
        sys.exit("\n".join(differing))


if __name__ == "__main__":
    main()
