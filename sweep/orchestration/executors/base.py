"""The base class of executors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar

from sweep.config.execution import Execution
from sweep.config.settings import Settings
from sweep.plan.retry import Outcome
from sweep.trial.folder import SweepFolder, TrialFolder


class Executor(ABC):
    """Runs attempts. The jobs of a cluster call `sweep.training.run_cluster_attempt`."""

    name: ClassVar[str]  # value of --executor
    extra: ClassVar[str | None] = None  # extra of this package that installs `library`
    library: ClassVar[str | None] = None  # module that only this executor's file imports
    # Table with the flags of this executor: fields annotated `RunFlag(Group.DEVICES)`.
    settings: ClassVar[type[Settings]] = Settings
    is_elsewhere: ClassVar[bool] = True  # False: all attempts run on the command's machine

    # True: a process runs one trial after the other, and compiles their steps once.
    shares_processes: ClassVar[bool] = False

    slots: list[dict[str, str]]
    """The environment of each attempt that may run now; empty: the command has to stop."""

    @classmethod
    def refuse_unsuited(cls, settings: Any) -> None:
        """Raise SweepError if the settings, of the type `cls.settings`, have a wrong value."""
        return None

    @classmethod
    def nodes_per_trial(cls, settings: Any) -> int:
        """Return over how many nodes the devices of a trial are spread."""
        return 1

    @abstractmethod
    def __init__(self, settings: Any, execution: Execution, folder: SweepFolder) -> None:
        """Connect to the machines; raise SweepError if they cannot run trials."""

    @abstractmethod
    def submit(self, folder: TrialFolder, environment: Mapping[str, str]) -> Future[Outcome]:
        """Start the newest attempt of a trial; the future holds its outcome, and never raises.

        docs/executors.md lists the kinds of outcomes of jobs that die.
        """

    @abstractmethod
    def stop(self, force: bool = False) -> None:
        """Ask all attempts to checkpoint and end; with `force` end them at once."""

    def release(self) -> None:  # noqa: B027
        """Free the memory of processes that wait for attempts."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all attempts."""
