"""Everything to do with a lent GPU, in one command that needs only what a worker needs.

    python benchmarks/gpu.py --text FOLDER --out OUT [--budget 8.192M] [--device cuda]

1. the memory forecast against measurement (benchmarks/memory.py), 2. the reference sweep at a small
budget, by the bare worker, 3. a minute of steady steps at each batch size, from which the full
budget's time is projected, and labelled so. Every part is written as soon as it is there, so that a
limit on the machine's time loses only what was under way. With --device cpu it rehearses all of it.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sweep.config.experiment import load_experiment
from sweep.config.numbers import parse_count
from sweep.config.trial import TrialConfig
from sweep.orchestration.execution import Logistics
from sweep.orchestration.planning import make_plan, save_plan
from sweep.training.device import device_name, flop_utilisation
from sweep.training.progress import Progress
from sweep.training.step import TrainingStep
from sweep.training.steps import GraphedSteps, Sums, build_steps
from sweep.trial.folder import SweepFolder

FULL_BUDGET = 327_680_000
PARTS = ("memory", "sweep", "steady")


def run_sweep(arguments: argparse.Namespace) -> SweepFolder:
    """Plan the reference and run its trials one after another."""
    folder = SweepFolder(arguments.out / "reference")
    fields = {
        "budget": arguments.budget,
        "batches": arguments.batches,
        "data": str(arguments.text.absolute()),
        **({"model": arguments.model} if arguments.model else {}),
    }
    settings = load_experiment("tinystories", fields)
    planned = make_plan(settings, Logistics(device=arguments.device), folder)
    save_plan(planned.plan, folder)
    for trial in folder.trials():
        print(f"trial {trial.id}, batch size {trial.read_config().science.batch_size}", flush=True)
        subprocess.run([sys.executable, "-m", "sweep.training", str(trial.path)], check=False)
    return folder


def steady(config: TrialConfig, seconds: float) -> dict[str, Any]:
    """Train for so long after warming up; return rates and the projected full time."""
    device = torch.device(config.execution.device)
    config = config.model_copy(update={"steps": 10**7})  # a schedule that does not end here
    step = TrainingStep(config, device, config.microbatch_size)
    compile_seconds = step.warm_up() if config.execution.compile else 0.0
    batch_size = config.science.batch_size
    steps = build_steps(config, step, Sums(Progress(), device))

    def take(count: int, first: int) -> None:
        for t in range(first, first + count):
            output = steps.take(t, None)
        output.loss.item()  # waits for the device

    take(20, 1)
    start, done, slice_steps = time.perf_counter(), 0, 20
    while time.perf_counter() - start < seconds:
        take(slice_steps, 21 + done)
        done += slice_steps
        spent = (time.perf_counter() - start) / done
        slice_steps = max(20, min(5000, int(2.0 / spent)))  # waits for the device every 2 seconds
    elapsed = time.perf_counter() - start
    rate = done * batch_size * config.tokens_per_sequence / elapsed
    return {
        "batch_size": batch_size,
        "is_cuda_graph": isinstance(steps, GraphedSteps),
        "microbatch_size": config.microbatch_size,
        "steps": done,
        "seconds": elapsed,
        "steps_per_second": done / elapsed,
        "tokens_per_second": rate,
        "mfu": flop_utilisation(config, device, rate),
        "seconds_compile": compile_seconds,
        "projected_seconds_of_full_budget": FULL_BUDGET / rate,
    }


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="folder of train.txt, valid.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", default="8.192M", type=parse_count)
    parser.add_argument("--batches", default="1,8,32,64,128,256")
    parser.add_argument("--model", default=None, help="another one, for a rehearsal")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--steady-seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(device_name(torch.device(arguments.device)), torch.__version__, flush=True)
    parts = arguments.parts.split(",")
    if "memory" in parts:
        command = [sys.executable, str(Path(__file__).parent / "memory.py")]
        command += ["--device", arguments.device, "--out", str(arguments.out / "memory.json")]
        subprocess.run(command, check=False)
    if "sweep" in parts:
        run_sweep(arguments)
    if "steady" in parts:
        rows = []
        for trial in SweepFolder(arguments.out / "reference").trials():
            rows.append(steady(trial.read_config(), arguments.steady_seconds))
            print(json.dumps(rows[-1]), flush=True)
            text = json.dumps({"full_budget": FULL_BUDGET, "rows": rows}, indent=1)
            (arguments.out / "steady.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
