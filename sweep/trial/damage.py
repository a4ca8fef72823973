"""Every kind of file of a sweep, and how damage to it is found."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from sweep.errors import CorruptFile, SweepError
from sweep.trial.files import (
    find_json,
    find_sha256,
)
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.trial.timing import read_timing


def _check_losses(trial: TrialFolder) -> None:
    result = trial.find_result()
    recorded = None if result is None else result.valid_losses_sha256
    _check_hash(trial.losses_path, recorded, is_always_kept=True)


def _check_weights(trial: TrialFolder) -> None:
    result = trial.find_result()
    recorded = None if result is None else result.weights_sha256
    _check_hash(trial.weights_path, recorded)


def _check_tokenizer(trial: TrialFolder) -> None:
    tokenizer = trial.read_config().science.tokenizer
    recorded = None if tokenizer is None else tokenizer.sha256
    _check_hash(trial.tokenizer_path, recorded)


def _check_hash(path: Path, recorded: str | None, is_always_kept: bool = False) -> None:
    """Compare a file with the sha256 that its trial recorded."""
    actual = find_sha256(path)
    if actual is None and not is_always_kept:
        return
    if actual != recorded:
        raise CorruptFile(f"{path} does not match the sha256 that its trial recorded.")


def _check_timing(sweep: SweepFolder) -> None:
    read_timing(sweep, sweep.require_plan().get("sweep_uid", ""))


# Patterns of names, with a check that raises if such a file is damaged. None: a damaged file is
# harmless, because a lock decides, because it is written again, or because only people read it.
TRIAL_FILES: dict[str, Callable[[TrialFolder], object] | None] = {
    "config.json": TrialFolder.read_config,
    "state.json": lambda trial: trial.read_sealed(trial.state_path),
    "stop.json": lambda trial: trial.read_sealed(trial.stop_path),
    "result.json": TrialFolder.read_result,
    "metrics.jsonl": TrialFolder.read_metrics,
    "checkpoint-*": lambda trial: [*map(trial.verify_checkpoint, trial.checkpoints())],
    "valid_losses.npy": _check_losses,
    "weights.safetensors": _check_weights,
    "tokenizer.json": _check_tokenizer,
    **dict.fromkeys(("lease.json", "log.txt", "reported.jsonl", "work", "resume")),
}
SWEEP_FILES: dict[str, Callable[[SweepFolder], object] | None] = {
    "plan.json": SweepFolder.require_plan,
    "timing.json": _check_timing,
    "tracking.json": lambda sweep: find_json(sweep.tracking_path),
    "check.json": lambda sweep: find_json(sweep.check_path),
    **dict.fromkeys(("check/*", "sweep.lock", "stop", "mlflow.db", "mlartifacts/*", "optuna.db")),
    **dict.fromkeys(("trials.csv", "answer.json", "report.*", "figures/*")),
}


def find_damage(folder: SweepFolder, without: Collection[str] = ()) -> list[str]:
    """Return a sentence about each damaged file of a sweep with an intact plan.

    Args:
        folder: the sweep.
        without: trials that need no folder.
    """
    checks = [partial(check, folder) for check in filter(None, SWEEP_FILES.values())]
    for trial in folder.trials():
        if trial.id in without:
            continue
        checks += [partial(check, trial) for check in filter(None, TRIAL_FILES.values())]
    problems = []
    for check in checks:
        try:
            check()
        except (SweepError, OSError) as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))
