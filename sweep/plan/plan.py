"""The plan: every trial of a sweep with its id, steps and accumulation, and how a plan grows."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from pydantic import ValidationError

from sweep.config.execution import Execution
from sweep.config.experiment import Experiment
from sweep.config.settings import Settings
from sweep.config.trial import Science, TrialConfig, tokenizer_of
from sweep.errors import CorruptFile, SweepError
from sweep.plan.policy import Policy, parse_policy
from sweep.plan.steps import choose_microbatch, per_device_of, tokens_per_trial, warmup_steps
from sweep.plan.tuning import GRID
from sweep.trial.files import sha256_of
from sweep.trial.folder import SweepFolder

TUNING_SEED = 1000
EVALUATION_TOKENS = 262_144  # per milestone at most; else 1 % of the budget


class PlannedTrial(Settings):
    """One row of the plan. `id` and `learning_rate` are null until tuning decides them."""

    id: str | None
    stage: Literal["report", "tune"]
    policy: str
    batch_size: int
    seed: int
    learning_rate: float | None
    beta2: float
    weight_decay: float
    warmup_min_steps: int
    tokens: int
    steps: int
    warmup_steps: int
    devices: int
    microbatch_size: int
    gradient_accumulation_steps: int
    forecast_bytes: int | None = None
    forecast_seconds: float | None = None


@dataclass(frozen=True)
class Inputs:
    """What trials read: identities, which are part of a trial's id, and paths, which are not.

    Attributes:
        data: identity of the text; None without one.
        data_path: absolute, or relative to the sweep folder; None for a named data set.
        start: identity of the initial weights; None if the seed makes them.
        init_path: their folder, as `data_path`.
        code: identity of user code.
    """

    data: dict[str, Any] | None = None
    data_path: str | None = None
    start: dict[str, Any] | None = None
    init_path: str | None = None
    code: dict[str, Any] | None = None

    def paths(self) -> dict[str, str | None]:
        """Return the paths as fields of a plan."""
        return {"data_path": self.data_path, "init_path": self.init_path}


class Plan(Settings):
    """plan.json. It only ever grows."""

    experiment: str
    settings: Experiment  # with the precision and the evaluation resolved
    execution: Execution
    data: dict[str, Any] | None
    data_path: str | None
    start: dict[str, Any] | None = None
    init_path: str | None = None
    code: dict[str, Any] | None = None
    model: dict[str, Any]  # name, parameters, embedding_parameters
    tokens_per_sequence: int
    token_budget: int
    tokens_are_common: bool
    epochs: float | None
    epochs_are_estimated: bool = True
    disk_bytes: int | None
    forecast_factor: float | None = None  # forecast_seconds may be off by this factor
    commands: tuple[tuple[str, ...], ...] = ()  # words of the commands that planned trials
    trials: tuple[PlannedTrial, ...]

    def science(self, row: PlannedTrial, learning_rate: float) -> Science:
        """Return everything about one trial that can change a number."""
        settings = self.settings
        assert settings.precision != "auto"
        has_tokenizer = self.data is not None or settings.tokenizer == "pretrained"
        return Science(
            stage=row.stage,
            policy=row.policy,
            workload=settings.workload,
            model=settings.model,
            data=self.data,
            tokenizer=tokenizer_of(settings) if has_tokenizer else None,
            optimizer=settings.optimizer.model_copy(
                update={"beta2": row.beta2, "weight_decay": row.weight_decay}
            ),
            schedule=settings.schedule.model_copy(
                update={"warmup_min_steps": row.warmup_min_steps}
            ),
            evaluation=settings.evaluation,
            precision=settings.precision,
            tokens=row.tokens,
            batch_size=row.batch_size,
            learning_rate=learning_rate,
            seed=row.seed,
            target=settings.target,
            grpo=settings.grpo,
            start=self.start,
            code=self.code,
        )

    def trial_config(self, row: PlannedTrial, sweep: str) -> TrialConfig:
        """Return what a worker needs to run one trial, whose rate must be decided."""
        assert row.id is not None and row.learning_rate is not None
        tuning_budget = self.settings.tuning.budget if row.stage == "tune" else None
        return TrialConfig(
            id=row.id,
            sweep=sweep,
            science=self.science(row, row.learning_rate),
            execution=self.execution,
            tokens_per_sequence=self.tokens_per_sequence,
            steps=row.steps,
            warmup_steps=row.warmup_steps,
            token_budget=tuning_budget or self.token_budget,
            microbatch_size=row.microbatch_size,
            data_path=self.data_path,
            init_path=self.init_path,
        )

    def sample_config(self, row: PlannedTrial) -> TrialConfig:
        """Return a config to time or forecast a row with, whether or not its rate is decided."""
        return self.trial_config(row.model_copy(update={"id": "sample", "learning_rate": 1e-9}), "")

    def located(self, folder: SweepFolder) -> "Plan":
        """Return the plan with absolute paths."""
        paths = {"data_path": self.data_path, "init_path": self.init_path}
        return self.model_copy(update={name: folder.locate(path) for name, path in paths.items()})

    def with_rate(
        self, row: PlannedTrial, rate: float, beta2: float | None = None, decay: float | None = None
    ) -> PlannedTrial:
        """Return a row with its rate, its other tuned values, and therefore its id."""
        tuned = {"beta2": beta2, "weight_decay": decay}
        given = {name: value for name, value in tuned.items() if value is not None}
        row = row.model_copy(update={"learning_rate": rate, **given})
        trial_id = sha256_of(self.science(row, rate).model_dump(mode="json"))[:12]
        return row.model_copy(update={"id": trial_id})

    def tuning_centre(self, batch_size: int) -> float:
        """Return the centre of a batch size's rate grid."""
        return self.settings.tuning.centre or Policy("tuned").rate_at(batch_size)

    def with_execution(self, **changes: Any) -> "Plan":
        """Return the plan with some settings of the execution changed."""
        return self.model_copy(update={"execution": self.execution.model_copy(update=changes)})

    @property
    def known_trials(self) -> tuple[PlannedTrial, ...]:
        """The rows that have an id."""
        return tuple(row for row in self.trials if row.id)

    @property
    def largest_step(self) -> PlannedTrial:
        """The row whose step needs the most memory."""
        return max(self.trials, key=lambda row: (row.microbatch_size, row.batch_size))

    def total_flops(self) -> int:
        """Training FLOPs of all rows; 0 if the model's are unknown."""
        return (self.settings.model.flops_per_token or 0) * sum(row.tokens for row in self.trials)


