"""The plan: every trial of a sweep with its id, steps and accumulation."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_serializer

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.config.experiment import (
    LEAST_POINTS,
    AnswerSettings,
    Experiment,
    NoiseSettings,
    OwnRate,
)
from sweep.config.models import ReplacedSize
from sweep.config.optimizers import OptimizerSettings, optimizer_facts
from sweep.config.settings import Settings, parse_settings
from sweep.config.trial import Science, TrialConfig, tokenizer_of
from sweep.plan.accumulation import choose_microbatch
from sweep.plan.course import Course, are_close, tokens_per_trial
from sweep.plan.learning_rate import warmup_steps
from sweep.plan.policies import LEAST_SEEDS, Policy, Tuned, is_tuned, parse_policy
from sweep.plan.rate_search import GRID, PREDICTED
from sweep.trial.folder import TRIAL_ID, SweepFolder, trial_id

TUNING_SEED = 1000


def _begin_with_sweep_run(words: tuple[str, ...]) -> tuple[str, ...]:
    if words[:2] != ("sweep", "run"):
        raise ValueError("commands must begin with sweep run")
    return words


# Words of a command line, which reports show so that people can repeat it.
SweepCommand = Annotated[tuple[str, ...], AfterValidator(_begin_with_sweep_run)]


class PlannedTrial(Settings):
    """One row of the plan. `id` and `learning_rate` are null until tuning decides them.

    With a budget of time, `id` and the counts are null until steps are timed. Final trials are
    written once they have an id, tuning trials also while they wait for a rate.
    """

    id: Annotated[str, Field(pattern=f"^{TRIAL_ID.pattern}$")] | None = None
    stage: Literal["final", "tune"] = "final"
    policy: str
    optimizer: str | None = None  # one of the sweep's; None: it has only one
    budget: int | None = None  # one of the sweep's, in tokens; None: it has only one
    batch_size: int
    seed: int = 0
    learning_rate: float | None = None
    beta2: float
    weight_decay: float
    warmup_min_steps: int
    tokens: int = 0  # it, the steps and the warmup are 0 until steps are timed, in JSON null
    steps: int = 0
    warmup_steps: int = 0
    devices: int
    microbatch_size: int
    gradient_accumulation_steps: int
    forecast_bytes: int | None = None
    forecast_seconds: float | None = None

    @property
    def arm(self) -> Arm:
        return Arm(self.optimizer, self.batch_size, self.budget)

    @field_serializer("tokens", "steps", "warmup_steps")
    def _write_count(self, count: int) -> int | None:
        return count if self.tokens else None


class Inputs(Settings):
    """Inputs of all trials. Identities are part of a trial's id; paths are not."""

    data: dict[str, Any] | None = None  # identity of the text
    data_path: str | None = None  # absolute, or relative to the sweep folder; None: a named set
    start: dict[str, Any] | None = None  # identity of the initial weights; None: from the seed
    init_path: str | None = None  # folder of the initial weights, as `data_path`
    code: dict[str, Any] | None = None  # identity of user code
    code_path: str | None = None  # folder of the experiment's file, which may hold its modules


class PlannedModel(Settings):
    """Describe the model that was built; counts are None until then."""

    name: str
    parameters: int | None = None
    trained_parameters: int | None = None  # None: all
    embedding_parameters: int | None = None  # also of the output projection
    flops_per_token: float | None = None  # in training; None: not known
    replaced_sizes: tuple[ReplacedSize, ...] = ()


class BudgetPlan(Settings):
    """The part of a plan with several budgets that differs between them, except the trials."""

    tokens: int  # the budget
    batches: tuple[int, ...]
    evaluation_sequences: int | None
    own_rate: OwnRate  # around which the first search begins
    tokens_are_common: bool
    epochs: float | None = None
    has_looks: bool = False


