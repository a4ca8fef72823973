"""Measurements on a GPU machine that has only the packages of a worker.

    python benchmarks/gpu.py sweep|steady|profile --text FOLDER --out OUT [--device cuda]

sweep: the reference sweep at a small budget; its folder is packed after every trial.
steady: a minute of steps at each batch size, from which the training time of the full budget is
projected. profile: the time of a step by operation. Results are written after each trial or batch
size, so that a time limit loses only the current one. `--device cpu` is a rehearsal.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import record

from sweep.config.experiment import load_experiment
from sweep.config.numbers import parse_count
from sweep.config.trial import Execution, TrialConfig
from sweep.orchestration.planning import Request, make_plan, save_plan
from sweep.training.checkpoint import Progress
from sweep.training.device import device_name, flop_utilization
from sweep.training.loop import Steps
from sweep.training.step import TrainingStep
from sweep.trial.folder import SweepFolder

FULL_BUDGET = 327_680_000


def planned(arguments: argparse.Namespace, path: Path) -> SweepFolder:
    """Plan the reference sweep."""
    folder = SweepFolder(path)
    fields = {
        "budget": arguments.budget,
        "batches": arguments.batches,
        "data": str(arguments.text.absolute()),
        **({"model": arguments.model} if arguments.model else {}),
    }
    settings = load_experiment("tinystories", fields)
    save_plan(make_plan(Request(settings, Execution(device=arguments.device), folder)).plan, folder)
    return folder


def run_sweep(arguments: argparse.Namespace, folder: SweepFolder) -> None:
    """Run the trials one after another, and pack the folder after each."""
    for trial in folder.trials():
        print(f"trial {trial.id}, batch size {trial.read_config().science.batch_size}", flush=True)
        subprocess.run([sys.executable, "-m", "sweep.training", str(trial.path)], check=False)
        with tarfile.open(arguments.out / "reference.tar.gz", "w:gz") as tar:
            tar.add(folder.path, "reference", filter=_small)


def _small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith(".safetensors") else entry


def profile(config: TrialConfig, count: int = 20) -> str:
    """Return a table of the operations that take the most time in `count` steps after warm-up."""
    device = torch.device(config.execution.device)
    step = TrainingStep(config, device)
    steps = Steps(config, step, Progress())
    for t in range(1, 11):
        steps.take(t)
    with torch.profiler.profile() as profiler:
        for t in range(11, 11 + count):
            loss = steps.take(t)
        loss.item()  # waits for the device
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    mode = "compiled" if config.execution.compile else "eager"
    title = f"batch size {config.science.batch_size}, {count} steps, {mode}"
    return f"{title}\n{profiler.key_averages().table(sort_by=by, row_limit=25)}\n"


def steady(config: TrialConfig, seconds: float) -> dict[str, Any]:
    """Train for some seconds after warm-up; return rates and the projected full time."""
    device = torch.device(config.execution.device)
    config = config.model_copy(update={"steps": 10**7})  # longer than this measurement
    step = TrainingStep(config, device)
    start = time.perf_counter()
    if config.execution.compile:
        step.warm_up()
    compile_seconds = time.perf_counter() - start
    batch_size = config.science.batch_size
    steps = Steps(config, step, Progress())

    def take(count: int, first: int) -> None:
        for t in range(first, first + count):
            loss = steps.take(t)
        loss.item()  # waits for the device

    take(20, 1)
    start, done, slice_steps = time.perf_counter(), 0, 20
    while time.perf_counter() - start < seconds:
        take(slice_steps, 21 + done)
        done += slice_steps
        seconds_per_step = (time.perf_counter() - start) / done
        slice_steps = max(20, min(5000, int(2.0 / seconds_per_step)))  # wait about every 2 seconds
    elapsed = time.perf_counter() - start
    rate = done * batch_size * config.tokens_per_sequence / elapsed
    return {
        "batch_size": batch_size,
        "microbatch_size": config.microbatch_size,
        "steps": done,
        "seconds": elapsed,
        "steps_per_second": done / elapsed,
        "tokens_per_second": rate,
        "mfu": flop_utilization(config, device, rate),
        "seconds_compile": compile_seconds,
        "full_budget": FULL_BUDGET,
        "projected_training_seconds_of_full_budget": FULL_BUDGET / rate,
    }


def main() -> None:
    """Run the part named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("sweep", "steady", "profile"))
    parser.add_argument("--text", type=Path, required=True, help="folder of train.txt, valid.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", default="8.192M", type=parse_count)
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--model", default=None, help="a smaller model, for a rehearsal")
    parser.add_argument("--seconds", type=float, default=60.0, help="of steady, per batch size")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(device_name(torch.device(arguments.device)), torch.__version__, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = planned(arguments, Path(name) / "reference")
        if arguments.part == "sweep":
            run_sweep(arguments, folder)
            return
        for trial in folder.trials():
            config = trial.read_config()
            torch.compiler.reset()  # torch compiles the same code for at most eight shapes
            if arguments.part == "profile":
                with (arguments.out / "profile.txt").open("a") as file:
                    file.write(profile(config))
                continue
            row = steady(config, arguments.seconds)
            print(json.dumps(row), flush=True)
            key = f"steady {config.science.model.name} {config.science.batch_size}"
            record({key: row}, arguments.device, arguments.out)


if __name__ == "__main__":
    main()
