"""The content of a timing.json that nothing measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.trial.timing import ArmTimes, Timing


def timing_of(
    seconds_per_step: Mapping[Arm, Sequence[float]],
    *,
    microbatch_sizes: Mapping[Arm, int] | None = None,
    cpu_share: float | None = 1.0,
    execution: Execution | None = None,
    **fields: Any,
) -> Timing:
    """Return the times of these arms, one per round; what is not given is the same for all."""
    arms = []
    for arm, seconds in seconds_per_step.items():
        size = arm.batch_size if microbatch_sizes is None else microbatch_sizes[arm]
        times = ArmTimes(
            optimizer=arm.optimizer,
            batch_size=arm.batch_size,
            microbatch_size=size,
            steps_per_round=3 if seconds else 0,
            seconds_per_step=tuple(seconds),
            seconds_compile=None,
            cpu_share=cpu_share,
            is_loaded=None if cpu_share is None else cpu_share < 0.9,
        )
        arms.append(times)
    if execution is None:
        execution = Execution(device="cpu", threads=2)
    values: dict[str, Any] = {
        "sweep_uid": "uid",
        "measured_at": "2026-01-01T00:00:00+00:00",
        "device": "Example CPU",
        "execution": execution.model_dump(mode="json"),
        "precision": "fp32",
        "torch_version": "2.13.0",
        "has_real_batches": True,
        "rounds": len(arms[0].seconds_per_step),
        "rounds_needed": 10,
        "reason": "",
        "seconds_evaluation": None,
        "arms": tuple(arms),
    }
    return Timing(**{**values, **fields})
