"""What the commands take: the flags that override an experiment, and those of where and how fast.

Loads click and the standard library only.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

PRECISIONS = ("auto", "fp32", "bf16", "bf16-pure")


class Folder(click.Path):
    """A path that is not empty, as `--out "$UNSET"` would be."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("must be the path of a folder, got none", param, ctx)
        return super().convert(value, param, ctx)


FOLDER = Folder(path_type=Path)
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--budget", {"help": "Training tokens of every trial: 327M, 327.68M, 3.2768e8."}),
    ("--batches", {"help": "Batch sizes in sequences: 1,8,32 or 1..512 (powers of two)."}),
    ("--model", {"help": "tinystories, small, quick, quadratic, or your module:object."}),
    ("--data", {"help": "tinystories, synthetic, or the path of a text file or folder."}),
    ("--workload", {"help": "pretrain, grpo, quadratic, or your module:object."}),
    ("--lr", {"help": "A rate, sqrt[:RATE@BATCH], linear:RATE@BATCH, or tuned."}),
    ("--tune", {"help": "What --lr tuned tunes: lr,beta2,weight_decay; lr by default."}),
    ("--tune-budget", {"help": "Tokens of each tuning trial; the budget by default."}),
    (
        "--target",
        {
            "metavar": "LOSS",
            "type": float,
            "help": "Train each trial to this validation "
            "loss, at most the budget, at a constant rate.",
        },
    ),
    ("--seeds", {"help": "Seeds per batch size; 1 at a fixed rate, else 3."}),
    ("--context", {"help": "Tokens per sequence."}),
    ("--vocabulary", {"help": "Rows of the embeddings, and the tokenizer's size."}),
    ("--tokenizer", {"type": click.Choice(["bpe", "bytes"]), "help": "How text becomes tokens."}),
    (
        "--init",
        {
            "metavar": "DIR",
            "help": "GRPO: a complete trial whose weights are the start, or "
            "the folder of a pretrained model of transformers.",
        },
    ),
    ("--group-size", {"metavar": "N", "help": "GRPO: completions of each prompt."}),
    ("--precision", {"type": click.Choice(PRECISIONS), "help": "auto: bf16 on CUDA, else fp32."}),
)
LOGISTICS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--device", {"default": "auto", "help": "auto, cpu, cuda, cuda:i or mps."}),
    ("--microbatch", {"help": "Sequences per forward-backward; changes rounding only."}),
    ("--accumulation", {"metavar": "N", "help": "Gradient accumulation steps; the microbatch "
                        "follows from them."}),
    ("--devices-per-trial", {"metavar": "N", "help": "Devices that each trial runs on, a process "
                             "for each; 1 by default."}),
    ("--zero", {"type": click.IntRange(0, 3), "help": "Split over a trial's devices: 1 optimizer "
                "states, 2 and gradients, 3 and weights; 0: nothing."}),
    ("--strategy", {"type": click.Choice(["torch", "deepspeed"]), "help": "Whose code splits them; "
                    "torch by default."}),
    ("--preset", {"type": click.Choice(["speed", "balanced", "memory"]), "help": "Choose by "
                  "forecast, and say why: microbatch, checkpointing, ZeRO stage, precision."}),
    ("--activation-checkpointing", {"is_flag": True, "help": "Less memory, more time."}),
    ("--device-memory", {"metavar": "SIZE", "help": "Hold a trial within it: 16GiB. On a CPU "
                         "every tensor is counted, which makes steps eager."}),
    ("--loss-chunk-rows", {"metavar": "N", "help": "Tokens whose logits exist at a time; "
                           "0: all of them."}),
    ("--generation-batch-size", {"metavar": "N", "help": "GRPO: completions sampled at once; four "
                                 "times the microbatch by default."}),
    ("--shares-prompts", {"is_flag": True, "help": "GRPO: compute a prompt once for all of its "
                          "completions; less memory."}),
    ("--keep", {"type": click.Choice(["none", "weights", "checkpoints"]), 
                "help": "What a finished trial keeps: weights by default; checkpoints: both."}),
    ("--out", {"type": FOLDER, "help": "The sweep's folder; "
               "results/EXPERIMENT by default. Same folder again: resume."}),
    ("--json", {"is_flag": True, "help": "Print one JSON document."}),
    ("--yes", {"is_flag": True, "help": "Do not ask."}),
    ("--quiet", {"is_flag": True, "help": "No plan and no progress."}),
)  # fmt: skip


def experiment_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add EXPERIMENT and the flags that override its fields."""
    for name, settings in reversed(OPTIONS + LOGISTICS):
        command = click.option(name, **settings)(command)
    return click.argument("experiment", default="tinystories")(command)


def memory_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add EXPERIMENT and the flags that matter to memory."""
    left_out = {"--budget", "--lr", "--tune", "--tune-budget", "--target", "--seeds"}
    left_out |= {"--keep", "--yes", "--quiet", "--out", "--preset", "--strategy"}
    chosen = [option for option in OPTIONS + LOGISTICS if option[0] not in left_out]
    for name, settings in reversed(chosen):
        command = click.option(name, **settings)(command)
    out = click.option("--out", type=FOLDER, help="Folder for the result as files.")
    return click.argument("experiment", default="tinystories")(out(command))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
folder_argument = click.argument("folder", type=FOLDER, metavar="DIR")


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add SOURCE and the tokenizer's flags."""
    command = click.option("--vocabulary", default="10000", show_default=True)(command)
    kinds = click.Choice(["bpe", "bytes"])
    command = click.option("--tokenizer", type=kinds, default="bpe", show_default=True)(command)
    return click.argument("source", default="tinystories")(command)
