"""Run attempts as processes of this machine."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from sweep.config.execution import Execution
from sweep.config.settings import Settings
from sweep.errors import SweepError
from sweep.orchestration.executors.base import Executor
from sweep.plan.retry import Outcome
from sweep.training import attempt_trial
from sweep.training.process import FreshProcess, outcome_of
from sweep.trial.folder import SweepFolder, TrialFolder


class LocalExecutor(Executor):
    """Runs each attempt in a fresh process, one per slot of `attempt_slots`."""

    name = "local"
    is_elsewhere = False

    def __init__(self, settings: Settings, execution: Execution, folder: SweepFolder) -> None:
        devices = execution.devices
        self.slots = attempt_slots(execution.device, devices)
        if not self.slots:
            raise SweepError(
                f"each trial needs {devices} GPUs, and this machine has fewer. Use a machine with "
                f"{devices} GPUs, or plan with fewer --devices-per-trial and another --out."
            )

        self._attempts: set[FreshProcess] = set()
        self._threads = ThreadPoolExecutor(len(self.slots), "attempt")
        self._is_stopping = False

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        process = FreshProcess(
            attempt_trial, folder.path, None, environment=environment, ends_itself=True
        )
        self._attempts.add(process)
        if self._is_stopping:
            process.stop()

        future: Future[Outcome] = self._threads.submit(outcome_of, process, folder)
        future.add_done_callback(lambda _: self._attempts.discard(process))
        return future

    def stop(self, force: bool = False) -> None:
        self._is_stopping = True
        for process in list(self._attempts):
            if force:
                process.kill()
            else:
                process.stop()

    def close(self) -> None:
        self._threads.shutdown()


def attempt_slots(device: str, devices: int = 1) -> list[dict[str, str]]:
    """Return a slot for each group of `devices` visible GPUs on `cuda`, otherwise one slot."""
    if device != "cuda":
        return [{}]

    from sweep.training.device import visible_gpus  # imports torch

    names = visible_gpus()
    groups = [names[i : i + devices] for i in range(0, len(names) - devices + 1, devices)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]