def tokens_at_once(device: str) -> int:
    """Return the most tokens of a planned microbatch, and of an evaluation batch."""
    return 65_536 if device.startswith("cuda") else 8_192


def load_plan(folder: SweepFolder) -> Plan | None:
    """Read plan.json; return None if nothing was planned yet.

    Raises:
        CorruptFile: if it is damaged, or no plan.
    """
    stored = folder.read_plan()
    return None if stored is None else parse_plan(stored, str(folder.plan_path))


def parse_plan(document: Mapping[str, Any], subject: str) -> Plan:
    """Return the plan in a document of plan.json.

    Raises:
        CorruptFile: if it is none.
    """
    fields = {key: document[key] for key in document if key not in ("format_version", "sha256")}
    try:
        return Plan.model_validate(fields)
    except ValidationError as error:
        mistake = error.errors()[0]
        key = ".".join(str(part) for part in mistake["loc"])
        raise CorruptFile(
            f"{subject} must be a plan of this version of sweep, but {key} is wrong "
            f"({mistake['msg']}). Restore it from a copy, or choose another --out."
        ) from error


def reporting_seeds(experiment: Experiment, policy: Policy) -> range:
    """Return the reporting seeds 0 … N-1; by default 1 at a fixed rate, else 3."""
    return range(experiment.seeds or (1 if policy.kind == "fixed" else 3))


def build_plan(
    experiment: Experiment,
    execution: Execution,
    inputs: Inputs | None = None,
    *,
    other_batches: tuple[int, ...] = (),
    command: tuple[str, ...] = (),
) -> Plan:
    """Plan every trial that the experiment names.

    Args:
        experiment: with `precision` resolved.
        execution: with device, devices and bounds decided.
        inputs: identities and paths of what trials read.
        other_batches: batch sizes that the sweep already has; they share the token count.
        command: words of the command line.

    Raises:
        SweepError: if the budget holds no step, or a microbatch or accumulation does not divide.
    """
    inputs = inputs or Inputs()
    policy, sequence = parse_policy(experiment.lr), experiment.traits.tokens_per_sequence
    universe = sorted({*experiment.batches, *other_batches})
    tokens, are_common = tokens_per_trial(experiment.budget, universe, sequence)
    evaluation = experiment.evaluation.model_copy(
        update={"sequences": _evaluation_sequences(experiment)}
    )
    model = experiment.model
    plan = Plan(
        experiment=experiment.name,
        settings=experiment.model_copy(update={"evaluation": evaluation}),
        execution=execution,
        data=inputs.data,
        data_path=inputs.data_path,
        start=inputs.start,
        init_path=inputs.init_path,
        code=inputs.code,
        model={
            "name": model.name,
            "parameters": model.parameters,
            "embedding_parameters": model.embedding_parameters,
        },
        tokens_per_sequence=sequence,
        token_budget=experiment.budget,
        tokens_are_common=are_common,
        epochs=None,
        disk_bytes=None,
        commands=(command,) if command else (),
        trials=(),
    )
    rows: list[PlannedTrial] = []
    if policy.kind == "tuned":
        rows += _rate_grids(plan, policy, universe)
    for batch in experiment.batches:
        row = _plan_batch_size(plan, policy, batch, tokens[batch])
        for seed in reporting_seeds(experiment, policy):
            seeded = row.model_copy(update={"seed": seed})
            is_open = policy.kind == "tuned"
            rows.append(seeded if is_open else plan.with_rate(seeded, policy.rate_at(batch)))
    return plan.model_copy(update={"trials": tuple(rows)})


