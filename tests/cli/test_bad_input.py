"""Nonsense gets one sentence with the remedy, exit code 2, no traceback, and nothing written."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from sweep.config.trial import TokenizerSettings
from sweep.data.sources import identify_data
from sweep.data.tokens import prepare_data
from sweep.trial.files import seal

FLAGS = [
    ("--budget", "x", "budget must be"),
    ("--budget", "63", "at least one step"),
    ("--batches", "four", "batch size must be"),
    ("--model", "huge", "model must be one of"),
    ("--workload", "sorting", "workload"),
    ("--lr", "nan", "lr must be"),
    ("--lr", "linear:1e308@1", "lr must be"),
    ("--lr", "tunned", "Did you mean 'tuned'?"),
    ("--seeds", "none", "or auto"),
    ("--max-seeds", "none", "such as 8."),
    ("--out", "", "must be the path of a folder"),
    ("--out", "x" * 300, "File name too long"),
    ("--device-memory", "16GB of it", "device-memory must be"),
    ("--loss-chunk-rows", "-1", "loss_chunk_rows must be"),
    ("--vocabulary", "100", "vocabulary must be at least"),
    ("--precision", "fp8", "precision"),
    ("--device", "tpu", "device must be"),
    ("--device", "cuda:99", "device must be"),
    ("--microbatch", "3", "microbatch_size must divide"),
    ("--accumulation", "3", "gradient_accumulation_steps must divide"),
    ("--data", "no/such/file.txt", "no/such/file.txt"),
    ("--tracking-uri", "ftp://x", "tracking"),
    ("--only", "zzz", "only must match exactly one trial"),
    ("--nonsense", "1", "nonsense"),
    ("--workload", ".x:y", "cannot be imported"),
    ("--optimizers", "adam", "Did you mean 'adamw'?"),
    ("--optimizers", "adamw,adamw", "optimizers must differ"),
    ("--optimizers", "adamw,none", "none is not one of them"),
]


@pytest.mark.parametrize(("flag", "value", "says"), FLAGS)
def test_every_flag_refuses_nonsense(refuse, flag, value, says):
    assert says in refuse("run", "quick", flag, value)


CHEAP = ("quadratic", "--batches", "4", "--device", "cpu", "--quiet")
TUNED = ("run", "quick", "--yes", "--lr", "tuned")
PLAN = ("plan", "quadratic", "--batches", "4", "--out", "s")
PLACEHOLDERS = "{batch_size} {steps} {learning_rate} {seed}"
NO_COMMANDS = [
    ((*TUNED, "--optimizers", "muon", "--devices-per-trial", "2", "--zero", "1"), "zero shards"),
    (("run", "quadratic", "--optimizers", "muon", "--lr", "tuned"), "no matrices between"),
    ((*TUNED, "--tune", "beta2"), "must contain lr"),
    ((*TUNED, "--tune", "lr,lr"), "at most once"),
    ((*TUNED, "--tune", ""), "tuning.dimensions"),
    ((*TUNED, "--tune-budget", "1G"), "at most the budget"),
    ((*TUNED, "--storage", "nonsense://x"), "--storage"),
    ((*TUNED, "--storage", "sqlite:////no/such/folder/x.db"), "--storage"),
    ((*PLAN, "--cluster", ""), "cluster must be nodes=N,gpus=G"),
    ((*PLAN, "--price", "inf"), "price must be a finite number"),
    ((*PLAN, "--price", "0"), "price must be greater than 0"),
    (("run", "quik"), "quick"),
    (("open",), "`sweep run quick`"),
    (("run", "quick", "--command", f"true {PLACEHOLDERS}"), "experiment 'quick' does not apply"),
    (("run", "--command", f"true {PLACEHOLDERS}", "--data", "x"), "data does not apply"),
    (("run", "--command", "true {batch_size} {steps} {lr} {seed}"), "mean 'learning_rate'?"),
    (("run", "quadratic", "--precision", "bf16"), "needs the precision fp32"),
    (("run", "elman", "--model", "quick", "--data", "synthetic"), "trains nothing"),
    (("forecast", "quick", "--device-memory", "0"), "device-memory must be"),
    (("probe", "quick", "--soak", "many"), "--soak"),
    (("ui", "x", "--port", "70000"), "70000"),
    (("report",), "`sweep run quick`"),
    (("report", "--from-mlflow", "sqlite:///x.db"), "--experiment"),
    (("report", "x", "--run", "abc"), "--from-mlflow"),
    (("report", "x", "--tracking-uri", "foo"), "tracking URI must be"),
    *(((command, "x"), "plan.json") for command in ("status", "stop", "report", "clean", "ui")),
]


@pytest.mark.parametrize(("arguments", "says"), NO_COMMANDS)
def test_commands_that_make_no_sense(refuse, arguments, says):
    assert says in refuse(*arguments)


def test_a_device_need_not_be_here_for_a_cluster_whose_times_are_known(refuse, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ("--batches", "4", "--device", "cuda", "--cluster", "gpus=8")
    assert "time estimate" in refuse("plan", "quadratic", *flags)


@pytest.mark.parametrize(("content", "says"), [(b"", "empty"), (b"a\x00b" * 100, "UTF-8")])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_texts_that_cannot_be_trained_on(refuse, tmp_path, content, says, command):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert says in refuse(command, "quick", "--data", path)


def test_a_data_folder_without_a_text(refuse, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no text file" in refuse("run", "quick", "--data", tmp_path / "empty")


def test_a_text_shorter_than_one_window_of_tokens(refuse, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"story {i} is short\n<|endoftext|>\n" for i in range(4)))
    assert "65 tokens" in refuse("run", "quick", "--data", path, "--quiet")


MODULES = {  # by flag and name: source, and a part of the message
    ("--model", "raises"): ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
    ("--model", "misspelt"): ("def (", "SyntaxError"),
    ("--model", "imports"): ("import no_such_package", "No module named 'no_such_package'"),
    ("--model", "lacks"): ("other = 1", "has no attribute 'build'"),
    ("--model", "exits"): ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ("--model", "number"): ("build = 5", "'int' object is not callable"),
    ("--model", "none"): ("def build(**sizes): return None", "torch.nn.Module"),
    ("--model", "empty"): ("import torch\ndef build(**k): return torch.nn.Identity()", "weights"),
    ("--model", "fails"): ("def build(**sizes): raise ValueError('bad')", "ValueError: bad"),
    ("--workload", "number"): ("build = 5", "'int' object is not callable"),
    ("--workload", "none"): ("def build(config, device): return None", "it builds a NoneType"),
    ("--workload", "fails"): ("def build(config, device): raise ValueError('a')", "ValueError: a"),
    ("--workload", "empty"): ("class build:\n def __init__(self, c, d): 0", "it builds a build"),
}


@pytest.mark.parametrize(("flag", "name"), MODULES)
def test_code_of_the_user_that_cannot_be_used(refuse, tmp_path, monkeypatch, flag, name):
    code, says = MODULES[flag, name]
    module = f"own{flag.replace('-', '_')}_{name}"  # imported once per process
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert says in refuse("run", "quick", flag, f"{module}:build", "--quiet", "--yes")


GRPO = 'model = "quick"\ndata = "synthetic"\nbudget = "60k"\nbatches = [8]\n'


def test_prompts_and_rewards_are_tried_as_soon_as_their_text_is_prepared(
    refuse, tmp_path, monkeypatch
):
    path = tmp_path / "mine.toml"
    (tmp_path / "own_reward.py").write_text("score = 'high'")
    monkeypatch.syspath_prepend(tmp_path)
    settings = TokenizerSettings(kind="bpe", vocabulary=512)
    prepare_data(identify_data("synthetic"), None, settings)
    path.write_text(f"{GRPO}[workload]\nkind = 'grpo'\nnew_tokens = 8\nprompt_tokens = 3\n")
    assert "prompt_tokens must hold the longest" in refuse("plan", path)
    path.write_text(
        f'{GRPO}[workload]\nkind = "grpo"\nnew_tokens = 8\nreward = "own_reward:score"\n'
    )
    assert "reward 'own_reward:score' must return a finite number" in refuse("plan", path)


def test_an_out_that_is_a_file_or_cannot_be_written(refuse, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "sweep"):
        assert "can be written" in refuse("run", "quick", "--out", out)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert "can be written" in refuse("run", "quick", "--out", "x")


@pytest.mark.parametrize("content", ["{", "\x00\x01", json.dumps(seal({"trials": "none"}))])
@pytest.mark.parametrize("command", [("run", "quick", "--out"), ("status",), ("report",)])
def test_a_corrupt_plan(refuse, tmp_path, content, command):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "plan.json").write_text(content)
    assert "plan.json" in refuse(*command, folder)
    assert [file.name for file in folder.iterdir()] == ["plan.json"]


def test_more_than_an_hour_needs_a_yes_and_a_trial_enough_disk(refuse, monkeypatch):
    sentence = refuse("run", *CHEAP, "--budget", "10G")
    assert "--yes" in sentence
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert "the disk must have" in refuse("run", *CHEAP)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "quick", "--out", "s3://bucket/name"),
        ("plan", "quick", "--out", "gs://bucket/name"),
        ("merge", "one", "--out", "s3://bucket/name"),
        ("status", "s3://bucket/name"),
    ],
)
def test_an_address_is_no_folder(refuse, arguments):
    message = refuse(*arguments)
    assert "a folder must be one of a file system" in message and "sweep merge" in message
