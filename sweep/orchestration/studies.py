"""Read a study of Optuna that another program made: `sweep answer optuna:STORAGE/STUDY`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import optuna
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from sweep.errors import SweepError, describe_error, list_some, without_secrets
from sweep.tracking.addresses import require_present, split_address, with_scheme

EXAMPLE = "optuna:sqlite:///study.db/NAME"


def read_study(address: str) -> tuple[list[dict[str, Any]], str]:
    """Return the trials of a study, with the headers of its `trials_dataframe`, and its direction.

    Args:
        address: a storage and the name of a study, as sqlite:///study.db/NAME, or the file of a
            database or a journal and a name. The only study of a file needs no name.

    Raises:
        SweepError: if there is no such study, or it has several objectives.
    """
    place, name = split_address(address)
    if not place:
        raise SweepError(f"a study must be named by storage and name, got {address!r}. {EXAMPLE}")
    require_present(place)
    place = with_scheme(place)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _reading(place, name):
        storage = _open(place)
        names = optuna.get_all_study_names(storage)
    if not name and len(names) == 1:
        name = names[0]
    if name not in names:
        known = list_some(sorted(names)) if names else "none"
        raise SweepError(
            f"{without_secrets(place)} must hold the study {name!r}; its studies: {known}. Name "
            f"storage and study: {EXAMPLE}."
        )
    with _reading(place, name):
        study = optuna.load_study(study_name=name, storage=storage)
        directions = study.directions
        trials = study.get_trials(deepcopy=False)
    if len(directions) != 1:
        raise SweepError(
            f"a study must have one objective, got {len(directions)} in {name!r}. Write its "
            "trials_dataframe() to a CSV file, and choose one by --metric values_0 --direction."
        )

    rows = []
    for trial in trials:
        row: dict[str, Any] = {
            "value": trial.value if trial.values else None,
            "state": trial.state.name,
        }
        if trial.duration is not None and trial.duration.total_seconds() > 0:
            row["hours"] = trial.duration.total_seconds() / 3600
        row |= {f"params_{key}": value for key, value in trial.params.items()}
        row |= {f"user_attrs_{key}": value for key, value in trial.user_attrs.items()}
        rows.append(row)
    return rows, directions[0].name.lower()


def _open(place: str) -> RDBStorage | JournalStorage:
    """Open a storage without changing it."""
    if "://" in place:
        return RDBStorage(place, skip_table_creation=True)
    return JournalStorage(JournalFileBackend(place))


@contextlib.contextmanager
def _reading(place: str, name: str) -> Iterator[None]:
    """Name storage and study in any error."""
    try:
        yield
    except Exception as error:  # databases have errors of their own
        raise SweepError(
            f"{without_secrets(place)} must hold the study {name!r} ({describe_error(error)}). "
            f"Name storage and study: {EXAMPLE}."
        ) from error
