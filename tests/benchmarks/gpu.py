"""All measurements on a GPU machine that has only the packages of a worker, within a time limit.

    python tests/benchmarks/gpu.py OUT [--seconds 480] [--device cuda] [--small]

Parts run in the order of PARTS, each in its own process and until its share of the time has passed;
time that a part leaves goes to the later ones. Each row is written when it is measured, into
OUT/DEVICE/DATE.json, so a part that is cut keeps its rows. After a cut, compiled code is cached in
another folder, because a compiler that was killed may have left half a file. A part that fails
leaves its traceback in OUT/log.txt. The tables of the profiler are in OUT/profile.txt, and
OUT/summary.txt, of at most 60 lines, is also printed last. gpu.sh prepares the environment.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contenders import benchmarked, matrix_size
from memory import benchmark_data, benchmark_settings, compare, trial_config
from record import record
from throughput import compete

from sweep.config.execution import Execution
from sweep.config.trial import TrialConfig
from sweep.plan.plan import Inputs, build_plan
from sweep.training.checkpoint import Progress
from sweep.training.device import device_name, flop_utilization, total_memory
from sweep.training.loop import Steps
from sweep.training.step import TrainingStep
from sweep.trial.folder import SweepFolder, TrialFolder

ROOT = Path(__file__).parents[2]
REFERENCE_TOKENS = 327_680_000
TESTS = "tests/training/test_gpu.py"  # other files need packages that a worker lacks
SUMMARY_LINES = 60
LINE_CHARACTERS = 500
SUMMARY_SECONDS = 5.0  # of the whole time
LARGEST_KERNELS = 10
COPIED_BYTES = 1 << 30
LAUNCH = r"cu(da)?[A-Za-z]*Launch"  # names in CUDA's runtime and driver


@dataclass(frozen=True)
class Scale:
    """What is measured: on a GPU, or small for a rehearsal on a CPU."""

    device: str
    is_small: bool

    @property
    def model(self) -> str:
        return "quick" if self.is_small else "reference"

    @property
    def short_model(self) -> str:
        return "quick" if self.is_small else "small"

    @property
    def precision(self) -> str:
        return "fp32" if self.is_small else "bf16"

    def batches(self, *sizes: int) -> list[int]:
        """Return the batch sizes; in a rehearsal the first two, at most 8."""
        return [min(size, 8) for size in sizes[:2]] if self.is_small else list(sizes)


class Part:
    """The measurements of one part, in its own process."""

    def __init__(self, scale: Scale, out: Path, deadline: float) -> None:
        self.scale, self.out = scale, out
        self.device = torch.device(scale.device)
        self.deadline = deadline  # by time.time()

    def write(self, key: str, row: dict[str, Any]) -> None:
        """Add a row to the results, now."""
        print(key, json.dumps(row), flush=True)
        record({key: row}, self.scale.device, self.out)

    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.time())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds_of(self, function: Callable[[], object], repeats: int = 10) -> float:
        """Return the least seconds of a call."""
        function()
        best = float("inf")
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            best = min(best, time.perf_counter() - start)
        return best


def measure_machine(part: Part) -> None:
    """Names, versions, and the rates of copies and of matrix products."""
    row: dict[str, Any] = {
        "device": device_name(part.device),
        "device_memory_bytes": total_memory(part.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
    }
    size = COPIED_BYTES // (16 if part.scale.is_small else 1)
    source = torch.zeros(size, dtype=torch.uint8, device=part.device)
    target = torch.empty_like(source)
    seconds = part.seconds_of(lambda: target.copy_(source))
    row["copy_gigabytes_per_second"] = 2 * size / seconds / 1e9  # read and written
    count = 512 if part.scale.is_small else matrix_size(part.scale.device)
    left, right = (
        torch.randn(count, count, device=part.device, dtype=torch.bfloat16) for _ in range(2)
    )
    seconds = part.seconds_of(lambda: left @ right)
    row["bf16_teraflops_per_second"] = 2 * count**3 / seconds / 1e12
    part.write("machine", row)


def plan_trial(
    scale: Scale,
    folder: Path,
    model: str,
    batch: int,
    steps: int,
    is_compiled: bool,
    graph_bound: int = 0,
) -> TrialFolder:
    """Write the folder of a trial, for `python -m sweep.training`."""
    settings = benchmark_settings(model, batches=[batch], precision=scale.precision)
    tokens = steps * batch * settings.tokens_per_sequence
    settings = settings.model_copy(update={"budget": tokens})
    execution = Execution(
        device=scale.device,
        compile=is_compiled,
        graph_bound=graph_bound,
        threads=torch.get_num_threads(),
        loss_chunk_rows=8192,
        keep="none",
    )
    plan = build_plan(settings, execution, Inputs(data=benchmark_data()))
    config = plan.trial_config(plan.trials[0], "benchmark")
    trial = SweepFolder(folder).trial(config.id)
    trial.path.mkdir(parents=True)
    trial.write_config(config)
    return trial


def run_trial(trial: TrialFolder) -> dict[str, Any]:
    """Run a trial in a forked attempt; raise the end of its log if it fails."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "sweep.training", str(trial.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    log = trial.log_path.read_text() if trial.log_path.exists() else ""
    if done.returncode:
        raise RuntimeError(f"{done.stdout}{done.stderr}{log[-5000:]}")
    result = trial.read_result()
    assert result is not None
    return {
        "device": result.device,
        "steps": result.steps,
        "seconds_wall": wall,
        "seconds_fixed": wall - result.seconds_training,
        "seconds_start": wall - result.seconds_total,
        "seconds_total": result.seconds_total,
        "seconds_compile": result.seconds_compile,
        "seconds_training": result.seconds_training,
        "seconds_evaluation": result.seconds_evaluation,
        "seconds_checkpoint": result.seconds_checkpoint,
        "seconds_noise": result.seconds_noise,
        "initial_train_loss": result.initial_train_loss,
        "final_train_loss": result.final_train_loss,
        "final_valid_loss": result.final_valid_loss,
    }


