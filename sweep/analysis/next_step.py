"""The next step of a sweep: the command that would settle what its answer leaves open.

A command is proposed only if its plan has no obstacle and trains something. If there is none, a
sentence says what would settle the answer.
"""

import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from sweep.analysis.answer import Answer
from sweep.analysis.answer_data import join
from sweep.analysis.checks import (
    FAIL,
    Check,
    learning_rate_at_edge,
    single_seed,
    tokens_differ,
)
from sweep.analysis.tables import SweepTables
from sweep.analysis.times import misses_budget, read_trial_time
from sweep.analysis.tuned_rates import TunedRate
from sweep.config.arms import Arm
from sweep.config.models import MODEL_PRESETS
from sweep.config.numbers import LEAST_BUDGET_RATIO, format_count, parse_count
from sweep.config.objective import LOSS
from sweep.decision.decision import LOOKS, UNDECIDED
from sweep.decision.first_rates import first_rates_of
from sweep.decision.next import next_trials
from sweep.decision.proposal import (
    Proposal,
    check_of_command,
    command_with,
    common_tokens,
    propose,
    propose_tuning,
    recorded_out,
    tuned_lr,
)
from sweep.decision.trials import TrialRecord, compared_value, parse_end
from sweep.errors import SweepError
from sweep.plan.commands import parse_command
from sweep.plan.course import (
    MOST_EPOCHS,
    Course,
    common_budget,
    repeats_too_often,
    tokens_per_trial,
)
from sweep.plan.plan import Plan, PlannedTrial, load_plan
from sweep.plan.policies import LEAST_SEEDS, parse_policy
from sweep.plan.rate_search import EXTENSIONS, ROUNDING
from sweep.trial.folder import SweepFolder
from sweep.trial.status import State

LEAST_STEPS = 10  # for a batch size that is added: with fewer, the warmup exceeds a tenth of them
LEAST_HOURS = 0.1  # proposed as --max-hours
TARGET_STEP = 0.1  # nats; proposed targets are multiples
BUDGET_FACTOR = 4  # between proposed budgets
USUAL_BUDGETS = 4  # that are proposed: one more than a law needs
BEYOND = 10  # a proposed training over the largest budget
TARGET_BUDGETS = 2  # budgets that a training to a proposed target may take, at a constant rate


@dataclass(frozen=True)
class NextStep:
    command: str | None = None
    seconds: float | None = None  # least time of the command; None: not known
    reason: str = ""  # why there is no command, or what to know about it, as sentences
    trials: tuple[PlannedTrial, ...] = ()  # certain to be trained by the command


@dataclass(frozen=True)
class TunedResults:
    """Checks, rates and answers for the trials with tuned rates of all optimizers."""

    checks: Sequence[Check]
    rates: Sequence[TunedRate]
    answers: Sequence[Answer]

    @property
    def blocking(self) -> list[Check]:
        return [check for check in self.checks if check.status == FAIL and check.blocks_claims]

    @property
    def codes(self) -> set[str]:
        return {check.code for check in self.blocking}

    @property
    def is_open(self) -> bool:
        """True if an answer leaves its question open."""
        return any(not answer.decided for answer in self.answers)

    @property
    def is_settled(self) -> bool:
        is_provisional = any(answer.provisional for answer in self.answers)
        is_answered = len(self.answers) > 0 and not self.is_open and not is_provisional
        return is_answered and not self.blocking


def read_records(sweep: SweepTables) -> list[TrialRecord]:
    """Return how each planned trial ended, from the table of trials."""
    objective = sweep.plan.settings.objective
    table = sweep.trials.set_index("id").to_dict("index")
    records = []
    for row in sweep.plan.known_trials:
        trial = table[str(row.id)]
        state, cause = parse_end(trial["state"], trial["cause"])
        value = compared_value(state, cause, _number(trial, objective.name), objective)
        slope = _number(trial, "valid_slope")
        records.append(TrialRecord(row, state, cause, value, read_trial_time(trial), slope))
    return records


