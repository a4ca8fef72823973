"""Check every hash in a sweep folder: `sweep status --verify`."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sweep.errors import CorruptFile, SweepError
from sweep.trial.files import find_json, find_sha256
from sweep.trial.folder import SweepFolder, TrialFolder


def find_damage(folder: SweepFolder) -> list[str]:
    """Return a sentence about each damaged file of a sweep with an intact plan."""
    checks: list[Callable[[], Any]] = [partial(find_json, folder.tracking_path)]
    for trial in folder.trials():
        checks += _checks_of(trial)
    problems = []
    for check in checks:
        try:
            check()
        except (SweepError, OSError) as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def _checks_of(trial: TrialFolder) -> Iterator[Callable[[], Any]]:
    yield trial.read_config
    yield partial(trial.read_sealed, trial.state_path)
    yield partial(trial.read_sealed, trial.stop_path)
    yield trial.read_result
    yield trial.read_metrics
    for checkpoint in trial.checkpoints():
        yield partial(trial.verify_checkpoint, checkpoint)
    result = trial.find_result() or {}
    yield partial(_compare, trial.losses_path, result.get("valid_losses_sha256"))
    if trial.weights_path.exists():  # otherwise not kept
        yield partial(_compare, trial.weights_path, result.get("weights_sha256"))
    if trial.tokenizer_path.exists() and (tokenizer := trial.read_config().science.tokenizer):
        yield partial(_compare, trial.tokenizer_path, tokenizer.sha256)


def _compare(path: Path, sha256: str | None) -> None:
    if find_sha256(path) != sha256:
        raise CorruptFile(
            f"{path} does not match the sha256 that was recorded when it was written."
        )