def measure_trials(part: Part) -> None:
    """One trial from config.json to result.json through a forked attempt, in three modes."""
    failures: list[str] = []
    for mode in ("eager", "compiled", "graphed"):
        with tempfile.TemporaryDirectory() as name:
            batch, steps = (4, 20) if part.scale.is_small else (32, 50)
            graph_bound = batch if mode == "graphed" else 0
            arguments = part.scale.model, batch, steps, mode != "eager", graph_bound
            trial = plan_trial(part.scale, Path(name) / "sweep", *arguments)
            try:
                part.write(f"trial {mode}", run_trial(trial))
            except RuntimeError as error:
                print(error, flush=True)
                part.write(f"trial {mode}", {"error": str(error).strip().splitlines()[-1][:200]})
                failures.append(mode)
    if failures:
        raise RuntimeError(f"the trial failed: {', '.join(failures)}")


def run_tests(part: Part) -> None:
    """The tests marked `gpu`; in a rehearsal those of the same file that run on a CPU."""
    marker = "gpu" if part.device.type == "cuda" else "not gpu and not slow"
    command = [sys.executable, "-m", "pytest", "-v", "-m", marker, "-W", "default"]
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", "--durations=10", TESTS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    ends: dict[str, str] = {}
    for line in process.stdout:
        print(line, end="", flush=True)
        if match := re.match(r"\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", line):
            ends[match[1]] = match[2]
            part.write("tests", ends)
    if process.wait():
        raise RuntimeError(f"pytest ended with exit code {process.returncode}")


def measure_throughput(part: Part) -> None:
    """Steps of sweep, as planned and with the other choice of a graph, and of a plain loop."""
    rounds = 2 if part.scale.is_small else 5
    failures: list[str] = []
    for batch in part.scale.batches(1, 64, 256):
        arguments = part.scale.model, batch, part.scale.device, part.scale.precision, rounds
        config = benchmarked(*arguments[:-1], True)
        is_graphed = batch <= config.execution.graph_bound
        other = "sweep without graph" if is_graphed else "sweep with graph"
        row = compete(*arguments, ["sweep", other, "plain loop compiled"])
        part.write(f"throughput {part.scale.precision} {part.scale.model} {batch}", row)
        failures += [f"{name} at {batch}: {why}" for name, why in row["failed"].items()]
    if failures:
        raise RuntimeError("; ".join(failures))


def compiled_steps(part: Part, batch: int) -> tuple[TrialConfig, Steps]:
    """Return the compiled steps of a trial, warmed up."""
    torch.compiler.reset()  # torch compiles the same code for at most eight shapes
    scale = part.scale
    config = benchmarked(scale.model, batch, scale.device, scale.precision, True)
    step = TrainingStep(config, part.device)
    step.warm_up()
    steps = Steps(config, step, Progress())
    for t in range(1, 11):
        steps.take(t).item()
    return config, steps