class Plan(Inputs):
    """plan.json. It only ever grows.

    The plan of one budget is a plan of its own. With several, `budgets` lists them, ascending, each
    row has its budget, and all other values that depend on the budget are those of the largest.
    """

    experiment: str
    # It tags the sweep's runs and names its Optuna studies; copies keep it.
    sweep_uid: Annotated[str, Field(pattern=r"^\w*$")] = ""
    settings: Experiment  # with the precision, the evaluation and the optimizer resolved
    execution: Execution
    model: PlannedModel
    tokens_per_sequence: int
    token_budget: int | None  # None with a budget of time
    tokens_are_common: bool
    epochs: float | None = None  # most of any trial; None until the text is tokenized
    disk_bytes: int | None = None
    forecast_factor: float | None = None  # forecast_seconds may be off by this factor
    forecast_reason: str | None = None  # for a large factor; "" if there is none
    commands: tuple[SweepCommand, ...] = ()  # that planned trials
    # Settings that `commands` lack: only Python can give them, or they are addresses with secrets.
    unrecorded: tuple[str, ...] = ()
    has_looks: bool = False  # seeds were added after earlier ones had been seen
    budgets: tuple[BudgetPlan, ...] = ()  # empty: the sweep has only one
    later_budgets: tuple[int, ...] = ()  # that a command asks for, and that are not planned yet
    trials: tuple[PlannedTrial, ...] = ()

    @property
    def by_budget(self) -> "tuple[Plan, ...]":
        """The plan of each budget, ascending; `self` if there is only one."""
        if not self.budgets:
            return (self,)
        return tuple(self._at(budget) for budget in self.budgets)

    @property
    def is_part(self) -> bool:
        """Whether other folders have other arms of the sweep (`--shard`)."""
        if not any("--shard" in words for words in self.commands):
            return False
        return any(plan._lacks_arms() for plan in self.by_budget)

    def _lacks_arms(self) -> bool:
        """Return True if some batch size with some optimizer has no trial; for one budget."""
        present = {(row.optimizer, row.batch_size) for row in self.trials}
        wanted = {(arm.optimizer, arm.batch_size) for arm in self.settings.arms}
        return not wanted <= present

    def find_budget(self, budget: int | str | tuple[int, ...]) -> "Plan | None":
        """Return the plan of a budget; None if the sweep does not have it."""
        for plan in self.by_budget:
            if plan.settings.budget == budget:
                return plan
        return None

    @property
    def budget_tokens(self) -> int:
        """The token budget; a sweep with a budget of time must not be asked."""
        assert self.token_budget is not None, "a budget of time has no tokens"
        return self.token_budget

    @property
    def known_epochs(self) -> float | None:
        """Epochs of the longest trial: 0 without data, None if they are not known."""
        return 0.0 if self.data is None else self.epochs

    def with_budget(self, plan: "Plan") -> "Plan":
        """Return the plan with that of one budget, new or in place of the one before.

        What does not depend on the budget is that of the new one.
        """
        plans = {other.token_budget: other for other in self.by_budget}
        plans[plan.token_budget] = plan
        if len(plans) == 1:
            return plan
        ascending = sorted(plans.values(), key=lambda other: other.budget_tokens)
        rows = []
        for other in ascending:
            budget = {"budget": other.budget_tokens}
            rows += [row.model_copy(update=budget) for row in other.trials]
        budgets = tuple(other._as_budget() for other in ascending)
        later = {*plan.later_budgets} - {budget.tokens for budget in budgets}
        changes = {
            "budgets": budgets,
            "later_budgets": tuple(sorted(later)),
            "trials": tuple(rows),
        }
        return plan._with_values_of(budgets[-1]).model_copy(update=changes)

    def of_all_steps(self) -> "Plan":
        """Return a plan with the trials of all budgets, for what depends only on their steps."""
        rows = tuple(row.model_copy(update={"budget": None}) for row in self.trials)
        return self.model_copy(update={"budgets": (), "trials": rows})

    def _as_budget(self) -> BudgetPlan:
        settings = self.settings
        return BudgetPlan(
            tokens=self.budget_tokens,
            batches=settings.batches,
            evaluation_sequences=settings.evaluation.sequences,
            own_rate=settings.tuning.own_rate,
            tokens_are_common=self.tokens_are_common,
            epochs=self.epochs,
            has_looks=self.has_looks,
        )

    def _at(self, budget: BudgetPlan) -> "Plan":
        rows = [row for row in self.trials if row.budget == budget.tokens]
        alone = tuple(row.model_copy(update={"budget": None}) for row in rows)
        return self._with_values_of(budget).model_copy(update={"budgets": (), "trials": alone})

    def _with_values_of(self, budget: BudgetPlan) -> "Plan":
        """Return the plan with the values of one of its budgets, but all trials."""
        settings = self.settings
        sequences = {"sequences": budget.evaluation_sequences}
        changes = {
            "budget": budget.tokens,
            "batches": budget.batches,
            "evaluation": settings.evaluation.model_copy(update=sequences),
            "tuning": settings.tuning.model_copy(update={"own_rate": budget.own_rate}),
        }
        return self.model_copy(
            update={
                "settings": settings.model_copy(update=changes),
                "token_budget": budget.tokens,
                "tokens_are_common": budget.tokens_are_common,
                "epochs": budget.epochs,
                "has_looks": budget.has_looks,
            }
        )

    def _of_row(self, row: PlannedTrial) -> "Plan":
        """Return the plan with the values of a row's budget."""
        for budget in self.budgets:
            if budget.tokens == row.budget:
                return self._with_values_of(budget)
        return self

    def science(self, row: PlannedTrial, learning_rate: float) -> Science:
        settings = self._of_row(row).settings
        optimizer = settings.optimizer.of(row.optimizer)
        values = {"beta2": row.beta2, "weight_decay": row.weight_decay}
        schedule = {"warmup_min_steps": row.warmup_min_steps}
        fields: dict[str, Any] = {
            **dict(settings),
            **dict(row),
            "data": self.data,
            "start": self.start,
            "code": self.code,
            "tokenizer": tokenizer_of(settings),
            "optimizer": optimizer.model_copy(update=values),
            "schedule": settings.schedule.model_copy(update=schedule),
            "learning_rate": learning_rate,
        }
        names = Science.model_fields.keys() - {"format_version"}
        return Science(**{name: fields[name] for name in names})

    def trial_config(self, row: PlannedTrial, sweep: str = "") -> TrialConfig:
        """Return the config of a trial.

        One without a rate is only to be timed or forecast, and so is the step of one without
        tokens.
        """
        if self.budgets:
            alone = self._of_row(row).model_copy(update={"budgets": ()})
            return alone.trial_config(row, sweep)
        if not row.tokens:
            step = row.batch_size * self.tokens_per_sequence
            settings = _evaluated(self.settings, step)
            row = _with_tokens(self, row, step)
            return self.model_copy(update={"settings": settings}).trial_config(row, sweep)
        tuning_budget = None
        if row.stage == "tune":
            tuning_budget = self.settings.tuning.budget
        noise_scale = NoiseSettings()
        if self.measures_noise(row):
            noise_scale = self.settings.noise_scale
        return TrialConfig(
            id=row.id or "sample",
            sweep=sweep,
            science=self.science(row, row.learning_rate or 1e-9),
            execution=self.execution,
            noise_scale=noise_scale,
            tokens_per_sequence=self.tokens_per_sequence,
            flops_per_token=self.model.flops_per_token,
            steps=row.steps,
            warmup_steps=row.warmup_steps,
            token_budget=tuning_budget or self.token_budget,
            objective_curve=self.settings.evaluated.curve,
            microbatch_size=row.microbatch_size,
            data_path=self.data_path,
            init_path=self.init_path,
            code_path=self.code_path,
        )

    def measures_noise(self, row: PlannedTrial) -> bool:
        """Return True if a trial measures the noise scale; a report reads only final trials."""
        settings = self.settings
        is_asked = settings.noise_scale.measure and settings.workload.can_measure_noise
        return is_asked and row.stage == "final"

    def course(self, row: PlannedTrial) -> Course:
        return Course.of_settings(self.settings, row.batch_size, row.tokens)

    def with_rate(self, row: PlannedTrial, rate: float, **tuned: float) -> PlannedTrial:
        """Return a row with its rate, other tuned values by field, and therefore its id."""
        row = row.model_copy(update={"learning_rate": rate, **tuned})
        if not row.tokens:  # which are part of the id
            return row
        return row.model_copy(update={"id": trial_id(self.science(row, rate))})

    def with_tokens(self, tokens: Mapping[Arm, int]) -> "Plan":
        """Return the plan with the tokens of the trials that have none, by arm."""
        most = max(tokens.values())
        plan = self.model_copy(update={"settings": _evaluated(self.settings, most)})
        rows = []
        for row in plan.trials:
            if not row.tokens:
                row = _with_tokens(plan, row, tokens[row.arm])
                if row.learning_rate is not None:
                    row = plan.with_rate(row, row.learning_rate)
            rows.append(row)
        are_common = len({row.tokens for row in rows}) == 1
        return plan.model_copy(update={"trials": tuple(rows), "tokens_are_common": are_common})

    def with_rate_of(self, winner: PlannedTrial, row: PlannedTrial) -> PlannedTrial:
        tuned = {"beta2": winner.beta2, "weight_decay": winner.weight_decay}
        return self.with_rate(row, winner.learning_rate or 0.0, **tuned)

    def tuning_centre(self, policy: Policy, arm: Arm) -> float:
        """Return the rate around which a policy tunes an arm."""
        tuning = self.settings.tuning
        optimizer = arm.optimizer or self.settings.optimizer.name
        chosen = tuning.centres.get(optimizer, tuning.centre)
        if chosen is not None:
            return chosen
        own = tuning.own_rate
        has_usual_centre = type(policy).rate_at is Tuned.rate_at
        if own.lr is None or not has_usual_centre:
            return policy.rate_at(arm.batch_size, optimizer)
        scale = optimizer_facts(optimizer)["rate"] / optimizer_facts(own.optimizer)["rate"]
        return float(scale * parse_policy(own.lr).rate_at(arm.batch_size, own.optimizer))

    def tuned_once(self, policy: str) -> list[PlannedTrial]:
        """Return the tuning trials of a policy with the first seed."""
        return [
            row
            for row in self.known_trials
            if row.stage == "tune" and row.policy == policy and row.seed == TUNING_SEED
        ]

    def searched(self, policy: str, arm: Arm) -> list[PlannedTrial]:
        """Return the trials of an arm's search; those that confirm its winner have more tokens."""
        rows = [row for row in self.tuned_once(policy) if row.arm == arm]
        least = min((row.tokens for row in rows), default=0)
        return [row for row in rows if row.tokens == least]

    @property
    def tuned_policy(self) -> str | None:
        """The name of the policy of the latest trials with tuned rates; None without any."""
        names = [row.policy for row in self.trials if is_tuned(row.policy)]
        return names[-1] if names else None

    @property
    def known_trials(self) -> tuple[PlannedTrial, ...]:
        return tuple(row for row in self.trials if row.id)

    @property
    def waiting_searches(self) -> tuple[PlannedTrial, ...]:
        """The first tuning trials of arms whose rates other searches are to predict."""
        return tuple(row for row in self.trials if row.stage == "tune" and not row.id)

    @property
    def awaits_rates(self) -> bool:
        """True if some final trials still need their rate."""
        return any(row.learning_rate is None for row in self.trials)

    @property
    def awaits_times(self) -> bool:
        """True if some trials have no tokens yet, because a budget of time was not measured."""
        return not all(row.tokens for row in self.trials)

    @property
    def needs_common_tokens(self) -> bool:
        """True if losses can be compared only if all batch sizes train on the same tokens."""
        return self.settings.target is None and self.token_budget is not None

    def can_compare(self, tokens: Collection[int]) -> bool:
        """Return True if losses of trainings on so many tokens can be compared.

        Those on tokens that differ a little need the slopes of curves.
        """
        settings = self.settings
        has_slopes = settings.evaluation.points >= LEAST_POINTS and not settings.workload.is_program
        is_equal = len({*tokens}) == 1
        return not self.needs_common_tokens or is_equal or (has_slopes and are_close(tokens))

    @property
    def has_unequal_amounts(self) -> bool:
        """True if losses are compared at unequal times or tokens, which needs slopes of curves."""
        is_by_tokens = self.token_budget is not None and self.tokens_are_common
        return self.settings.target is None and not is_by_tokens

    @property
    def largest_step(self) -> tuple[int, bool]:
        """The largest microbatch, and whether a step has several of them, which takes more."""
        steps = ((row.microbatch_size, row.gradient_accumulation_steps > 1) for row in self.trials)
        return max(steps)

    def distinct_steps(self) -> list[TrialConfig]:
        """Return a config for each optimizer and batch size."""
        rows = {row.arm: row for row in self.trials}
        return [self.trial_config(row) for row in rows.values()]

    @property
    def why_untimed(self) -> str:
        """Why steps cannot be timed side by side in one process; "" if they can."""
        if self.settings.workload.is_program:
            return "a command"
        if self.execution.devices > 1:
            return f"{self.execution.devices} devices per trial"
        return ""

    def with_execution(self, **changes: Any) -> "Plan":
        """Return the plan of the same trials with another execution, which splits their batches."""
        execution = self.execution.model_copy(update=changes)
        plan = self.model_copy(update={"execution": execution})
        rows = [row.model_copy(update=_split_batch(plan, row.batch_size)) for row in plan.trials]
        return plan.model_copy(update={"trials": tuple(rows)})

    def with_answer(self, **changes: Any) -> "Plan":
        """Return the plan of the same trials with other settings of the answer."""
        fields = self.settings.answer.model_dump() | changes
        answer = parse_settings(AnswerSettings, fields, "the answer")
        settings = self.settings.model_copy(update={"answer": answer})
        return self.model_copy(update={"settings": settings})