def _rate_grids(plan: Plan, policy: Policy, universe: list[int]) -> list[PlannedTrial]:
    """Plan the first rates to try at every batch size.

    They are in ascending order; with a target from the centre outwards, because each trial is
    bounded by those before it.
    """
    has_target = plan.settings.target is not None
    factors = sorted(GRID, key=lambda factor: abs(math.log(factor)) if has_target else factor)
    budget = plan.settings.tuning.budget or plan.token_budget
    tokens, _ = tokens_per_trial(budget, universe, plan.tokens_per_sequence)
    rows = []
    for batch in plan.settings.batches:
        row = _plan_batch_size(plan, policy, batch, tokens[batch])
        row = row.model_copy(update={"stage": "tune", "seed": TUNING_SEED})
        rows += [plan.with_rate(row, plan.tuning_centre(batch) * factor) for factor in factors]
    return rows


def _plan_batch_size(plan: Plan, policy: Policy, batch: int, tokens: int) -> PlannedTrial:
    """Plan one batch size under one policy; the seed, the rate and the id are filled in later."""
    settings, execution, traits = plan.settings, plan.execution, plan.settings.traits
    optimizer = policy.optimizer_at(batch, plan.tokens_per_sequence, settings.optimizer)
    schedule = settings.schedule
    if policy.kind != "fixed":
        schedule = schedule.model_copy(update={"warmup_min_steps": 0})
    steps = tokens // (batch * plan.tokens_per_sequence)
    assert steps * batch * plan.tokens_per_sequence == tokens
    per_device = per_device_of(batch, execution.devices, traits.group_size)
    bound = tokens_at_once(execution.device) // plan.tokens_per_sequence
    size = choose_microbatch(
        per_device,
        execution.microbatch,
        min(bound, execution.microbatch_bound or bound),
        traits.group_size,
        execution.accumulation,
    )
    return PlannedTrial(
        id=None,
        stage="report",
        policy=policy.name,
        batch_size=batch,
        seed=0,
        learning_rate=None,
        beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        warmup_min_steps=schedule.warmup_min_steps,
        tokens=tokens,
        steps=steps,
        warmup_steps=warmup_steps(steps, schedule),
        devices=execution.devices,
        microbatch_size=size,
        gradient_accumulation_steps=per_device // size,
    )


