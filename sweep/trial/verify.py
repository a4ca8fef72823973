"""The kinds of files in a sweep folder and the check of each, for `sweep status --verify`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from sweep.errors import CorruptFile, SweepError
from sweep.trial.files import find_json, find_sha256
from sweep.trial.folder import SweepFolder, TrialFolder


def _check_tokenizer(trial: TrialFolder) -> None:
    if trial.tokenizer_path.exists() and (tokenizer := trial.read_config().science.tokenizer):
        _compare(trial.tokenizer_path, tokenizer.sha256)


def _check_weights(trial: TrialFolder) -> None:
    if trial.weights_path.exists():  # otherwise not kept
        _compare(trial.weights_path, _recorded(trial, "weights"))


def _recorded(trial: TrialFolder, name: str) -> str | None:
    return (trial.find_result() or {}).get(f"{name}_sha256")


def _compare(path: Path, sha256: str | None) -> None:
    if find_sha256(path) != sha256:
        raise CorruptFile(f"{path} does not match the sha256 that its trial recorded.")


# Patterns of names, with a check that raises if such a file is damaged. None: a damaged file is
# harmless, because a lock decides, because it is written again, or because only people read it.
TRIAL_FILES: dict[str, Callable[[TrialFolder], object] | None] = {
    "config.json": TrialFolder.read_config,
    "state.json": lambda trial: trial.read_sealed(trial.state_path),
    "stop.json": lambda trial: trial.read_sealed(trial.stop_path),
    "result.json": TrialFolder.read_result,
    "metrics.jsonl": TrialFolder.read_metrics,
    "checkpoint-*": lambda trial: [trial.verify_checkpoint(name) for name in trial.checkpoints()],
    "valid_losses.npy": lambda trial: _compare(trial.losses_path, _recorded(trial, "valid_losses")),
    "weights.safetensors": _check_weights,
    "tokenizer.json": _check_tokenizer,
    "lease.json": None,
    "log.txt": None,
}
SWEEP_FILES: dict[str, Callable[[SweepFolder], object] | None] = {
    "plan.json": SweepFolder.require_plan,
    "tracking.json": lambda sweep: find_json(sweep.tracking_path),
    **dict.fromkeys(("sweep.lock", "stop", "mlflow.db", "mlartifacts/*", "optuna.db")),
    **dict.fromkeys(("trials.csv", "answer.json", "report.*", "figures/*")),
}


def find_damage(folder: SweepFolder) -> list[str]:
    """Return a sentence about each damaged file of a sweep with an intact plan."""
    checks = [partial(check, folder) for check in filter(None, SWEEP_FILES.values())]
    for trial in folder.trials():
        checks += [partial(check, trial) for check in filter(None, TRIAL_FILES.values())]
    problems = []
    for check in checks:
        try:
            check()
        except (SweepError, OSError) as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))
