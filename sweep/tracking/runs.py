"""What MLflow is told of one trial: params and tags once, metric lines as they settle, the end.

Every write may be repeated: MLflow keeps a point once per name, time, step and value.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.config.trial import TrialConfig
from sweep.errors import SweepError
from sweep.tracking.record import Mirrored
from sweep.tracking.store import document_tags
from sweep.trial.files import sha256_of
from sweep.trial.folder import MESSAGE_CHARACTERS, State, TrialFolder, TrialStatus
from sweep.trial.metrics import read_metrics_with_offsets

if TYPE_CHECKING:
    from mlflow import MlflowClient

BATCH_METRICS = 1000  # of one log_batch, MLflow's limit; far below its 1 MB
PLACE = ("time", "step", "tokens")  # of a line; the step follows from the tokens
BATCH_TAGS = 50  # of up to 7500 characters
PARAM_CHARACTERS = 500  # databases before MLflow 2.8 hold no more
FINAL_STATUS = {
    State.COMPLETE: "FINISHED",
    State.PRUNED: "KILLED",
    State.FAILED: "FAILED",
    State.WAITING: "KILLED",  # stopped; RUNNING again when it resumes
}
FINAL_METRICS = (
    *("final_train_loss", "final_valid_loss", "best_valid_loss", "bits_per_byte"),
    *("clipped_step_fraction", "seconds_total", "seconds_compile", "seconds_training"),
    *("seconds_evaluation", "seconds_checkpoint", "seconds_noise", "tokens_per_second", "mfu"),
    "peak_memory_bytes",
)
RESULT_TAGS = {
    "git_commit": "mlflow.source.git.commit",
    "torch_version": "sweep.torch_version",
    "device": "sweep.device",
}


def run_name(config: TrialConfig) -> str:
    """Name a trial's run for people: `batch 64 seed 0 lr 0.001`."""
    science = config.science
    tuning = "tune: " if science.stage == "tune" else ""
    name = f"batch {science.batch_size} seed {science.seed} lr {science.learning_rate:g}"
    return tuning + name


def set_tags(client: "MlflowClient", run_id: str, tags: dict[str, str]) -> None:
    """Set tags, long documents in several requests."""
    from mlflow.entities import RunTag

    entities = [RunTag(key, value) for key, value in tags.items()]
    for start in range(0, len(entities), BATCH_TAGS):
        client.log_batch(run_id, tags=entities[start : start + BATCH_TAGS], synchronous=True)


def log_params(client: "MlflowClient", run_id: str, params: dict[str, Any]) -> None:
    """Log params: nested settings by dotted names, nothing for null ones."""
    from mlflow.entities import Param

    flat = [Param(key, str(value)[:PARAM_CHARACTERS]) for key, value in flatten(params)]
    for start in range(0, len(flat), 100):
        client.log_batch(run_id, params=flat[start : start + 100], synchronous=True)


def flatten(settings: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested settings with their dotted names."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{place}{key}.")
        elif value is not None:
            yield f"{place}{key}", value