def profile_steps(part: Part) -> None:
    """Launches per step, the share of time in which kernels run, and the largest kernels."""
    count = 5 if part.scale.is_small else 20
    for batch in part.scale.batches(1, 64):
        _, steps = compiled_steps(part, batch)
        start = time.perf_counter()
        for t in range(11, 11 + count):
            steps.take(t)
        part.synchronize()
        seconds = (time.perf_counter() - start) / count  # without the profiler
        with torch.profiler.profile() as profiler:
            for t in range(11 + count, 11 + 2 * count):
                steps.take(t)
            part.synchronize()
        is_cuda = part.device.type == "cuda"
        averages = profiler.key_averages()
        microseconds = {
            event.key: float(event.self_device_time_total if is_cuda else event.self_cpu_time_total)
            for event in averages
            if not is_cuda or (event.device_type.name == "CUDA" and not event.is_user_annotation)
        }
        largest = sorted(microseconds, key=lambda name: -microseconds[name])[:LARGEST_KERNELS]
        launches = sum(event.count for event in averages if re.match(LAUNCH, event.key))
        row: dict[str, Any] = {
            "steps": count,
            "seconds_per_step": seconds,
            "launches_per_step": launches / count,
            "busy_share": sum(microseconds.values()) / 1e6 / count / seconds,
            "largest_kernels": [
                {"name": name[:120], "microseconds_per_step": microseconds[name] / count}
                for name in largest
            ],
        }
        part.write(f"profile {part.scale.model} {batch}", row)
        by = "self_device_time_total" if is_cuda else "self_cpu_time_total"
        with (part.out / "profile.txt").open("a") as file:
            table = averages.table(sort_by=by, row_limit=40)
            file.write(f"batch size {batch}, {count} steps\n{table}\n")


def measure_graphs(part: Part) -> None:
    """Steps with and without a CUDA graph, and steps that cannot be captured."""
    scale = part.scale
    for batch, mode in itertools.product(scale.batches(1, 8), ("eager", "compiled")):
        plain, expected = graph_row(part, batch, mode, 0)
        graphed, losses = graph_row(part, batch, mode, batch)
        row = {
            "seconds_per_step": plain,
            "seconds_per_step_of_graph": graphed,
            "speedup": plain / graphed,
            "largest_loss_difference": largest_difference(losses, expected),
        }
        part.write(f"graph {scale.model} {batch} {mode}", row)

    _, expected = graph_row(part, 1, "eager", 0)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        _, losses = graph_row(part, 1, "eager", 1, waits=True)
    fallback: dict[str, Any] = {
        "sentence": output.getvalue().strip()[:200],
        "largest_loss_difference": largest_difference(losses, expected),
    }
    part.write(f"graph {scale.model} fallback", fallback)


def graph_row(
    part: Part, batch: int, mode: str, graph_bound: int, waits: bool = False
) -> tuple[float, list[float]]:
    """Return seconds per step, and the losses of the first steps, which may wait for the device."""
    torch.compiler.reset()
    scale = part.scale
    is_compiled = mode == "compiled"
    arguments = scale.model, batch, scale.device, scale.precision, is_compiled, graph_bound
    config = benchmarked(*arguments)
    step = TrainingStep(config, part.device)
    backward = step.parallel.backward

    def backward_and_wait(loss: torch.Tensor) -> None:
        backward(loss)
        loss.item()

    if waits:
        step.parallel.backward = backward_and_wait  # type: ignore[method-assign]
    if is_compiled:
        step.warm_up()
    steps = Steps(config, step, Progress())
    losses = [steps.take(t).item() for t in range(1, 21)]
    taken, start = 20, time.perf_counter()
    while time.perf_counter() - start < (0.2 if scale.is_small else 2.0):
        for t in range(taken + 1, taken + 21):
            loss = steps.take(t)
        loss.item()  # waits for the device
        taken += 20
    return (time.perf_counter() - start) / (taken - 20), losses


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True))


def measure_fixed_seconds(part: Part) -> None:
    """Seconds of a short trial besides its training: the first one compiles, the second has not to.

    In a sweep, one process starts all attempts, so later trials start sooner than these two.
    """
    for order in ("first", "second"):
        with tempfile.TemporaryDirectory() as name:
            arguments = part.scale.short_model, 8, 20, True
            trial = plan_trial(part.scale, Path(name) / "sweep", *arguments)
            part.write(f"fixed {part.scale.short_model} {order}", run_trial(trial))


def compare_memory(part: Part) -> None:
    """The forecast of a step's peak memory against the measured one."""
    limit = total_memory(part.device)
    is_compiled = part.device.type == "cuda"
    for batch in part.scale.batches(1, 32, 256):
        scale = part.scale
        config = trial_config(scale.model, batch, scale.precision, scale.device, is_compiled)
        part.write(f"memory {scale.model} {batch}", compare(config, limit))


