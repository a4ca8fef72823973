"""Small trials for the tests of workloads, and a Llama with the weights of our transformer."""

import pytest
import torch

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.data.synthetic_stories import synthetic_identity
from tests.plans import build_plan

CPU = torch.device("cpu")
GRPO = {"kind": "grpo", "task": "words", "group_size": 4, "prompt_tokens": 40, "new_tokens": 12}


def trial_config(experiment, batch=8, microbatch=None, execution=None, **fields):
    fields = {"batches": [batch], "precision": "fp32", **fields}
    experiment = load_experiment(experiment, fields)
    threads = Execution(device="cpu", threads=2, **(execution or {}))
    data = synthetic_identity() if experiment.data else None
    plan = build_plan(experiment, threads, data=data, microbatch=microbatch)
    row = plan.trials[-1].model_copy(update={"learning_rate": 1e-3, "id": "x"})
    return plan.trial_config(row, "sweep")


def grpo_config(batch=8, microbatch=None, execution=None, precision="fp32", **grpo):
    fields = {"model": "quick", "data": "synthetic", "budget": 100 * batch * 52}
    fields |= {"precision": precision, "workload": {**GRPO, **grpo}}
    return trial_config("grpo-words", batch, microbatch, execution, **fields)


def metrics(workload):
    """Return the means of a workload's metrics since they were last cleared."""
    sums = workload.meter.state()
    return {name: total / count for name, (total, count) in sums.items() if count}


def names_in_llama(blocks):
    """Return, by the name of each of our weights, the weights of Llama that are stacked in it."""
    names = {"embedding": ["model.embed_tokens"], "norm": ["model.norm"], "head": ["lm_head"]}
    for index in range(blocks):
        own, theirs = f"blocks.{index}.", f"model.layers.{index}."
        names |= {
            own + "query_key_value": [f"{theirs}self_attn.{name}_proj" for name in "qkv"],
            own + "attention_out": [theirs + "self_attn.o_proj"],
            own + "gate_up": [f"{theirs}mlp.{name}_proj" for name in ("gate", "up")],
            own + "down": [theirs + "mlp.down_proj"],
            own + "attention_norm": [theirs + "input_layernorm"],
            own + "feed_forward_norm": [theirs + "post_attention_layernorm"],
        }
    return {f"{n}.weight": [f"{m}.weight" for m in parts] for n, parts in names.items()}


def llama_with_weights_of(model, settings):
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=settings.d_model,
            intermediate_size=settings.d_ff,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    )
    weights = {}
    for name, parts in names_in_llama(settings.layers).items():
        weight = model.get_parameter(name)
        weights |= dict(zip(parts, weight.chunk(len(parts)), strict=True))
    llama.load_state_dict(weights)
    return llama
