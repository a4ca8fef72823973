"""Jobs that planning runs in a child process: user code and torch stay out of the user's own."""

from collections.abc import Callable, Iterable
from typing import Any

from sweep.config.objects import load_object
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, WorkerDied
from sweep.training.process import FreshProcess

JOB_SECONDS = 120.0


def run_job(function: Callable[..., Any], *arguments: object, seconds: float = JOB_SECONDS) -> Any:
    """Run a module-level function in a child process and return its result.

    Raises:
        SweepError: with the function's own message if it raised, died or took too long.
    """
    try:
        return FreshProcess(function, *arguments).result(timeout=seconds)
    except WorkerDied as error:
        raise SweepError(str(error).removeprefix("SweepError: ")) from error


def identities_of(names: Iterable[str], should_stop: object) -> dict[str, Any]:
    """Return what `identity()` of each user object returns, for those that have one."""
    objects = {name: load_object(name) for name in names}
    return {name: value.identity() for name, value in objects.items() if hasattr(value, "identity")}


def inspect_trial(config: TrialConfig, should_stop: object) -> int | None:
    """Check that a trial's workload can be built and scored, and count the model's parameters.

    Raises:
        SweepError: if user code, a reward or the prompts cannot work.
    """
    from sweep.data.tokens import find_prepared
    from sweep.models import count_parameters
    from sweep.workloads import check_workload

    science, text = config.science, None
    if science.data is not None:
        assert science.tokenizer is not None
        text = find_prepared(science.data, science.tokenizer)
    check_workload(config, text)
    return count_parameters(science.model, config.execution.activation_checkpointing)