def measure_steady_rates(part: Part) -> None:
    """Rates of long runs of steps, projected to the reference sweep."""
    batches = part.scale.batches(1, 8, 32, 256)
    for index, batch in enumerate(batches):
        start = time.perf_counter()
        config, steps = compiled_steps(part, batch)
        seconds_compile = time.perf_counter() - start
        share = part.seconds_left() / (len(batches) - index) - seconds_compile
        seconds = min(20.0, max(2.0, share))
        taken = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            for t in range(11 + taken, 31 + taken):
                loss = steps.take(t)
            loss.item()  # waits for the device
            taken += 20
        elapsed = time.perf_counter() - start
        rate = taken * batch * config.tokens_per_sequence / elapsed
        row = {
            "steps": taken,
            "seconds": elapsed,
            "steps_per_second": taken / elapsed,
            "tokens_per_second": rate,
            "mfu": flop_utilization(config, part.device, rate),
            "seconds_compile": seconds_compile,
            "projected_seconds_of_reference": REFERENCE_TOKENS / rate,
        }
        part.write(f"steady {part.scale.model} {batch}", row)


# Functions by the name of the part, with its share of the time.
PARTS: dict[str, tuple[Callable[[Part], None], float]] = {
    "machine": (measure_machine, 0.05),
    "trial": (measure_trials, 0.15),
    "tests": (run_tests, 0.22),
    "throughput": (measure_throughput, 0.22),
    "profile": (profile_steps, 0.07),
    "graph": (measure_graphs, 0.10),
    "fixed": (measure_fixed_seconds, 0.05),
    "memory": (compare_memory, 0.06),
    "steady": (measure_steady_rates, 0.08),
}


def run_parts(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, str]:
    """Run each part in a process until its share of the time has passed; return how they ended."""
    started = time.time()
    available = arguments.seconds - SUMMARY_SECONDS
    whole = sum(PARTS[name][1] for name in names)
    share, ends = 0.0, dict[str, str]()
    compiled = tempfile.mkdtemp()
    for name in names:
        share += PARTS[name][1] / whole
        deadline = started + share * available
        command = [sys.executable, __file__, *sys.argv[1:], "--part", name]
        begun = time.time()
        with (arguments.out / "log.txt").open("a") as log:
            print(f"== {name}", file=log, flush=True)
            process = subprocess.Popen(
                [*command, "--deadline", str(deadline)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": compiled},
                process_group=0,
            )
            try:
                code = process.wait(max(1.0, deadline - begun))
                ends[name] = "done" if code == 0 else f"failed with exit code {code}, see log.txt"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ends[name] = "cut by its time limit"
                compiled = tempfile.mkdtemp()
        ends[name] += f" after {time.time() - begun:.0f} s"
        print(f"{name}: {ends[name]}", flush=True)
    return ends


def summarize(out: Path, ends: dict[str, str]) -> list[str]:
    """Return the rows of all parts as lines."""
    rows: dict[str, Any] = {}
    for path in out.glob("*/*.json"):
        rows |= json.loads(path.read_text())["results"]
    lines: list[str] = []
    for name, end in ends.items():
        lines.append(f"== {name}: {end}")
        for key, row in rows.items():
            if key.split()[0] == name:
                lines += describe_row(key, row)
    if len(lines) > SUMMARY_LINES:
        omitted = len(lines) - SUMMARY_LINES + 1
        lines = [*lines[: SUMMARY_LINES - 1], f"… {omitted} more lines in summary.txt"]
    return lines


def describe_row(key: str, row: dict[str, Any]) -> list[str]:
    """Return a row as a line, with another for each of its kernels."""
    values: list[str] = []
    kernels: list[str] = []
    if key == "tests":
        failed = [f"{name} {end}" for name, end in row.items() if end in ("FAILED", "ERROR")]
        counted = [f"{end} {[*row.values()].count(end)}" for end in sorted(set(row.values()))]
        return [f"tests: {', '.join(counted)}", *failed[:5]]
    for name, value in flat(row).items():
        if isinstance(value, float):
            values.append(f"{name} {value:.4g}")
        elif isinstance(value, str | int):
            values.append(f"{name} {value}")
    for kernel in row.get("largest_kernels", ()):
        kernels.append(f"  {kernel['microseconds_per_step']:9.1f} µs  {kernel['name'][:100]}")
    return [f"{key}: {', '.join(values)}"[:LINE_CHARACTERS], *kernels]


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their path."""
    values: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name} ")
        else:
            values[f"{prefix}{name}"] = value
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0, help="of all parts together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a rehearsal with a small model")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, comma-separated")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scale = Scale(arguments.device, arguments.small)
    if arguments.part:
        measure, _ = PARTS[arguments.part]
        measure(Part(scale, arguments.out, arguments.deadline))
        return
    names = arguments.parts.split(",")
    if unknown := sorted({*names} - {*PARTS}):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends = run_parts(arguments, names)
    lines = summarize(arguments.out, ends)
    (arguments.out / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
