"""Benchmarks of this machine, as whole processes: `make bench`.

Pairs are interleaved in one run and compared as ratios of medians, since machines are shared.
Throughput beside other trainers: throughput.py.
"""

import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

from ratios import ratio
from record import record

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.data.synthetic import synthetic_documents, synthetic_identity
from sweep.orchestration.planning import make_plan
from sweep.orchestration.runner import run_plan
from sweep.trial.folder import SweepFolder

SWEEP = [sys.executable, "-m", "sweep"]
MANY = ["run", "quadratic", "--batches", "4", "--budget", "40", "--device", "cpu", "--quiet"]
QUICK = ["run", "quick", "--batches", "16", "--device", "cpu", "--quiet", "--yes"]

LONGER = [*QUICK[:2], "--budget", "786432", *QUICK[2:]]


def seconds_of(command: list[str], environment: dict[str, str] | None = None) -> float:
    """Run a command to its end; return wall-clock seconds."""
    start = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    return time.perf_counter() - start


def interleaved(runs: int, **commands: Callable[[int], float]) -> dict[str, object]:
    """Time commands in turn; return every time and the medians."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for index in range(runs):
        for name, command in commands.items():
            times[name].append(command(index))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"seconds": times, "median_seconds": medians}


def start_up(folder: Path) -> dict[str, object]:
    """`sweep --help` beside an interpreter that does nothing."""
    return interleaved(
        9,
        sweep_help=lambda _: seconds_of([*SWEEP, "--help"]),
        bare_python=lambda _: seconds_of([sys.executable, "-c", "pass"]),
    )


def finished_sweep(folder: Path) -> dict[str, object]:
    """The same command again on a finished sweep of 100 trials."""
    command = [*SWEEP, *MANY, "--seeds", "100", "--out", str(folder / "hundred")]
    first = seconds_of(command)
    found = interleaved(5, again=lambda _: seconds_of(command))
    return {**found, "first_seconds": first, "first_seconds_per_trial": first / 100}


def first_step(folder: Path) -> dict[str, object]:
    """From the command to the first logged step of `quick` on the CPU, tokens prepared."""

    def until_first_line(index: int) -> float:
        out = folder / f"first-{index}"
        started = time.time()
        subprocess.run(
            [*SWEEP, *QUICK, "--out", str(out), "--seeds", "1"], check=True, capture_output=True
        )
        (metrics,) = out.glob("trials/*/metrics.jsonl")
        first = json.loads(metrics.read_text().splitlines()[0])
        return float(first["time"]) - started

    until_first_line(-1)  # prepares the tokens
    return interleaved(3, first_logged_step=until_first_line)


def compiled_trials(folder: Path) -> dict[str, object]:
    """Seconds of compiled trials of `small` until the first step: first, then later.

    The first compiles anew, in a cache of its own; the others find its step there. What their
    processes take to be forked is not in it.
    """
    out = SweepFolder(folder / "compiled")
    fields = {"model": "small", "data": "synthetic", "budget": "40960", "batches": [16], "seeds": 8}
    planned = make_plan(load_experiment("tinystories", fields), Execution(device="cpu"), out)
    execution = planned.plan.execution.model_copy(update={"compile": True})  # small as the plan is
    planned = replace(planned, plan=planned.plan.model_copy(update={"execution": execution}))
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor")):
        run_plan(planned, out)
    spent = ("seconds_training", "seconds_evaluation", "seconds_checkpoint", "seconds_noise")
    others = {}
    for trial in out.trials():
        result = trial.read_result()
        assert result is not None, trial
        others[result["seed"]] = result["seconds_total"] - sum(result[name] for name in spent)
    first, *later = (others[seed] for seed in sorted(others))
    return {"first_seconds": first, "later_seconds": later, "median": statistics.median(later)}


def tracking(folder: Path) -> dict[str, object]:
    """Training seconds of a trial with the MLflow mirror beside it, and by the bare worker.

    The mirror begins once a sweep (it imports MLflow and makes a store), so that the steps behind
    a trial's first quarter are held against each other apart.
    """
    later: dict[str, list[float]] = {"mirrored": [], "bare": []}

    def training_seconds(out: Path, name: str) -> float:
        (result,), (metrics,) = out.glob("trials/*/result.json"), out.glob("trials/*/metrics.jsonl")
        seconds, tokens = [], 0
        for line in map(json.loads, metrics.read_text().splitlines()):
            if rate := line.get("perf/tokens_per_second"):
                seconds.append((line["tokens"] - tokens) / rate)
                tokens = line["tokens"]
        later[name].append(sum(seconds[len(seconds) // 4 :]))
        return float(json.loads(result.read_text())["seconds_training"])

    def mirrored(index: int) -> float:
        out = folder / f"mirrored-{index}"
        seconds_of([*SWEEP, *LONGER, "--out", str(out)])
        return training_seconds(out, "mirrored")

    def bare(index: int) -> float:
        out = folder / f"bare-{index}"
        seconds_of([*SWEEP, "plan", *LONGER[1:-2], "--out", str(out)])
        (trial,) = out.glob("trials/*")
        seconds_of([sys.executable, "-m", "sweep.training", str(trial)])
        return training_seconds(out, "bare")

    found = interleaved(9, mirrored=mirrored, bare=bare)
    return {
        **found,
        "mirrored_over_bare": ratio(*found["seconds"].values()),  # type: ignore[attr-defined]
        "seconds_behind_first_quarter": later,
        "mirrored_over_bare_behind_first_quarter": ratio(*later.values()),
    }


def chunked_loss(folder: Path) -> dict[str, object]:
    """Linear layer and cross-entropy of the reference's shapes: plain over chunked, by rows."""
    import torch
    import torch.nn.functional as F

    from sweep.models.loss import linear_cross_entropy

    weight = torch.randn(10_000, 512).mul_(0.02).requires_grad_()

    def seconds(hidden: torch.Tensor, targets: torch.Tensor, rows: int) -> float:
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        if rows:
            loss = linear_cross_entropy(hidden, weight, targets, rows)
        else:
            loss = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
        (loss / len(targets)).backward()
        return time.perf_counter() - start

    found: dict[str, object] = {}
    for batch in (8, 32):
        hidden = torch.randn(batch * 256, 512).requires_grad_()
        targets = torch.randint(10_000, (batch * 256,))
        times: dict[int, list[float]] = {rows: [] for rows in (0, 128, 256, 512, 1024, 2048)}
        for _ in range(5):
            for rows, measured in times.items():
                measured.append(seconds(hidden, targets, rows))
        found[f"batch {batch}"] = {
            f"{rows} rows": statistics.median(a / b for a, b in zip(times[0], each, strict=True))
            for rows, each in times.items()
            if rows
        }
    return found


