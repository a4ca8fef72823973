"""Measure the orchestrator's overhead: many trials of one step, from the plan to MLflow.

    python tests/benchmarks/overhead.py local 100 1000 10000  # attempts in the command's process
    python tests/benchmarks/overhead.py processes 100         # each in a fresh process
    python tests/benchmarks/overhead.py ray 500               # each in a process of a local Ray

Each count is one command in a temporary folder. The same command then runs again after half of the
trials were reset to their state before the first attempt. Results go to
results/benchmarks/<device>/<date>.json, under `overhead KIND COUNT`.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from record import record

BATCHES = tuple(range(16, 26))
TOKENS = BATCHES[-1]  # one step at each batch size


def command(kind: str, count: int, out: Path) -> dict[str, float]:
    """Plan and run `count` trials; return seconds, peak memory and the number of ended trials."""
    from sweep.config.execution import Execution
    from sweep.config.load import load_experiment
    from sweep.orchestration.executors.build import services_table
    from sweep.orchestration.planning import make_plan
    from sweep.orchestration.progress import Progress
    from sweep.orchestration.request import Request
    from sweep.orchestration.runner import run_plan
    from sweep.trial.folder import SweepFolder
    from tests.fakes.executors import InlineExecutor

    folder, started = SweepFolder(out), time.perf_counter()
    fields = {"batches": BATCHES, "seeds": count // len(BATCHES), "budget": TOKENS}
    experiment = load_experiment("quadratic", fields)
    services = services_table()(executor="ray" if kind == "ray" else "local")
    execution = Execution(device="cpu", keep="none")
    planned = make_plan(Request(experiment, execution, folder, services))
    seconds_planning = time.perf_counter() - started
    ended: list[float] = []
    with Progress(folder, None, is_quiet=False) as progress:
        summary = run_plan(
            planned,
            folder,
            services,
            executor=InlineExecutor() if kind == "local" else None,
            on_change=progress.update,
            on_finished=lambda: ended.append(time.perf_counter()),
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds_planning": seconds_planning,
        "seconds_running": ended[0] - started - seconds_planning,
        "seconds_total": time.perf_counter() - started,
        "peak_memory_bytes": peak,
        "ended": sum(status.state.is_finished for status in summary.states.values()),
        "not_mirrored": float(bool(summary.untracked)),
    }


def measured(kind: str, count: int, out: Path) -> dict[str, float]:
    """Run `command` in a fresh process."""
    words = [sys.executable, __file__, "one", kind, str(count), str(out)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def reset_half(out: Path) -> int:
    """Reset half of the trials to their state before the first attempt; return their number."""
    from sweep.trial.folder import SweepFolder

    trials = SweepFolder(out).trials()[::2]
    for trial in trials:
        trial.clear()
        trial.state_path.unlink()
    return len(trials)


def benchmark(kind: str, count: int) -> dict[str, float]:
    """Measure `count` trials, and resuming with none and with half of them to run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sweep"
        first = again = measured(kind, count, out)
        assert first["ended"] == count, first
        seconds_mirrored = first["seconds_total"]
        while again["not_mirrored"]:
            again = measured(kind, count, out)
            seconds_mirrored += again["seconds_total"]
        again = measured(kind, count, out)  # every trial is complete
        taken = reset_half(out)
        half = measured(kind, count, out)
    return {
        "trials": count,
        **first,
        "trials_per_second": count / first["seconds_running"],
        "seconds_until_all_is_mirrored": seconds_mirrored,
        "seconds_resuming_nothing": again["seconds_running"],
        "seconds_resuming_half": half["seconds_running"],
        "trials_per_second_resuming": taken / half["seconds_running"],
    }


def main() -> None:
    """Measure every count named on the command line."""
    kind, *counts = sys.argv[1:]
    if kind == "one":
        print(json.dumps(command(counts[0], int(counts[1]), Path(counts[2]))))
        return
    for count in counts:
        result = benchmark(kind, int(count))
        print(json.dumps(result, indent=1), flush=True)
        record({f"overhead {kind} {count}": result})


if __name__ == "__main__":
    main()
