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
    "shares_prompts": "1",
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
    if option.name in VALUES and option.expose_value
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


def test_variables_change_the_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    variables = {"MICROBATCH": "2", "DEVICES_PER_TRIAL": "2", "ZERO": "3", "BATCHES": "8"}
    variables |= {"LOSS_CHUNK_ROWS": "64", "ACTIVATION_CHECKPOINTING": "1", "BUDGET": "16384"}
    for name, text in variables.items():
        monkeypatch.setenv(f"SWEEP_RUN_{name}", text)
    result = CliRunner().invoke(sweep, ["run", "quick", "--device", "cpu", "--dry-run", "--json"])
    plan = json.loads(result.stdout)
    ((trial,), execution) = plan["trials"], plan["execution"]
    assert (trial["batch_size"], trial["microbatch_size"], trial["devices"]) == (8, 2, 2)
    assert (execution["zero"], execution["loss_chunk_rows"]) == (3, 64)
    assert execution["activation_checkpointing"] and plan["token_budget"] == 16384