def stages_of(rows: Iterable[PlannedTrial]) -> list[list[PlannedTrial]]:
    """Return the trials that may run at once, in the order in which they start.

    A batch size whose first rates are predicted starts after those before it; final trials without
    a rate follow all tuning trials.
    """
    known: list[PlannedTrial] = []
    waiting: dict[int, list[PlannedTrial]] = {}
    finals: list[PlannedTrial] = []
    for row in rows:
        if row.id is not None:
            known.append(row)
        elif row.stage == "tune":
            waiting.setdefault(row.batch_size, []).append(row)
        else:
            finals.append(row)
    return [stage for stage in (known, *waiting.values(), finals) if stage]


def tokens_at_once(device: str) -> int:
    """Return the most tokens of a planned microbatch, and of an evaluation batch."""
    return 65_536 if device.startswith("cuda") else 8_192


def load_plan(folder: SweepFolder) -> Plan | None:
    stored = folder.read_plan()
    return None if stored is None else parse_plan(stored, str(folder.plan_path))


def parse_plan(document: Mapping[str, Any], subject: str) -> Plan:
    fields = {key: document[key] for key in document if key not in ("format_version", "sha256")}
    return parse_settings(Plan, fields, subject)


def build_plan(
    experiment: Experiment,
    execution: Execution,
    inputs: Inputs,
    *,
    command: tuple[str, ...] = (),
    unrecorded: tuple[str, ...] = (),
    old: Plan | None = None,
) -> Plan:
    """Plan every trial; those of the `old` plan share the token count and keep their rates."""
    policy = parse_policy(experiment.lr)
    old_rows = old.known_trials if old else ()
    all_old_rows = old.trials if old else ()
    tokens, are_common = _tokens_of_arms(experiment, all_old_rows)
    settings = experiment.model_copy(update={"optimizer": _resolve_optimizer(experiment)})
    if old is not None and old.tuned_policy is not None:  # searches that have begun go on
        own_rate = old.settings.tuning.own_rate
        tuning = settings.tuning.model_copy(update={"own_rate": own_rate})
        settings = settings.model_copy(update={"tuning": tuning})
    if experiment.token_budget is not None:
        settings = _evaluated(settings, experiment.token_budget)
    elif old is not None:
        settings = _with_sequences(settings, old.settings.evaluation.sequences)
    model = PlannedModel(name=experiment.model.name, replaced_sizes=experiment.replaced_sizes)
    plan = Plan(
        **dict(inputs),
        experiment=experiment.name,
        settings=settings,
        execution=execution,
        model=model,
        tokens_per_sequence=experiment.tokens_per_sequence,
        token_budget=experiment.token_budget,
        tokens_are_common=are_common,
        commands=(command,) if command else (),
        unrecorded=unrecorded,
        has_looks=experiment.seeds == "auto",
    )

    winners = {row.arm: row for row in finals_of(policy, old_rows, experiment.arms)}
    rows: list[PlannedTrial] = []
    if policy.is_tuned:
        tuning_tokens, _ = _tokens_of_arms(experiment, all_old_rows, is_of_tuning=True)
        has_search = {*winners, *_searched_arms(policy, old_rows)}
        for arm in experiment.arms:
            if arm in winners:
                continue
            row = _plan_arm(plan, policy, arm, tuning_tokens[arm])
            row = row.model_copy(update={"stage": "tune", "seed": TUNING_SEED})
            rows += _first_trials(plan, policy, row, has_search)
            has_search.add(arm)

    for arm in experiment.arms:
        final = _plan_arm(plan, policy, arm, tokens[arm])
        seeds = experiment.seeds or policy.default_seeds
        if seeds == "auto":
            present = (row.seed + 1 for row in finals_of(policy, old_rows, [arm]))
            seeds = max([LEAST_SEEDS, *present])
        for seed in range(int(seeds)):
            row = final.model_copy(update={"seed": seed})
            if not policy.is_tuned:
                row = plan.with_rate(row, policy.rate_at(row.batch_size))
            elif arm in winners:
                row = plan.with_rate_of(winners[arm], row)
            rows.append(row)
    return plan.model_copy(update={"trials": tuple(rows)})


