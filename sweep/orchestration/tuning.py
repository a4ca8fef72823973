"""Tune the rates of a sweep in rounds, then plan the final trials on fresh seeds.

Each round is decided from the plan and the trial folders while no trial runs, so that an
interrupted sweep continues as if it had not been interrupted. Optuna proposes the values of new
trials and shows one study per batch size and optimizer.
"""

import logging
import math
import os
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState

from sweep.config.arms import Arm
from sweep.decision.first_rates import Values, first_rates_of, points_of_search
from sweep.decision.rates import rates_to_use, stack_points
from sweep.errors import causes_of
from sweep.orchestration.looks import trial_value
from sweep.orchestration.schedule import Scheduler
from sweep.orchestration.status import is_complete
from sweep.plan.plan import TUNING_SEED, Plan, PlannedTrial
from sweep.plan.policies import Policy
from sweep.plan.rate_search import (
    CONFIRMATION,
    EXTENSIONS,
    RateTrial,
    best_of,
    is_in,
    neighbours,
    next_rates,
    rung_steps,
    survivors,
)
from sweep.plan.retry import is_to_run
from sweep.tracking import store
from sweep.tracking.addresses import sqlite_address, sqlite_path, with_driver
from sweep.trial.files import sha256_of
from sweep.trial.folder import TrialFolder
from sweep.trial.status import Cause, State, has_failed

LOG = logging.getLogger(__name__)
Pauses = dict[str, int | None]  # the step that each trial runs to, by id; None: the last
FACTOR = 8.0  # range of β2's half-life and of weight decay, around the policy's values
BEYOND = 2.0 ** (EXTENSIONS + 3)  # range of rates, around the grid
TRIAL_ID = "sweep.trial_id"


@dataclass(frozen=True)
class TuningTrial(RateTrial):
    """A tuning trial: its row of the plan, and its state according to its folder."""

    row: PlannedTrial
    value: float | None  # its `trial_value`
    is_pruned: bool  # at a rung
    at_rungs: tuple[tuple[int, float], ...]  # step and value at each rung so far

    @property
    def id(self) -> str:
        return str(self.row.id)


@dataclass(frozen=True)
class Study:
    """The tuning trials of one arm at one token count."""

    name: str  # in Optuna's storage
    template: PlannedTrial  # a tuning trial of any rate, with the policy's β2 and weight decay
    grid: tuple[float, ...]  # the first rates
    finest: float  # ratio of neighbouring rates at which refinement ends
    extra: tuple[str, ...]  # dimensions other than the rate: beta2, weight_decay
    rungs: tuple[int, ...]  # steps at which trials of the grid are compared
    trials: list[TuningTrial]

    def bounds(self) -> list[TuningTrial]:
        """Return the trials next to the best finished one, which must run to the end."""
        return neighbours(self.trials) if self.trials and not self.extra else []

    def propose(self, plan: Plan) -> PlannedTrial:
        """Plan the trial that Optuna's TPE suggests after the finished ones."""
        space, trials = self._in_optuna()
        sampler = TPESampler(seed=1000 + len(trials), n_startup_trials=0)
        study = optuna.create_study(sampler=sampler)
        study.add_trials(trials)

        values = study.ask(space).params
        tuned = {
            "beta2": self.template.beta2 ** (1 / values.get("beta2", 1.0)),
            "weight_decay": self.template.weight_decay * values.get("weight_decay", 1.0),
        }
        return plan.with_rate(self.template, values["learning_rate"], **tuned)

    def record(self, storage: BaseStorage) -> None:
        """Add finished trials that the storage lacks, or that ended differently when run again."""
        study = optuna.create_study(storage=storage, study_name=self.name, load_if_exists=True)
        stored = named_trials(study)
        for trial in self._in_optuna()[1]:
            old = stored.get(trial.user_attrs[TRIAL_ID])
            if old is None or (old.state, old.value) != (trial.state, trial.value):
                study.add_trial(trial)

    def _in_optuna(self) -> tuple[dict[str, BaseDistribution], list[FrozenTrial]]:
        """Return the dimensions, the rate and factors on other values, and the finished trials."""
        low = min(self.grid) / BEYOND
        high = max(self.grid) * BEYOND
        space = {"learning_rate": FloatDistribution(low, high, log=True)}
        factor = FloatDistribution(1 / FACTOR, FACTOR, log=True)
        space |= dict.fromkeys(self.extra, factor)

        trials = []
        for trial in self.trials:
            if trial.loss is None:
                continue
            values = {"learning_rate": trial.rate, **self._factors(trial.row)}
            for name, value in values.items():  # rounding may lead out of the range
                values[name] = min(max(value, space[name].low), space[name].high)
            trials.append(
                optuna.trial.create_trial(
                    state=TrialState.PRUNED if trial.is_pruned else TrialState.COMPLETE,
                    value=None if trial.is_pruned else trial.loss,
                    params=values,
                    distributions={**space},
                    user_attrs={TRIAL_ID: trial.id},
                    intermediate_values=dict(trial.at_rungs),
                )
            )
        return {**space}, trials

    def _factors(self, row: PlannedTrial) -> dict[str, float]:
        """Return a row's half-life of β2 and weight decay, as multiples of the template's."""
        factors = {}
        if "beta2" in self.extra:
            factors["beta2"] = math.log(self.template.beta2) / math.log(row.beta2)
        if "weight_decay" in self.extra:
            decay = self.template.weight_decay
            factors["weight_decay"] = row.weight_decay / decay if decay else 1.0
        return factors


