"""Bytes of weights, gradients and optimizer on each device, by ZeRO stage: arithmetic only.

A stage divides more of them by the devices (Rajbhandari et al. 2019); activations are divided by
none. So each stage leaves at least as much room for sequences as the one before: a larger stage
asks for no smaller microbatch. Those are the states between steps; within a step torch's own
sharding (`sweep.training.parallel`) gathers some of them, which `on_devices` counts.
"""

from dataclasses import astuple, dataclass, replace

from sweep.memory.points import Forecast

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class ModelStates:
    """Bytes of what a model's training holds between steps: per parameter, or on a device."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


MIXED_ADAM = ModelStates(2, 2, 12)  # per parameter: float32 weights and both moments in optimizer
SHARDED_FROM = ModelStates(weights=3, gradients=2, optimizer=1)  # stage


def states_per_device(
    parameters: int, devices: int, stage: int, per_parameter: ModelStates
) -> ModelStates:
    """Return bytes on each device; where parameters do not divide, on the one with the most.

    Args:
        parameters: of the whole model.
        devices: that share it.
        stage: 0 shards nothing, 1 the optimizer, 2 gradients too, 3 weights too.
        per_parameter: bytes, such as `MIXED_ADAM`.
    """
    shard = -(-parameters // devices)
    parts = zip(astuple(per_parameter), astuple(SHARDED_FROM), strict=True)
    return ModelStates(*(size * (shard if stage >= of else parameters) for size, of in parts))


@dataclass(frozen=True)
class Gathered:
    """Bytes of weights that a process gathers together."""

    largest_layer: int
    outside: int  # of all layers: embeddings, the last norm, the output


def on_devices(whole: Forecast, devices: int, stage: int, gathered: Gathered) -> Forecast:
    """Return the forecast of one device of several, from that of one which holds everything.

    Stages 0 and 1 hold buckets of all gradients, between steps too. Within a step stage 2 has all
    weights beside its part of them, stage 3 those of a layer and the next, and of what lies outside
    of layers. The gradients of a layer, and of what lies outside, are whole until they are summed.
    """
    if devices == 1:
        return whole
    held = whole.by_category
    weights, gradients, states = (
        held.get(name, 0) for name in ("weights", "gradients", "optimizer")
    )
    layer, outside = gathered.largest_layer, gathered.outside
    own_states = -(-states // devices) if stage >= 1 else states
    own_weights = -(-weights // devices) if stage >= 2 else weights
    own_gradients = -(-gradients // devices) if stage >= 2 else max(gradients, weights)
    more_weights = {0: 0, 1: 0, 2: weights, 3: min(weights, 2 * layer + outside)}[stage]
    more_gradients = min(gradients, layer + outside) if stage >= 2 else 0
    split = {
        "weights": own_weights + more_weights,
        "gradients": own_gradients + more_gradients,
        "optimizer": own_states,
    }
    at_rest = own_weights - weights + own_states - states + (weights if stage < 2 else 0)
    return replace(
        whole,
        peak_bytes=whole.peak_bytes + sum(split.values()) - weights - gradients - states,
        by_category={**held, **split},
        rest_bytes=whole.rest_bytes + at_rest,
        evaluation_bytes=whole.evaluation_bytes + at_rest + more_weights,
    )