def _searched_arms(policy: Policy, rows: Sequence[PlannedTrial]) -> set[Arm]:
    """Return the arms with tuning trials of a policy."""
    return {row.arm for row in rows if row.stage == "tune" and row.policy == policy.name}


def _first_trials(
    plan: Plan, policy: Policy, row: PlannedTrial, has_search: Collection[Arm]
) -> list[PlannedTrial]:
    """Return the first tuning trials of an arm, like a row.

    They have no rates yet if searches of other batch sizes are to predict them; and none are
    returned then if its own search has begun.

    Args:
        plan: the plan of the command.
        policy: its policy.
        row: a tuning trial of the arm.
        has_search: the arms whose searches have begun, or begin before this one.
    """
    predicts = plan.settings.tuning.predicts_rates
    if predicts and any(arm.optimizer == row.optimizer for arm in has_search):
        return [] if row.arm in has_search else [row] * PREDICTED
    centre = plan.tuning_centre(policy, row.arm)
    return [plan.with_rate(row, centre * factor) for factor in GRID]


def _tokens_of_arms(
    experiment: Experiment, old_rows: Sequence[PlannedTrial], is_of_tuning: bool = False
) -> tuple[dict[Arm, int], bool]:
    """Return the tokens of trials by arm, and whether they are equal for all batch sizes.

    With a budget of time, an arm without earlier trials has 0.
    """
    budget = experiment.token_budget
    if budget is None:
        fixed = {row.arm: row.tokens for row in old_rows}
        tokens = {arm: fixed.get(arm, 0) for arm in experiment.arms}
        return tokens, len({*tokens.values(), *fixed.values()}) == 1

    if is_of_tuning and experiment.tuning.budget is not None:
        budget = experiment.tuning.budget
    batches = sorted({*experiment.batches, *(row.batch_size for row in old_rows)})
    by_size, are_common = tokens_per_trial(
        budget, batches, experiment.tokens_per_sequence, is_of_tuning
    )
    return {arm: by_size[arm.batch_size] for arm in experiment.arms}, are_common


