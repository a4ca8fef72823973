"""Flags of run, plan, forecast and probe read SWEEP_<COMMAND>_*, and do as on the command line."""

import json

import pytest
from click import Context
from click.testing import CliRunner

from sweep.cli import sweep

VALUES = {
    "budget": "16384",
    "batches": "4",
    "model": "small",
    "data": "synthetic",
    "lr": "2e-3",
    "workload": "pretrain",
    "tune": "lr",
    "tune_budget": "8192",
    "target": "3.5",
    "seeds": "2",
    "context": "32",
    "vocabulary": "300",
    "tokenizer": "bytes",
    "init": "x",
    "group_size": "4",
    "precision": "fp32",
    "device": "cpu",
    "microbatch": "2",
    "accumulation": "2",
    "devices_per_trial": "2",
    "zero": "1",
    "strategy": "torch",
    "preset": "memory",
    "activation_checkpointing": "1",
    "device_memory": "1GiB",
    "loss_chunk_rows": "64",
    "generation_batch_size": "4",
    "keep": "none",
    "out": "x",
    "json": "1",
    "yes": "1",
    "quiet": "1",
    "tracking_uri": "http://x",
    "storage": "sqlite://",
    "executor": "ray",
    "ray_address": "127.0.0.1:6379",
    "slurm": "partition=gpu",
    "only": "x",
    "dry_run": "1",
    "retry": "diverged",
    "cluster": "gpus=8",
    "price": "2.5",
    "largest": "64",
    "multiple": "2",
    "soak": "5",
}
HELP = {"help_option_names": ["-h", "--help"]}  # click keeps a command's help option
OPTIONS = [
    (command, option)
    for command in ("run", "plan", "forecast", "probe")
    for option in sweep.commands[command].get_params(Context(sweep.commands[command], **HELP))
    if option.name in VALUES
]


def flags_of(command, *arguments):
    """Return the flags that a command gets."""
    prefix = f"SWEEP_{command.upper()}"
    return (
        sweep.commands[command]
        .make_context(command, ["quick", *arguments], auto_envvar_prefix=prefix)
        .params
    )


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_a_variable_does_what_the_flag_does(monkeypatch, command, option):
    value, without = VALUES[option.name], flags_of(command)
    by_flag = flags_of(command, option.opts[0], *([] if option.is_flag else [value]))
    monkeypatch.setenv(f"SWEEP_{command.upper()}_{option.name.upper()}", value)
    assert flags_of(command) == by_flag != without


# What the variables of an earlier system were for: batch sizes per device, and rows of logits.
EFFECTS = [
    ({"MICROBATCH": "2"}, ("trials", 0, "microbatch_size"), 2),
    ({"ACCUMULATION": "8"}, ("trials", 0, "microbatch_size"), 1),
    ({"DEVICES_PER_TRIAL": "2"}, ("trials", 0, "devices"), 2),
    ({"DEVICES_PER_TRIAL": "2", "ZERO": "3"}, ("execution", "zero"), 3),
    ({"LOSS_CHUNK_ROWS": "64"}, ("execution", "loss_chunk_rows"), 64),
    ({"ACTIVATION_CHECKPOINTING": "1"}, ("execution", "activation_checkpointing"), True),
    ({"DEVICE_MEMORY": "64MiB", "PRESET": "memory"}, ("execution", "preset"), "memory"),
    ({"DEVICE_MEMORY": "9MiB", "PRESET": "memory"}, ("trials", 0, "microbatch_size"), 4),
]


@pytest.mark.parametrize(("variables", "place", "value"), EFFECTS)
def test_variables_change_the_plan(monkeypatch, tmp_path, variables, place, value):
    monkeypatch.chdir(tmp_path)
    for name, text in variables.items():
        monkeypatch.setenv(f"SWEEP_RUN_{name}", text)
    command = ["run", "quick", "--batches", "8", "--budget", "16384", "--device", "cpu"]
    result = CliRunner().invoke(sweep, [*command, "--dry-run", "--json"])
    found = json.loads(result.stdout)
    for step in place:
        found = found[step]
    assert found == value
