"""An executor without processes."""

from collections.abc import Mapping
from concurrent.futures import Future

import torch

from sweep.orchestration.executors.base import Executor
from sweep.plan.retry import Outcome
from sweep.training.attempt import run_attempt
from sweep.trial.folder import TrialFolder


class InlineExecutor(Executor):
    """Runs each attempt in this process when it is submitted."""

    is_elsewhere = False

    def __init__(self) -> None:
        self.slots = [{}]
        self._answer: str | None = None

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        future, mode = Future[Outcome](), torch.get_deterministic_debug_mode()
        future.set_result(run_attempt(folder.path, lambda: self._answer))
        torch.set_deterministic_debug_mode(mode)  # `run_attempt` changes it
        return future

    def stop(self, force: bool = False) -> None:
        self._answer = "stopped"

    def close(self) -> None:
        """Do nothing: every submitted attempt has ended."""
