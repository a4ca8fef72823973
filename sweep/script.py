"""Functions for a training that `sweep run` starts: `sweep.log`, `sweep.settings`, callbacks.

This file needs only the standard library, so a project may also copy it. The callbacks import
transformers or Lightning when they are first used.
"""

import contextlib
import json
import os
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# What libraries call the metrics of validation and of training.
VALID = ("valid", "val", "validation", "eval", "evaluation", "dev")
TRAIN = ("train", "training")
# Values that trainers log about the training itself, and Lightning's metrics of single batches.
NOT_METRICS = re.compile(
    r"(.*_)?(num_tokens|num_input_tokens_seen|steps?|runtime|model_preparation_time|total_flos"
    r"|lr|learning_rate|(samples|steps|tokens|examples)_per_second)|epoch"
)


@dataclass(frozen=True)
class Trial:
    """The values of a trial, which a training must use."""

    batch_size: int  # sequences, or examples, per optimizer step over all devices
    microbatch_size: int  # sequences per device and forward-backward
    accumulation: int  # microbatches per step and device
    steps: int  # optimizer steps
    tokens: int  # training tokens
    examples: int  # the same in sequences, or examples
    learning_rate: float  # peak
    final_learning_rate: float  # after the last step
    warmup_steps: int  # steps with a rising learning rate
    weight_decay: float
    beta2: float
    seed: int
    eval_steps: int  # steps between evaluations, which divide `steps`
    epochs: float | None  # None without --examples-per-epoch
    device: str  # cuda, cpu or mps
    folder: str  # existing folder for files of the trial
    resume: str  # where a checkpoint is kept, a file or a folder

    def log(self, metrics: Mapping[str, Any] | None = None, /, *, step: int, **values: Any) -> None:
        """Report metrics after a step, as `sweep.log` does."""
        log(metrics, step=step, **values)


def settings() -> Trial | None:
    """Return the values of this trial; None unless `sweep` started the script."""
    text = os.environ.get("SWEEP_TRIAL")
    if not text:
        return None
    values = json.loads(text)
    return Trial(**{field.name: values[field.name] for field in fields(Trial)})


def log(metrics: Mapping[str, Any] | None = None, /, *, step: int, **values: Any) -> None:
    """Report metrics by name after a step: `sweep.log({"train/loss": 2.5}, step=10)`.

    Does nothing unless `sweep` started the script, and in other processes than the first of a
    distributed training. Values may be tensors or arrays of one number. `tokens` or `examples`,
    if given, must be those trained on so far.
    """
    path = os.environ.get("SWEEP_LOG")
    if path and os.environ.get("RANK", "0") == "0":
        line = {"time": time.time(), "step": int(step), **(metrics or {}), **values}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")


def metric_name(name: str) -> str | None:
    """Return a library's name of a metric as `sweep` names it; None if it is no metric.

    `eval_loss`, `val/loss`, `Loss/valid` and Lightning's `val_loss_epoch` are `valid/loss`; `loss`
    and other names without such a part are those of the training, `train/loss`.
    """
    words = [word for word in re.split(r"[^A-Za-z0-9]+", name.lower()) if word]
    if len(words) > 1 and words[-1] == "epoch":
        words.pop()
    if not words or NOT_METRICS.fullmatch("_".join(words)):
        return None
    for group, names in (("valid", VALID), ("train", TRAIN)):
        for position in (0, -1):
            if words[position] in names:
                others = words[1:] if position == 0 else words[:-1]
                return f"{group}/{'_'.join(others)}" if others else None
    return f"train/{'_'.join(words)}"


