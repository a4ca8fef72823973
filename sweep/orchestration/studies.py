"""Read a study of Optuna that another program made: `sweep answer optuna:STORAGE/STUDY`."""

from typing import Any

import optuna
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from sweep.errors import SweepError, describe_error, without_secrets
from sweep.tracking.addresses import require_present, split_address

EXAMPLE = "optuna:sqlite:///study.db/NAME"


def read_study(address: str) -> tuple[list[dict[str, Any]], str]:
    """Return the trials of a study, with the headers of its `trials_dataframe`, and its direction.

    Args:
        address: a storage and the name of a study, as sqlite:///study.db/NAME, or the file of a
            journal and a name.

    Raises:
        SweepError: if there is no such study, or it has several objectives.
    """
    place, name = split_address(address)
    if not place or not name:
        raise SweepError(f"a study must be named by storage and name, got {address!r}. {EXAMPLE}")
    require_present(place)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage: Any
        if "://" in place:
            storage = RDBStorage(place, skip_table_creation=True)
        else:
            storage = JournalStorage(JournalFileBackend(place))
        study = optuna.load_study(study_name=name, storage=storage)
        directions = study.directions
        trials = study.get_trials(deepcopy=False)
    except Exception as error:  # databases have errors of their own
        raise SweepError(
            f"{without_secrets(place)} must hold the study {name!r} ({describe_error(error)}). "
            f"Name storage and study: {EXAMPLE}."
        ) from error
    if len(directions) != 1:
        raise SweepError(f"a study must have one objective, got {len(directions)} in {name!r}.")

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
