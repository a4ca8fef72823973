"""Benchmarks of whole commands on this machine: `make bench`.

    python tests/benchmarks/run.py [NAME …]

Commands that are compared run alternately, because machines are shared. throughput.py compares with
other trainers.
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
from sweep.config.load import load_experiment
from sweep.data.synthetic_stories import open_split, synthetic_identity
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import Request
from sweep.orchestration.runner import run_plan
from sweep.trial.folder import SweepFolder

SWEEP = [sys.executable, "-m", "sweep"]
MANY = ["run", "quadratic", "--batches", "4", "--budget", "40", "--device", "cpu", "--quiet"]
QUICK = ["run", "quick", "--batches", "16", "--device", "cpu", "--quiet", "--yes"]
LONGER = [*QUICK[:2], "--budget", "786432", *QUICK[2:]]


def seconds_of(command: list[str], environment: dict[str, str] | None = None) -> float:
    """Run a command; return wall-clock seconds."""
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
    """Time commands alternately; return every time and the medians."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for index in range(runs):
        for name, command in commands.items():
            times[name].append(command(index))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"seconds": times, "median_seconds": medians}


def start_up(folder: Path) -> dict[str, object]:
    """Time `sweep --help`, and an interpreter that does nothing."""
    return interleaved(
        9,
        sweep_help=lambda _: seconds_of([*SWEEP, "--help"]),
        bare_python=lambda _: seconds_of([sys.executable, "-c", "pass"]),
    )


def finished_sweep(folder: Path) -> dict[str, object]:
    """Time the same command again on a finished sweep of 100 trials."""
    command = [*SWEEP, *MANY, "--seeds", "100", "--out", str(folder / "hundred")]
    first = seconds_of(command)
    times = interleaved(5, again=lambda _: seconds_of(command))
    return {**times, "first_seconds": first, "first_seconds_per_trial": first / 100}


def first_step(folder: Path) -> dict[str, object]:
    """Time from the command to the first logged step of `quick`, with prepared tokens."""

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
    """Time compiled trials of `small` until their first step: the first trial, and later ones.

    The first trial starts with an empty compiler cache, and the others reuse the compiled steps of
    its process. The time to fork the process is not included.
    """
    out = SweepFolder(folder / "compiled")
    fields = {"model": "small", "data": "synthetic", "budget": "40960", "batches": [16], "seeds": 8}
    planned = make_plan(
        Request(load_experiment("tinystories", fields), Execution(device="cpu"), out)
    )
    # A plan this small would run eagerly.
    execution = planned.plan.execution.model_copy(update={"compile": True})
    planned = replace(planned, plan=planned.plan.model_copy(update={"execution": execution}))
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor")):
        run_plan(planned, out)
    spent = ("seconds_training", "seconds_evaluation", "seconds_checkpoint", "seconds_noise")
    others = {}
    for trial in out.trials():
        result = trial.read_result()
        assert result is not None, trial
        row = result.as_row()
        others[result.seed] = result.seconds_total - sum(row[name] for name in spent)
    first, *later = (others[seed] for seed in sorted(others))
    return {"first_seconds": first, "later_seconds": later, "median": statistics.median(later)}


def tracking(folder: Path) -> dict[str, object]:
    """Compare the training time of a trial with the MLflow mirror and by a bare worker.

    The mirror starts during the trial: it imports MLflow and creates a store. Therefore the steps
    after a trial's first quarter are also compared separately.
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

    times = interleaved(9, mirrored=mirrored, bare=bare)
    return {
        **times,
        "mirrored_over_bare": ratio(*times["seconds"].values()),  # type: ignore[attr-defined]
        "seconds_after_first_quarter": later,
        "mirrored_over_bare_after_first_quarter": ratio(*later.values()),
    }


def chunked_loss(folder: Path) -> dict[str, object]:
    """Compare plain with chunked cross-entropy at the reference's shapes, by rows per chunk."""
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
        (loss / len(targets)).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - start

    ratios: dict[str, object] = {}
    for batch in (8, 32):
        hidden = torch.randn(batch * 256, 512).requires_grad_()
        targets = torch.randint(10_000, (batch * 256,))
        times: dict[int, list[float]] = {rows: [] for rows in (0, 128, 256, 512, 1024, 2048)}
        for _ in range(5):
            for rows, measured in times.items():
                measured.append(seconds(hidden, targets, rows))
        ratios[f"batch {batch}"] = {
            f"{rows} rows": statistics.median(a / b for a, b in zip(times[0], each, strict=True))
            for rows, each in times.items()
            if rows
        }
    return ratios


def report(folder: Path) -> dict[str, object]:
    """Time the report of 1,000 trials with 2,000 points each, figures included."""
    fakes = runpy.run_path(str(Path(__file__).parents[1] / "analysis/fake_sweeps.py"))
    fakes["write_fake_sweep"](
        folder / "thousand", batches="1,2,4,8,16,32,64,128,256,512", seeds=100, points=2000,
        budget=512 * 64 * 2000,
    )  # fmt: skip
    write = "import sys, sweep; sweep.write_report(sys.argv[1])"
    command = [sys.executable, "-c", write, str(folder / "thousand")]
    return interleaved(3, report=lambda _: seconds_of(command))


def tokenizing(folder: Path) -> dict[str, object]:
    """Time training a tokenizer of 2,048 tokens on a text and tokenizing it."""
    text = folder / "text"
    text.mkdir()
    identity = synthetic_identity(train=60_000, valid=500)
    for split in ("train", "valid"):
        documents = (piece.text for piece in open_split(identity, split)())
        (text / f"{split}.txt").write_text("\n<|endoftext|>\n".join(documents))
    size = sum(file.stat().st_size for file in text.iterdir())

    def prepare(index: int) -> float:
        cache = {"SWEEP_CACHE": str(folder / f"cache-{index}")}
        command = [*SWEEP, "data", "prepare", str(text), "--vocabulary", "2048"]
        return seconds_of(command, cache)

    times = interleaved(3, prepare=prepare)
    seconds = times["median_seconds"]["prepare"]  # type: ignore[index]
    return {**times, "megabytes": size / 1e6, "megabytes_per_second": size / 1e6 / seconds}


def noise_probes(folder: Path) -> dict[str, object]:
    """Measure the time of noise probes relative to training, for `quick`."""
    out = folder / "noise"
    command = ["run", "quick", "--batches", "4,64", "--noise", "--device", "cpu"]
    seconds_of([*SWEEP, *command, "--quiet", "--yes", "--out", str(out)])
    results = [json.loads(path.read_text()) for path in out.glob("trials/*/result.json")]
    return {
        f"batch {result['batch_size']}": result["seconds_noise"] / result["seconds_training"]
        for result in results
    }


BENCHMARKS = (
    *(start_up, finished_sweep, first_step, compiled_trials, tracking),
    *(chunked_loss, report, tokenizing, noise_probes),
)


def main() -> None:
    """Run the benchmarks named on the command line, or all, and record the results."""
    names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["SWEEP_CACHE"] = str(folder / "cache")
        for benchmark in BENCHMARKS:
            if names and benchmark.__name__ not in names:
                continue
            print(f"{benchmark.__name__}: {benchmark.__doc__}")
            result = benchmark(folder)
            print(json.dumps(result, indent=1))
            print(f"wrote {record({benchmark.__name__: result})}")


if __name__ == "__main__":
    main()
