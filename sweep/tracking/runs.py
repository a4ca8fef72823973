"""Read the runs of another program from MLflow: `sweep answer mlflow:URI/EXPERIMENT`."""

from typing import Any

from sweep.errors import SweepError
from sweep.tracking.addresses import (
    check_tracking_uri,
    require_present,
    split_address,
    with_scheme,
    without_password,
)
from sweep.tracking.store import connect, find_experiment, reading

MOST_RUNS = 50_000  # that MLflow returns at once
EXAMPLE = "mlflow:http://localhost:5000/NAME"
MILLISECONDS = 3_600_000.0  # in an hour


def read_runs(address: str) -> list[dict[str, Any]]:
    """Return the runs of an experiment, with the headers of `mlflow.search_runs`.

    Args:
        address: a tracking URI and the name of an experiment, as sqlite:///mlflow.db/NAME.

    Raises:
        SweepError: if there is no such experiment, or the store cannot be read.
    """
    uri, name = split_address(address)
    if not uri or not name:
        raise SweepError(
            f"an experiment must be named by tracking URI and name, got {address!r}. {EXAMPLE}"
        )
    uri = check_tracking_uri(with_scheme(uri))
    require_present(uri)
    with reading("MLflow", uri):
        client = connect(uri)
        experiment = find_experiment(client, without_password(uri), name)
        runs = client.search_runs([experiment], max_results=MOST_RUNS)
    if runs.token:
        raise SweepError(f"an experiment must have at most {MOST_RUNS} runs, got more in {name!r}.")
    rows = []
    for run in runs:
        row: dict[str, Any] = {"run_id": run.info.run_id, "status": run.info.status}
        if run.info.end_time and run.info.end_time > run.info.start_time:
            row["hours"] = (run.info.end_time - run.info.start_time) / MILLISECONDS
        row |= {f"params.{key}": value for key, value in run.data.params.items()}
        row |= {f"metrics.{key}": value for key, value in run.data.metrics.items()}
        rows.append(row)
    return rows
