"""Check what a sweep cannot promise of a command, by short trainings: `sweep check`."""

import math
import os
import time
from collections.abc import Callable, Sequence
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
from sweep.plan.plan import Plan
from sweep.plan.policies import parse_policy
from sweep.plan.retry import Outcome, begin_attempt, microbatch_within
from sweep.trial.files import load_json, remove, write_json
from sweep.trial.folder import SweepFolder, TrialFolder

EQUAL = 1e-6  # largest relative difference of the losses of equal trainings
SPLIT = 1e-4  # the same, if one of them splits its batches
NOT_CHECKED = "Whether the script reads the same examples in the same order at every batch size."
SEED_NOT_CHECKED = (
    "Whether the validation data depend on the seed: the weights before the first step may, too."
)
Losses = dict[tuple[int, str], float]  # by step and name


def check_command(request: Request, on_start: Callable[[str], None], steps: int) -> dict[str, Any]:
    """Train by a command several times, and compare; return the document of check.json.

    Most train at the smallest batch size above 1 for `steps` or the budget, in the folder `check`,
    the others with another batch size, rate, number of steps or seed.
    """
    request = request.by_budget()[0]  # the smallest budget suffices
    workload = request.experiment.workload
    if not workload.is_program:
        raise SweepError("only a command or a function can be checked. Name it with --command.")

    with holding(request.folder):
        trainings = _Trainings(request, on_start, steps)
        verdicts = {
            "command_repeats": trainings.compare("again", EQUAL),
            "command_accumulation": trainings.split_batches(),
            "command_resumes": trainings.resume(),
            "command_counts": trainings.count_examples(),
        }
        others = _Variations(trainings, repeats=verdicts["command_repeats"][0] == "PASS")
        verdicts |= others.verdicts()
        checks = {}
        for name, (status, evidence) in verdicts.items():
            checks[name] = {"status": status, "evidence": evidence}
        document = {
            "command": workload.code[0],
            "code": trainings.plan.code,
            **trainings.row.model_dump(include={"batch_size", "steps", "seed", "learning_rate"}),
            "checks": checks,
            "not_checked": [NOT_CHECKED, *others.not_checked],
        }
        write_json(request.folder.check_path, document)
    return document


class _Trainings:
    """Trainings of one trial, each in a folder of its own, compared with the first of them."""

    def __init__(self, request: Request, on_start: Callable[[str], None], steps: int) -> None:
        self.folder = SweepFolder(request.folder.path / "check")
        self.on_start = on_start
        for name in ("first", "again", "split", "resumed", *VARIED):
            remove(self.folder.path / name)

        self.batches = request.experiment.batches
        small = _shortened(request.experiment, steps)
        if small.code_folder is not None:  # each training has another folder
            code_folder = os.path.abspath(small.code_folder)
            small = small.model_copy(update={"code_folder": code_folder})
        self.request = replace(request, experiment=small, folder=self.folder, command=())
        self.plan = make_plan(self.request).plan
        self.row = self.plan.trials[0]

        outcome, self.trial = self.train("first")
        if outcome.kind != "complete":
            raise SweepError(f"the command must complete {self.row.steps} steps: {outcome.message}")
        self.losses = _losses_of(self.trial)

    def train(
        self,
        name: str,
        most_lines: float = math.inf,
        plan: Plan | None = None,
        **changes: Any,
    ) -> tuple[Outcome, TrialFolder]:
        """Train in a folder of this name; kill the command once it has reported so many lines.

        Args:
            name: what the folder is called.
            most_lines: after which it is killed.
            plan: whose last trial is trained; by default that of the first training.
            changes: fields of the trial's status that get other values.
        """
        if plan is None:
            plan = self.plan
        row = plan.trials[-1]
        self.on_start(f"{name}: {row.steps} steps of batch size {row.batch_size}")
        folder = SweepFolder(self.folder.path / name)
        save_plan(plan, folder)
        trial = folder.trial(str(row.id))
        trial.write_status(begin_attempt(trial.read_status().changed(**changes)))

        executor = LocalExecutor(Settings(), plan.execution, folder)
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

        largest, (step, metric) = _largest_difference(first, second, [*first])
        status = "FAIL" if largest > tolerance else "PASS"
        text = f"The largest relative difference of {len(first)} losses is {largest:.1e}"
        return status, f"{text}, {metric} at step {step}."

    def count_examples(self) -> tuple[str, str]:
        """Return whether the program reports counts. A wrong one ends the first training."""
        lines = map(load_json, _reported(self.trial))
        names = {name for line in lines for name in ("examples", "tokens") if name in line}
        if not names:
            return "NOT APPLICABLE", "It reports neither examples nor tokens. Report either."
        return "PASS", f"The {' and '.join(sorted(names))} that it reports are those of the plan."

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


