"""Load a sweep as tables: one row per trial, one row per logged point.

Reached through `sweep.load_sweep("results/quick")`. Reads a sweep folder, finished or not, or a
published copy of one; `load_stored_sweep` restores a folder from a tracking store first.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sweep.errors import CorruptFile
from sweep.plan.plan import Plan, PlannedTrial, parse_plan
from sweep.trial.files import canonical_json, replacing, sha256_of_file
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
WHOLE = ("step", "tokens")


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
    records, lines, warnings = [], {}, list[str]()
    for row in plan.known_trials:
        assert row.id is not None
        trial = folder.trial(row.id)
        record, damage = _read_record(trial)
        records.append(_record(plan, row, record))
        lines[row.id], torn = _read_curve(trial, record.get("metrics_sha256"))
        warnings += damage + torn
    return Sweep(folder.name, plan, _trials(records), _curves(lines), tuple(warnings))


def load_stored_sweep(tracking_uri: str, experiment: str, run_id: str | None = None) -> Sweep:
    """Load a sweep from an MLflow store alone: the newest parent run unless one is named."""
    from sweep.tracking.restore import restore_sweep  # imports mlflow

    with tempfile.TemporaryDirectory() as parent:
        folder = restore_sweep(tracking_uri, experiment, run_id, Path(parent))
        return load_sweep(folder.path)


def write_trials_csv(sweep: Sweep, path: Path) -> None:
    """Write every trial atomically, with the columns of docs/results.md."""
    table = sweep.trials[list(TRIAL_COLUMNS)].copy()
    for column in INTEGER_COLUMNS:
        table[column] = table[column].astype("Int64")
    with replacing(path) as part:
        table.to_csv(part, index=False, lineterminator="\n")


def _read_record(trial: TrialFolder) -> tuple[dict[str, Any], list[str]]:
    """Return result.json or, without one, state.json; and warnings about damaged files."""
    warnings = []
    try:
        if result := trial.read_result():
            if result.get("id") == trial.id:
                return result, []
            warnings.append(
                f"trial {trial.id}: result.json belongs to another trial and is left out."
            )
    except CorruptFile:
        warnings.append(
            f"trial {trial.id}: result.json is damaged or was changed; its numbers are left out."
        )
    try:
        status = trial.read_status()
    except CorruptFile:
        return {"state": None}, [*warnings, f"trial {trial.id}: state.json is damaged; left out."]
    record: dict[str, Any] = {
        "state": str(status.state),
        "cause": str(status.cause) if status.cause else None,
        "message": status.message[:MESSAGE_CHARACTERS] if status.cause else None,
        "attempts": status.attempts,
    }
    if status.microbatch_size:
        record["microbatch_size"] = status.microbatch_size
    return record, warnings


def _record(plan: Plan, row: PlannedTrial, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the planned values, replaced by the measured ones."""
    planned = row.model_dump(exclude={"warmup_min_steps", "forecast_bytes", "forecast_seconds"})
    planned |= {"state": "WAITING", "attempts": 0, "parameters": plan.model.get("parameters")}
    merged = planned | {key: value for key, value in record.items() if key in TRIAL_COLUMNS}
    size = int(merged["microbatch_size"])
    if "gradient_accumulation_steps" not in record:
        merged["gradient_accumulation_steps"] = row.batch_size // (row.devices * size)
    if isinstance(merged.get("execution"), dict):
        merged["execution"] = canonical_json(merged["execution"])
    return merged


def _trials(records: list[dict[str, Any]]) -> pd.DataFrame:
    table = pd.DataFrame(records, columns=list(TRIAL_COLUMNS))
    whole = [name for name in INTEGER_COLUMNS if table[name].notna().all()]
    for name in TRIAL_COLUMNS:
        if name in TEXT_COLUMNS:
            table[name] = table[name].astype(object).where(table[name].notna(), None)
        else:
            table[name] = table[name].astype("int64" if name in whole else "float64")
    return table


def _read_curve(trial: TrialFolder, sha256: str | None) -> tuple[dict[str, Any], list[str]]:
    """Read metrics.jsonl in one parse; a torn last line is left out."""
    try:
        data = trial.metrics_path.read_bytes()
    except FileNotFoundError:
        return {}, []
    lines = data.rpartition(b"\n")[0].replace(b"\n", b",")
    try:
        columns = _columns(json.loads(b"[" + lines + b"]"))
    except (ValueError, TypeError, AttributeError):
        return {}, [f"trial {trial.id}: metrics.jsonl is damaged; its curve is left out."]
    if sha256 and sha256_of_file(trial.metrics_path) != sha256:
        return columns, [f"trial {trial.id}: metrics.jsonl was changed after result.json."]
    return columns, []


def _columns(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Turn lines into one float array per key; null and absent become NaN."""
    by_keys: dict[tuple[str, ...], list[int]] = {}
    for index, line in enumerate(lines):
        by_keys.setdefault(tuple(line), []).append(index)
    columns: dict[str, Any] = {}
    # Lines have few distinct sets of keys; each set is converted at once.
    for keys, indices in by_keys.items():
        block = np.array([tuple(lines[index].values()) for index in indices], dtype=np.float64)
        for name, values in zip(keys, block.T, strict=True):
            columns.setdefault(name, np.full(len(lines), np.nan))[indices] = values
    return columns


def _curves(by_trial: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    lengths = [len(next(iter(columns.values()), ())) for columns in by_trial.values()]
    codes = np.repeat(np.arange(len(by_trial)), lengths)
    ids = pd.Categorical.from_codes(codes, categories=pd.Index(list(by_trial), dtype=object))
    table: dict[str, Any] = {"id": ids}
    metrics = set[str]().union(*by_trial.values()) - set(POINT_COLUMNS)
    for name in (*POINT_COLUMNS, *sorted(metrics)):
        pairs = zip(by_trial.values(), lengths, strict=True)
        parts = [columns.get(name, np.full(length, np.nan)) for columns, length in pairs]
        joined = np.concatenate([np.array([]), *parts])
        is_whole = name in WHOLE and bool(np.isfinite(joined).all())
        table[name] = joined.astype(np.int64) if is_whole else joined
    return pd.DataFrame(table)


def curves_by_trial(sweep: Sweep, metric: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield id, tokens and values of every trial that has finite points of a metric."""
    if metric not in sweep.curves:
        return
    points = sweep.curves[sweep.curves[metric].notna()]
    codes = points["id"].cat.codes.to_numpy()
    tokens, values = points["tokens"].to_numpy(), points[metric].to_numpy()
    names = points["id"].cat.categories
    is_first = np.append(True, codes[1:] != codes[:-1])[: len(codes)]
    starts = np.flatnonzero(is_first).tolist()
    for start, end in zip(starts, [*starts[1:], len(codes)], strict=False):
        yield str(names[codes[start]]), tokens[start:end], values[start:end]
