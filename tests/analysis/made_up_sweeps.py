"""Sweep folders with made-up results, many by number: planned for real, never trained."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.load import load_experiment
from sweep.config.settings import settings_of
from sweep.config.workloads import UserWorkload
from sweep.orchestration.executors.build import services_table
from sweep.orchestration.request import record_command
from sweep.plan.growth import grow_plan
from sweep.plan.plan import TUNING_SEED, Inputs, Plan, PlannedTrial
from sweep.plan.policies import parse_policy
from sweep.resources import sha256_of_file
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.status import Cause, State, TrialStatus
from tests.analysis.fake_sweeps import fake_result
from tests.plans import build_plan_of_grids

CPU = Execution(device="cpu", threads=2)
SERVICES = {setting.name for setting in settings_of(services_table())}
BATCHES = ("4,8", "4,16,64", "2,4,8,16", "1,2", "6,10,15", "7,16,60", "32,64,128")
MAXIMIZED = UserWorkload(
    object="my_project:Classifier", objective="accuracy", direction="maximize", tolerance=0.02
)
MISFIT = {  # as a forecast bounds steps that do not fit
    "microbatch_bound": 1,
    "microbatch_bound_alone": 1,
    "reason": "By forecast, not even a microbatch of 1 fits: steps may use 1 MiB.",
}
Ended = tuple[PlannedTrial, str, float]  # state or cause, and value


def write_made_up_sweep(path: Path, number: int, **settings: Any) -> Plan:
    """Write a sweep whose settings and results follow from a number; `settings` replace some."""
    rng = random.Random(number)
    given: dict[str, Any] = {
        "batches": rng.choice(BATCHES),
        "budget": rng.choice([3200, 6400, 30_000]),
        "precision": "fp32",
        "device": "cpu",
    }
    if rng.random() < 0.25:
        given["optimizers"] = "sgd,adamw"
    if rng.random() < 0.2:
        given["target"] = 0.5
    given |= settings
    plan = None
    for lr in rng.choice([["tuned"], ["tuned"], ["tuned"], ["0.1"], ["0.1", "tuned"], ["sqrt"]]):
        policy = {"lr": lr, "seeds": rng.choice([1, 2, 3, 3, 5, "auto", "auto"])}
        if policy["seeds"] == "auto" and rng.random() < 0.4:
            policy["max_seeds"] = rng.choice([3, 5, 12])
        if policy["seeds"] == "auto" and rng.random() < 0.2:
            policy["max_hours"] = rng.choice([1e-6, 2.0])
        if lr == "tuned" and "target" not in given and rng.random() < 0.15:
            policy["tune_budget"] = 1600
        plan = _grow(plan, path, {**given, **policy})
    assert plan is not None
    if rng.random() < 0.15:
        objective = plan.settings.model_copy(update={"workload": MAXIMIZED})
        plan = plan if "target" in given else plan.model_copy(update={"settings": objective})
    plan = plan.model_copy(update={"trials": plan.known_trials})
    if random.Random(f"memory {number}").random() < 0.15:  # leaves the other choices as they were
        plan = plan.model_copy(update={"execution": plan.execution.model_copy(update=MISFIT)})
    results = _search_and_report(plan, rng) if _is_tuned(plan) else _report(plan, rng)
    return write_results(path, plan, results)


def write_clear_sweep(
    path: Path, levels: Mapping[int, float], noise: float = 1e-5, **settings: Any
) -> Plan:
    """Write a tuned sweep of five seeds with hardly any noise, from the loss by batch size."""
    given = {"batches": ",".join(map(str, levels)), "lr": "tuned", "seeds": 5, "device": "cpu"}
    plan = _grow(None, path, {"precision": "fp32", "budget": 6400, **given, **settings})
    return write_clear_results(path, plan, levels, noise)


def write_clear_results(
    path: Path, plan: Plan, levels: Mapping[int, float], noise: float = 1e-5
) -> Plan:
    """Write results with hardly any noise: those of a search if the plan tunes, and reports."""
    rng, results = random.Random(0), list[Ended]()
    factors = dict[Arm, list[float]]()  # left for rates that are predicted
    for row in plan.trials:
        level = levels[row.batch_size]
        rates = [r.learning_rate or 1.0 for r in plan.trials if r.arm == row.arm and r.id]
        if rates:
            centre = math.exp(sum(map(math.log, rates)) / len(rates))
        else:
            centre = plan.tuning_centre(parse_policy(row.policy), row.arm)
        if row.id is None and row.stage == "tune":
            factor = factors.setdefault(row.arm, [2.0, 0.5, 1.0]).pop()
            row = plan.with_rate(row, factor * centre)
        elif row.id is None:
            row = plan.with_rate(row, centre)
        distance = math.log((row.learning_rate or centre) / centre)
        results.append(_end(row, level + 0.05 * distance**2, noise, 0.0, rng))
    return write_results(path, plan, results)


def write_results(path: Path, plan: Plan, results: Sequence[Ended]) -> Plan:
    """Write plan.json and the folders of these trials."""
    rows = tuple(row for row, _, _ in results)
    plan = plan.model_copy(update={"trials": rows, "sweep_uid": "1"})
    path.mkdir(parents=True, exist_ok=True)
    folder = SweepFolder(path)
    write_json(folder.plan_path, plan.model_dump(mode="json"))
    for row, outcome, value in results:
        _write_trial(folder, plan, row, outcome, value)
    return plan


def _grow(plan: Plan | None, path: Path, given: dict[str, Any]) -> Plan:
    of_trials = {name: given[name] for name in given if name not in {"device", *SERVICES}}
    experiment: Experiment = load_experiment("quadratic", of_trials)
    command, unrecorded = record_command("quadratic", given, path)
    words = {"command": command, "unrecorded": unrecorded}
    new = build_plan_of_grids(experiment, CPU, Inputs(), **words, old=plan)
    return grow_plan(plan, new) if plan else new


def _is_tuned(plan: Plan) -> bool:
    return any(row.stage == "tune" for row in plan.trials)


def _report(plan: Plan, rng: random.Random) -> list[Ended]:
    noise, failing = rng.choice([0.001, 0.01, 0.05]), rng.choice([0.0, 0.0, 0.1])
    gaps = {arm: rng.choice([0.0, 0.005, 0.02, 0.2]) for arm in plan.settings.arms}
    rows = [row for row in plan.trials if row.policy != "tuned" and row.stage == "final"]
    return [_end(row, 1.0 + gaps[row.arm], noise, failing, rng) for row in rows]


def _search_and_report(plan: Plan, rng: random.Random) -> list[Ended]:
    results = _report(plan, rng)
    noise, failing = rng.choice([0.0005, 0.002, 0.02]), rng.choice([0.0, 0.0, 0.0, 0.05])
    is_equal = rng.random() < 0.05
    for arm in plan.settings.arms:
        level = 1.0 + rng.choice([0.0, 0.004, 0.02, 0.1])
        shift, limit = rng.choice([0.0, 0.3, -0.2, 0.6, 2.5]), rng.choice([1.2, 9.0, 9.0])
        if rng.random() < 0.03:
            limit = -9.0  # every rate diverges
        grid = [row for row in plan.trials if row.stage == "tune" and row.arm == arm]
        centre = math.exp(sum(math.log(row.learning_rate or 1) for row in grid) / len(grid))
        template = grid[0]
        if rng.random() < 0.9:  # otherwise the search found its winner on fewer tokens only
            final_tokens = _final_tokens(plan, arm)
            steps = final_tokens // (arm.batch_size * plan.tokens_per_sequence)
            template = template.model_copy(update={"tokens": final_tokens, "steps": steps})
        factors = [2.0 ** (i / 2) for i in range(-4, 5)]
        if rng.random() < 0.3:
            factors = [1.0, 0.5, 2.0, 0.25, 4.0]
        tuned: list[Ended] = []
        for factor in factors:
            distance = math.log(factor) - shift
            outcome = "diverged" if math.log(factor) > limit else ""
            if not outcome and abs(distance) > 1 and rng.random() < 0.3:
                outcome = "PRUNED"
            row = plan.with_rate(template, centre * factor)
            tuned.append(_end(row, level + 0.05 * distance**2, noise, failing, rng, outcome))
        if rng.random() < 0.3:
            near = sorted(tuned, key=lambda end: end[2])[: rng.choice([2, 5])]
            for row, _, value in near:
                again = row.model_copy(update={"seed": TUNING_SEED + 1})
                again = plan.with_rate(again, row.learning_rate or 1.0)
                tuned.append(_end(again, value, noise, failing, rng))
        results += tuned
        complete = [end for end in tuned if end[1] == "COMPLETE"]
        if not complete or rng.random() < 0.03:
            continue  # no rate yet
        best = min(complete, key=lambda end: end[2])
        count = {"auto": 3}.get(str(plan.settings.seeds)) or int(plan.settings.seeds or 3)
        count = rng.choice([count, count, 5, 8, 20]) if plan.has_looks else count
        for seed in range(count):
            row = template.model_copy(update={"stage": "final", "seed": seed})
            row = plan.with_rate(row, best[0].learning_rate or 1.0)
            end = _end(row, level, 0.0 if is_equal else noise, failing / 3, rng)
            results.append(end)
    return list({row.id: (row, outcome, value) for row, outcome, value in results}.values())


def _final_tokens(plan: Plan, arm: Arm) -> int:
    from sweep.plan.course import tokens_per_trial

    sizes = {row.batch_size for row in plan.trials}
    return tokens_per_trial(plan.token_budget, sizes, plan.tokens_per_sequence)[0][arm.batch_size]


def _end(
    row: PlannedTrial,
    mean: float,
    noise: float,
    failing: float,
    rng: random.Random,
    outcome: str = "",
) -> Ended:
    if not outcome and rng.random() < failing:
        outcome = rng.choice(["WAITING", "error", "lost", "out_of_memory", "diverged"])
    return row, outcome or "COMPLETE", mean + rng.gauss(0, noise)


def _write_trial(
    folder: SweepFolder, plan: Plan, row: PlannedTrial, outcome: str, value: float
) -> None:
    trial = folder.trial(str(row.id))
    trial.write_config(plan.trial_config(row, folder.name))
    cause = Cause(outcome) if outcome in [*Cause] else None
    state = State.FAILED if cause else State(outcome)
    if state is State.WAITING:
        return
    trial.write_status(TrialStatus(state=state, cause=cause, attempts=1, fencing=1))
    if state is not State.COMPLETE and cause is not Cause.DIVERGED:
        return
    trial.metrics_path.write_text("")
    result = fake_result(plan, row, state, cause)
    loss = value if state is State.COMPLETE else None
    result |= {"final_valid_loss": loss, "best_valid_loss": loss, "initial_train_loss": None}
    if plan.settings.evaluated.name == "final_valid_accuracy":
        result["final_valid_accuracy"] = None if loss is None else 3.0 - loss
    if plan.settings.target is not None and loss is not None:
        result["tokens_to_target"] = row.tokens * 0.5 * loss
    result["metrics_sha256"] = sha256_of_file(trial.metrics_path)
    write_json(trial.result_path, result)
