"""The executor protocol, the executor of this machine, and the choice of one."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from sweep.config.trial import Execution, Services
from sweep.errors import SweepError
from sweep.orchestration.ray_executor import RayExecutor
from sweep.orchestration.slurm_executor import SlurmExecutor, parse_request
from sweep.plan.retry import Outcome
from sweep.training import attempt_trial
from sweep.training.process import FreshProcess, outcome_of
from sweep.trial.folder import SweepFolder, TrialFolder
from sweep.usercode.objects import require_extra


class Executor(Protocol):
    """Runs attempts. The jobs of a cluster call `sweep.training.run_cluster_attempt`."""

    @property
    def slots(self) -> list[dict[str, str]]:
        """The environment of each attempt that may run now; empty: the command has to stop."""

    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Start the newest attempt of a trial; the future holds its outcome."""

    def stop(self, force: bool = False) -> None:
        """Ask all attempts to checkpoint and end; with `force` end them at once."""

    def close(self) -> None:
        """Wait for all attempts."""


class LocalExecutor:
    """Runs each attempt in a fresh process, one per slot of `attempt_slots`."""

    def __init__(self, device: str, devices: int = 1) -> None:
        self.slots = attempt_slots(device, devices)
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
            process.kill() if force else process.stop()

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


def check_services(services: Services) -> None:
    """Refuse settings that do not go together, and an executor whose extra is missing."""
    for name, executor in (("ray_address", "ray"), ("slurm", "slurm")):
        if getattr(services, name) is not None and services.executor != executor:
            raise SweepError(
                f"{name} needs the executor {executor}, got {services.executor}. Add --executor "
                f"{executor}, or leave it out."
            )
    parse_request(services.slurm)
    if package := {"ray": "ray", "slurm": "submitit"}.get(services.executor):
        require_extra(package, services.executor, f"executor {services.executor}")


def build_executor(services: Services, execution: Execution, folder: SweepFolder) -> Executor:
    """Return the executor that the services name, which `check_services` accepts."""
    if services.executor != "local" and ":" in execution.device:
        raise SweepError(
            f"device must be cuda, cpu or auto with the executor {services.executor}, got "
            f"{execution.device!r}. Leave the number out."
        )
    match services.executor:
        case "local":
            return LocalExecutor(execution.device, execution.devices)
        case "ray":
            return RayExecutor(execution, services.ray_address)
        case "slurm":
            return SlurmExecutor(execution, folder, parse_request(services.slurm))
