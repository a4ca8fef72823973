"""Peak memory of a training step without the device: fake tensors, real bookkeeping.

The step is the one that trains (`sweep.training.step`), run twice on tensors without data, so that
optimizer states are there; `LiveStorages` counts what would be held. No weights are made.
Compiled steps are forecast as eager ones, which mostly keep more; that is not calibrated.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sweep.config.trial import Execution, TrialConfig
from sweep.errors import SweepError
from sweep.memory.points import Forecast
from sweep.memory.search import Found, Look, find_largest
from sweep.memory.zero import STAGES, Gathered, on_devices
from sweep.models import build_without_weights
from sweep.models.precision import weight_dtype
from sweep.training.device import usable_memory
from sweep.training.noise import GradientSums
from sweep.training.parallel import layers_of
from sweep.training.process import ShouldStop
from sweep.training.step import TrainingStep
from sweep.training.storages import LiveStorages
from sweep.workloads import build_workload

STEPS = 2  # in the second one gradients of the first were freed and optimizer states are there


def forecast_step(config: TrialConfig) -> Forecast:
    """Forecast the steps and the evaluations of one trial.

    Raises:
        SweepError: if the model or the workload needs values that fake tensors do not have.
    """
    batch_size = config.science.batch_size // config.execution.devices
    plain = {"compile": False, "device": "cpu"}
    here = config.model_copy(update={"execution": config.execution.model_copy(update=plain)})
    shown = _shown(config, batch_size)
    vocabulary = getattr(config.science.model, "vocabulary", None)
    try:
        model = build_without_weights(build_workload(here, torch.device("cpu")).build_model)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, LiveStorages(None, vocabulary) as storages:
            _give_storage(model, weight_dtype(config.science.precision))
            step = TrainingStep(here, torch.device("cpu"), config.microbatch_size, model)
            storages.watch(step.model, step.optimizer)
            phases: dict[str, tuple[int, dict[str, int]]] = {}

            def note(phase: str) -> None:
                phases[phase] = storages.peak_bytes, storages.peak
                storages.forget_peak()

            if step.rollouts is not None:
                step.rollouts.on_phase, step.rollouts.is_rehearsal = note, True
            for _ in range(STEPS):
                storages.forget_peak()
                is_split = shown > config.microbatch_size and step.rollouts is None
                sums = GradientSums() if is_split else None
                step(step.workload.random_batch(shown), 1e-3, sums)
                note("update")
            seen, rest = dict(phases), storages.live_bytes
            phases.clear()  # the evaluation has some too
            step.evaluate(step.workload.random_batch(config.execution.evaluation_batch_size))
            evaluation = max([storages.peak_bytes, *(size for size, _ in phases.values())])
    except SweepError:
        raise
    except Exception as error:  # whatever a user's model does with values that are not there
        raise SweepError(
            f"the memory of {config.science.model.name!r} cannot be forecast without running it "
            f"({type(error).__name__}: {str(error)[:200]}). Measure it with `sweep probe`."
        ) from error
    sizes = batch_size, config.microbatch_size
    peak, by_category = max(seen.values(), key=lambda one: one[0])
    found = Forecast(*sizes, peak, by_category, rest, evaluation)
    if step.rollouts is None:
        return found
    return replace(found, phases={name: bytes_ for name, (bytes_, _) in seen.items()})


def _shown(config: TrialConfig, batch_size: int) -> int:
    """Return how many sequences of a batch tell its peak: some microbatches, unless it samples."""
    if config.science.grpo is not None:
        return batch_size
    return min(batch_size, config.telling_parts(config.microbatch_size) * config.microbatch_size)


def _give_storage(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace meta tensors by fake ones on the CPU; weights that are tied stay tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and id(weight) not in made:
                made[id(weight)] = nn.Parameter(
                    torch.empty(weight.shape, dtype=dtype), requires_grad=weight.requires_grad
                )
            if weight is not None:
                module._parameters[name] = made[id(weight)]  # type: ignore[assignment]
        for held in (module._buffers, module.__dict__):  # a tensor may be a plain attribute
            for name, tensor in held.items():
                if isinstance(tensor, torch.Tensor):
                    held[name] = torch.empty(tensor.shape, dtype=tensor.dtype)


class Forecasts:
    """Forecasts of one experiment's configurations, each made once."""

    def __init__(self, execution: Execution | None = None) -> None:
        """Args: execution: over whose devices a trial is split, if it is."""
        self._known: dict[tuple[int, int, int], Forecast] = {}
        self._split = execution if execution and execution.devices > 1 else None

    @property
    def made(self) -> list[Forecast]:
        """All of them, in order."""
        return list(self._known.values())

    def of(self, config: TrialConfig) -> Forecast:
        """Forecast a configuration, as `forecast_step` does."""
        size = config.microbatch_size
        batch = config.science.batch_size // config.execution.devices
        shown = _shown(config, batch)
        key = (shown, size, config.execution.evaluation_batch_size)
        if key not in self._known:
            found = forecast_step(config)
            if self._split:
                gathered = gathered_bytes(config)
                found = on_devices(found, self._split.devices, self._split.zero, gathered)
            self._known[key] = found
        return replace(self._known[key], batch_size=batch)


def forecast_stages(config: TrialConfig, devices: int) -> list[Forecast]:
    """Forecast one device's step with each ZeRO stage over so many devices, 0 to 3."""
    whole, gathered = forecast_step(config), gathered_bytes(config)
    return [on_devices(whole, devices, stage, gathered) for stage in STAGES]


def gathered_bytes(config: TrialConfig) -> Gathered:
    """Return the bytes of a model's largest layer, and of what lies outside of its layers."""
    model = build_without_weights(build_workload(config, torch.device("cpu")).build_model)
    width = weight_dtype(config.science.precision).itemsize

    def size(module: nn.Module) -> int:
        return width * sum(weight.numel() for weight in module.parameters())

    layers = [size(layer) for layer in layers_of(model)]
    return Gathered(max(layers, default=0), size(model) - sum(layers))


def largest_microbatch(
    config: TrialConfig,
    limit_bytes: int,
    forecasts: Forecasts,
    cap: int | None = None,
    is_accumulated: bool = False,
) -> Found:
    """Find the largest microbatch, up to `cap`, whose forecast peaks are within the limit.

    With `is_accumulated` a step has as many of them as tell what any larger number takes.
    """

    def look(size: int) -> Look:
        parts = config.telling_parts(size) if is_accumulated else 1
        found = forecasts.of(config.sized(parts * size, size))
        return Look(found.needed_bytes <= limit_bytes, found.peak_bytes)

    return find_largest(look, limit_bytes, config.group_size, cap)


def largest_here(config: TrialConfig, should_stop: ShouldStop) -> tuple[int, int]:
    """Return the largest microbatch and evaluation batch that this machine holds by forecast.

    At most the config's, and at least 1, or a group: that not even that fits the device will say.
    """
    limit = usable_memory(config.execution)
    cap, at_once = config.microbatch_size, config.execution.evaluation_batch_size
    forecasts = Forecasts(config.execution)
    if forecasts.of(config).needed_bytes <= limit:
        return cap, at_once
    found = largest_microbatch(config, limit, forecasts, cap, is_accumulated=True)
    largest = max(config.group_size, found.largest)
    return largest, min(at_once, largest)


def forecast_rows(
    configs: Iterable[TrialConfig], should_stop: ShouldStop | None = None
) -> list[Forecast]:
    """Forecast trials as planned, each different configuration once."""
    configs = list(configs)
    forecasts = Forecasts(configs[0].execution if configs else None)
    return [forecasts.of(config) for config in configs]
