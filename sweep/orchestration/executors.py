"""Build the executor that the services name."""

from dataclasses import dataclass

from sweep.config.objects import require_extra
from sweep.config.trial import Execution
from sweep.errors import SweepError
from sweep.orchestration.local import Executor, LocalExecutor
from sweep.orchestration.ray_executor import RayExecutor
from sweep.orchestration.slurm_executor import SlurmExecutor, parse_request
from sweep.trial.folder import SweepFolder

PACKAGES = {"ray": "ray", "slurm": "submitit"}  # imported package, by executor and extra


@dataclass(frozen=True)
class Services:
    """Where attempts run."""

    executor: str = "local"  # local, ray or slurm
    ray_address: str | None = None  # None: a Ray of this machine, for this command
    slurm: str | None = None  # what each job requests: partition=gpu,time=4h


Place = Services
HERE = Services()


def check_services(services: Services) -> None:
    """Refuse options that do not belong to the executor, and a missing extra.

    Raises:
        SweepError: naming the option or the command that installs the extra.
    """
    if services.executor not in ("local", *PACKAGES):
        raise SweepError(f"executor must be local, ray or slurm, got {services.executor!r}.")
    options = {"ray": ("ray-address", services.ray_address), "slurm": ("slurm", services.slurm)}
    for executor, (option, value) in options.items():
        if value is not None and services.executor != executor:
            raise SweepError(
                f"{option} needs the executor {executor}, got {services.executor}. Add "
                f"--executor {executor}, or leave it out."
            )
    parse_request(services.slurm)
    if package := PACKAGES.get(services.executor):
        require_extra(package, services.executor, f"executor {services.executor}")


def build_executor(services: Services, execution: Execution, folder: SweepFolder) -> Executor:
    """Return the executor that the services name.

    Raises:
        SweepError: if it cannot be used, or cannot hold a trial.
    """
    check_services(services)
    if services.executor == "local":
        return LocalExecutor(execution.device, execution.devices, execution.compile)
    if ":" in execution.device:
        raise SweepError(
            f"device must be cuda, cpu or auto with the executor {services.executor}, which "
            f"assigns devices itself, got {execution.device!r}. Leave the number out."
        )
    if services.executor == "slurm":
        return SlurmExecutor(execution, folder, parse_request(services.slurm))
    return RayExecutor(execution, services.ray_address)
