"""The plan: every trial of a sweep with its id, steps and accumulation, and how a plan grows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from sweep.config.experiment import Experiment
from sweep.config.models import Settings
from sweep.config.trial import Execution, Science, TokenizerSettings, TrialConfig
from sweep.errors import CorruptFile
from sweep.plan.policy import Policy, parse_policy
from sweep.plan.steps import choose_microbatch, per_device_of, tokens_per_trial, warmup_steps
from sweep.plan.tuning import GRID
from sweep.trial.files import sha256_of
from sweep.trial.folder import SweepFolder

TUNING_SEED = 1000
EVALUATION_TOKENS = 262_144  # per milestone at most; else 1 % of the budget
MODEL_FIELDS = ("name", "parameters", "embedding_parameters")  # of the model, as the plan shows it
COMPILE_FLOPS = 10**13  # of the whole plan, from which compiling pays on CPU


Split = tuple[int | None, int | None]  # microbatch size and accumulation steps as asked


class PlannedTrial(Settings):
    """One row of the plan; null where tuning decides."""

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
class Start:
    """Weights that trials start from: what they are, and where they lie."""

    identity: dict[str, Any]
    path: str | None  # absolute or from the sweep folder


class Plan(Settings):
    """plan.json. Only ever grows."""

    experiment: str
    settings: Experiment  # precision resolved, evaluation filled in
    execution: Execution
    data: dict[str, Any] | None  # identity
    data_path: str | None
    start: dict[str, Any] | None = None  # identity of the weights that trials start from
    init_path: str | None = None  # where they lie
    model: dict[str, Any]  # name, parameters, embedding_parameters
    tokens_per_sequence: int
    token_budget: int
    tokens_are_common: bool
    epochs: float | None
    epochs_are_estimated: bool = True
    disk_bytes: int | None
    commands: tuple[tuple[str, ...], ...] = ()  # words of those that planned trials of this sweep
    trials: tuple[PlannedTrial, ...]

    def science(self, row: PlannedTrial, learning_rate: float) -> Science:
        """Return everything of one trial that can change a number."""
        settings = self.settings
        assert settings.precision != "auto"
        is_pretrained = settings.tokenizer == "pretrained"  # prompts are of its tokens
        return Science(
            stage=row.stage,
            policy=row.policy,
            workload=settings.workload,
            model=settings.model,
            data=self.data,
            tokenizer=tokenizer_of(settings) if self.data or is_pretrained else None,
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
            grpo=settings.grpo and settings.grpo.model_copy(update={"init": None}),
            start=self.start,
        )

    def trial_config(self, row: PlannedTrial, sweep: str) -> TrialConfig:
        """Return what a worker needs to run one trial of a known rate."""
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

    def located(self, folder: SweepFolder) -> "Plan":
        """Return the plan with its paths as they are from anywhere, not from the sweep folder."""
        paths = {"data_path": self.data_path, "init_path": self.init_path}
        return self.model_copy(update={name: folder.locate(path) for name, path in paths.items()})

    def with_rate(
        self, row: PlannedTrial, rate: float, beta2: float | None = None, decay: float | None = None
    ) -> PlannedTrial:
        """Return a row with its rate, its other tuned values, and so its id."""
        tuned = {"beta2": beta2, "weight_decay": decay}
        given = {name: value for name, value in tuned.items() if value is not None}
        row = row.model_copy(update={"learning_rate": rate, **given})
        trial_id = sha256_of(self.science(row, rate).model_dump(mode="json"))[:12]
        return row.model_copy(update={"id": trial_id})

    def tuning_centre(self, batch_size: int) -> float:
        """Return the rate that a batch size's grid lies around."""
        return self.settings.tuning.centre or Policy("tuned").rate_at(batch_size)

    def sample_config(self, row: PlannedTrial) -> TrialConfig:
        """Return a config like a row's, with or without id and rate: to be timed or forecast."""
        return self.trial_config(row.model_copy(update={"id": "sample", "learning_rate": 1e-9}), "")

    @property
    def known_trials(self) -> tuple[PlannedTrial, ...]:
        """The rows that have an id."""
        return tuple(row for row in self.trials if row.id)

    def total_flops(self) -> int:
        """Training FLOPs of all rows; 0 where the model's are not known."""
        return (self.settings.model.flops_per_token or 0) * sum(row.tokens for row in self.trials)


def tokens_at_once(device: str) -> int:
    """Return the most tokens of a planned microbatch, and of an evaluation batch."""
    return 65_536 if device.startswith("cuda") else 8_192


def tokenizer_of(settings: Experiment) -> TokenizerSettings:
    """Return how an experiment's text becomes tokens."""
    model = settings.model
    assert model.kind != "quadratic"
    if model.kind != "hugging_face" or settings.tokenizer != "pretrained":
        return TokenizerSettings(kind=settings.tokenizer, vocabulary=model.vocabulary)
    sha256, end = model.tokenizer_sha256, model.end
    return TokenizerSettings(kind="pretrained", vocabulary=model.vocabulary, sha256=sha256, end=end)


def load_plan(folder: SweepFolder) -> Plan | None:
    """Read plan.json; None where nothing was planned yet.

    Raises:
        CorruptFile: if it is damaged, or no plan.
    """
    stored = folder.read_plan()
    return None if stored is None else parse_plan(stored, str(folder.plan_path))