def _number(trial: Mapping[Any, Any], column: str) -> float | None:
    value = trial.get(column)
    return None if value is None or pd.isna(value) else float(value)


def next_step(sweep: SweepTables, tuned: TunedResults | None) -> NextStep:
    """Return the next step of a sweep; `tuned` is None if it has no trials with tuned rates."""
    if sweep.plan.is_part:
        return NextStep(
            reason="This folder has a part of the sweep. `sweep merge` joins all parts."
        )
    search = _Search(sweep)
    try:
        return search.tune() if tuned is None else search.settle(tuned)
    except SweepError as error:  # why no command can be proposed
        return NextStep(reason=str(error))


def command_for_soonest(sweep: SweepTables, answer: Answer) -> str | None:
    """Return the command that would tell which batch size is the soonest; None if none is known.

    Times are measured, or the sweep is repeated with a target: the loss that the batch size with
    the fewest tokens reaches, rounded up. No times tell after a missed budget of time.
    """
    search = _Search(sweep)
    budget = sweep.plan.token_budget
    if search.has_missed_budget():
        return None
    is_known = answer.soonest.batch_size is not None  # but for the times
    lacks_times = len(sweep.smaller) > 0 and len(answer.times_reasons) > 0
    if is_known or lacks_times or sweep.plan.settings.target is not None or budget is None:
        return command_for_times(sweep)

    size = answer.fewest_tokens.batch_size
    reached = None if size is None else answer[size].mean
    has_target = not sweep.plan.settings.workload.is_program
    epochs = sweep.plan.epochs
    if epochs is not None and repeats_too_often(TARGET_BUDGETS * epochs):
        return None
    if reached is None or answer.metric != LOSS.name or not has_target:
        return None
    changes = {
        "target": round(math.ceil(reached / TARGET_STEP) * TARGET_STEP, 1),
        "budget": TARGET_BUDGETS * budget,
        "lr": search.lr,
        "seeds": "auto",
        "out": search.free_out("target"),
    }
    with contextlib.suppress(SweepError):
        return propose(sweep.plan, changes, is_elsewhere=True).command
    return None


def command_for_times(sweep: SweepTables) -> str | None:
    """Return the command that times the steps of a sweep; None if they cannot be timed."""
    if sweep.plan.why_untimed:
        return None
    return shlex.join(("sweep", "time", _Search(sweep).folder_to_name()))


def can_decide_more(sweep: SweepTables, sizes: Sequence[int]) -> bool:
    """Return True if trainings at tuned rates would be added with `--answer order`."""
    settings = sweep.plan.settings
    answer = settings.answer.model_copy(update={"question": "order"})
    changes = {"batches": tuple(sizes), "lr": tuned_lr(sweep.plan), "answer": answer}
    experiment = settings.model_copy(update=changes)
    return bool(next_trials(sweep.plan, experiment, read_records(sweep), sweep.timing))


def command_for_fewest_tokens(sweep: SweepTables, answer: Answer) -> str | None:
    """Return the command that compares batch sizes at equal tokens; None if there is none.

    The tokens are those of the batch size that is recommended for a budget of time.
    """
    plan = sweep.plan
    rows = [row for row in plan.known_trials if row.batch_size == answer.recommended]
    sizes = [row.batch_size for row in answer.batch_sizes]
    search = _Search(sweep)
    changes = {
        "budget": common_budget(rows[0].tokens, sizes, plan.tokens_per_sequence),
        "timing": None,
        "lr": search.lr,
        "seeds": "auto",
        "out": search.free_out("tokens"),
    }
    with contextlib.suppress(SweepError):
        return propose(plan, changes, is_elsewhere=True).command
    return None