def _evaluated(experiment: Experiment, tokens: int) -> Experiment:
    """Return the experiment with as many sequences of an evaluation as suit a trial's tokens."""
    tokens_of_evaluation = min(262_144, tokens // 100)
    sequences = max(8, -(-tokens_of_evaluation // experiment.tokens_per_sequence))
    return _with_sequences(experiment, sequences)


def _with_sequences(experiment: Experiment, sequences: int | None) -> Experiment:
    """Return the experiment with a number of sequences of each evaluation, if it has none."""
    if experiment.evaluation.sequences is not None:
        return experiment
    evaluation = experiment.evaluation.model_copy(update={"sequences": sequences})
    return experiment.model_copy(update={"evaluation": evaluation})


def _resolve_optimizer(experiment: Experiment) -> OptimizerSettings:
    """Return the settings of the optimizers with the options that they always have."""
    if experiment.workload.is_program:
        return experiment.optimizer
    return experiment.optimizer.with_options_of(experiment.optimizer_names)


def requested_ids(plan: Plan, new: Plan, experiment: Experiment) -> tuple[str, ...]:
    """Return the ids of the trials that a command names.

    Args:
        plan: the folder's plan, with all its trials.
        new: the plan of the command, with the trials that it names.
        experiment: the experiment of the command.
    """
    ids = {row.id for row in new.known_trials}
    policy = parse_policy(experiment.lr).name
    tuning = {row.arm for row in new.trials if row.id is None}
    if experiment.seeds == "auto":
        tuning |= {*experiment.arms}
    return tuple(
        str(row.id)
        for row in plan.known_trials  # with all rates that tuning has tried so far
        if row.id in ids or (row.stage == "tune" and row.arm in tuning and row.policy == policy)
    )


def finals_of(
    policy: Policy, rows: Iterable[PlannedTrial], arms: Collection[Arm]
) -> list[PlannedTrial]:
    """Return the final trials of a policy, which a fixed rate is part of."""
    return [
        row
        for row in rows
        if row.stage == "final"
        and row.arm in arms
        and policy.is_policy_of(row.policy, row.learning_rate)
    ]


def _plan_arm(plan: Plan, policy: Policy, arm: Arm, tokens: int) -> PlannedTrial:
    """Plan a trial of an arm; the seed, the rate and the id are filled in later.

    `tokens` are 0 if they are not known yet.
    """
    optimizer = policy.optimizer_at(
        arm.batch_size, plan.tokens_per_sequence, plan.settings.optimizer.of(arm.optimizer)
    )
    schedule = policy.adapt_schedule(plan.settings.schedule)
    row = PlannedTrial(
        policy=policy.name,
        optimizer=arm.optimizer,
        batch_size=arm.batch_size,
        beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        warmup_min_steps=schedule.warmup_min_steps,
        **_split_batch(plan, arm.batch_size),
    )
    return _with_tokens(plan, row, tokens) if tokens else row


def _with_tokens(plan: Plan, row: PlannedTrial, tokens: int) -> PlannedTrial:
    """Return a row with its tokens, and the steps that follow from them."""
    schedule = plan.settings.schedule.model_copy(update={"warmup_min_steps": row.warmup_min_steps})
    steps = Course.of_settings(plan.settings, row.batch_size, tokens).steps
    warmup = warmup_steps(steps, schedule)
    return row.model_copy(update={"tokens": tokens, "steps": steps, "warmup_steps": warmup})


def _split_batch(plan: Plan, batch: int) -> dict[str, Any]:
    """Return how the plan's execution splits a batch size, by the fields of `PlannedTrial`."""
    execution = plan.execution
    fastest = tokens_at_once(execution.device) // plan.tokens_per_sequence
    if not plan.settings.workload.has_known_model:
        fastest = batch  # neither its memory nor its speed is known
    bound = execution.microbatch_bound or fastest
    size = choose_microbatch(
        batch,
        min(fastest, bound),
        alone_at_most=min(fastest, execution.microbatch_bound_alone or bound),
        devices=execution.devices,
        sequences_per_group=plan.settings.workload.sequences_per_group,
        microbatch=execution.microbatch,
        accumulation=execution.accumulation,
    )
    return {
        "devices": execution.devices,
        "microbatch_size": size,
        "gradient_accumulation_steps": batch // (size * execution.devices),
    }
