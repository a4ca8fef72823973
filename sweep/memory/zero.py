"""Memory of one device per ZeRO stage, from the forecast of a device that holds everything.

Each stage splits more of the training state over the devices (Rajbhandari et al. 2019): 1 the
optimizer, 2 also gradients, 3 also weights. No stage splits activations. This is arithmetic for the
sharding in `sweep.training.parallel`, which gathers some of the state again during a step.
"""

from dataclasses import replace

from sweep.memory.points import Forecast

STAGES = (0, 1, 2, 3)


def on_devices(
    whole: Forecast, devices: int, stage: int, largest_layer: int, outside: int
) -> Forecast:
    """Return the forecast of one of several devices.

    Stages 0 and 1 keep a bucket for each gradient, also between steps. During a step stage 2 holds
    all weights in addition to its shard, stage 3 those of two layers and those outside of layers.
    Gradients of one layer, and of the weights outside of layers, are whole until they are reduced.

    Args:
        largest_layer: bytes of its weights.
        outside: bytes of weights outside of layers: embeddings, the last norm, the output.
    """
    if devices == 1:
        return whole
    held = whole.by_category
    weights, gradients, states = (
        held.get(name, 0) for name in ("weights", "gradients", "optimizer")
    )
    own_states = -(-states // devices) if stage >= 1 else states
    own_weights = -(-weights // devices) if stage >= 2 else weights
    own_gradients = -(-gradients // devices) if stage >= 2 else max(gradients, weights)
    more_weights = {0: 0, 1: 0, 2: weights, 3: min(weights, 2 * largest_layer + outside)}[stage]
    more_gradients = min(gradients, largest_layer + outside) if stage >= 2 else 0
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
