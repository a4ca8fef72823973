"""An executor without processes."""

from concurrent.futures import Future

import torch

from sweep.training.worker import run_attempt


class InlineExecutor:
    """Runs each attempt in this process when it is submitted."""

    def __init__(self):
        self.slots = [{}]
        self._answer = None

    def submit(self, folder, environment):
        future, mode = Future(), torch.get_deterministic_debug_mode()
        future.set_result(run_attempt(folder.path, lambda: self._answer))
        torch.set_deterministic_debug_mode(mode)  # `run_attempt` changes it
        return future

    def stop(self, force=False):
        self._answer = "stopped"

    def close(self):
        """Do nothing: every submitted attempt has ended."""