class Tuning:
    """Decides the rounds of a tuned sweep."""

    def __init__(
        self, plan: Plan, policy: Policy, schedule: Scheduler, storage: str | None
    ) -> None:
        self.policy = policy
        self.schedule = schedule
        self.folder = schedule.folder
        self.settings = plan.settings.tuning
        self.target = plan.settings.target
        self.objective = plan.settings.objective

        self.is_default = storage is None  # a file in the folder
        default_url = sqlite_address(self.folder.path / "optuna.db")
        self.storage_url = storage if storage else default_url

        self.open_finals: dict[Arm, list[PlannedTrial]] = {}
        self._awaited: dict[Arm, PlannedTrial] = {}  # tuning trials whose rates are predicted
        for row in plan.trials:
            if row.id is None and row.stage == "final":
                self.open_finals.setdefault(row.arm, []).append(row)
            elif row.id is None:
                self._awaited[row.arm] = row

        self._started: set[str] = set()  # ids that this command has started
        self._is_warned = False

    def next_round(self) -> Pauses:
        """Search rates, confirm winners of an early or joint search, then plan the final trials."""
        searches, pauses = self._advance_searches()
        if pauses:
            return pauses

        best = self._winners(searches, self._values_of_decided().values())
        early = [row for row in best if self._needs_confirmation(row)]
        confirmations = [self._confirmation(row.arm, row) for row in early]
        confirmations = [study for study in confirmations if not self._is_broken(study)]
        for study in confirmations:
            pauses |= self._advance(study)
        if pauses:
            return pauses

        winners = [row for row in best if row not in early]
        winners += self._winners(confirmations)
        plan = self.schedule.plan  # a search adds to it
        rows = []
        for winner in winners:
            waiting = self.open_finals.pop(winner.arm)
            rows += [plan.with_rate_of(winner, row) for row in waiting]
        return self.schedule.add(rows)

    def _needs_confirmation(self, winner: PlannedTrial) -> bool:
        """Return True for a winner of a joint search, or of one with a smaller budget."""
        is_joint = len(self.settings.dimensions) > 1
        return is_joint or winner.tokens < self.open_finals[winner.arm][0].tokens

    def _advance_searches(self) -> tuple[list[Study], Pauses]:
        """Bring the searches a step further; return those that are not broken, and the trials.

        If searches predict rates, the next one of an optimizer starts when the one before it, in
        the order of the plan, has settled: interruptions and the number of trials at once change
        nothing. A broken one does not keep the others waiting, which then begin without it.
        """
        searches = []
        pauses: Pauses = {}
        waiting = set[str | None]()  # optimizers whose searches wait for the one that runs
        values = self._values_of_decided()
        for arm in self.open_finals:
            if arm.optimizer in waiting:
                continue
            study = self._search(arm, values)
            if self._is_broken(study):
                continue
            searches.append(study)
            values[arm] = _values_of(study.trials)
            started = self._advance(study)
            pauses |= started
            if started and self.settings.predicts_rates:
                waiting.add(arm.optimizer)
        return searches, pauses

    def _values_of_decided(self) -> dict[Arm, Values]:
        """Return the values of the searches of arms whose rates are decided."""
        plan = self.schedule.plan
        tuned = dict.fromkeys(row.arm for row in plan.tuned_once(self.policy.name))
        values: dict[Arm, Values] = {}
        for arm in tuned:
            if arm in self.open_finals:
                continue
            rows = plan.searched(self.policy.name, arm)
            trials = [self._read_trial(row, ()) for row in rows]
            values[arm] = _values_of(trials)
        return values

    def _is_broken(self, study: Study) -> bool:
        """Return True if a trial of the study failed; the next command tries it again."""
        for trial in study.trials:
            if trial.id in self._started:
                status = self.folder.trial(trial.id).read_status()
                if has_failed(status.state, status.cause):
                    return True
        return False

    def _search(self, arm: Arm, values: Mapping[Arm, Values]) -> Study:
        """Return the search of an arm, given the values of those that were searched before."""
        plan = self.schedule.plan
        rows = plan.searched(self.policy.name, arm)
        template = rows[0] if rows else self._awaited[arm]

        # With a target the schedule ends late trials; a command cannot pause.
        rungs: tuple[int, ...] = ()
        if self.settings.prune and self.target is None and plan.settings.workload.can_pause:
            rungs = rung_steps(plan.course(template), plan.settings.evaluation)
        trials = [self._read_trial(row, rungs) for row in rows]
        first = first_rates_of(plan, self.policy, arm, {**values, arm: _values_of(trials)})
        if not first.may_prune:
            rungs = ()
            trials = [replace(trial, at_rungs=()) for trial in trials]
        return Study(
            name=self._study_name(arm, template, "search"),
            template=template,
            grid=first.rates,
            finest=first.finest,
            extra=tuple(name for name in self.settings.dimensions if name != "lr"),
            rungs=rungs,
            trials=trials,
        )

    def _confirmation(self, arm: Arm, winner: PlannedTrial) -> Study:
        """Return a study of a few rates around the winner's, at the tokens of the final trials."""
        values = {"beta2": winner.beta2, "weight_decay": winner.weight_decay}
        final = self.open_finals[arm][0]
        template = final.model_copy(update={"stage": "tune", "seed": TUNING_SEED, **values})
        rate = winner.learning_rate or 0.0
        rows = self.schedule.plan.tuned_once(self.policy.name)
        rows = [row for row in rows if row.arm == arm]
        confirmed = (template.tokens, winner.beta2, winner.weight_decay)
        rows = [row for row in rows if (row.tokens, row.beta2, row.weight_decay) == confirmed]
        return Study(
            name=self._study_name(arm, template, "confirmation"),
            template=template,
            grid=tuple(rate * factor for factor in CONFIRMATION),
            finest=CONFIRMATION[-1],
            extra=(),
            rungs=(),
            trials=[self._read_trial(row, ()) for row in rows],
        )

    def _study_name(self, arm: Arm, template: PlannedTrial, stage: str) -> str:
        plan = self.schedule.plan
        # The uid tells sweeps on two machines apart, the path a folder and its copy.
        path = str(self.folder.path.resolve())
        digest = sha256_of([plan.sweep_uid, path, plan.with_rate(template, 1.0).id])[:8]
        title = f"{arm.label}, {template.tokens} {plan.settings.token_unit}, {stage} {digest}"
        return f"{self.folder.name}: {title}"

    def _read_trial(self, row: PlannedTrial, rungs: tuple[int, ...]) -> TuningTrial:
        """Read a trial and what tuning minimizes: the objective, or tokens to the target."""
        folder = self.folder.trial(str(row.id))
        status = folder.read_status()
        points = self._evaluations(folder)
        value = trial_value(self.folder, row, self.objective)

        minimized = value
        has_ended = not is_to_run(status) and status.cause is not Cause.DIVERGED
        if self.target is not None and has_ended:
            minimized = self._tokens_to_target(folder, points)
        elif has_ended and (value is None or math.isnan(value)):
            minimized = math.inf  # it has no result, and the search goes on without it
        return TuningTrial(
            rate=row.learning_rate or 0.0,
            loss=minimized,
            row=row,
            value=value,
            is_pruned=status.state is State.PRUNED and self.target is None,
            at_rungs=tuple((step, points[step][1]) for step in rungs if step in points),
        )

    def _evaluations(self, folder: TrialFolder) -> dict[int, tuple[int, float]]:
        """Return tokens and loss of each evaluation, by step."""
        points = {}
        for line in folder.find_metrics():
            if self.objective.curve in line:
                loss = line[self.objective.curve]
                loss = math.inf if loss is None else self.objective.sign * float(loss)
                points[line["step"]] = line["tokens"], loss
        return points

    def _tokens_to_target(self, folder: TrialFolder, points: dict[int, tuple[int, float]]) -> float:
        """Return the tokens to the target, or more if it was not reached.

        Without a crossing, the tokens grow with the distance, which guides the search.
        """
        assert self.target is not None
        result = folder.find_result()
        if result is not None and result.tokens_to_target:
            return result.tokens_to_target
        tokens, last_loss = points[max(points)] if points else (1, math.inf)
        return tokens * (1 + max(0.0, last_loss - self.target))

    def _advance(self, study: Study) -> Pauses:
        """Bring a study a step further; return its trials, none once it has settled."""
        self._record(study)
        is_open = any(trial.loss is None for trial in study.trials)
        pauses = self._continue(study) if is_open else self._extend(study)
        self._started |= pauses.keys()
        return pauses

    def _record(self, study: Study) -> None:
        """Write finished trials to Optuna's storage; wait while it is locked or does not answer."""
        while not self.schedule.is_ending:
            try:
                if self.is_default:
                    store.set_aside_damaged(self.folder.path / "optuna.db")
                study.record(open_storage(self.storage_url))
                return
            except Exception as error:
                if not is_without_answer(error):
                    raise
                if not self._is_warned:
                    LOG.warning("Optuna's storage is locked or does not answer. Tuning waits.")
                self._is_warned = True
                time.sleep(2)

    def _continue(self, study: Study) -> Pauses:
        """Run open trials to their next rung; prune the worse half when all have reached it."""
        bounds = study.bounds()
        open_trials = [trial for trial in study.trials if trial.loss is None]
        raced = []
        for trial in open_trials:
            if trial not in bounds and is_in(trial.rate, study.grid):
                raced.append(trial)

        level = min((len(trial.at_rungs) for trial in raced), default=0)  # rungs that all reached
        running = [trial for trial in raced if len(trial.at_rungs) == level]
        if level > 0 and running == raced:
            kept_ids = self._prune(study, raced, level)
            running = [trial for trial in running if trial.id in kept_ids]

        pauses: Pauses = {trial.id: None for trial in open_trials if trial not in raced}
        next_rung = study.rungs[level] if level < len(study.rungs) else None
        for trial in running:
            pauses[trial.id] = next_rung
        return pauses

    def _prune(self, study: Study, raced: list[TuningTrial], level: int) -> set[str]:
        """Prune the raced trials that are worse after `level` rungs; return the ids to keep."""
        losses = {}
        for trial in study.trials:
            if len(trial.at_rungs) >= level:
                _, loss = trial.at_rungs[level - 1]
                losses[trial.id] = trial.rate, loss
        kept_ids = survivors(losses)

        reason = f"pruned at step {study.rungs[level - 1]}: in the worse half of the trials"
        for index, trial in enumerate(study.trials):
            if trial in raced and trial.id not in kept_ids:
                self.schedule.prune(self.folder.trial(trial.id), reason, keep_checkpoint=True)
                study.trials[index] = replace(trial, loss=math.inf, is_pruned=True)
        return kept_ids

    def _extend(self, study: Study) -> Pauses:
        """Add the study's next trials; if it has settled, run its pruned bounds to the end."""
        rows = self._next_rows(study)
        pauses = self.schedule.add(rows)
        if not study.rungs:
            return pauses

        for row in rows:
            if is_in(row.learning_rate or 0.0, study.grid):
                pauses[str(row.id)] = study.rungs[0]
        if not rows:
            for trial in study.bounds():
                if trial.is_pruned:
                    self.schedule.revive(self.folder.trial(trial.id))
                    pauses[trial.id] = None
        return pauses

    def _next_rows(self, study: Study) -> list[PlannedTrial]:
        """Plan what a study tries next: the grid first, then TPE's proposals or a refinement."""
        plan = self.schedule.plan
        if study.extra and len(study.trials) >= len(study.grid):
            if len(study.trials) < self.settings.trials:
                return [study.propose(plan)]
            return []

        rates = next_rates(study.trials, study.grid, study.finest)
        return [plan.with_rate(study.template, rate) for rate in rates]

    def _winners(
        self, studies: list[Study], of_decided: Iterable[Values] = ()
    ) -> list[PlannedTrial]:
        """Return the winners of the studies that have one; remove pruned trials' checkpoints.

        Unless several dimensions were searched, the rate is the one that gives up least in the
        worst case, by the losses near the best one. Earlier searches, whose rates are decided, also
        show the noise.
        """
        won = []
        points = []
        for study in studies:
            row = self._winner(study)
            if row is None:
                continue
            won.append((study, row))
            points.append(points_of_search(_values_of(study.trials)))
        if not won:
            return []

        winners = []
        points += map(points_of_search, of_decided)
        log_rates = rates_to_use(stack_points(points), pools_noise=self.settings.predicts_rates)
        for (study, row), log_rate in zip(won, log_rates[: len(won)], strict=True):
            if not study.extra:
                rate = float(f"{math.exp(log_rate):.3g}")
                row = row.model_copy(update={"learning_rate": rate})
            winners.append(row)
        return winners

    def _winner(self, study: Study) -> PlannedTrial | None:
        """Return the best row, and remove the checkpoints of pruned trials."""
        for trial in study.trials:
            if trial.is_pruned:
                self.folder.trial(trial.id).remove_checkpoints()

        best = best_of(study.trials)
        has_result = best.loss is not None and math.isfinite(best.loss)
        if not has_result or not is_complete(self.folder.trial(best.id), self.target):
            return None
        return best.row


