"""Optuna's part in tuning: one study per batch size, asked for rates and told what they gave.

The trial folders are the truth; a study that was lost, or lags behind, is brought up to date.
"""

import contextlib
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import BaseStorage, RDBStorage, get_storage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from sweep.errors import SweepError
from sweep.plan.tuning import EXTENSIONS, Search, Shown, Tried, next_rates
from sweep.tracking.store import ANSWER_SECONDS, one_sentence, with_driver, without_password

SAMPLER_SEED = 1000
FACTOR = 8.0  # within which β2's half-life and weight decay are searched, around what policy holds
BEYOND = 2.0 ** (EXTENSIONS + 3)  # of the centre: no rate that is ever tried lies outside
TRIAL_ID = "sweep.trial_id"
LOCK = 5_000_000  # any number that every sweep agrees on


def space(search: Search) -> dict[str, BaseDistribution]:
    """Return the dimensions: rates as they are, the others as factors."""
    low, high = min(search.grid) / BEYOND, max(search.grid) * BEYOND
    factor = FloatDistribution(1 / FACTOR, FACTOR, log=True)
    rate = FloatDistribution(low, high, log=True)
    return {"learning_rate": rate, **dict.fromkeys(search.extra, factor)}


class BracketingSampler(BaseSampler):
    """Brackets the best rate, extends past an edge, then refines by halving gaps in log rate."""

    def __init__(self, search: Search, wanted: int = 0) -> None:
        self._search, self._wanted = search, wanted

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the one dimension."""
        return {"learning_rate": space(self._search)["learning_rate"]}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the next rate; of several that are due the first."""
        tried = [_tried(one) for one in named_trials(study).values()]
        search = self._search
        rates = next_rates(tried, search.grid, search.finest, self._wanted)
        if not rates:
            raise SweepError(
                f"study {study.study_name!r} must lack a rate when it is asked for one, but has "
                "settled. Remove it from the storage; it is rebuilt from the trial folders."
            )
        return {"learning_rate": rates[0]}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        """Refuse a dimension that a trial of ours does not have: somebody else asked for it."""
        raise SweepError(
            f"study {study.study_name!r} must have the one dimension learning_rate, got "
            f"{param_name!r}. Give sweep a storage of its own."
        )


def named_trials(study: Study) -> dict[str, FrozenTrial]:
    """Return the study's trials by the id of ours; of several with one id the newest."""
    trials = study.get_trials(deepcopy=False)
    return {one.user_attrs[TRIAL_ID]: one for one in trials if one.user_attrs.get(TRIAL_ID)}


def _tried(trial: FrozenTrial) -> Tried:
    value = trial.value if trial.state is TrialState.COMPLETE else math.inf
    return Tried(trial.params["learning_rate"], value if trial.state.is_finished() else None)


def open_storage(url: str) -> BaseStorage:
    """Open a database of studies; while trials run it holds no connection.

    Raises:
        SweepError: if Optuna cannot use it.
    """
    shown, url = without_password(url), with_driver(url)
    os.environ.setdefault("PGCONNECT_TIMEOUT", ANSWER_SECONDS)
    try:
        with _alone(url, shown):
            return get_storage(RDBStorage(url, {"poolclass": sqlalchemy.NullPool}))
    except SweepError:
        raise
    except Exception as error:  # whatever a database, its driver or an address can raise
        raise SweepError(
            f"storage must be a database that Optuna can use, got {shown!r} "
            f"({one_sentence(error)}). Correct --storage."
        ) from error


@contextlib.contextmanager
def _alone(url: str, shown: str) -> Iterator[None]:
    """Let others wait meanwhile: of several that make Optuna's tables at once most would fail."""
    if not url.startswith("postgresql"):
        yield
        return
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(LOCK)))
        tables = sqlalchemy.inspect(connection).get_table_names()
        if "alembic_version" in tables and "studies" not in tables:
            raise SweepError(
                f"storage must be a database of its own, got {shown!r}, which holds the tables of "
                "another program, such as MLflow. Make another, and name it with --storage."
            )
        yield