def parse_plan(document: Mapping[str, Any], subject: str) -> Plan:
    """Return the plan that a document of plan.json, or of a tracking store, holds.

    Raises:
        CorruptFile: if it is none.
    """
    fields = {key: document[key] for key in document if key not in ("format_version", "sha256")}
    try:
        return Plan.model_validate(fields)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise CorruptFile(
            f"{subject} must hold a plan of this version of sweep, but {place} is wrong "
            f"({error.errors()[0]['msg']}). Restore it from a copy, or choose another --out."
        ) from error


def tokens_per_sequence(experiment: Experiment) -> int:
    """Return what the built-in workloads declare.

    The context length; 1 for `quadratic`; prompt and new tokens for `grpo`.
    """
    grpo = experiment.grpo
    return experiment.model.context if grpo is None else grpo.tokens_per_sequence


def seeds_of(experiment: Experiment, policy: Policy) -> range:
    """Return the reporting seeds 0 to N-1; by default 1 at a fixed rate, else 3."""
    return range(experiment.seeds or (1 if policy.kind == "fixed" else 3))


def build_plan(
    experiment: Experiment,
    execution: Execution,
    *,
    data: dict[str, Any] | None,
    data_path: str | None = None,
    start: Start | None = None,
    microbatch: int | None = None,
    accumulation: int | None = None,
    also_batches: tuple[int, ...] = (),
    command: tuple[str, ...] = (),
) -> Plan:
    """Plan every trial that the experiment names.

    Args:
        experiment: with `precision` resolved.
        execution: where trials run.
        data: identity of the data, from `sweep.data.identify_data`.
        data_path: where it lies, absolute or from the sweep folder.
        start: weights that trials start from; None: those of their seeds.
        microbatch, accumulation: the flags, or None.
        also_batches: batch sizes already in the sweep; they share the token count.
        command: the words that were typed.

    Raises:
        SweepError: if the budget holds no step, or a microbatch or accumulation does not divide.
    """
    policy, context = parse_policy(experiment.lr), tokens_per_sequence(experiment)
    universe = sorted({*experiment.batches, *also_batches})
    tokens, are_common = tokens_per_trial(experiment.budget, universe, context)
    evaluation = {"sequences": _evaluation_sequences(experiment, context)}
    settings = experiment.model_copy(
        update={"evaluation": experiment.evaluation.model_copy(update=evaluation)}
    )
    plan = Plan(
        experiment=experiment.name,
        settings=settings,
        execution=execution,
        data=data,
        data_path=data_path,
        start=start.identity if start else None,
        init_path=start.path if start else None,
        model={name: getattr(experiment.model, name) for name in MODEL_FIELDS},
        tokens_per_sequence=context,
        token_budget=experiment.budget,
        tokens_are_common=are_common,
        epochs=None,
        disk_bytes=None,
        commands=(command,) if command else (),
        trials=(),
    )
    rows, split = [], (microbatch, accumulation)
    for batch in experiment.batches:
        row = _row(plan, policy, batch, tokens[batch], split)
        for seed in seeds_of(experiment, policy):
            seeded = row.model_copy(update={"seed": seed})
            is_open = policy.kind == "tuned"
            rows.append(seeded if is_open else plan.with_rate(seeded, policy.rate_at(batch)))
    grids = _grids(plan, policy, universe, split) if policy.kind == "tuned" else []
    return plan.model_copy(update={"trials": (*grids, *rows)})


def _grids(plan: Plan, policy: Policy, universe: list[int], split: Split) -> list[PlannedTrial]:
    """Plan the rates that every batch size is tried at first: ascending, or from the centre."""
    is_bounded = plan.settings.target is not None  # by the trials before it
    factors = sorted(GRID, key=lambda factor: abs(math.log(factor)) if is_bounded else factor)
    budget = plan.settings.tuning.budget or plan.token_budget
    tokens, _ = tokens_per_trial(budget, universe, plan.tokens_per_sequence)
    rows = []
    for batch in plan.settings.batches:
        row = _row(plan, policy, batch, tokens[batch], split)
        row = row.model_copy(update={"stage": "tune", "seed": TUNING_SEED})
        centre = plan.tuning_centre(batch)
        rows += [plan.with_rate(row, centre * factor) for factor in factors]
    return rows


def _row(plan: Plan, policy: Policy, batch: int, tokens: int, split: Split) -> PlannedTrial:
    """Plan one batch size under one policy; stage, seed, rate and id are still to be filled."""
    settings, execution = plan.settings, plan.execution
    optimizer = policy.optimizer_at(batch, plan.tokens_per_sequence, settings.optimizer)
    is_fixed = policy.kind == "fixed"
    schedule = settings.schedule.model_copy(
        update={"warmup_min_steps": settings.schedule.warmup_min_steps if is_fixed else 0}
    )
    steps = tokens // (batch * plan.tokens_per_sequence)
    assert steps * batch * plan.tokens_per_sequence == tokens
    bound = tokens_at_once(execution.device) // plan.tokens_per_sequence
    group_size = settings.grpo.group_size if settings.grpo else 1
    per_device = per_device_of(batch, execution.devices, group_size)
    at_most = min(bound, execution.microbatch_bound or bound)
    microbatch, accumulation = split
    size = choose_microbatch(per_device, microbatch, at_most, group_size, accumulation)
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


def _evaluation_sequences(experiment: Experiment, context: int) -> int:
    """Return the milestone set's size: as asked, else 1 % of the budget, 8 sequences at least."""
    if experiment.evaluation.sequences:
        return experiment.evaluation.sequences
    return max(8, -(-min(EVALUATION_TOKENS, experiment.budget // 100) // context))
