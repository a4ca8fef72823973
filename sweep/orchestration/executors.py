"""Build the executor that the services name."""

from sweep.config.execution import Execution, Services
from sweep.config.objects import require_extra
from sweep.errors import SweepError
from sweep.orchestration.local import Executor, LocalExecutor
from sweep.orchestration.ray_executor import RayExecutor
from sweep.orchestration.slurm_executor import SlurmExecutor, parse_request
from sweep.trial.folder import SweepFolder

PACKAGES = {"ray": "ray", "slurm": "submitit"}  # by executor, which is also the extra's name


def check_services(services: Services) -> None:
    """Refuse settings that do not go together, and an executor whose extra is missing."""
    for name, executor in (("ray_address", "ray"), ("slurm", "slurm")):
        if getattr(services, name) is not None and services.executor != executor:
            raise SweepError(
                f"{name} needs the executor {executor}, got {services.executor}. Add --executor "
                f"{executor}, or leave it out."
            )
    parse_request(services.slurm)
    if package := PACKAGES.get(services.executor):
        require_extra(package, services.executor, f"executor {services.executor}")


def build_executor(services: Services, execution: Execution, folder: SweepFolder) -> Executor:
    """Return the executor that the services name.

    Raises:
        SweepError: if it cannot be used, or cannot run a trial.
    """
    check_services(services)
    if services.executor == "local":
        return LocalExecutor(execution.device, execution.devices)
    if ":" in execution.device:
        raise SweepError(
            f"device must be cuda, cpu or auto with the executor {services.executor}, which "
            f"assigns devices itself, got {execution.device!r}. Leave the number out."
        )
    if services.executor == "slurm":
        return SlurmExecutor(execution, folder, parse_request(services.slurm))
    return RayExecutor(execution, services.ray_address)
