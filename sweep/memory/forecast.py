"""Forecast the peak memory of eager training steps on tensors without data."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # private: used in no other file

from sweep.config.execution import Execution
from sweep.config.numbers import format_bytes
from sweep.config.trial import TrialConfig
from sweep.errors import SweepError, describe_error
from sweep.memory.search import Forecast, find_largest
from sweep.models.build import build_without_weights, weight_dtype
from sweep.training.parallel import layers_of
from sweep.training.step import TrainingStep
from sweep.training.storages import LiveStorages
from sweep.workloads.build import build_workload, count_flops

STAGES = get_args(Execution.model_fields["zero"].annotation)
CPU = torch.device("cpu")
MOST_TOKENS = 2**22  # of a microbatch that is forecast in a search
NEAR = 0.001  # share of the peak by which a forecast may miss a line


class Forecasts:
    """Forecasts of one experiment's configurations on one of its devices, each computed once."""

    def __init__(self, devices: int = 1, zero: int = 0) -> None:
        self.devices = devices  # `on_one_device` leaves out devices and zero
        self.zero = zero
        self.whole_steps: dict[int, int] = {}  # peaks of the steps in one microbatch, by its size
        self._forecasts: dict[tuple[int, int, int, str], Forecast] = {}

    def of(self, config: TrialConfig) -> Forecast:
        key = _key(config)
        if key not in self._forecasts:
            forecast = forecast_step(config)
            if self.devices > 1:
                forecast = on_devices(forecast, self.devices, self.zero, *_gathered_bytes(config))
            self._forecasts[key] = forecast
            if _peak_sequences(config) == config.microbatch_size:
                self.whole_steps[config.microbatch_size] = forecast.peak_bytes
        return self._forecasts[key]

    def of_all(self, configs: Sequence[TrialConfig]) -> list[Forecast]:
        """Forecast several steps; those between three on a line are read from the line."""
        kinds: dict[tuple[int, str], list[TrialConfig]] = {}
        for config in configs:
            is_whole = _peak_sequences(config) == config.microbatch_size
            if is_whole and not config.science.workload.samples:
                kind = config.execution.evaluation_batch_size, config.science.optimizer.name
                kinds.setdefault(kind, []).append(config)
        for alike in kinds.values():
            self._forecast_lines(sorted(alike, key=lambda config: config.microbatch_size))
        return [self.of(config) for config in configs]

    def _forecast_lines(self, configs: Sequence[TrialConfig]) -> None:
        """Forecast steps of increasing sizes in one microbatch.

        A peak is the largest of several sums that grow with the size, so it is convex: where a
        point lies on the chord of two others, so do all between them.
        """
        if len(configs) < 4:
            return
        middle = len(configs) // 2
        first, between, last = (self.of(configs[index]) for index in (0, middle, -1))
        if not _is_near(between, _on_chord(first, last, between.microbatch_size)):
            self._forecast_lines(configs[: middle + 1])
            self._forecast_lines(configs[middle:])
            return
        for config in configs:
            self._forecasts.setdefault(_key(config), _on_chord(first, last, config.microbatch_size))

    def bound(self, configs: Sequence[TrialConfig], limit_bytes: int) -> dict[str, Any]:
        """Return changes of the execution with which planned steps fit; none if all fit already."""
        largest: dict[tuple[str, bool], TrialConfig] = {}
        for config in configs:
            is_alone = config.microbatch_size == config.sequences_per_device
            kind = config.science.optimizer.name, is_alone
            others = [config, largest.get(kind, config)]
            largest[kind] = max(others, key=lambda c: (c.microbatch_size, c.science.batch_size))
        if all(self.of(config).needed_bytes <= limit_bytes for config in largest.values()):
            return {}
        evaluated = min(
            configs[0].execution.evaluation_batch_size,
            max(config.microbatch_size for config in largest.values()),
        )
        evaluations = [
            config.with_microbatch(config.microbatch_size, evaluation_batch_size=evaluated)
            for config in largest.values()
        ]
        if all(self.of(config).needed_bytes <= limit_bytes for config in evaluations):
            return {"evaluation_batch_size": evaluated}  # only evaluations were too large

        group = configs[0].sequences_per_group
        execution = configs[0].execution
        cap = max(config.microbatch_size for config in configs)
        alone = min(
            self.find_largest(config, limit_bytes, cap, is_accumulated=False)
            for config in largest.values()
        )
        accumulated = 0
        if alone:
            steps = largest.values()
            accumulated = min(self.find_largest(config, limit_bytes, alone) for config in steps)

        reason = ""
        is_split = any(config.sequences_per_device > alone for config in configs)
        if execution.microbatch or execution.accumulation:
            reason = "By forecast, the microbatch that was set does not fit"
        elif not alone or (is_split and not accumulated):
            reason = f"By forecast, not even a microbatch of {group} fits"
        if reason:
            reason += f": steps may use {format_bytes(limit_bytes)}."
        return {
            "microbatch_bound": max(accumulated, group),
            "microbatch_bound_alone": max(alone, group),
            "evaluation_batch_size": min(execution.evaluation_batch_size, max(alone, group)),
            "reason": reason,
        }

    def find_largest(
        self,
        config: TrialConfig,
        limit_bytes: int,
        cap: int | None = None,
        is_accumulated: bool = True,
    ) -> int:
        """Return the largest microbatch that fits, accumulated or alone; or 0.

        Sizes above `largest_forecast` are not tried.
        """

        def needed_bytes(size: int) -> int:
            parts = config.parts_to_peak(size) if is_accumulated else 1
            return self.of(config.on_one_device(parts * size, size)).needed_bytes

        if cap is None:
            cap = largest_forecast(config)
        cap = max(cap, config.sequences_per_group)  # a microbatch may be a part of a group
        return find_largest(needed_bytes, limit_bytes, config.sequences_per_group, cap).largest