def describe(client: "MlflowClient", run_id: str, config: TrialConfig) -> None:
    """Log a trial's settings as params, and its data as a dataset input."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    science = config.science.model_dump(mode="json", exclude={"data", "format_version"})
    log_params(
        client,
        run_id,
        {
            **science,
            "steps": config.steps,
            "warmup_steps": config.warmup_steps,
            "tokens_per_sequence": config.tokens_per_sequence,
            "microbatch_size": config.microbatch_size,
            "devices": config.execution.devices,
            "device": config.execution.device,
        },
    )
    data = config.science.data
    if data is not None:
        source = json.dumps(data)[:60_000]
        name = str(data.get("name", "data"))[:500]
        dataset = Dataset(name, sha256_of(data)[:36], source_type="sweep", source=source)
        tag = InputTag("mlflow.data.context", "training")
        client.log_inputs(run_id, [DatasetInput(dataset, [tag])])


def first_time(trial: TrialFolder) -> int | None:
    """Return when the first line was written, in milliseconds, or None before it."""
    try:
        with trial.metrics_path.open("rb") as file:
            time: float = json.loads(file.readline())["time"]
    except (FileNotFoundError, json.JSONDecodeError):  # none, or a torn one
        return None
    return round(time * 1000)


def began_anew(trial: TrialFolder, entry: Mirrored) -> bool:
    """Tell whether the first line is another: resuming keeps every mirrored line, or none."""
    return entry.began not in (None, first_time(trial))


def log_lines(
    client: "MlflowClient", trial: TrialFolder, entry: Mirrored, on_accepted: Callable[[], None]
) -> None:
    """Log the settled lines behind the offset, and move it after each accepted batch.

    A line's own time is its timestamp, and its tokens are its step: there is one line of each.
    """
    from mlflow.entities import Metric

    lines = read_metrics_with_offsets(trial.metrics_path, entry.offset, trial.settled_length())
    metrics: list[Metric] = []
    for number, (line, end) in enumerate(lines):
        time, tokens = round(line["time"] * 1000), line["tokens"]
        metrics += [
            Metric(key, float(value), time, tokens)
            for key, value in line.items()
            if key not in PLACE and value is not None
        ]
        following = len(lines[number + 1][0]) if number + 1 < len(lines) else BATCH_METRICS
        if len(metrics) + following > BATCH_METRICS:
            client.log_batch(entry.run_id, metrics=metrics, synchronous=True)
            entry.offset, entry.last_tokens, entry.last_milliseconds = end, tokens, time
            on_accepted()
            metrics = []


def log_end(
    client: "MlflowClient", trial: TrialFolder, entry: Mirrored, status: TrialStatus
) -> None:
    """Log a finished trial's result, end its run, and keep its files as artifacts."""
    from mlflow.entities import Metric

    result = trial.read_result() or {}
    step, time = max(0, entry.last_tokens), entry.last_milliseconds or _changed(trial.result_path)
    metrics = [
        Metric("final/" + name.removeprefix("final_"), float(result[name]), time, step)
        for name in FINAL_METRICS
        if isinstance(result.get(name), int | float)
    ]
    client.log_batch(entry.run_id, metrics=metrics, synchronous=True)
    named = {tag: str(result[key]) for key, tag in RESULT_TAGS.items() if result.get(key)}
    set_tags(client, entry.run_id, document_tags("sweep.result", result) | named)
    set_status(client, trial, entry, status, FINAL_STATUS[status.state])
    for path in (trial.config_path, trial.result_path, trial.losses_path, trial.log_path):
        if path.exists():
            client.log_artifact(entry.run_id, str(path))


def set_status(
    client: "MlflowClient",
    trial: TrialFolder,
    entry: Mirrored,
    status: TrialStatus,
    run_status: str,
) -> None:
    """Bring the run's status and its tags to where the trial stands."""
    told = status.changed(mlflow_run_id=None)
    if (run_status, told) == (entry.run_status, entry.told):
        return
    tags = {
        "sweep.state": str(status.state),
        "sweep.cause": str(status.cause or ""),
        "sweep.attempts": str(status.attempts),
        "sweep.message": status.message[:MESSAGE_CHARACTERS],
        "sweep.microbatch_size": str(status.microbatch_size or ""),  # after out of memory
    }
    set_tags(client, entry.run_id, tags)
    set_run_status(client, entry.run_id, run_status, _changed(trial.state_path))
    entry.run_status, entry.told = run_status, told


def set_run_status(
    client: "MlflowClient", run_id: str, status: str, end_time: int | None = None
) -> None:
    """Let a run go on, or end it, by default now."""
    if status == "RUNNING":
        client.update_run(run_id, status)
    else:
        client.set_terminated(run_id, status, end_time)


def _changed(path: Path) -> int:
    """Return when a file was last changed, in milliseconds; 0 for none."""
    return path.stat().st_mtime_ns // 10**6 if path.exists() else 0


def delete_others(client: "MlflowClient", run_ids: list[str], kept: str) -> None:
    """Delete what a request made whose answer was lost; nothing was ever written to it."""
    for run_id in run_ids:
        if run_id != kept:
            client.delete_run(run_id)


def concerns_one_run(error: Exception) -> bool:
    """Tell whether other trials can go on: the store refused this one, or its file is damaged."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        return error.error_code in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
    return isinstance(error, SweepError | ValueError | KeyError)
