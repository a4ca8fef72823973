"""Studies of a tuned sweep: their trials, read from the folders, and Optuna's part in them.

Optuna proposes the values of new trials and stores one study per batch size. The trial folders are
the source of truth: a study that lacks trials is brought up to date from them.
"""

import math
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState

from sweep.errors import SweepError
from sweep.plan.plan import Plan, PlannedTrial
from sweep.plan.rates import EXTENSIONS, Tried, neighbours
from sweep.tracking.store import ANSWER_SECONDS, one_sentence, with_driver, without_password
from sweep.trial.files import read_metrics
from sweep.trial.folder import Cause, State, SweepFolder

SAMPLER_SEED = 1000
FACTOR = 8.0  # range of β2's half-life and of weight decay, around the policy's values
BEYOND = 2.0 ** (EXTENSIONS + 3)  # range of rates, around the grid
TRIAL_ID = "sweep.trial_id"
LOCK = 5_000_000  # key of an advisory lock, the same for every sweep


@dataclass(frozen=True)
class TuningTrial(Tried):
    """A tuning trial: its row of the plan, and its state according to its folder."""

    row: PlannedTrial
    is_pruned: bool  # at a rung
    at_rungs: tuple[tuple[int, float], ...]  # step and validation loss at each rung so far

    @property
    def id(self) -> str:
        return str(self.row.id)


def read_tuning_trial(
    sweep: SweepFolder, row: PlannedTrial, rungs: tuple[int, ...], target: float | None
) -> TuningTrial:
    """Read a tuning trial with what tuning minimizes: its final loss, or tokens to the target.

    If a trial did not reach the target, its tokens are more than were trained, and they grow with
    the distance to the target, which tells the search where to continue.
    """
    folder = sweep.trial(str(row.id))
    status, result = folder.read_status(), folder.read_result() or {}
    points: dict[int, tuple[int, float]] = {}  # tokens and loss of each evaluation, by step
    for line in read_metrics(folder.metrics_path):
        if "valid/loss" in line:
            loss = line["valid/loss"]
            points[line["step"]] = line["tokens"], math.inf if loss is None else float(loss)
    is_diverged = status.cause is Cause.DIVERGED
    minimized: float | None = math.inf  # diverged, or pruned at a rung
    if not status.state.is_finished or (status.state is State.FAILED and not is_diverged):
        minimized = None  # it will be tried again
    elif target is not None and not is_diverged:
        tokens, last = points[max(points)] if points else (1, math.inf)
        minimized = result.get("tokens_to_target") or tokens * (1 + max(0.0, last - target))
    elif status.state is State.COMPLETE:
        minimized = float(result["final_valid_loss"])
    return TuningTrial(
        rate=float(row.learning_rate or 0.0),
        loss=minimized,
        row=row,
        is_pruned=status.state is State.PRUNED and target is None,
        at_rungs=tuple((step, points[step][1]) for step in rungs if step in points),
    )


@dataclass(frozen=True)
class Study:
    """The tuning trials of one batch size at one token count."""

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

    def propose(self, plan: Plan, rates: Sequence[float]) -> list[PlannedTrial]:
        """Plan the next trials.

        The rates are enqueued, with the policy's values in the other dimensions. Without rates,
        TPE samples one trial from the finished ones.
        """
        space, trials = self._in_optuna()
        sampler = TPESampler(seed=SAMPLER_SEED + len(trials), n_startup_trials=0)
        study = optuna.create_study(sampler=sampler)
        study.add_trials(trials)
        for rate in rates:
            study.enqueue_trial({**dict.fromkeys(space, 1.0), "learning_rate": rate})
        rows = []
        for _ in range(max(1, len(rates))):
            values = study.ask(space).params
            tuned = {
                "beta2": self.template.beta2 ** (1 / values.get("beta2", 1.0)),
                "weight_decay": self.template.weight_decay * values.get("weight_decay", 1.0),
            }
            rows.append(plan.with_rate(self.template, values["learning_rate"], **tuned))
        return rows

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
        low, high = min(self.grid) / BEYOND, max(self.grid) * BEYOND
        factor = FloatDistribution(1 / FACTOR, FACTOR, log=True)
        space = {"learning_rate": FloatDistribution(low, high, log=True)}
        space |= dict.fromkeys(self.extra, factor)
        beta2, decay, trials = self.template.beta2, self.template.weight_decay, []
        for trial in (trial for trial in self.trials if trial.loss is not None):
            values = {"learning_rate": trial.rate}
            if "beta2" in space:
                values["beta2"] = math.log(beta2) / math.log(trial.row.beta2)
            if "weight_decay" in space:
                values["weight_decay"] = trial.row.weight_decay / decay if decay else 1.0
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


def named_trials(study: optuna.Study) -> dict[str, FrozenTrial]:
    """Return a study's trials by the id of the sweep's trial; of several the newest."""
    return {trial.user_attrs[TRIAL_ID]: trial for trial in study.get_trials(deepcopy=False)}


def open_storage(url: str) -> BaseStorage:
    """Open a database of studies, which holds no connection while trials run."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    os.environ.setdefault("PGCONNECT_TIMEOUT", ANSWER_SECONDS)
    address, url = without_password(url), with_driver(url)
    pool = {"poolclass": sqlalchemy.NullPool}
    try:
        with sqlalchemy.create_engine(url, **pool).begin() as connection:
            if url.startswith("postgresql"):  # Optuna cannot create its tables twice at once
                lock = sqlalchemy.func.pg_advisory_xact_lock(LOCK)
                connection.execute(sqlalchemy.select(lock))
            tables = sqlalchemy.inspect(connection).get_table_names()
            if "alembic_version" in tables and "studies" not in tables:
                raise ValueError("Optuna needs a database of its own, but MLflow may use this one")
            return get_storage(RDBStorage(url, pool))
    except Exception as error:  # databases, drivers and addresses raise anything
        raise SweepError(
            f"storage must be a database that Optuna can use, got {address!r} "
            f"({one_sentence(error)}). Correct --storage."
        ) from error


def is_without_answer(error: BaseException | None) -> bool:
    """Return True if an error means that a database server does not answer at the moment."""
    while error is not None:
        if isinstance(error, sqlalchemy.exc.OperationalError | sqlalchemy.exc.InterfaceError):
            return not isinstance(error.orig, sqlite3.Error)
        error = error.__cause__
    return False