def _values_of(trials: Iterable[TuningTrial]) -> Values:
    """Return values by rate, NaN for those without one."""
    return {trial.rate: math.nan if trial.value is None else trial.value for trial in trials}


def named_trials(study: optuna.Study) -> dict[str, FrozenTrial]:
    """Return a study's newest trial for each id of a trial of the sweep."""
    return {trial.user_attrs[TRIAL_ID]: trial for trial in study.get_trials(deepcopy=False)}


def open_storage(url: str) -> BaseStorage:
    """Open a database of studies, which holds no connection while trials run."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    os.environ.setdefault("PGCONNECT_TIMEOUT", store.ANSWER_SECONDS)
    pool = {"poolclass": sqlalchemy.NullPool}
    sqlite_path(url)  # refuses an address that does more than to name a file
    with (
        store.reading("The database of --storage", url),
        sqlalchemy.create_engine(with_driver(url), **pool).begin() as connection,
    ):
        if url.startswith("postgresql"):  # Optuna cannot create its tables twice at once
            lock = sqlalchemy.func.pg_advisory_xact_lock(5_000_000)
            connection.execute(sqlalchemy.select(lock))
        tables = sqlalchemy.inspect(connection).get_table_names()
        if "alembic_version" in tables and "studies" not in tables:
            raise ValueError("Optuna needs a database of its own, but MLflow may use this one.")
        template = with_driver(url).replace("{", "{{").replace("}", "}}")  # Optuna formats it
        return RDBStorage(template, pool)


def is_without_answer(error: BaseException | None) -> bool:
    """Return True if a database server does not answer, or another process locks the file."""
    if store.sqlite_fault(error) == "locked":
        return True

    server_errors = sqlalchemy.exc.OperationalError | sqlalchemy.exc.InterfaceError
    for cause in causes_of(error):
        if isinstance(cause, server_errors) and not isinstance(cause.orig, sqlite3.Error):
            return True
    return False
