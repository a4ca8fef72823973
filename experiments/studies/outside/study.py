"""Does a sweep over a training script give the results of our own training?

python -m experiments.studies.outside.study [--out DIR] [--lr tuned] [--seeds 3] [--budget 196608]

One sweep trains by the workload `pretrain`, the other by the command of train.py: the same model,
stream, optimizer and schedule in a process of its own. All final losses and both answers are
compared.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd

import sweep

ROOT = Path(__file__).parents[3]
COMMAND = (
    "python experiments/studies/outside/train.py --batch-size {batch_size} --lr {learning_rate} "
    "--steps {steps} --warmup {warmup_steps} --seed {seed} --log {log} --resume {resume} "
    "--microbatch {microbatch_size} --beta2 {beta2} --weight-decay {weight_decay}"
)
KEYS = ["stage", "batch_size", "seed", "learning_rate", "beta2", "weight_decay"]
TOLERANCE = 1e-6


def run_both(out: Path, *options: str) -> None:
    """Run the two sweeps with the same options of `sweep run`; they resume if they exist."""
    inside = ["experiments/studies/outside/inside.toml", "--loss-chunk-rows", "0"]
    outside = ["--command", COMMAND, "--context", "64"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for name, words in (("inside", inside), ("outside", outside)):
        own = [*words, *options, "--device", "cpu", "--yes", "--out", str(out / name)]
        command = [sys.executable, "-m", "sweep", "run", *own]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PATH": path})


def compare(out: Path) -> pd.DataFrame:
    """Return the trials of both sweeps with the difference of their final losses."""
    columns = [*KEYS, "final_valid_loss"]
    inside, outside = (sweep.load_sweep(out / n).trials[columns] for n in ("inside", "outside"))
    both = pd.merge(inside, outside, on=KEYS, how="outer")
    both["difference"] = (both["final_valid_loss_x"] - both["final_valid_loss_y"]).abs()
    return both


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/outside"))
    parser.add_argument("--lr", default="tuned")
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--batches", default="4,16")
    parser.add_argument("--budget", default="196608")
    arguments = parser.parse_args()

    options = []
    for name in ("lr", "seeds", "batches", "budget"):
        options += [f"--{name}", getattr(arguments, name)]
    run_both(arguments.out, *options)

    trials = compare(arguments.out)
    answers = [sweep.load_sweep(arguments.out / n).answer() for n in ("inside", "outside")]
    print(trials.to_string(index=False))
    largest = trials["difference"].max()
    missing = int(trials["difference"].isna().sum())
    print(
        f"{len(trials)} trials, {missing} of them in one sweep only; largest difference {largest}"
    )
    ends = [(a.candidates, a.recommended, a.decided) if a else None for a in answers]
    print(f"candidates, recommended, decided: {ends[0]} inside, {ends[1]} outside")
    is_equal = missing == 0 and largest <= TOLERANCE and ends[0] == ends[1]
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