def is_without_answer(error: BaseException | None) -> bool:
    """Tell whether an error means that a server of studies does not answer, and may again."""
    while error is not None:
        if isinstance(error, sqlalchemy.exc.OperationalError | sqlalchemy.exc.InterfaceError):
            return not isinstance(error.orig, sqlite3.Error)
        error = error.__cause__
    return False


class Studies:
    """The studies of one sweep, in one storage.

    Raises:
        SweepError: if the storage cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._storage = open_storage(url)
        self._named: dict[str, RateStudy] = {}

    def of(self, search: Search) -> "RateStudy":
        """Return the study of a search."""
        if search.name not in self._named:
            self._named[search.name] = RateStudy(search, self._storage)
        return self._named[search.name]


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

    def ask(self, wanted: int, name: Callable[[dict[str, float]], str]) -> None:
        """Ask for what is to be tried next: of a grid all that is missing, else one trial.

        Args:
            wanted: trials of this study at least.
            name: called with each trial's values; returns the id of ours.
        """
        has_asked = False
        while not has_asked or self._is_grid_open():
            has_asked = True
            number = len(self.study.get_trials(deepcopy=False))
            self.study.sampler = (
                TPESampler(seed=SAMPLER_SEED + number, n_startup_trials=0)
                if self.search.extra and number >= len(self.search.grid)
                else BracketingSampler(self.search, wanted)
            )
            if self.search.extra and number < len(self.search.grid):
                values = {"learning_rate": self.search.grid[number]}
                values |= dict.fromkeys(self.search.extra, 1.0)
                self._add(name(values), Shown(values, None, False, ()))
            else:
                trial = self.study.ask(space(self.search))
                trial.set_user_attr(TRIAL_ID, name(dict(trial.params)))

    def _is_grid_open(self) -> bool:
        return len(named_trials(self.study)) < len(self.search.grid)

    def bring_up_to_date(self, shown: Mapping[str, Shown]) -> None:
        """Give the study what the trial folders hold, by trial id."""
        known = named_trials(self.study)
        for one in self.study.get_trials(deepcopy=False):
            if not one.state.is_finished() and one.user_attrs.get(TRIAL_ID) not in shown:
                trial = optuna.trial.Trial(self.study, one._trial_id)
                trial.set_user_attr(TRIAL_ID, "")  # asked for, but the plan never held it
                self.study.tell(trial, state=TrialState.FAIL)
        for trial_id, found in shown.items():
            old = known.get(trial_id)
            if old is None or (old.state.is_finished() and not _is_told(old, found)):
                self._add(trial_id, found)  # a study that was lost, or of a trial that ran again
            elif not old.state.is_finished():
                self._tell(optuna.trial.Trial(self.study, old._trial_id), found)

    def _tell(self, trial: optuna.trial.Trial, found: Shown) -> None:
        reported = self.study.trials[trial.number].intermediate_values
        for step, loss in found.at_rungs:
            if step not in reported:
                trial.report(loss, step)
        if found.is_pruned:
            self.study.tell(trial, state=TrialState.PRUNED)
        elif found.loss is not None:
            self.study.tell(trial, found.loss)

    def _add(self, trial_id: str, found: Shown) -> None:
        """Add a trial that the study never asked for, in one write."""
        state = TrialState.COMPLETE if found.loss is not None else TrialState.RUNNING
        state = TrialState.PRUNED if found.is_pruned else state
        self.study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=found.loss if state is TrialState.COMPLETE else None,
                params=found.values,
                distributions=space(self.search),
                user_attrs={TRIAL_ID: trial_id},
                intermediate_values=dict(found.at_rungs),
            )
        )


def _is_told(trial: FrozenTrial, found: Shown) -> bool:
    """Tell whether a finished trial of a study says what its folder shows."""
    if found.is_pruned:
        return trial.state is TrialState.PRUNED
    return trial.state is TrialState.COMPLETE and trial.value == found.loss


def default_storage(folder: Path) -> str:
    """Return the address of optuna.db in a sweep folder."""
    return f"sqlite:///{(folder / 'optuna.db').absolute()}"