def command_for_longer(sweep: SweepTables) -> str | None:
    """Return the command that tells about longer trainings; None if there is none.

    It sweeps several budgets, or if the sweep has several, it recommends from them.
    """
    plan = sweep.plan
    if plan.settings.target is not None:
        return None
    search = _Search(sweep)
    if sweep.smaller:
        tokens_beyond = str(BEYOND * plan.budget_tokens)
        words = ("sweep", "recommend", search.folder_to_name(), "--tokens", tokens_beyond)
        return shlex.join(words)

    changes: dict[str, Any] = {"lr": search.lr, "seeds": "auto", **search.own_out()}
    tokens = plan.token_budget
    if tokens is None:  # a budget of time
        tokens = common_budget(
            int(median(row.tokens for row in plan.known_trials)),
            sweep.batch_sizes,
            plan.tokens_per_sequence,
        )
        changes |= {"timing": None, "out": search.free_out("tokens")}
    if plan.settings.tuning.budget is not None:  # which several budgets refuse
        if not any("--tune-budget" in words for words in plan.commands):
            return None
        changes |= {"tune_budget": None, "out": search.free_out("budgets")}
        tuning = plan.settings.tuning.model_copy(update={"budget": None})
        settings = plan.settings.model_copy(update={"tuning": tuning})
        plan = plan.model_copy(update={"settings": settings})
    with contextlib.suppress(SweepError):
        powers = _powers_of_budgets(plan.epochs)
        factors = [float(BUDGET_FACTOR) ** power for power in powers]
        budgets = [_write_budget(plan, changes, tokens, factor) for factor in factors]
        if budgets:
            return command_with(plan, **changes, budget=budgets, batches="auto")
    return None


def _powers_of_budgets(epochs: float | None) -> range:
    """Return the powers of budgets from this one on, or smaller ones too if data would repeat.

    There are none if the data are repeated too often already.
    """
    first = 0
    if epochs is not None and epochs > 0:
        if repeats_too_often(epochs):
            return range(0)
        more = math.floor(math.log(MOST_EPOCHS / epochs) / math.log(BUDGET_FACTOR))
        first = min(0, more + 1 - USUAL_BUDGETS)
    return range(first, first + USUAL_BUDGETS)


def _write_budget(plan: Plan, changes: Mapping[str, Any], tokens: int, factor: float) -> str:
    """Return a budget as a word of a command, rounded if that leaves equal tokens.

    Args:
        plan: the sweep.
        changes: flags of its command that get other values.
        tokens: the sweep's budget.
        factor: the wanted budget over the present one.

    Raises:
        SweepError: if it would be refused, by itself in another folder.
    """
    exact = math.floor(tokens * factor)
    words = [str(exact)]
    rounded = format_count(float(f"{exact:.2g}"))
    ratio = parse_count(rounded) / tokens
    if max(ratio, 1 / ratio) >= LEAST_BUDGET_RATIO:
        words.insert(0, rounded)
    for word in words:
        proposed = propose(plan, {**changes, "budget": word}, is_elsewhere=True).plan
        counts = {row.tokens for row in proposed.trials if row.stage == "final"}
        repeats = 0.0 if plan.epochs is None else plan.epochs * max(counts) / tokens
        if proposed.can_compare(counts) and repeats <= MOST_EPOCHS:
            return word
    raise SweepError(f"Batch sizes have no equal tokens at a budget of {exact}.")


def command_for_budget(sweep: SweepTables, tokens: int) -> tuple[str, int]:
    """Return the command of the next budget towards a training, and its tokens.

    It is at most four times the sweep's largest one, and repeats the data at most four times.

    Raises:
        SweepError: if there is no such budget, or no command line can have the sweep's settings.
    """
    plan = sweep.plan
    most = math.inf
    if plan.epochs:
        most = MOST_EPOCHS / plan.epochs
    if most < LEAST_BUDGET_RATIO:
        raise SweepError(
            f"A larger budget would repeat the data over {MOST_EPOCHS} times. Sweep on more data, "
            "in another --out."
        )
    wanted = max(tokens / plan.budget_tokens, LEAST_BUDGET_RATIO)
    factor = min(wanted, BUDGET_FACTOR, most)
    changes = _Search(sweep).own_out()
    word = _write_budget(plan, changes, plan.budget_tokens, factor)
    command = command_with(plan, **changes, budget=word, batches="auto")
    return command, parse_count(word)