def largest_forecast(config: TrialConfig) -> int:
    """Return the largest microbatch that a search forecasts: its time grows with the tokens."""
    group = config.sequences_per_group
    sequences = max(MOST_TOKENS // config.tokens_per_sequence, config.sequences_per_device)
    return max(sequences // group, 1) * group


def _key(config: TrialConfig) -> tuple[int, int, int, str]:
    """Return what decides a forecast within one experiment."""
    evaluation = config.execution.evaluation_batch_size
    optimizer = config.science.optimizer.name
    return _peak_sequences(config), config.microbatch_size, evaluation, optimizer


def _on_chord(first: Forecast, last: Forecast, size: int) -> Forecast:
    """Return the forecast of a microbatch size on the line through those of two others."""
    share = (size - first.microbatch_size) / (last.microbatch_size - first.microbatch_size)

    def between(low: int, high: int) -> int:
        return round(low + share * (high - low))

    return Forecast(
        microbatch_size=size,
        peak_bytes=between(first.peak_bytes, last.peak_bytes),
        by_category={
            name: between(first.by_category.get(name, 0), last.by_category.get(name, 0))
            for name in first.by_category | last.by_category
        },
        rest_bytes=between(first.rest_bytes, last.rest_bytes),
        evaluation_bytes=between(first.evaluation_bytes, last.evaluation_bytes),
    )


def _is_near(one: Forecast, other: Forecast) -> bool:
    """Return whether no number of two forecasts differs by more than a thousandth of the peak."""
    names = one.by_category.keys() | other.by_category.keys()
    pairs = [(one.by_category.get(name, 0), other.by_category.get(name, 0)) for name in names]
    pairs += [(one.peak_bytes, other.peak_bytes), (one.rest_bytes, other.rest_bytes)]
    pairs += [(one.evaluation_bytes, other.evaluation_bytes)]
    return all(abs(a - b) <= NEAR * one.peak_bytes for a, b in pairs)


def _peak_sequences(config: TrialConfig) -> int:
    """Return how many sequences determine the peak; further microbatches repeat it."""
    sequences = config.sequences_per_device
    if config.science.workload.samples:
        return sequences
    micro = config.microbatch_size
    return min(sequences, config.parts_to_peak(micro) * micro)


def forecast_step(config: TrialConfig) -> Forecast:
    """Forecast the steps and the evaluations of one trial on one device."""
    try:
        size = _peak_sequences(config)
        micro = config.microbatch_size
        here = config.with_microbatch(micro, compile=False, device="cpu")
        model = build_without_weights(build_workload(here, CPU).build_model)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, LiveStorages(None, config.science.model.vocabulary) as storages:
            _allocate(model, weight_dtype(config.science.precision))
            step = TrainingStep(here, CPU, model)
            storages.watch(step.model, step.optimizer)
            peaks: dict[str, tuple[int, dict[str, int]]] = {}

            def end_phase(name: str) -> None:
                peaks[name] = storages.peak_bytes, storages.peak
                storages.forget_peak()

            step.workload.on_phase = end_phase
            step.workload.is_rehearsal = True
            for _ in range(2):  # the second one holds optimizer states
                storages.forget_peak()
                step(step.workload.random_batch(size), 1e-3)
                end_phase("update")
            phases = {name: peak for name, (peak, _) in peaks.items() if step.samples}
            peak, by_category = max(peaks.values(), key=lambda phase: phase[0])
            rest = storages.live_bytes

            peaks.clear()
            step.evaluate(step.workload.random_batch(config.execution.evaluation_batch_size))
            end_phase("evaluation")  # it has other phases too if the workload samples
        evaluation = max(phase_peak for phase_peak, _ in peaks.values())
        return Forecast(micro, peak, by_category, rest, evaluation, phases)
    except SweepError:
        raise
    except Exception as error:  # a user's model may raise anything
        raise SweepError(
            f"memory of {config.science.model.name!r} must be forecast on tensors without values, "
            f"got {describe_error(error)}. Measure it with `sweep probe`."
        ) from error


def forecast_flops(config: TrialConfig) -> float:
    """Count the FLOPs per token of a training step."""
    workload = build_workload(config, CPU)
    model = build_without_weights(workload.build_model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _allocate(model, torch.float32)
        return count_flops(workload, model)


def _allocate(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace meta tensors by fake ones on the CPU; tied weights stay tied."""
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weights = list(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, weight in weights:
            key = id(weight)
            if key not in allocated:
                data = torch.empty(weight.shape, dtype=dtype)
                allocated[key] = nn.Parameter(data, requires_grad=weight.requires_grad)
            setattr(module, name, allocated[key])

        tensors = dict(module.named_buffers(recurse=False))
        for name, value in vars(module).items():  # a tensor may also be a plain attribute
            if isinstance(value, torch.Tensor):
                tensors[name] = value
        for name, tensor in tensors.items():
            setattr(module, name, torch.empty(tensor.shape, dtype=tensor.dtype))


def forecast_stages(config: TrialConfig, devices: int) -> list[Forecast]:
    whole = forecast_step(config)
    largest_layer, outside = _gathered_bytes(config)
    return [on_devices(whole, devices, stage, largest_layer, outside) for stage in STAGES]


def _gathered_bytes(config: TrialConfig) -> tuple[int, int]:
    """Return the bytes of a model's largest layer, and of the weights outside of its layers."""
    model = build_without_weights(build_workload(config, CPU).build_model)
    width = weight_dtype(config.science.precision).itemsize
    layers = [_count_weights(layer) for layer in layers_of(model)]
    outside = _count_weights(model) - sum(layers)
    return width * max(layers, default=0), width * outside


def _count_weights(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def on_devices(
    whole: Forecast, devices: int, stage: int, largest_layer: int, outside: int
) -> Forecast:
    """Return the forecast of one of several devices; `outside`: bytes of weights not in layers.

    Stages 0 and 1 keep a bucket for each gradient, also between steps. During a step stage 2 holds
    all weights in addition to its shard, stage 3 those of two layers and those outside of layers.
    Gradients of one layer, and of the weights outside of layers, are whole until they are reduced.
    """
    weights = whole.by_category["weights"]
    gradients = whole.by_category["gradients"]
    states = whole.by_category["optimizer"]

    own_states = -(-states // devices) if stage >= 1 else states
    at_rest = own_states - states
    if stage < 2:
        own_weights = weights
        gathered = 0
        own_gradients = max(gradients, weights)
        at_rest += weights
    else:
        own_weights = -(-weights // devices)
        gathered = weights if stage == 2 else min(weights, 2 * largest_layer + outside)
        own_gradients = -(-gradients // devices) + min(gradients, largest_layer + outside)
        at_rest += own_weights - weights

    split = {"gradients": own_gradients, "weights": own_weights + gathered, "optimizer": own_states}
    return replace(
        whole,
        peak_bytes=whole.peak_bytes + sum(split.values()) - weights - gradients - states,
        by_category={**whole.by_category, **split},
        rest_bytes=whole.rest_bytes + at_rest,
        evaluation_bytes=whole.evaluation_bytes + at_rest + gathered,
    )
