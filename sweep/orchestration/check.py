"""Check what a sweep cannot promise of a command, by short trainings: `sweep check`."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sweep.config.experiment import Experiment
from sweep.config.settings import Settings
from sweep.errors import SweepError
from sweep.orchestration.executors.local import LocalExecutor
from sweep.orchestration.holding import holding
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import Request
from sweep.plan.course import Course
from sweep.plan.policies import parse_policy
from sweep.plan.retry import Outcome, begin_attempt, microbatch_within
from sweep.trial.files import load_json, remove, write_json
from sweep.trial.folder import SweepFolder, TrialFolder

EQUAL = 1e-6  # largest relative difference of the losses of equal trainings
SPLIT = 1e-4  # the same, if one of them splits its batches
NOT_CHECKED = "Whether the script reads the same examples in the same order at every batch size."


def check_command(request: Request, on_start: Callable[[str], None], steps: int) -> dict[str, Any]:
    """Train by a command several times, and compare; return the document of check.json.

    All train at the smallest batch size above 1 for `steps` or the budget, in the folder `check`.
    """
    request = request.by_budget()[0]  # the smallest budget suffices
    workload = request.experiment.workload
    if not workload.is_program:
        raise SweepError("only a command can be checked. Name it with --command.")

    with holding(request.folder):
        trainings = _Trainings(request, on_start, steps)
        verdicts = {
            "command_repeats": trainings.compare("again", EQUAL),
            "command_accumulation": trainings.split_batches(),
            "command_resumes": trainings.resume(),
        }
        checks = {}
        for name, (status, evidence) in verdicts.items():
            checks[name] = {"status": status, "evidence": evidence}
        document = {
            "command": workload.code[0],
            "code": trainings.plan.code,
            **trainings.row.model_dump(include={"batch_size", "steps", "seed", "learning_rate"}),
            "checks": checks,
            "not_checked": [NOT_CHECKED],
        }
        write_json(request.folder.check_path, document)
    return document


class _Trainings:
    """Trainings of one trial, each in a folder of its own, compared with the first of them."""

    def __init__(self, request: Request, on_start: Callable[[str], None], steps: int) -> None:
        self.folder = SweepFolder(request.folder.path / "check")
        self.on_start = on_start
        for name in ("first", "again", "split", "resumed"):
            remove(self.folder.path / name)

        small = _shortened(request.experiment, steps)
        request = replace(request, experiment=small, folder=self.folder, command=())
        self.plan = make_plan(request).plan
        self.row = self.plan.trials[0]

        outcome, self.trial = self.train("first")
        if outcome.kind != "complete":
            raise SweepError(f"the command must complete {self.row.steps} steps: {outcome.message}")
        self.losses = _losses_of(self.trial)

    def train(
        self, name: str, most_lines: float = math.inf, **changes: Any
    ) -> tuple[Outcome, TrialFolder]:
        """Train in a folder of this name; kill the command once it has reported so many lines."""
        self.on_start(f"{name}: {self.row.steps} steps of batch size {self.row.batch_size}")
        folder = SweepFolder(self.folder.path / name)
        save_plan(self.plan, folder)
        trial = folder.trial(str(self.row.id))
        trial.write_status(begin_attempt(trial.read_status().changed(**changes)))

        executor = LocalExecutor(Settings(), self.plan.execution, folder)
        future = executor.submit(trial, executor.slots[0])
        try:
            while not future.done() and len(_reported(trial)) < most_lines:
                time.sleep(0.02)
        finally:
            executor.stop(force=True)  # if it still runs
        return future.result(), trial

    def compare(self, name: str, tolerance: float, **changes: Any) -> tuple[str, str]:
        """Train again, and compare all losses."""
        outcome, trial = self.train(name, **changes)
        if outcome.kind != "complete":
            return "FAIL", f"The other training did not complete: {outcome.message}"

        first = self.losses
        second = _losses_of(trial)
        if first.keys() != second.keys():
            step, metric = min(first.keys() ^ second.keys())
            return "FAIL", f"Only one training reported {metric} at step {step}."

        differences = []
        for key, value in first.items():
            scale = max(abs(value), abs(second[key]), 1e-300)
            differences.append((abs(value - second[key]) / scale, key))
        largest, (step, metric) = max(differences)
        status = "FAIL" if largest > tolerance else "PASS"
        text = f"The largest relative difference of {len(first)} losses is {largest:.1e}"
        return status, f"{text}, {metric} at step {step}."

    def split_batches(self) -> tuple[str, str]:
        config = self.trial.read_config()
        half = microbatch_within(config.microbatch_size // 2, config)
        if not config.science.workload.splits_batches:
            return "NOT APPLICABLE", "The command has no {microbatch_size} and no {accumulation}."
        if half == config.microbatch_size:
            return "NOT APPLICABLE", f"A microbatch of {half} cannot be split."
        return self.compare("split", SPLIT, microbatch_size=half)

    def resume(self) -> tuple[str, str]:
        if not self.plan.settings.workload.can_resume:
            return "NOT APPLICABLE", "The command has no {resume}: a killed trial begins again."

        _, trial = self.train("resumed", len(_reported(self.trial)) // 2)
        lines = _reported(trial)
        is_over = any(load_json(line)["step"] >= self.row.steps for line in lines)
        if is_over or not lines or not trial.resume_path.exists():
            return "NOT APPLICABLE", "It had ended, or not yet saved. Use more --steps."

        status, evidence = self.compare("resumed", EQUAL)
        last_and_next = _reported(trial)[len(lines) - 1 :][:2]  # the next may be missing
        steps = [load_json(line)["step"] for line in last_and_next]
        story = f"Killed at step {steps[0]}, it reported again from step {steps[-1]} on"
        return status, f"{story}. {evidence}"


def _shortened(experiment: Experiment, steps: int) -> Experiment:
    """Return the experiment at one batch size and rate, for a number of steps or its budget."""
    policy = parse_policy(experiment.lr)
    batch_size = min((size for size in experiment.batches if size > 1), default=1)
    rate = policy.rate_at(batch_size)
    if policy.is_tuned and experiment.tuning.centre:
        rate = experiment.tuning.centre

    assert experiment.token_budget is not None, "a command has a budget of tokens"
    course = Course.of_settings(experiment, batch_size, experiment.token_budget)
    budget = course.tokens_at(max(1, min(steps, course.steps)))
    changes = {"batches": (batch_size,), "lr": repr(rate), "seeds": 1, "budget": budget}
    return experiment.model_copy(update=changes)


def _reported(trial: TrialFolder) -> list[bytes]:
    """Return the complete lines that the command of a trial has reported."""
    path = trial.reported_path
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _losses_of(trial: TrialFolder) -> dict[tuple[int, str], float]:
    """Return the losses and validation metrics of a trial by step and name."""
    losses = {}
    for line in trial.read_metrics():
        for name, value in line.items():
            is_loss = name == "train/loss" or name.startswith("valid/")
            if is_loss and value is not None:
                losses[line["step"], name] = value
    return losses
