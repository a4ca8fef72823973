"""A sweep folder as `sweep run` leaves it, with made-up curves: planned for real, never trained."""

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sweep.config.execution import Execution
from sweep.config.experiment import OwnRate
from sweep.config.load import load_experiment
from sweep.orchestration.request import record_command
from sweep.plan.growth import grow_plan
from sweep.plan.plan import Inputs, Plan, PlannedTrial
from sweep.resources import sha256_of_file
from sweep.trial.files import sha256_of, write_json
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.status import Cause, State, TrialStatus
from tests.plans import build_plan_of_grids

DATA = {"name": "synthetic", "grammar_version": 1, "seed": 0, "bytes": 2_000_000}
Outcome = Callable[[PlannedTrial], str]


def write_fake_sweep(
    path: Path,
    *,
    lrs: tuple[str, ...] = ("1e-3",),
    outcome: Outcome = lambda row: "COMPLETE",
    change: Callable[[PlannedTrial], Mapping[str, Any]] = lambda row: {},
    points: int | None = None,
    experiment: str = "quick",
    **overrides: Any,
) -> Plan:
    """Write plan.json and the trial folders of one plan per rate, grown into one.

    `outcome` is COMPLETE, WAITING, RUNNING or a cause of FAILED; `change` replaces keys of
    result.json; `points` are train lines per trial; `overrides` are fields of the experiment.
    """
    plan = None
    for lr in lrs:
        settings = load_experiment(experiment, {"precision": "fp32", "lr": lr, **overrides})
        tuning = settings.tuning.model_copy(
            update={"own_rate": OwnRate()}
        )  # `fake_loss` suits no file
        settings = settings.model_copy(update={"tuning": tuning})
        data, execution = DATA if settings.data else None, Execution(device="cpu", threads=2)
        given = {"precision": "fp32", "lr": lr, **overrides}
        command, unrecorded = record_command(experiment, given, path)
        words: Any = {"command": command, "unrecorded": unrecorded}
        code_path = settings.code_folder if settings.user_code else None
        inputs = Inputs(data=data, code_path=code_path)
        new = _decided(build_plan_of_grids(settings, execution, inputs, **words))
        plan = grow_plan(plan, new) if plan else new
    assert plan is not None
    plan = plan.model_copy(update={"trials": plan.known_trials, "sweep_uid": "1"})
    path.mkdir(parents=True)
    folder = SweepFolder(path)
    write_json(folder.plan_path, plan.model_dump(mode="json"))
    for row in plan.trials:
        trial = folder.trial(str(row.id))
        trial.write_config(plan.trial_config(row, path.name))
        _write_trial(trial, plan, row, outcome(row), change(row), points)
    return plan


def _decided(plan: Plan) -> Plan:
    # A report that awaits its rate gets that of the tuning trial with the least loss.
    rows = []
    for row in plan.trials:
        if row.id is None:
            tried = [trial for trial in plan.known_trials if trial.stage == "tune"]
            tried = [trial for trial in tried if trial.batch_size == row.batch_size]
            best = min(tried, key=lambda trial: fake_loss(plan, trial, 1.0))
            row = plan.with_rate(row, float(best.learning_rate or 0))
        rows.append(row)
    return plan.model_copy(update={"trials": tuple(rows)})


def _write_trial(
    trial: TrialFolder, plan: Plan, row: PlannedTrial, outcome: str, change: Any, points: int | None
) -> None:
    cause = Cause(outcome) if outcome in list(Cause) else None
    state = State.FAILED if cause else State(outcome)
    if state != State.WAITING:
        trial.write_status(TrialStatus(state=state, cause=cause, attempts=1, fencing=1))
    if outcome in ("COMPLETE", "RUNNING", "diverged"):
        share = 1.0 if outcome == "COMPLETE" else 0.4
        lines = fake_lines(plan, row, points or plan.settings.evaluation.train_points, share)
        trial.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if outcome in ("COMPLETE", "diverged"):
        result = fake_result(plan, row, state, cause)
        result["metrics_sha256"] = sha256_of_file(trial.metrics_path)
        write_json(trial.result_path, {**result, **change})


