"""Presets: how a trial's steps are split and held, chosen by forecast, with the reason.

`speed` takes the largest microbatch within all of the memory that a plan may use, `balanced` within
70 % of it, `memory` within half, recomputing activations and splitting all that can be split.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sweep.config.numbers import format_bytes
from sweep.config.trial import TrialConfig
from sweep.memory.forecast import Forecasts, largest_microbatch
from sweep.memory.zero import STAGES
from sweep.plan.steps import largest_divisor
from sweep.training.device import usable_memory
from sweep.training.process import ShouldStop

SHARES = {"speed": 1.0, "balanced": 0.7, "memory": 0.5}  # of what a plan may use
LEAST = "memory"  # the preset that saves whatever can be saved
LAST_RESORT = "bf16-pure"  # precision where nothing else fits


@dataclass(frozen=True)
class Asked:
    """What a preset may not choose, because it was given."""

    zero: int | None = None
    activation_checkpointing: bool = False
    precision: bool = False
    microbatch: bool = False


@dataclass(frozen=True)
class Chosen:
    """What a preset chose."""

    zero: int
    activation_checkpointing: bool
    precision: str
    microbatch_size: int  # at most
    reason: str


def choose(config: TrialConfig, preset: str, asked: Asked, should_stop: ShouldStop) -> Chosen:
    """Choose by forecast what a preset says, for the largest step of a plan.

    Of what loses nothing first: a smaller ZeRO stage before a larger, keeping activations before
    recomputing them, the plan's precision before weights in bfloat16.

    Args:
        config: of the largest microbatch that the plan would take.
        preset: a key of SHARES.
        asked: what is given.
        should_stop: never asked.
    """
    usable = usable_memory(config.execution)
    limit, wanted = int(SHARES[preset] * usable), config.microbatch_size
    within = f"within {SHARES[preset]:.0%} of {format_bytes(usable)} by forecast"
    for precision, recomputes, stages in _variants(config, preset, asked):
        fits = {
            stage: _largest(_varied(config, stage, recomputes, precision), limit, wanted)
            for stage in stages
        }
        per_device = config.science.batch_size // config.execution.devices
        sizes = {
            stage: largest_divisor(per_device, found, config.group_size) if found else 0
            for stage, found in fits.items()
        }
        if asked.microbatch:  # it is taken whatever fits
            sizes = {stage: size if size >= wanted else 0 for stage, size in sizes.items()}
        if largest := max(sizes.values()):
            stage = min(stage for stage in stages if sizes[stage] == largest)
            reason = f"{largest} sequences at once {within}"
            if config.execution.devices > 1:
                reason += f", ZeRO {stage}"
            if stage and 0 in sizes:
                reason += f", without which {sizes[0] or 'not one'} would fit"
            if recomputes:
                why = "which saves most" if preset == LEAST else "without it not one fits"
                reason += f", activation checkpointing, {why}"
            if precision != config.science.precision:
                reason += f", {precision}: in {config.science.precision} not one fits"
            return Chosen(stage, recomputes, precision, fits[stage], f"{preset}: {reason}")
    return Chosen(
        stages[-1], recomputes, precision, config.group_size, f"{preset}: nothing fits {within}"
    )


def _variants(
    config: TrialConfig, preset: str, asked: Asked
) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """Yield precision, whether activations are recomputed, and stages; what loses least first."""
    stages = STAGES if config.execution.devices > 1 else (0,)
    if asked.zero is not None:
        stages = (asked.zero,)
    elif preset == LEAST:
        stages = stages[-1:]
    own = config.science.precision
    for precision in (own,) if asked.precision or own == LAST_RESORT else (own, LAST_RESORT):
        for recomputes in (False, True):
            if recomputes or not (asked.activation_checkpointing or preset == LEAST):
                yield precision, recomputes, stages


def _varied(config: TrialConfig, zero: int, recomputes: bool, precision: str) -> TrialConfig:
    execution = {"zero": zero, "activation_checkpointing": recomputes}
    return config.model_copy(
        update={
            "execution": config.execution.model_copy(update=execution),
            "science": config.science.model_copy(update={"precision": precision}),
        }
    )


def _largest(config: TrialConfig, limit: int, wanted: int) -> int:
    """Return the largest microbatch up to the wanted one that fits; 0 where none does."""
    forecasts = Forecasts(config.execution)
    return largest_microbatch(config, limit, forecasts, wanted, is_accumulated=True).largest
