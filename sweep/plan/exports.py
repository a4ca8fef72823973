"""A planned trial in the words and the file format of another trainer: `sweep plan --export`.

An exporter is a function in `EXPORTS`. Each writes the whole batch, that of a device, and the
accumulation, which must multiply to the first: batch size = microbatch size × devices × steps of
accumulation. Files of others may say more; these say what a plan decides.
"""

import json
from collections.abc import Callable
from typing import Any

from sweep.errors import SweepError
from sweep.plan.plan import Plan, PlannedTrial

QUOTED_NO = "'no'"  # which YAML 1.1 takes for false without quotes


def _deepspeed(plan: Plan, row: PlannedTrial) -> str:
    """Return a configuration of DeepSpeed: https://www.deepspeed.ai/docs/config-json."""
    document: dict[str, Any] = {
        "train_batch_size": row.batch_size,
        "train_micro_batch_size_per_gpu": row.microbatch_size,
        "gradient_accumulation_steps": row.gradient_accumulation_steps,
        "zero_optimization": {"stage": plan.execution.zero},
        "bf16": {"enabled": _is_half(plan)},
    }
    if plan.settings.optimizer.clip:
        document["gradient_clipping"] = plan.settings.optimizer.clip
    return json.dumps(document, indent=2) + "\n"


def _accelerate(plan: Plan, row: PlannedTrial) -> str:
    """Return a file for `accelerate launch --config_file`.

    Accelerate has no batch size of its own: that of a device is the data loader's, in a comment.
    """
    lines = [
        f"# batch size {row.batch_size} = {row.microbatch_size} (data loader of each process) × "
        f"{row.devices} processes × {row.gradient_accumulation_steps} (accumulation)",
        "compute_environment: LOCAL_MACHINE",
        f"mixed_precision: {'bf16' if _is_half(plan) else QUOTED_NO}",
        "num_machines: 1",
        f"num_processes: {row.devices}",
    ]
    if plan.execution.zero:
        clip = plan.settings.optimizer.clip
        lines += [
            "distributed_type: DEEPSPEED",
            "deepspeed_config:",
            f"  gradient_accumulation_steps: {row.gradient_accumulation_steps}",
            f"  zero_stage: {plan.execution.zero}",
        ]
        lines += [f"  gradient_clipping: {clip}"] if clip else []
    else:
        is_cpu = plan.execution.device_type == "cpu"
        kind = "'NO'"
        if row.devices > 1:
            kind = "MULTI_CPU" if is_cpu else "MULTI_GPU"
        lines += [f"distributed_type: {kind}", f"use_cpu: {str(is_cpu).lower()}"]
    return "\n".join(lines) + "\n"


def _trl(plan: Plan, row: PlannedTrial) -> str:
    """Return a file for `trl sft --config` or, for GRPO, `trl grpo --config`.

    Its keys are those of TrainingArguments, so that any Trainer of transformers can read it.
    """
    half = "true" if _is_half(plan) else "false"
    lines = [
        f"# batch size {row.batch_size}, on {row.devices} processes",
        f"per_device_train_batch_size: {row.microbatch_size}",
        f"gradient_accumulation_steps: {row.gradient_accumulation_steps}",
        f"max_steps: {row.steps}",
        f"bf16: {half}",
        f"max_grad_norm: {plan.settings.optimizer.clip}",
    ]
    if plan.execution.zero:
        stage = plan.execution.zero
        lines.append(f"# ZeRO stage {stage} is set by the launcher, or by `deepspeed: FILE` here")
    recomputes = str(plan.execution.activation_checkpointing).lower()
    lines.append(f"gradient_checkpointing: {recomputes}")  # TRL's own default is true
    if plan.settings.precision == "bf16-pure":
        lines.append("# bf16-pure: load the weights in bf16 too (dtype of model_init_kwargs)")
    if row.learning_rate is not None:
        lines.append(f"learning_rate: {_yaml_number(row.learning_rate)}")
    workload = plan.settings.workload
    if workload.samples:
        lines += [
            f"num_generations: {workload.sequences_per_group}",
            f"generation_batch_size: {row.batch_size}",
        ]
    return "\n".join(lines) + "\n"


def _torchtitan(plan: Plan, row: PlannedTrial) -> str:
    """Return tables of a configuration of torchtitan, which derives the accumulation.

    Stages of ZeRO become its degrees: 0 replicates, 2 and 3 shard, and 2 keeps gathered weights; it
    has no stage 1.
    """
    is_sharded = plan.execution.zero >= 2
    if plan.execution.zero == 1:
        raise SweepError("torchtitan shards weights, gradients and optimizer. Plan --zero 0 or 3.")
    mode = "full" if plan.execution.activation_checkpointing else "none"
    clip = plan.settings.optimizer.clip
    precision = "bfloat16" if _is_half(plan) else "float32"
    reshard = "never" if plan.execution.zero == 2 else "default"
    lines = [
        f"# batch size {row.batch_size} = {row.microbatch_size} × {row.devices} devices × "
        f"{row.gradient_accumulation_steps} (accumulation)",
        "[training]",
        f"local_batch_size = {row.microbatch_size}",
        f"global_batch_size = {row.batch_size}",
        f"seq_len = {plan.tokens_per_sequence}",
        f"steps = {row.steps}",
        f"max_norm = {clip if clip else 'inf'}",  # 0 would zero the gradients
        f'mixed_precision_param = "{precision}"',
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if is_sharded else row.devices}",
        f"data_parallel_shard_degree = {row.devices if is_sharded else 1}",
        f'fsdp_reshard_after_forward = "{reshard}"',
        "",
        "[activation_checkpoint]",
        f'mode = "{mode}"',
    ]
    if row.learning_rate is not None:
        lines += ["", "[optimizer]", f"lr = {row.learning_rate}"]
    return "\n".join(lines) + "\n"


def _yaml_number(value: float) -> str:
    """Write a number for YAML 1.1, which takes 1e-05 for a text."""
    mantissa, e, exponent = repr(value).partition("e")
    if e and "." not in mantissa:
        mantissa += ".0"
    return f"{mantissa}{e}{exponent}"


def _is_half(plan: Plan) -> bool:
    return plan.settings.precision.startswith("bf16")


EXPORTS: dict[str, Callable[[Plan, PlannedTrial], str]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "trl": _trl,
    "torchtitan": _torchtitan,
}


def export_plan(plan: Plan, name: str) -> str:
    """Return the only batch size of a plan as the file of another trainer.

    Raises:
        SweepError: if the plan has several batch sizes, optimizers or policies, or its steps are
            not known yet.
    """
    finals = [row for row in plan.trials if row.stage == "final"]
    kinds = {
        "batch size": ("--batches", [str(row.batch_size) for row in finals]),
        "optimizer": ("--optimizers", [str(row.optimizer) for row in finals]),
        "rate": ("--lr", [row.policy for row in finals]),
    }
    for kind, (flag, values) in kinds.items():
        listed = ", ".join(dict.fromkeys(values))
        if len({*values}) > 1:
            raise SweepError(f"--export writes one {kind}, got {listed}. Name one of {flag}.")
    row = finals[0]
    if not row.steps:
        raise SweepError("--export needs steps that are known. Give a --budget of tokens.")
    product = row.microbatch_size * row.devices * row.gradient_accumulation_steps
    assert product == row.batch_size, "the plan checks it"
    return EXPORTS[name](plan, row)
