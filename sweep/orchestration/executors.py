"""Executors by name: where attempts run, as the command line says it."""

from dataclasses import dataclass

from sweep.config.objects import require_extra
from sweep.config.trial import Execution
from sweep.errors import SweepError
from sweep.orchestration.local import Executor, LocalExecutor
from sweep.orchestration.ray_executor import RayExecutor
from sweep.orchestration.slurm_executor import SlurmExecutor, parse_request
from sweep.trial.folder import SweepFolder

PACKAGES = {"ray": "ray", "slurm": "submitit"}  # by executor, which is also the extra's name


@dataclass(frozen=True)
class Place:
    """Where attempts run; logistics, which change no number."""

    executor: str = "local"  # local, ray or slurm
    ray_address: str | None = None  # of a running cluster; None: one of this machine, for this
    slurm: str | None = None  # what to ask SLURM for: partition=gpu,time=4h

    def check(self) -> None:
        """Refuse flags that do not go together, and an executor whose extra is missing."""
        if self.executor not in ("local", *PACKAGES):
            raise SweepError(f"executor must be local, ray or slurm, got {self.executor!r}.")
        for flag, executor in (("ray_address", "ray"), ("slurm", "slurm")):
            if getattr(self, flag) is not None and self.executor != executor:
                raise SweepError(
                    f"{flag.replace('_', '-')} goes with the executor {executor}, got "
                    f"{self.executor}. Add --executor {executor}, or leave it out."
                )
        parse_request(self.slurm)
        if package := PACKAGES.get(self.executor):
            require_extra(package, self.executor, f"executor {self.executor}")


HERE = Place()


def build_executor(place: Place, execution: Execution, folder: SweepFolder) -> Executor:
    """Return the executor that a place names.

    Raises:
        SweepError: if it cannot be used, or cannot hold a trial.
    """
    place.check()
    if place.executor == "local":
        return LocalExecutor(execution.device, execution.devices)
    if ":" in execution.device:
        raise SweepError(
            f"device must be cuda, cpu or auto with the executor {place.executor}, which chooses "
            f"among devices itself, got {execution.device!r}. Leave the number out."
        )
    if place.executor == "slurm":
        return SlurmExecutor(execution, folder, parse_request(place.slurm))
    return RayExecutor(execution, folder, place.ray_address)