def command_for_model(sweep: SweepTables, larger_than: float) -> str | None:
    """Return the command that sweeps a larger model at the same budgets; None if there is none.

    Args:
        sweep: one with a shipped model and budgets of tokens.
        larger_than: parameters without embeddings, of the largest model that has been swept.
    """
    plan = sweep.plan
    model = plan.settings.model
    sizes = {name: each.parameters_of_layers for name, each in MODEL_PRESETS.items()}
    larger = {name: size for name, size in sizes.items() if size and size > larger_than}
    if model.parameters_of_layers is None or not larger:
        return None
    following = min(larger, key=larger.__getitem__)
    changes = {
        "model": following,
        "vocabulary": model.vocabulary,
        "context": model.context,
        "budget": [str(of_budget.plan.budget_tokens) for of_budget in sweep.by_budget],
        "batches": "auto",
        "out": _Search(sweep).free_out(following),
    }
    with contextlib.suppress(SweepError):
        return command_with(plan, **changes)
    return None


class _Search:
    """Tries commands in the order of what they must settle first."""

    def __init__(self, sweep: SweepTables) -> None:
        self.sweep = sweep
        self.plan = sweep.plan
        self.lr = tuned_lr(self.plan)
        self.records = read_records(sweep)
        self.seconds_per_token = _seconds_per_token(sweep, self.records)

    def tune(self) -> NextStep:
        """Propose to tune the rate at each batch size."""
        sizes = self.sweep.batch_sizes
        if self.has_missed_budget():
            return self._step(self._elsewhere(sizes))
        return self._step(propose_tuning(self.plan, sizes, self.free_out(), **self.own_out()))

    def settle(self, tuned: TunedResults) -> NextStep:
        """Propose what a sweep with tuned rates needs."""
        rows = self._tuned_rows() if tuned.answers else self.plan.trials
        sizes = sorted({row.batch_size for row in rows})
        step = self._repeat_with_common_tokens(sizes, tuned)
        if step is None:
            step = self._resume(sizes)
        if step is None and self.has_missed_budget():
            step = self._step(self._elsewhere(sizes))
        if step is None:
            step = self._tune_again(sizes, tuned)
        if step is None and not tuned.is_settled:
            step = self._add_trials(sizes)
        if step is None and tuned.is_open:  # what `which` does not ask about may still be decided
            step = self._add_trials(sizes, answer="order")
        if step is not None:
            return step

        if tuned.is_settled:
            step = self._check_command()
            return self._extend(sizes, tuned) if step is None else step
        reason = self._reason(tuned)
        step = self._check_command(reason)
        return NextStep(reason=reason) if step is None else step

    def _repeat_with_common_tokens(
        self, sizes: Sequence[int], tuned: TunedResults
    ) -> NextStep | None:
        """Propose a new sweep if the tokens of these batch sizes differ, which allows no claim."""
        if self._has_common_tokens(sizes) and tokens_differ.__name__ not in tuned.codes:
            return None
        changes = {
            "batches": list(sizes),
            "lr": self.lr,
            "seeds": "auto",
            **common_tokens(self.plan, sizes),
            "out": self.free_out(),
        }
        return self._step(propose(self.plan, changes, is_elsewhere=True))

    def _has_common_tokens(self, sizes: Sequence[int]) -> bool:
        plan = self.plan
        if plan.settings.target is not None or plan.token_budget is None:
            return True  # as far as the comparison needs it
        all_sizes = {*sizes, *self.sweep.batch_sizes}
        tokens, _ = tokens_per_trial(plan.token_budget, all_sizes, plan.tokens_per_sequence)
        different_tokens = {tokens[size] for size in sizes}
        return plan.can_compare(different_tokens)

    def _resume(self, sizes: Sequence[int]) -> NextStep | None:
        """Propose the same command if trials are open, or a batch size has no rate yet."""
        rows = self._tuned_rows()
        finals = [row for row in rows if row.stage == "final"]
        open_ids = {str(r.row.id) for r in self.records if r.is_open and r.row in rows}
        optimizers = {row.optimizer for row in rows}
        arms = {Arm(optimizer, size) for optimizer, size in product(optimizers, sizes)}
        without_finals = arms - {row.arm for row in finals}
        if not open_ids and all(map(self._has_no_rate, without_finals)):
            return None

        most = max((row.seed + 1 for row in finals), default=LEAST_SEEDS)
        seeds = "auto" if self.plan.has_looks or most < LEAST_SEEDS else most
        for count in dict.fromkeys([seeds, "auto"]):
            changes = {
                "batches": list(sizes),
                "lr": self.lr,
                "seeds": count,
                **self.own_out(),
            }
            proposal = propose(self.plan, changes)
            if open_ids <= proposal.requested:
                return self._step(proposal)
        return None

    def has_missed_budget(self) -> bool:
        """Return True if trainings did not take the budget of time; only a new sweep can.

        The tokens of a sweep are fixed.
        """
        budget = self.plan.settings.time_budget_seconds
        if budget is None:
            return False
        seconds: dict[tuple[str, Arm], list[float]] = {}
        for record in self.records:
            row = record.row
            if row.stage == "final" and record.value is not None and record.time is not None:
                seconds.setdefault((row.policy, row.arm), []).append(record.time.seconds)
        return any(misses_budget(median(times), budget) for times in seconds.values())

    def _has_no_rate(self, arm: Arm) -> bool:
        """Return True if the search of a batch size has ended without a trial that completed."""
        records = [
            record
            for record in self.records
            if record.row.stage == "tune" and record.row.arm == arm and record.row.policy == self.lr
        ]
        if not records or any(record.is_open for record in records):
            return False
        values = [record.value for record in records if record.value is not None]
        if any(map(math.isfinite, values)):
            return False
        if self.plan.settings.target is not None:
            return True

        rates = [record.row.learning_rate for record in records if record.row.learning_rate]
        first = first_rates_of(self.plan, parse_policy(self.lr), arm, self._values_of_tuning())
        lowest_of_search = min(first.rates) / 2.0**EXTENSIONS * ROUNDING
        return min(rates, default=math.inf) <= lowest_of_search

    def _values_of_tuning(self) -> dict[Arm, dict[float, float]]:
        """Return the values of the trials of the searches, by arm and rate."""
        by_id = {
            record.row.id: math.nan if record.value is None else record.value
            for record in self.records
        }
        values: dict[Arm, dict[float, float]] = {}
        for arm in dict.fromkeys(record.row.arm for record in self.records):
            for row in self.plan.searched(self.lr, arm):
                if row.learning_rate is not None:
                    values.setdefault(arm, {})[row.learning_rate] = by_id.get(row.id, math.nan)
        return values

    def _tune_again(self, sizes: Sequence[int], tuned: TunedResults) -> NextStep | None:
        """Propose a new search, around other rates or on the tokens of the final trials."""
        changes = dict[str, Any]()
        is_at_edge = learning_rate_at_edge.__name__ in tuned.codes
        is_early = any(not rate.is_full for rate in tuned.rates)
        if is_at_edge and not all(rate.is_inside for rate in tuned.rates):
            centre = self._other_centre(tuned.rates)
            changes["tune_centre"] = f"{centre:.3g}"
        if is_early:
            changes["tune_budget"] = self.plan.token_budget
        if is_at_edge or is_early:
            return self._step(self._elsewhere(sizes, **changes))
        return None

    def _other_centre(self, rates: Sequence[TunedRate]) -> float:
        """Return a centre for a grid around the best rates that are at an end of theirs."""
        settings = self.plan.settings
        at_lowest = list[float]()
        at_highest = list[float]()
        for rate in rates:
            if rate.is_inside:
                continue
            measured = rate.trials.dropna(subset="value")["learning_rate"]
            if rate.best is not None and math.isclose(rate.best, measured.max()):
                at_highest.append(rate.best)
            elif rate.best is not None:
                at_lowest.append(rate.best)
            elif settings.target is None:
                at_lowest.append(float(rate.trials["learning_rate"].min()))
            else:
                raise SweepError(
                    f"No rate reached the target at batch size {rate.batch_size}. Raise "
                    "--target or --budget, in another --out."
                )

        if settings.optimizers:
            raise SweepError(
                "The best rates of some optimizers are at an end of those tried. Set their "
                "centres in [tuning] of an experiment file, in another --out."
            )
        if bool(at_lowest) == bool(at_highest):
            raise SweepError(
                "The best rates are at the lowest end of those tried at some batch sizes and at "
                "the highest at others. Tune these batch sizes apart, each with its own "
                "--tune-centre and --out."
            )
        return max(at_highest) if at_highest else min(at_lowest)

    def _add_trials(self, sizes: Sequence[int], **others: Any) -> NextStep | None:
        """Propose `--seeds auto`, with a higher limit if the sweep has reached its own."""
        answer = self.plan.settings.answer
        limits = [answer.max_seeds, min(2 * answer.max_seeds, LOOKS[-1]), LOOKS[-1]]
        for limit in dict.fromkeys(limits):
            changes = {
                **others,
                "batches": list(sizes),
                "lr": self.lr,
                **self.own_out(),
                "seeds": "auto",
            }
            if limit > answer.max_seeds:
                changes["max_seeds"] = limit
            proposal = propose(self.plan, changes)
            trials = proposal.trials_to_run(self.records, self.sweep.timing)
            if not trials:
                continue

            seconds = self._seconds(trials)
            needed = 0.0 if seconds is None else seconds / 3600
            least_hours = max(needed, LEAST_HOURS / 10)
            if answer.max_hours is not None and answer.max_hours < least_hours:
                hours = max(needed, LEAST_HOURS)
                proposal = propose(self.plan, {**changes, "max_hours": f"{hours:.2g}"})
            return self._step(proposal)
        return None

    def _extend(self, sizes: Sequence[int], tuned: TunedResults) -> NextStep:
        """Propose a smaller or a larger batch size if the best one may be at an end."""
        candidates = {*chain.from_iterable(answer.candidates for answer in tuned.answers)}
        added = []
        if sizes[0] in candidates and sizes[0] > 1:
            added.append(sizes[0] // 2)
        if sizes[-1] in candidates:
            added.append(2 * sizes[-1])

        reasons = []
        for size in added:
            try:
                return self._step(self._with_batch_size(sizes, size))
            except SweepError as error:
                reasons.append(str(error))
        return NextStep(reason=" ".join(dict.fromkeys(reasons)))

    def _with_batch_size(self, sizes: Sequence[int], added: int) -> Proposal:
        plan = self.plan
        steps = LEAST_STEPS  # with a budget of time, its steps are not known yet
        if plan.token_budget is not None:
            steps = Course.of_settings(plan.settings, added, plan.token_budget).steps
        if steps < LEAST_STEPS:
            raise SweepError(
                f"Batch size {added} would take {steps} steps at this budget, which are too few. "
                "Compare it at a larger --budget, in another --out."
            )
        self._refuse_untimed_size(added)
        batches = sorted([*sizes, added])
        changes = {
            "batches": batches,
            "lr": self.lr,
            "seeds": "auto",
            "timing": None,  # a file that fixed the tokens of the others lacks this one
            **self.own_out(),
        }
        try:
            proposal = propose(self.plan, changes)
        except SweepError:  # for example because the tokens of the others would change
            return self._elsewhere(batches)
        rows = [row for row in proposal.plan.trials if row.stage == "final"]
        tokens = {row.tokens for row in rows if row.policy == self.lr}
        if not plan.can_compare(tokens):
            return self._elsewhere(batches)
        return proposal

    def _refuse_untimed_size(self, added: int) -> None:
        """Refuse to add a batch size whose steps the command could not time."""
        if self.plan.token_budget is not None or not self.plan.commands:
            return
        _, flags = parse_command(self.plan.commands[-1])
        if "executor" in flags:  # trials may run on other machines
            raise SweepError(
                f"Batch size {added} may be better. Time its steps with those of the others where "
                "they run (sweep time), and give the file as --timing."
            )

    def _elsewhere(self, sizes: Sequence[int], **changes: Any) -> Proposal:
        """Propose a new sweep, with a budget that all batch sizes use up."""
        plan = self.plan
        if plan.needs_common_tokens:
            common = common_tokens(plan, sizes)
            is_other = common["budget"] != plan.token_budget and not plan.tokens_are_common
            added = set(sizes) - set(self.sweep.batch_sizes)
            if is_other or added:
                changes = {**common, **changes}
        changes = {
            "batches": list(sizes),
            "lr": self.lr,
            "seeds": "auto",
            **changes,
            "out": self.free_out(),
        }
        return propose(plan, changes, is_elsewhere=True)

    def _check_command(self, reason: str = "") -> NextStep | None:
        """Propose `sweep check` for a command that was not checked."""
        if not self.plan.settings.workload.is_program or self.sweep.checked.get("checks"):
            return None
        command = check_of_command(self.plan, **self.own_out())
        if command is None:
            return None
        return NextStep(command, reason=reason)

    def _reason(self, tuned: TunedResults) -> str:
        """Return sentences about what would settle the answer, although no command can."""
        sentences = []
        equal = self._equal_seeds()
        if equal:
            sizes = join(equal)
            sentences.append(
                f"All seeds gave the same result at batch size {sizes}. Let the training draw its "
                "random numbers from the seed, in another --out."
            )
        for check in tuned.blocking:
            if check.code != single_seed.__name__ or not equal:
                sentences.append(check.remedy)
        if sentences:
            return " ".join(dict.fromkeys(sentences))

        rows = [*chain.from_iterable(answer.batch_sizes for answer in tuned.answers)]
        undecided = sorted({r.batch_size for r in rows if r.tolerance_verdict == UNDECIDED})
        if undecided and tuned.is_open:
            seeds = min(row.seeds for row in rows if row.batch_size in undecided)
            subject = f"batch size {join(undecided)}"
            if seeds >= LOOKS[-1]:
                why = f"{subject} has {seeds} seeds, the most that the intervals are made for"
            else:
                cause = "its learning rate"
                if any(answer.pursues == "time" for answer in tuned.answers):
                    cause += " or its time"
                elif self.plan.has_unequal_amounts:
                    cause += " or its time" if self.plan.token_budget is None else " or its tokens"
                why = f"more seeds cannot decide about {subject}, because of {cause}"
            answer = tuned.answers[0]
            tolerance = answer.compared.write(answer.tolerance)
            return (
                f"No further trainings settle this: {why}. A tolerance above {tolerance} "
                "(--tolerance) may be decided, or a larger --budget, in another --out."
            )
        if tuned.answers:
            return "No further trainings settle this. Try a larger --budget, in another --out."
        return (
            "Fewer than two batch sizes have results that can be compared. Lower the learning "
            "rates (--tune-centre), in another --out."
        )

    def _equal_seeds(self) -> list[int]:
        """Return the batch sizes at which several seeds gave one result."""
        values: dict[Arm, list[float]] = {}
        for record in self.records:
            row = record.row
            if row.stage != "final" or row.policy != self.lr:
                continue
            if record.value is not None and math.isfinite(record.value):
                values.setdefault(row.arm, []).append(record.value)

        equal = set()
        for arm, of_seeds in values.items():
            if len(of_seeds) >= LEAST_SEEDS and len({*of_seeds}) == 1:
                equal.add(arm.batch_size)
        return sorted(equal)

    def _tuned_rows(self) -> list[PlannedTrial]:
        return [row for row in self.plan.trials if row.policy == self.lr]

    def own_out(self) -> dict[str, Any]:
        """Return a change of --out if the recorded one is not this folder any more."""
        recorded = Path(recorded_out(self.plan))
        folder = SweepFolder(self.sweep.path)
        if folder.is_published:  # a copy of results, without the folders of trials
            return {}

        is_own = recorded.name == folder.path.resolve().name
        if is_own and recorded.exists():  # else the command ran in another folder than this one
            with contextlib.suppress(SweepError):
                stored = load_plan(SweepFolder(recorded))
                is_own = stored is None or stored.sweep_uid == self.plan.sweep_uid
        return {} if is_own else {"out": str(folder.path)}

    def free_out(self, question: str = "") -> str:
        """Return a folder for a new sweep, next to this one; another question has its own name."""
        out = self.own_out().get("out")
        if out is None:
            out = recorded_out(self.plan)
        name = self.sweep.path.resolve().name
        start = f"-{question}" if question else ""
        end = start
        number = 2
        while not end or self.sweep.path.with_name(name + end).exists():
            end = f"{start}-{number}"
            number += 1
        return f"{out}{end}"

    def folder_to_name(self) -> str:
        """Return this folder as its commands name it."""
        return str(self.own_out().get("out", recorded_out(self.plan)))

    def _step(self, proposal: Proposal) -> NextStep:
        trials = proposal.trials_to_run(self.records, self.sweep.timing)
        if not trials:
            raise SweepError("The same command would train nothing more.")
        return NextStep(
            command=proposal.command,
            seconds=self._seconds(trials),
            reason=_about_secrets(self.plan),
            trials=tuple(trials),
        )

    def _seconds(self, trials: Sequence[PlannedTrial]) -> float | None:
        """Return the least time of trials."""
        total = 0.0
        for row in trials:
            seconds_per_token = self._seconds_per_token_like(row)
            if seconds_per_token is None:
                return None
            seconds = row.tokens * seconds_per_token
            if not row.tokens:  # they are not known yet, but their time
                seconds = self.plan.settings.time_budget_seconds or 0.0
            total += seconds
        return total

    def _seconds_per_token_like(self, row: PlannedTrial) -> float | None:
        """Return the time of the most similar arm that was measured; None if there is none."""

        def distance(arm: Arm) -> tuple[bool, float]:
            has_other_optimizer = arm.optimizer != row.optimizer
            return has_other_optimizer, abs(math.log(arm.batch_size / row.batch_size))

        if not self.seconds_per_token:
            return None
        nearest = min(self.seconds_per_token, key=distance)
        return self.seconds_per_token[nearest]


def _seconds_per_token(sweep: SweepTables, records: Sequence[TrialRecord]) -> dict[Arm, float]:
    """Return the median time of complete trials over their planned tokens.

    While several share a device, each takes its part of the time.
    """
    seconds = sweep.trials.set_index("id")["seconds_total"].astype(float)
    seconds /= sweep.plan.execution.trials_at_once
    measured: dict[Arm, list[float]] = {}
    for record in records:
        time = float(seconds[str(record.row.id)])
        if record.state is State.COMPLETE and math.isfinite(time):
            measured.setdefault(record.row.arm, []).append(time / record.row.tokens)
    return {arm: float(pd.Series(times).median()) for arm, times in measured.items()}


def _about_secrets(plan: Plan) -> str:
    if not plan.unrecorded:
        return ""
    flags = join(f"--{name.replace('_', '-')}" for name in plan.unrecorded)
    return f"Also give {flags} as before: addresses with a password or a token are not recorded."