def fake_loss(plan: Plan, row: PlannedTrial, progress: float) -> float:
    """Fall from ln V as a power of tokens; a rate suits one batch size; a seed shifts the end."""
    noise = random.Random(f"{row.batch_size} {row.seed} {row.policy}").gauss(0, 0.005)
    start = math.log(plan.settings.model.vocabulary or 40) + 0.08
    ideal = 1e-3 * math.sqrt(row.batch_size / 16)
    slowness = 0.03 * abs(math.log2(float(row.learning_rate or 1) / ideal))
    end = 1.5 + slowness + noise
    return end + (start - end) * (1 + 400 * progress) ** -0.7


def fake_reward(loss: float) -> float:
    return math.exp(-loss)


def fake_lines(
    plan: Plan, row: PlannedTrial, points: int, share: float = 1.0
) -> list[dict[str, Any]]:
    course = plan.course(row)
    evaluated = set(course.milestones(plan.settings.evaluation.points))
    lines = []
    for step in course.milestones(points):
        if step > share * row.steps:
            break
        tokens = course.tokens_at(step)
        loss = fake_loss(plan, row, step / row.steps)
        where = {"time": 1.7e9 + step * 0.01, "step": step, "tokens": tokens}
        where["perf/seconds"] = step * 0.01
        more = {"train/grad_norm": 0.5, "train/clipped": 0.1, "perf/tokens_per_second": 20_000.5}
        lines.append({**where, "train/loss": loss, **more})
        if step in evaluated and plan.settings.workload.samples:
            lines.append({**where, "valid/reward": fake_reward(loss)})
        elif step in evaluated:
            lines.append({**where, "valid/loss": loss + 0.02})
    return lines


def fake_result(
    plan: Plan, row: PlannedTrial, state: State = State.COMPLETE, cause: Cause | None = None
) -> dict[str, Any]:
    """Make a result.json; a diverged trial came 40 % of the way and has no final losses."""
    is_whole = state == State.COMPLETE
    steps = row.steps if is_whole else int(0.4 * row.steps)
    tokens = steps * row.batch_size * plan.tokens_per_sequence
    end = fake_loss(plan, row, 1.0)
    per_second = 20_000 * row.batch_size / (row.batch_size + 8)
    training = tokens / per_second * (1 + 0.01 * row.seed)
    has_bytes = is_whole and plan.data is not None
    of_plan = {"budget", "warmup_min_steps", "forecast_bytes", "forecast_seconds"}
    planned = row.model_dump(exclude=of_plan)
    result = {**planned, "tokens": tokens, "steps": steps, "state": state, "cause": cause}
    result["optimizer"] = row.optimizer or plan.settings.optimizer.name
    result |= {"message": f"{cause} at step 1" if cause else None, "attempts": 1}
    result |= {"epochs": 0.61 if plan.data else None, "parameters": plan.model.parameters}
    result |= dict.fromkeys(("tokens_to_target", "mfu"))
    result |= dict.fromkeys(("metrics_sha256", "valid_losses_sha256", "weights_sha256"))
    result |= {"seconds_compile": 0.0, "seconds_training": training, "seconds_evaluation": 2.0}
    result |= {"seconds_checkpoint": 0.5, "seconds_noise": 0.0, "seconds_total": training + 3.5}
    result |= {"device": "Example CPU", "torch_version": "2.13.0+cpu", "git_commit": "0" * 40}
    result |= {
        "initial_train_loss": fake_loss(plan, row, 0.0),
        "initial_valid_loss": fake_loss(plan, row, 0.0) + 0.02,
        "final_train_loss": end - 0.01 if is_whole else None,
        "final_valid_loss": end + 0.02 if is_whole else None,
        "best_valid_loss": end + 0.01,
        "bits_per_byte": (end + 0.02) / math.log(2) / 3.9 if has_bytes else None,
        "bytes_per_token": 3.9 if has_bytes else None,
        "clipped_step_fraction": 0.25 / math.sqrt(row.batch_size),
        "tokens_per_second": per_second,
        "peak_memory_bytes": 400 * 2**20 + row.microbatch_size * 3 * 2**20,
        "data_sha256": sha256_of(plan.data) if plan.data else None,
        "execution": plan.execution.model_dump(mode="json"),
        "initial_valid_reward": None,
        "final_train_reward": None,
    }
    if plan.settings.workload.samples:
        result |= dict.fromkeys(name for name in result if name.endswith("_loss"))
        result["bits_per_byte"] = result["bytes_per_token"] = None
        result["initial_valid_reward"] = fake_reward(fake_loss(plan, row, 0.0))
        result["final_train_reward"] = fake_reward(end - 0.01) if is_whole else None
        result["final_valid_reward"] = fake_reward(end) if is_whole else None
    return result
