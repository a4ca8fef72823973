"""Compare memory forecasts with measurements: `make bench-memory`.

Each row is a training step of one model at one batch size, forecast on tensors without data and
measured in a fresh process. It needs only the packages of a worker, and transformers for gpt2.
Defaults on CUDA: batch sizes 1 to 512, eager and compiled, bf16 and fp32. On a CPU: a few small
ones, eager.
"""

import argparse
import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, record

from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.load import load_experiment
from sweep.config.trial import TrialConfig
from sweep.data.sources import identify_data
from sweep.errors import SweepError, WorkerDied
from sweep.memory.forecast import forecast_flops, forecast_step
from sweep.memory.probe import measure
from sweep.memory.search import Measurement
from sweep.orchestration.execution import LOSS_CHUNK_ROWS, decide_graphs
from sweep.plan.plan import Inputs, build_plan
from sweep.training.device import has_compiler, total_memory
from sweep.training.process import FreshProcess

# Fields that choose a benchmarked model, in addition to the names of experiments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("tinystories", {}),
    "small": ("tinystories", {"model": "small"}),
    "quick": ("quick", {}),
}
CUDA_BATCHES = ",".join(str(2**power) for power in range(10))
POINT_SECONDS = 240.0


def benchmark_data() -> dict[str, Any]:
    """Return the identity of packed tokens that BENCHMARK_DATA names, by default synthetic text."""
    if path := os.environ.get("BENCHMARK_DATA"):
        return dict(json.loads(Path(path).read_text()))
    return identify_data("synthetic")


def benchmark_settings(model: str, **fields: Any) -> Experiment:
    """Return the settings of a model of MODELS, or of an experiment."""
    experiment, chosen = MODELS.get(model, (model, {}))
    return load_experiment(experiment, {**chosen, **fields})


def trial_config(
    experiment: str,
    batch: int,
    precision: str,
    device: str,
    is_compiled: bool,
    decides_graphs: bool = False,
    **more: Any,
) -> TrialConfig:
    """Return the config of one step at this batch size, in one microbatch, with the usual loss."""
    fields = {"batches": [batch], "precision": precision, "budget": 10**9, **more}
    execution = Execution(
        device=device,
        microbatch=batch,
        threads=torch.get_num_threads(),
        compile=is_compiled,
        evaluation_batch_size=1,
        loss_chunk_rows=LOSS_CHUNK_ROWS[device.partition(":")[0]],
    )
    settings = benchmark_settings(experiment, **fields)
    plan = build_plan(settings, execution, Inputs(data=benchmark_data()))
    row = plan.trials[0].model_copy(update={"learning_rate": 1e-6})
    if decides_graphs and execution.device_type == "cuda":
        flops = forecast_flops(plan.trial_config(row, "memory"))
        model = plan.model.model_copy(update={"flops_per_token": flops})
        plan = plan.model_copy(update={"model": model})
        plan = plan.with_execution(**decide_graphs(plan))
    return plan.trial_config(row, "memory")


def compare(config: TrialConfig, limit: int) -> dict[str, Any]:
    """Forecast and measure one configuration."""
    batch = config.science.batch_size
    row: dict[str, Any] = {
        "experiment": config.science.model.name,
        "precision": config.science.precision,
        "compiled": config.execution.compile,
        "batch_size": batch,
    }
    try:
        row["forecast_bytes"] = forecast_step(config).peak_bytes
    except SweepError as error:
        return {**row, "status": "ERROR", "message": str(error)}
    process = FreshProcess(measure, config, limit, 3)
    try:
        point: Measurement = process.result(timeout=POINT_SECONDS)
    except WorkerDied as error:
        return {**row, "status": "ERROR", "message": str(error)}
    row |= {"status": point.status, "message": point.message, "measured_bytes": point.peak_bytes}
    row |= {"reserved_bytes": point.reserved_bytes, "tokens_per_second": point.tokens_per_second}
    if point.peak_bytes:
        row["forecast_over_measured"] = row["forecast_bytes"] / point.peak_bytes
    return row


def main() -> None:
    """Compare every configuration, and record the results after each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--experiments", default="", help="names, comma-separated")
    parser.add_argument("--batches", default="")
    parser.add_argument("--precisions", default="")
    parser.add_argument("--modes", default="", help="eager, compiled")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    is_cuda = arguments.device.startswith("cuda")
    experiments = arguments.experiments or ("tinystories,gpt2" if is_cuda else "quick,tinystories")
    batches = arguments.batches or (CUDA_BATCHES if is_cuda else "1,4,16")
    precisions = arguments.precisions or ("bf16,fp32" if is_cuda else "fp32")
    modes = arguments.modes or ("eager,compiled" if is_cuda and has_compiler("cuda") else "eager")
    limit = total_memory(torch.device(arguments.device))
    choices = product(experiments.split(","), precisions.split(","), modes.split(","))
    for experiment, precision, mode in choices:
        rows: list[dict[str, Any]] = []
        for batch in map(int, batches.split(",")):
            config = trial_config(
                experiment, batch, precision, arguments.device, mode == "compiled"
            )
            rows.append(compare(config, limit))
            print(json.dumps(rows[-1]), flush=True)
            key = f"memory {experiment} {precision} {mode}"
            path = record({key: rows}, arguments.device, arguments.out)
            if rows[-1]["status"] == "OUT_OF_MEMORY":
                break
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
