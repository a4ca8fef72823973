"""Steps per second beside what one would run instead: `make bench`, or on a GPU `make bench-gpu`.

    python benchmarks/throughput.py [--models quick,small] [--batches 1,8,32] [--rounds 25]

For each model and batch size every contender (contenders.py) is started and warmed up; then they
take turns, a slice of a second each, round after round, so that all see the same machine. A
ratio is the median over rounds of seconds a step, a contender's over sweep's, with the 95 %
interval of a bootstrap over rounds. Losses of the first steps are held against the plain loop's,
which clips them by a norm in float64: where they differ the benchmark fails.
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
from contenders import CONTENDERS, WARM_UP, benchmarked, matrix_size
from ratios import ratio
from record import RESULTS, record

HERE = Path(__file__).parent
SLICE_SECONDS = 1.0  # longer ones differ by more: the machine changes meanwhile
MOST_STEPS = 400  # of a slice
PATIENCE = 300.0  # seconds for an answer
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}  # nats, over WARM_UP steps that train


class Contender:
    """A process that takes steps when it is told to.

    Its name may end with variables of its own: `sweep GOMP_SPINCOUNT=1000`.
    """

    def __init__(self, name: str, model: str, batch: int, device: str, precision: str) -> None:
        self.name, self.seconds = name, list[float]()  # per step, a round each
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        words = name.split()
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        which = " ".join(word for word in words if "=" not in word)
        command = [sys.executable, str(HERE / "contenders.py"), which, model, str(batch)]
        paths = [str(HERE.parent), os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [*command, device, precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def warm_up(self) -> None:
        """Wait until it has taken its first steps."""
        answer = self._answer()
        self.warm_up_seconds, self.losses = answer["seconds"], answer["losses"]

    def size_slices(self) -> None:
        """Take two steps, and from them how many a slice is."""
        trial = self._order(2)
        self.steps = max(1, min(MOST_STEPS, round(SLICE_SECONDS / (trial / 2))))

    def take_turn(self) -> None:
        """Take a slice of steps."""
        self.seconds.append(self._order(self.steps) / self.steps)

    def _order(self, steps: int) -> float:
        """Have steps taken; return their seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone: the answer says why
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
        said = self._stderr.read().strip().splitlines()[-1:]
        raise RuntimeError(" ".join([f"ended with {code}:", *said]))

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
    """Start contenders, and let them take turns; return those that lived, and why others did not.

    On a GPU, whose machine has many cores, they warm up side by side.
    """
    one_by_one = device == "cpu"
    started: list[Contender] = []
    failed: dict[str, str] = {}

    def attempt(one: Contender, act: Callable[[Contender], None]) -> None:
        if one.name not in failed:
            try:
                act(one)
            except RuntimeError as error:
                failed[one.name] = str(error)

    try:
        for name in names:
            started.append(Contender(name, model, batch, device, precision))
            if one_by_one:
                attempt(started[-1], Contender.warm_up)
        for one in started:
            if not one_by_one:
                attempt(one, Contender.warm_up)
        for one in started:
            attempt(one, Contender.size_slices)
        for turn in range(rounds):
            for place in range(len(started)):
                attempt(started[(place + turn) % len(started)], Contender.take_turn)
    finally:
        for one in started:
            one.end()
    return [one for one in started if one.name not in failed], failed


def compete(
    model: str, batch: int, device: str, precision: str, rounds: int, names: list[str]
) -> dict[str, Any]:
    """Let contenders train one model at one batch size; return rates and ratios."""
    running, failed = take_turns(names, rounds, model, batch, device, precision)
    found = {one.name: one for one in running}
    document: dict[str, Any] = {"contenders": {}, "failed": failed, "rounds": rounds}
    config = benchmarked(model, batch, device, precision, False)
    tokens = batch * config.tokens_per_sequence
    product = found.pop("matrix product", None)
    own = found.get("sweep")
    for name, one in found.items():
        seconds = statistics.median(one.seconds)
        document["contenders"][name] = {
            "seconds_per_step": seconds,
            "tokens_per_second": tokens / seconds,
            "over_sweep": own and ratio(one.seconds, own.seconds),
            "warm_up_seconds": one.warm_up_seconds,
        }
    if product:
        done = [2 * matrix_size(device) ** 3 / seconds for seconds in product.seconds]
        document["matrix_product_flops_per_second"] = statistics.median(done)
        flops = (config.science.model.flops_per_token or 0) * tokens
        if own:
            reached = [flops / seconds for seconds in own.seconds]
            document["share_of_matrix_product_rate"] = ratio(reached, done)
    if plain := found.get("plain loop"):
        differences = {
            name: float(np.abs(np.subtract(one.losses, plain.losses)).max())
            for name, one in found.items()
            if one.losses and one is not plain
        }
        document["largest_loss_differences"] = differences  # nats, over the first steps
        document["steps_compared"] = WARM_UP
    return document


def unequal(results: dict[str, Any], precision: str) -> list[str]:
    """Name what trained otherwise than the plain loop, or of ourselves and it, not at all."""
    differing = [
        f"{key}: losses of {name} differ by up to {found:.2g} nats"
        for key, result in results.items()
        for name, found in result.get("largest_loss_differences", {}).items()
        if not found <= LOSS_TOLERANCE[precision]
    ]
    return differing + [
        f"{key}: {name} {result['failed'][name]}"
        for key, result in results.items()
        for name in ("sweep", "plain loop")
        if name in result["failed"]
    ]


def table(results: dict[str, Any], names: list[str]) -> str:
    """Write the ratios as markdown."""
    others = [name for name in names if name not in ("sweep", "matrix product")]
    lines = [
        "| model | batch size | steps/s of sweep | share of matrix-product rate | "
        + " | ".join(others)
        + " |"
    ]
    lines.append("| --- " * (lines[0].count("|") - 1) + "|")
    for key, found in results.items():
        model, batch = key.split()
        rows, share = found["contenders"], found.get("share_of_matrix_product_rate")
        own = rows.get("sweep")
        cells = [model, batch, f"{1 / own['seconds_per_step']:.3g}" if own else "–"]
        cells.append(f"{share['ratio']:.0%}" if share else "")
        for name in others:
            one = rows.get(name, {}).get("over_sweep")
            cells.append(
                f"{one['ratio']:.2f} [{one['low']:.2f}, {one['high']:.2f}]" if one else "–"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is asked for, record it, print the table; fail where losses are not equal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="reference,small,quick")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    names = arguments.contenders.split(",")
    for model in arguments.models.split(","):
        for batch in arguments.batches.split(","):
            found = compete(
                model, int(batch), arguments.device, arguments.precision, arguments.rounds, names
            )
            print(json.dumps(found), flush=True)
            results[f"{model} {batch}"] = found
            key = f"throughput {arguments.precision} {model} {batch}"
            record({key: found}, arguments.device, arguments.out)
    print(table(results, names))
    if differing := unequal(results, arguments.precision):
        sys.exit("\n".join(differing))


if __name__ == "__main__":
    main()
