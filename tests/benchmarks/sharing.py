"""Tokens per CPU second of two processes at once, and of one with two threads, over one's.

    python tests/benchmarks/sharing.py

Steps are eager, and each process reports its own CPU time. Run it next to other programs: on an
idle machine with two cores nothing is shared.
"""

import statistics
import subprocess
import sys
import time

import torch
from contenders import benchmarked

from sweep.training.step import TrainingStep

ROUNDS = 5
WARM_UP = 3  # steps
CASES = (("quick", 16, 60), ("small", 8, 12))  # model, batch size, steps


def tokens_per_cpu_second(model: str, batch_size: int, steps: int) -> float:
    """Return the tokens of a CPU second of this process."""
    step = TrainingStep(benchmarked(model, batch_size, "cpu", "fp32", False), torch.device("cpu"))
    batch = step.workload.random_batch(batch_size)
    for _ in range(WARM_UP):
        step(batch, 1e-3)
    start = time.process_time()
    for _ in range(steps):
        step(batch, 1e-3)
    return steps * batch[0].numel() / (time.process_time() - start)


def mean_of_processes(count: int, threads: int, *case: str) -> float:
    """Run several processes at once, and return the mean of their tokens per CPU second."""
    command = [sys.executable, __file__, str(threads), *case]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return statistics.mean(float(process.communicate()[0]) for process in processes)


def main() -> None:
    """Compare in interleaved rounds; with arguments, be one of the processes."""
    if len(sys.argv) > 1:
        threads, model, batch_size, steps = sys.argv[1:]
        torch.set_num_threads(int(threads))
        print(tokens_per_cpu_second(model, int(batch_size), int(steps)))
        return
    for case in CASES:
        words = [str(part) for part in case]
        at_once = []
        of_two_threads = []
        for _ in range(ROUNDS):
            alone = mean_of_processes(1, 1, *words)
            at_once.append(mean_of_processes(2, 1, *words) / alone)
            of_two_threads.append(mean_of_processes(1, 2, *words) / alone)
        print(
            f"{case[0]}, batch size {case[1]}: two at once {statistics.median(at_once):.2f}, "
            f"one of two threads {statistics.median(of_two_threads):.2f}"
        )


if __name__ == "__main__":
    main()