def report(folder: Path) -> dict[str, object]:
    """The report of 1,000 trials of 2,000 points, figures included, before MLflow gets it."""
    fakes = runpy.run_path(str(Path(__file__).parents[1] / "tests/analysis/fake_sweeps.py"))
    fakes["write_fake_sweep"](
        folder / "thousand", batches="1,2,4,8,16,32,64,128,256,512", seeds=100, points=2000,
        budget=512 * 64 * 2000,
    )  # fmt: skip
    write = "import sys, sweep; sweep.write_report(sys.argv[1])"
    command = [sys.executable, "-c", write, str(folder / "thousand")]
    return interleaved(3, report=lambda _: seconds_of(command))


def tokenizing(folder: Path) -> dict[str, object]:
    """Training a tokenizer of 2,048 on a text and tokenizing it, megabytes a second."""
    text = folder / "text"
    text.mkdir()
    identity = synthetic_identity(train=60_000, valid=500)
    for split in ("train", "valid"):
        documents = synthetic_documents(identity, split)
        (text / f"{split}.txt").write_text("\n<|endoftext|>\n".join(documents))
    size = sum(file.stat().st_size for file in text.iterdir())

    def prepare(index: int) -> float:
        cache = {"SWEEP_CACHE": str(folder / f"cache-{index}")}
        command = [*SWEEP, "data", "prepare", str(text), "--vocabulary", "2048"]
        return seconds_of(command, cache)

    found = interleaved(3, prepare=prepare)
    seconds = found["median_seconds"]["prepare"]  # type: ignore[index]
    return {**found, "megabytes": size / 1e6, "megabytes_per_second": size / 1e6 / seconds}


def noise_probes(folder: Path) -> dict[str, object]:
    """Seconds of noise probes over those of training, for `quick` at its default settings."""
    out = folder / "noise"
    command = ["run", "quick", "--batches", "4,64", "--device", "cpu", "--quiet", "--yes"]
    seconds_of([*SWEEP, *command, "--out", str(out)])
    results = [json.loads(path.read_text()) for path in out.glob("trials/*/result.json")]
    return {
        f"batch {one['batch_size']}": one["seconds_noise"] / one["seconds_training"]
        for one in results
    }


BENCHMARKS = (
    *(start_up, finished_sweep, first_step, compiled_trials, tracking),
    *(chunked_loss, report, tokenizing, noise_probes),
)


def main() -> None:
    """Run the benchmarks that are named, or all, and write the results beside earlier ones."""
    chosen = [one for one in BENCHMARKS if one.__name__ in (sys.argv[1:] or one.__name__)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["SWEEP_CACHE"] = str(folder / "cache")
        for benchmark in chosen:
            print(f"{benchmark.__name__}: {benchmark.__doc__}")
            found = benchmark(folder)
            print(json.dumps(found, indent=1))
            print(f"wrote {record({benchmark.__name__: found})}")


if __name__ == "__main__":
    main()
