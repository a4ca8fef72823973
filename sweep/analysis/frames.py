"""Load a sweep as tables: one row per trial, one row per logged point.

`sweep.load_sweep("results/quick")` reads a sweep folder, finished or not, or a published copy of
one.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sweep.errors import CorruptFile
from sweep.plan.plan import Plan, parse_plan
from sweep.trial.files import canonical_json, read_metrics, replacing, sha256_of_file
from sweep.trial.folder import MESSAGE_CHARACTERS, SweepFolder, TrialFolder

TEXT_COLUMNS = (
    *("id", "stage", "policy", "state", "cause", "message", "device", "torch_version"),
    *("git_commit", "data_sha256", "execution"),
)
INTEGER_COLUMNS = (
    *("batch_size", "seed", "tokens", "steps", "warmup_steps", "devices", "microbatch_size"),
    *("gradient_accumulation_steps", "attempts", "parameters", "peak_memory_bytes"),
)
TRIAL_COLUMNS = (
    *("id", "stage", "policy", "batch_size", "seed", "learning_rate", "beta2", "weight_decay"),
    *("tokens", "epochs", "steps", "warmup_steps", "devices", "microbatch_size"),
    *("gradient_accumulation_steps", "state", "cause", "message", "attempts", "parameters"),
    *("initial_train_loss", "initial_valid_loss", "final_train_loss", "final_valid_loss"),
    *("best_valid_loss", "tokens_to_target", "bits_per_byte", "bytes_per_token"),
    "clipped_step_fraction",
    *("seconds_total", "seconds_compile", "seconds_training", "seconds_evaluation"),
    *("seconds_checkpoint", "seconds_noise", "tokens_per_second", "mfu", "peak_memory_bytes"),
    *("device", "torch_version", "git_commit", "data_sha256", "execution"),
)
POINT_COLUMNS = ("time", "step", "tokens")


@dataclass(frozen=True, eq=False)
class Sweep:
    """One sweep, read at one moment."""

    name: str
    plan: Plan
    trials: pd.DataFrame  # one row per planned trial that has an id; TRIAL_COLUMNS
    curves: pd.DataFrame  # one row per logged point: id, time, step, tokens, one column a metric
    warnings: tuple[str, ...]  # sentences about files that were left out


def load_sweep(path: str | Path) -> Sweep:
    """Read a sweep folder without starting or changing anything.

    Raises:
        SweepError: if the folder holds no readable plan.json.
    """
    folder = SweepFolder(Path(path))
    plan = parse_plan(folder.require_plan(), str(folder.plan_path))
    records, curves, warnings = [], dict[str, dict[str, Any]](), list[str]()
    for row in plan.known_trials:
        trial = folder.trial(str(row.id))
        measured = _read_record(trial, warnings)
        record = {**row.model_dump(), "parameters": plan.model.get("parameters"), "attempts": 0}
        record |= measured
        if "gradient_accumulation_steps" not in measured:
            sequences = row.devices * int(record["microbatch_size"])
            record["gradient_accumulation_steps"] = row.batch_size // sequences
        if isinstance(record.get("execution"), dict):
            record["execution"] = canonical_json(record["execution"])
        records.append(record)
        curves[trial.id] = _read_curve(trial, record.get("metrics_sha256"), warnings)
    trials = pd.DataFrame(records, columns=list(TRIAL_COLUMNS))
    for name in trials:
        if name in TEXT_COLUMNS:
            trials[name] = trials[name].astype(object).where(trials[name].notna(), None)
        else:
            is_whole = name in INTEGER_COLUMNS and trials[name].notna().all()
            trials[name] = trials[name].astype("int64" if is_whole else "float64")
    return Sweep(folder.name, plan, trials, _join_curves(curves), tuple(warnings))


def load_stored_sweep(tracking_uri: str, experiment: str, run_id: str | None = None) -> Sweep:
    """Load a sweep from an MLflow store alone: the newest parent run unless one is named."""
    from sweep.tracking.restore import restore_sweep  # imports mlflow

    with tempfile.TemporaryDirectory() as parent:
        folder = restore_sweep(tracking_uri, experiment, run_id, Path(parent))
        return load_sweep(folder.path)


def write_trials_csv(sweep: Sweep, path: Path) -> None:
    """Write every trial atomically, with the columns of docs/results.md."""
    table = sweep.trials[list(TRIAL_COLUMNS)].astype(dict.fromkeys(INTEGER_COLUMNS, "Int64"))
    with replacing(path) as part:
        table.to_csv(part, index=False, lineterminator="\n")


def _read_record(trial: TrialFolder, warnings: list[str]) -> dict[str, Any]:
    """Return result.json or, without one, state.json."""
    try:
        result = trial.read_result()
        if result and result.get("id") == trial.id:
            return result
        if result:
            warnings.append(f"trial {trial.id}: result.json belongs to another trial.")
    except CorruptFile:
        warnings.append(
            f"trial {trial.id}: result.json is damaged or was changed; its numbers are left out."
        )
    try:
        status = trial.read_status()
    except CorruptFile:
        warnings.append(f"trial {trial.id}: state.json is damaged; left out.")
        return {"state": None}
    record: dict[str, Any] = {"state": str(status.state), "attempts": status.attempts}
    if status.cause:
        record |= {"cause": str(status.cause), "message": status.message[:MESSAGE_CHARACTERS]}
    if status.microbatch_size:
        record["microbatch_size"] = status.microbatch_size
    return record


def _read_curve(trial: TrialFolder, sha256: str | None, warnings: list[str]) -> dict[str, Any]:
    """Return the columns of metrics.jsonl as float arrays; null and absent values are NaN."""
    try:
        lines = read_metrics(trial.metrics_path)
        names = dict.fromkeys(name for line in lines for name in line)
        columns = {name: np.array([line.get(name) for line in lines], float) for name in names}
    except (ValueError, TypeError, AttributeError):
        warnings.append(f"trial {trial.id}: metrics.jsonl is damaged; its curve is left out.")
        return {}
    if sha256 and lines and sha256_of_file(trial.metrics_path) != sha256:
        warnings.append(f"trial {trial.id}: metrics.jsonl was changed after result.json.")
    return columns


def _join_curves(by_trial: dict[str, dict[str, Any]]) -> pd.DataFrame:
    lengths = [len(columns.get("tokens", ())) for columns in by_trial.values()]
    codes, ids = (
        np.repeat(np.arange(len(by_trial)), lengths),
        pd.Index(list(by_trial), dtype=object),
    )
    table: dict[str, Any] = {"id": pd.Categorical.from_codes(codes, ids)}
    metrics = set[str]().union(*by_trial.values()) - set(POINT_COLUMNS)
    for name in (*POINT_COLUMNS, *sorted(metrics)):
        pairs = zip(by_trial.values(), lengths, strict=True)
        parts = [columns.get(name, np.full(length, np.nan)) for columns, length in pairs]
        values = np.concatenate([np.array([]), *parts])
        is_whole = name in ("step", "tokens") and bool(np.isfinite(values).all())
        table[name] = values.astype(np.int64) if is_whole else values
    return pd.DataFrame(table)


def curves_by_trial(sweep: Sweep, metric: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield id, tokens and values of every trial that has finite points of a metric."""
    if metric in sweep.curves:
        points = sweep.curves[sweep.curves[metric].notna()]
        for trial, rows in points.groupby("id", observed=True):
            yield str(trial), rows["tokens"].to_numpy(), rows[metric].to_numpy()