def named_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that are metrics, by the names of `sweep`."""
    named = {metric_name(name): value for name, value in values.items()}
    return {name: value for name, value in named.items() if name is not None}


def training_arguments(arguments: Any) -> Any:
    """Set the values of this trial on the arguments of a Trainer of transformers or TRL.

    Sets batch size, accumulation, steps, learning rate and seed; evaluates before the first step
    and about 20 times; keeps the schedule, the optimizer and its other values. Completions of GRPO
    are sampled anew for each step. Outputs go to the folder of the trial. Changes nothing unless
    `sweep` started the script.

    Args:
        arguments: transformers.TrainingArguments, or a class derived from it, such as SFTConfig.

    Returns:
        The same object.

    Raises:
        ValueError: if the Trainer may change the batch size (`auto_find_batch_size`).
    """
    trial = settings()
    if trial is None:
        return arguments
    if getattr(arguments, "auto_find_batch_size", False):
        raise ValueError("auto_find_batch_size must be off, because it changes the batch size.")
    arguments.per_device_train_batch_size = trial.microbatch_size
    arguments.gradient_accumulation_steps = trial.accumulation
    arguments.max_steps = trial.steps
    arguments.learning_rate = trial.learning_rate
    arguments.seed = trial.seed
    if hasattr(arguments, "steps_per_generation"):  # GRPO derived them from the former values
        arguments.steps_per_generation = trial.accumulation
        arguments.generation_batch_size = trial.batch_size
    arguments.output_dir = trial.resume
    arguments.eval_strategy = type(arguments.eval_strategy)("steps")
    arguments.eval_steps = trial.eval_steps
    arguments.eval_on_start = True
    return arguments


def __getattr__(name: str) -> Any:
    if name == "TrainerCallback":
        return _trainer_callback()
    if name == "LightningCallback":
        return _lightning_callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _trainer_callback() -> Any:
    from transformers import TrainerCallback as Base

    class TrainerCallback(Base):
        """Reports what a Trainer of transformers or TRL logs: its losses and evaluations."""

        def on_train_begin(
            self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
        ) -> None:
            trial = settings()
            is_grpo = hasattr(args, "num_generations")  # whose data set holds prompts
            if trial is None or is_grpo or not state.is_world_process_zero:
                return
            with contextlib.suppress(TypeError, AttributeError):  # data without a length
                rest = len(train_dataloader.dataset) % trial.batch_size
                steps = len(train_dataloader.dataset) // trial.batch_size
                if rest and trial.steps > steps and not args.dataloader_drop_last:
                    warnings.warn(
                        f"The last step of each epoch has {rest} of {trial.batch_size} examples. "
                        "Train on a multiple of the batch size.",
                        stacklevel=2,
                    )

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            is_summary = "train_runtime" in (logs or {})  # means over the training, after its end
            if logs and state.is_world_process_zero and not is_summary:
                metrics = named_metrics(logs)
                if metrics:
                    log(metrics, step=state.global_step)

    globals()["TrainerCallback"] = TrainerCallback
    return TrainerCallback


def _lightning_callback() -> Any:
    try:
        from lightning.pytorch import Callback as Base
    except ImportError:
        from pytorch_lightning import Callback as Base

    class LightningCallback(Base):  # type: ignore[misc]
        """Reports the loss of each step and what a module logs while it is validated."""

        def __init__(self) -> None:
            self.loss = 0.0  # sum over the microbatches since the last step
            self.step = 0  # the newest one

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is None:
                return
            self.loss += float(loss)  # Lightning has divided it by the number of microbatches
            if trainer.global_step > self.step:
                self.step = trainer.global_step
                if trainer.is_global_zero and self.step % trainer.log_every_n_steps == 0:
                    log({"train/loss": self.loss}, step=self.step)
                self.loss = 0.0

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            is_partial = trainer.sanity_checking and trainer.num_sanity_val_steps != float("inf")
            if trainer.is_global_zero and not is_partial:
                metrics = named_metrics(trainer.callback_metrics)
                valid = {name: value for name, value in metrics.items() if "valid/" in name}
                if valid:
                    log(valid, step=trainer.global_step)

    globals()["LightningCallback"] = LightningCallback
    return LightningCallback
