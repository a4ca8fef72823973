"""A training script without dependencies, and attempts to run it by its command."""

import sys

from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import read_request
from sweep.training import attempt_trial
from sweep.training.process import FreshProcess, outcome_of
from sweep.trial.folder import SweepFolder
from sweep.trial.status import TrialStatus

# Minimizes w²/2 with noisy gradients; the stream of noise is the same at every batch size.
SCRIPT = """
import argparse, json, os, random, sys, time

parser = argparse.ArgumentParser()
for name in ("--batch-size", "--steps", "--seed"):
    parser.add_argument(name, type=int, required=True)
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--log", required=True)
parser.add_argument("--resume")
parser.add_argument("--microbatch", type=int)
options = parser.parse_args()

def report(step, **metrics):
    line = {"step": step, **{name.replace("_", "/"): value for name, value in metrics.items()}}
    with open(options.log, "a") as file:
        file.write(json.dumps(line) + "\\n")

w, first = 1.0, 0
if options.resume and os.path.exists(options.resume):
    with open(options.resume) as file:
        w, first = json.load(file)
for t in range(first, options.steps):
    numbers = range(t * options.batch_size, (t + 1) * options.batch_size)
    noise = sum(random.Random(f"{options.seed} {n}").gauss(0, 1) for n in numbers)
    w -= options.lr * (w + noise / options.batch_size)
    report(t + 1, train_loss=w * w / 2)
    # here
    if (t + 1) % 5 == 0 and options.resume:
        with open(options.resume + ".part", "w") as file:
            json.dump([w, t + 1], file)
        os.replace(options.resume + ".part", options.resume)
report(options.steps, valid_loss=w * w / 2)
"""
COMMAND = (
    f"{sys.executable} train.py --batch-size {{batch_size}} --lr {{learning_rate}} "
    "--steps {steps} --seed {seed} --log {log}"
)


class Attempts:
    """Runs attempts of the first trial of a planned command, each in a fresh process."""

    def __init__(self, folder, command, **settings):
        settings = {"budget": 80, "batches": "4", "lr": "0.1", "device": "cpu", **settings}
        request = read_request(None, {"command": command, **settings}, folder)
        self.plan = make_plan(request).plan
        save_plan(self.plan, SweepFolder(folder))
        self.trial = SweepFolder(folder).trials()[0]
        self.process = None

    def start(self, **status):
        self.process = FreshProcess(attempt_trial, self.trial.path, TrialStatus(**status))

    def end(self):
        return outcome_of(self.process, self.trial)

    def run(self, **status):
        self.start(attempts=1, **status)
        return self.end()