def _evaluation_sequences(experiment: Experiment) -> int:
    """Return the size of the milestone set: as set, else 1 % of the budget, at least 8."""
    tokens = min(EVALUATION_TOKENS, experiment.budget // 100)
    derived = max(8, math.ceil(Fraction(tokens, experiment.traits.tokens_per_sequence)))
    return experiment.evaluation.sequences or derived


# Settings that trials of one sweep may differ in, or that are identified in another way.
NOT_SHARED = {"batches", "seeds", "lr", "question", "data", "name", "init"}


def grow_plan(old: Plan, new: Plan) -> Plan:
    """Return `old` with the trials of `new`.

    Raises:
        SweepError: naming the difference, if anything but batch sizes, seeds and rates differs.
    """
    are_tuned = is_tuned(old) and is_tuned(new)
    difference = _first_difference(_shared(old, are_tuned), _shared(new, are_tuned))
    if difference:
        key, before, after = difference
        raise SweepError(
            f"a sweep may only grow by batch sizes, seeds and rates, but {key} would change "
            f"from {before!r} to {after!r}. Choose another --out for another experiment."
        )
    for stage, budget in (("report", None), ("tune", old.settings.tuning.budget)):
        _check_tokens(old, new, stage, budget or old.token_budget)
    present = {row.id for row in old.known_trials}
    added = tuple(row for row in new.known_trials if row.id not in present)
    trials = (*old.known_trials, *added)
    reported = {row.tokens for row in trials if row.stage == "report"}
    settings = old.settings
    if not is_tuned(old):
        settings = settings.model_copy(update={"tuning": new.settings.tuning})
    commands = (*old.commands, *(new.commands if added else ()))
    return old.model_copy(
        update={
            "settings": settings,
            "trials": trials,
            "commands": tuple(dict.fromkeys(commands)),
            "tokens_are_common": len(reported) == 1 if reported else old.tokens_are_common,
        }
    )


def is_tuned(plan: Plan) -> bool:
    """Return True if some rates of a plan are tuned."""
    return any(row.policy == "tuned" for row in plan.trials)


def with_decided_rates(new: Plan, old: Plan) -> Plan:
    """Return `new` with the rates that tuning already decided in `old`."""
    decided = {
        row.batch_size: row
        for row in old.known_trials
        if row.policy == "tuned" and row.stage == "report"
    }
    rows = []
    for row in new.trials:
        winner = decided.get(row.batch_size) if row.policy == "tuned" else None
        if winner is None:
            rows.append(row)
        elif row.stage == "report":
            assert winner.learning_rate is not None
            rows.append(new.with_rate(row, winner.learning_rate, winner.beta2, winner.weight_decay))
    return new.model_copy(update={"trials": tuple(rows)})


def _check_tokens(old: Plan, new: Plan, stage: str, budget: int) -> None:
    """Refuse batch sizes that would change the token count of trials already planned."""
    tokens: dict[int, int] = {}
    for row in old.trials:  # a confirmation at the full budget has more tokens than its search
        if row.stage == stage:
            tokens[row.batch_size] = min(row.tokens, tokens.get(row.batch_size, row.tokens))
    universe = sorted({row.batch_size for row in (*old.trials, *new.trials)})
    changed, _ = tokens_per_trial(budget, universe, old.tokens_per_sequence)
    for batch, count in tokens.items():
        if changed[batch] != count:
            raise SweepError(
                "added batch sizes must not change the common token count, but it would change "
                f"from {count} to {changed[batch]} at batch size {batch}. Choose sizes with the "
                "same least common multiple, or another --out."
            )


def _shared(plan: Plan, with_tuning: bool) -> dict[str, Any]:
    """Return the science that all trials of a sweep share."""
    excluded = NOT_SHARED if with_tuning else {*NOT_SHARED, "tuning"}
    settings = plan.settings.model_dump(mode="json", exclude=excluded)
    return {**settings, "data": plan.data, "start": plan.start, "code": plan.code}


def _first_difference(a: Any, b: Any, key: str = "") -> tuple[str, Any, Any] | None:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in sorted({*a, *b}):
            inner = f"{key}.{name}" if key else name
            if difference := _first_difference(a.get(name), b.get(name), inner):
                return difference
        return None
    return None if a == b else (key, a, b)


ANSWERING_SEEDS = 3
REPLACED = ("--batches", "--lr", "--seeds")


def typed_command(experiment: str, flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a `sweep run`; flags that are None or False are left out."""
    words = ["sweep", "run", experiment]
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list | tuple):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(str(value))
    return tuple(words)


def answering_command(plan: Plan) -> str | None:
    """Return the command that tunes the rate at each batch size; None if the plan does so."""
    batches = sorted({row.batch_size for row in plan.trials})
    tuned = [row for row in plan.trials if row.policy == "tuned" and row.stage == "report"]
    seeds_of = {batch: {r.seed for r in tuned if r.batch_size == batch} for batch in batches}
    if tuned and min(map(len, seeds_of.values())) >= ANSWERING_SEEDS:
        return None
    old = plan.commands[-1] if plan.commands else ("sweep", "run", plan.settings.name)
    words = [
        word
        for before, word in zip(("", *old), old, strict=False)
        if word not in REPLACED and before not in REPLACED
    ]
    seeds = str(_answering_seeds(plan))
    words += ["--batches", ",".join(map(str, batches)), "--lr", "tuned", "--seeds", seeds]
    return shlex.join(words)


def answering_cost(
    plan: Plan, seconds: Mapping[int, float | None], done: Mapping[int, int] | None = None
) -> tuple[int, float | None]:
    """Return the least cost of the answering command: trainings, and their seconds if known.

    Args:
        plan: of the sweep.
        seconds: of one training by batch size, estimated or measured.
        done: trainings that are already complete, by batch size.
    """
    each = len(GRID) + _answering_seeds(plan)
    left = {row.batch_size: each for row in plan.trials}
    left = {batch: max(0, each - (done or {}).get(batch, 0)) for batch in left}
    costs = [(count, seconds.get(batch)) for batch, count in left.items() if count]
    totals = [count * each_seconds for count, each_seconds in costs if each_seconds is not None]
    return sum(left.values()), sum(totals) if len(totals) == len(costs) else None


def _answering_seeds(plan: Plan) -> int:
    return max(ANSWERING_SEEDS, len({r.seed for r in plan.trials if r.stage == "report"}))