# Folders of the trainings that differ from the first one in a value.
VARIED = ("larger", "faster", "longer", "reseeded")
NEEDS_LARGER = "NOT APPLICABLE", "That needs two batch sizes above 1. Name more --batches."


class _Variations:
    """Trainings with another batch size, rate, length or seed, whose losses must differ."""

    def __init__(self, trainings: _Trainings, repeats: bool) -> None:
        self.trainings = trainings
        self.repeats = repeats  # whether equal trainings have equal losses
        self.not_checked: list[str] = []

    def verdicts(self) -> dict[str, tuple[str, str]]:
        row = self.trainings.row
        assert row.learning_rate is not None, "the rate is fixed"
        faster, _ = self._judge("faster", lr=repr(2 * row.learning_rate))
        longer, _ = self._judge("longer", budget=2 * row.tokens)
        reseeded, of_seed = self._judge("reseeded", seeds=2)
        if of_seed is not None:
            self._compare_seeds(of_seed)

        larger = validation = NEEDS_LARGER
        size = min((size for size in self.trainings.batches if size > row.batch_size), default=None)
        if size is not None:
            budget = row.tokens // row.batch_size * size
            larger, of_size = self._judge("larger", batches=(size,), budget=budget)
            if of_size is not None:
                validation = self._must_agree(of_size, size)
        return {
            "command_validation": validation,
            "command_batch_size": larger,
            "command_learning_rate": faster,
            "command_steps": longer,
            "command_seed": reseeded,
        }

    def _judge(self, name: str, **changes: Any) -> tuple[tuple[str, str], Losses | None]:
        """Train with other values of some settings; return whether they count, and the losses."""
        losses, problem = self._train(name, changes)
        if losses is None:
            return ("FAIL", problem), None
        return self._must_differ(losses), losses

    def _train(self, name: str, changes: dict[str, Any]) -> tuple[Losses | None, str]:
        request = self.trainings.request
        experiment = request.experiment.model_copy(update=changes)
        plan = make_plan(replace(request, experiment=experiment)).plan
        outcome, trial = self.trainings.train(name, plan=plan)
        if outcome.kind != "complete":
            return None, f"The other training did not complete: {outcome.message}"
        return _losses_of(trial), ""

    def _must_differ(self, losses: Losses) -> tuple[str, str]:
        """Judge whether a value has an effect on the losses after the first step."""
        if not self.repeats:
            return "NOT APPLICABLE", "Trainings with equal values differ, so others tell nothing."
        first = self.trainings.losses
        half = self.trainings.row.steps / 2  # early losses hardly depend on the rate
        common = [key for key in first.keys() & losses.keys() if key[0] >= half]
        if not common:
            return "NOT APPLICABLE", f"No loss of both is at a step from {half:g} on. Report more."
        largest, (step, metric) = _largest_difference(first, losses, common)
        if largest <= EQUAL:
            return "FAIL", f"{len(common)} losses up to step {max(common)[0]} are the same."
        return "PASS", f"{metric} at step {step} differs by {largest:.1e} of its size."

    def _must_agree(self, losses: Losses, batch_size: int) -> tuple[str, str]:
        """Judge whether validation before the first step is the same at two batch sizes."""
        first = self.trainings.losses
        common = [key for key in first.keys() & losses.keys() if key[0] == 0]
        common = [key for key in common if key[1].startswith("valid/")]
        if not common:
            return "NOT APPLICABLE", "It reports no valid/… at step 0. Evaluate before training."
        if not self.repeats:
            return "NOT APPLICABLE", "Trainings with equal values differ, so others tell nothing."
        largest, (step, metric) = _largest_difference(first, losses, common)
        values = (
            f"{metric} at step {step} is {first[step, metric]:.6g} at batch size "
            f"{self.trainings.row.batch_size} and {losses[step, metric]:.6g} at {batch_size}."
        )
        return "FAIL" if largest > EQUAL else "PASS", values

    def _compare_seeds(self, losses: Losses) -> None:
        first = self.trainings.losses
        common = [key for key in first.keys() & losses.keys() if key[0] == 0]
        if not common or _largest_difference(first, losses, common)[0] > EQUAL:
            self.not_checked.append(SEED_NOT_CHECKED)


def _largest_difference(
    first: Losses, second: Losses, keys: Sequence[tuple[int, str]]
) -> tuple[float, tuple[int, str]]:
    """Return the largest difference of two losses over their size, and where it is."""
    differences = []
    for key in keys:
        scale = max(abs(first[key]), abs(second[key]), 1e-300)
        differences.append((abs(first[key] - second[key]) / scale, key))
    return max(differences)


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


def _losses_of(trial: TrialFolder) -> Losses:
    """Return the losses and validation metrics of a trial by step and name."""
    losses = {}
    for line in trial.read_metrics():
        for name, value in line.items():
            is_loss = name == "train/loss" or name.startswith("valid/")
            if is_loss and value is not None:
                losses[line["step"], name] = value
    return losses
