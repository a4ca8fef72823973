"""Optuna studies of a tuned sweep, one per batch size.

The trial folders are the source of truth: a study that was lost, or is behind, is brought up to
date from them.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from sweep.errors import SweepError
from sweep.plan.tuning import EXTENSIONS, Search, TuningResult, next_rates
from sweep.tracking.store import ANSWER_SECONDS, one_sentence, with_driver, without_password

SAMPLER_SEED = 1000
FACTOR = 8.0  # range of β2's half-life and of weight decay, around the policy's values
BEYOND = 2.0 ** (EXTENSIONS + 3)  # range of rates, around the grid
TRIAL_ID = "sweep.trial_id"
LOCK = 5_000_000  # key of the advisory lock, the same for every sweep


def search_space(search: Search) -> dict[str, BaseDistribution]:
    """Return the dimensions of a search: the rate itself, and factors for the others."""
    low, high = min(search.grid) / BEYOND, max(search.grid) * BEYOND
    factor = FloatDistribution(1 / FACTOR, FACTOR, log=True)
    rate = FloatDistribution(low, high, log=True)
    return {"learning_rate": rate, **dict.fromkeys(search.extra, factor)}


def named_trials(study: Study) -> dict[str, FrozenTrial]:
    """Return a study's trials by the id of the sweep's trial; of several the newest."""
    trials = study.get_trials(deepcopy=False)
    return {t.user_attrs[TRIAL_ID]: t for t in trials if t.user_attrs.get(TRIAL_ID)}


class RateStudy:
    """One study.

    Args:
        search: what it looks for.
        storage: an open one.
    """

    def __init__(self, search: Search, storage: BaseStorage) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.search = search
        self.study = optuna.create_study(
            storage=storage,
            study_name=search.name,
            direction="minimize",
            load_if_exists=True,
        )
        self._live: dict[str, Trial] = {}  # started by this process, which can report on them

    def suggest(
        self,
        results: Mapping[str, TuningResult],
        wanted: int,
        name: Callable[[dict[str, float]], str],
    ) -> None:
        """Start the next trials of the study, if it has not settled.

        The rates of the grid, beyond its edges and between neighbours are enqueued; with several
        dimensions TPE samples after the grid.

        Args:
            results: of the trials so far, by id.
            wanted: least number of trials.
            name: called with each new trial's values; returns its id.
        """
        search, number = self.search, len(results)
        if search.extra and number >= len(search.grid):
            if number < max(search.trials, wanted):
                self.study.sampler = TPESampler(seed=SAMPLER_SEED + number, n_startup_trials=0)
                trial = self.study.ask(search_space(search))
                self._note(name(dict(trial.params)), trial)
            return
        for rate in next_rates(results.values(), search.grid, search.finest, wanted):
            values = {"learning_rate": rate, **dict.fromkeys(search.extra, 1.0)}
            self.study.enqueue_trial(values)
            self._note(name(values), self.study.ask(search_space(search)))

    def _note(self, trial_id: str, trial: Trial) -> None:
        trial.set_user_attr(TRIAL_ID, trial_id)
        self._live[trial_id] = trial

    def update(self, results: Mapping[str, TuningResult]) -> None:
        """Bring the study up to date with the trial folders.

        Args:
            results: of every planned trial, by id.
        """
        stored = named_trials(self.study)
        for trial in self.study.get_trials(deepcopy=False):
            if trial.state is TrialState.WAITING:
                self.study.ask(search_space(self.search))  # enqueued by a command that was killed
            if not trial.state.is_finished() and trial.user_attrs.get(TRIAL_ID) not in results:
                self.study.tell(trial.number, state=TrialState.FAIL)
        for trial_id, result in results.items():
            known = stored.get(trial_id)
            if known is None or (known.state.is_finished() and not _agrees(known, result)):
                self._add(trial_id, result)
            elif not known.state.is_finished():
                self._tell(trial_id, known, result)

    def _tell(self, trial_id: str, trial: FrozenTrial, result: TuningResult) -> None:
        if live := self._live.get(trial_id):
            for step, loss in result.at_rungs:
                if step not in trial.intermediate_values:
                    live.report(loss, step)
        if result.is_pruned:
            self.study.tell(trial.number, state=TrialState.PRUNED)
        elif result.loss is not None:
            self.study.tell(trial.number, result.loss)

    def _add(self, trial_id: str, result: TuningResult) -> None:
        """Add a trial that the study has lost, or that ran again."""
        state = TrialState.COMPLETE if result.loss is not None else TrialState.RUNNING
        state = TrialState.PRUNED if result.is_pruned else state
        self.study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=result.loss if state is TrialState.COMPLETE else None,
                params=result.values,
                distributions=search_space(self.search),
                user_attrs={TRIAL_ID: trial_id},
                intermediate_values=dict(result.at_rungs),
            )
        )


def _agrees(trial: FrozenTrial, result: TuningResult) -> bool:
    """Return True if a finished trial of a study has the result of its folder."""
    if result.is_pruned:
        return trial.state is TrialState.PRUNED
    return trial.state is TrialState.COMPLETE and trial.value == result.loss


def default_storage(folder: Path) -> str:
    """Return the URL of optuna.db in a sweep folder."""
    return f"sqlite:///{(folder / 'optuna.db').absolute()}"


def open_storage(url: str) -> BaseStorage:
    """Open a database of studies. It holds no connection while trials run.

    Raises:
        SweepError: if Optuna cannot use it.
    """
    shown, url = without_password(url), with_driver(url)
    os.environ.setdefault("PGCONNECT_TIMEOUT", ANSWER_SECONDS)
    try:
        with _locked(url, shown):
            return get_storage(RDBStorage(url, {"poolclass": sqlalchemy.NullPool}))
    except SweepError:
        raise
    except Exception as error:  # databases, drivers and addresses raise anything
        raise SweepError(
            f"storage must be a database that Optuna can use, got {shown!r} "
            f"({one_sentence(error)}). Correct --storage."
        ) from error


@contextlib.contextmanager
def _locked(url: str, shown: str) -> Iterator[None]:
    """Let other sweeps wait, because Optuna fails if several create its tables at once."""
    if not url.startswith("postgresql"):
        yield
        return
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(LOCK)))
        tables = sqlalchemy.inspect(connection).get_table_names()
        if "alembic_version" in tables and "studies" not in tables:
            raise SweepError(
                f"storage must be a database of its own, got {shown!r}, which has the tables of "
                "another program, such as MLflow. Create another one for --storage."
            )
        yield


def is_without_answer(error: BaseException | None) -> bool:
    """Return True if an error means that a database server does not answer at the moment."""
    while error is not None:
        if isinstance(error, sqlalchemy.exc.OperationalError | sqlalchemy.exc.InterfaceError):
            return not isinstance(error.orig, sqlite3.Error)
        error = error.__cause__
    return False
