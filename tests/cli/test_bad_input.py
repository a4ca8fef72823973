"""Nonsense gets one sentence with the remedy, exit code 2, no traceback, and nothing written."""

import json
import os
import subprocess
import sys

import pytest
import torch

from sweep.config.trial import TokenizerSettings
from sweep.data.sources import identify_data
from sweep.data.tokens import prepare_data
from sweep.trial.files import seal

FLAGS = [
    ("--budget", "x", "budget must be"),
    ("--budget", "-1", "budget must be"),
    ("--budget", "63", "at least one step"),
    ("--budget", "1e30", "1e18"),
    ("--batches", "4,4", "each batch size once"),
    ("--batches", "-4", "batch size must be"),
    ("--batches", "four", "batch size must be"),
    ("--batches", "", "batch size must be"),
    ("--batches", "3..9", "powers of two"),
    ("--model", "huge", "model must be one of"),
    ("--model", "no.such:Model", "must be a Python file"),
    ("--workload", "sorting", "workload"),
    ("--workload", "os:nothing", "no attribute 'nothing'"),
    ("--lr", "nan", "lr must be"),
    ("--lr", "sqrt:1@", "lr must be"),
    ("--lr", "linear:1e308@1", "lr must be at most"),
    ("--out", "", "must be the path of a folder"),
    ("--out", "x" * 300, "File name too long"),
    ("--device-memory", "16GB of it", "device_memory must be"),
    ("--loss-chunk-rows", "-1", "loss_chunk_rows must be"),
    ("--seeds", "some", "seeds must be"),
    ("--context", "1.5", "context must be"),
    ("--vocabulary", "100", "vocabulary must be at least"),
    ("--tokenizer", "words", "tokenizer"),
    ("--precision", "fp8", "precision"),
    ("--device", "tpu", "device must be"),
    ("--device", "cuda:99", "device must be"),
    ("--microbatch", "3", "microbatch_size must divide"),
    ("--accumulation", "3", "gradient_accumulation_steps must divide"),
    ("--data", "no/such/file.txt", "no/such/file.txt"),
    ("--data", "nosuchname", "nosuchname"),
    ("--keep", "everything", "keep"),
    ("--executor", "cloud", "executor"),
    ("--tracking-uri", "ftp://x", "tracking"),
    ("--tracking-uri", "mlruns", "tracking"),
    ("--retry", "all", "retry"),
    ("--only", "zzz", "only must name one trial"),
    ("--nonsense", "1", "nonsense"),
    ("--budget", "1e999999M", "budget must be"),
    ("--workload", ".x:y", "must be a Python file"),
]


@pytest.mark.parametrize(("flag", "value", "says"), FLAGS)
def test_every_flag_refuses_nonsense(refuse, flag, value, says):
    assert says in refuse("run", "quick", flag, value)


TUNED = ("run", "quick", "--yes", "--lr", "tuned")
PLAN = ("plan", "quick", "--out", "s")
NO_COMMANDS = [
    ((*TUNED, "--tune", "beta2"), "must contain lr"),
    ((*TUNED, "--tune", "lr,lr"), "at most once"),
    ((*TUNED, "--tune", "lr,clip"), "clip"),
    ((*TUNED, "--tune", ""), "tuning.dimensions"),
    ((*TUNED, "--tune-budget", "1G"), "at most the budget"),
    ((*TUNED, "--tune-budget", "no"), "budget must be"),
    ((*TUNED, "--storage", "nonsense://x"), "--storage"),
    ((*TUNED, "--storage", "sqlite:////no/such/folder/x.db"), "--storage"),
    ((*PLAN, "--cluster", ""), "cluster must be nodes=N,gpus=G"),
    ((*PLAN, "--cluster", "nodes=16"), "cluster must be nodes=N,gpus=G"),
    ((*PLAN, "--cluster", "gpus=8,gpus=4"), "cluster must be nodes=N,gpus=G"),
    ((*PLAN, "--cluster", "nodes=0,gpus=8"), "nodes must be a whole number"),
    ((*PLAN, "--cluster", "gpus=8", "--price", "inf"), "price must be at least 0"),
    ((*PLAN, "--cluster", "gpus=8", "--price", "much"), "--price"),
    ((*PLAN, "--price", "2.5"), "needs --cluster"),
    (("run", "quik"), "quick"),
    (("run", "quadratic", "--precision", "bf16"), "needs the precision fp32"),
    (("run", "elman", "--batches", "1", "--data", "synthetic", "--quiet"), "trains nothing"),
    (("forecast", "quick", "--device-memory", "0"), "device_memory must be"),
    (("probe", "quick", "--soak", "many"), "--soak"),
    (("ui", "x", "--port", "70000"), "70000"),
    (("report",), "--from-mlflow"),
    (("report", "--from-mlflow", "sqlite:///x.db"), "--experiment"),
    (("report", "x", "--run", "abc"), "--from-mlflow"),
    (("report", "x", "--tracking-uri", "foo"), "tracking URI must be"),
    *(((command, "x"), "plan.json") for command in ("status", "stop", "report", "clean", "ui")),
]


@pytest.mark.parametrize(("arguments", "says"), NO_COMMANDS)
def test_commands_that_make_no_sense(refuse, arguments, says):
    assert says in refuse(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without the device")
@pytest.mark.parametrize(
    ("flags", "says"), [((), "that this machine has"), (("--cluster", "gpus=8"), "time estimate")]
)
def test_a_device_need_not_be_here_for_a_cluster_whose_times_are_known(refuse, flags, says):
    assert says in refuse("plan", "quadratic", "--batches", "4", "--device", "cuda", *flags)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"a\x00b" * 100, "UTF-8"),
        (b"\xff\xfe" * 100, "UTF-8"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_texts_that_cannot_be_trained_on(refuse, tmp_path, content, says, command):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert says in refuse(command, "quick", "--data", path)


def test_a_text_shorter_than_one_window_of_tokens(refuse, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"story {i} is short\n<|endoftext|>\n" for i in range(4)))
    assert "65 tokens" in refuse("run", "quick", "--data", path, "--quiet")


SETTINGS = {"model": "'quick'", "data": "'synthetic'", "budget": "196_608", "batches": "[4]"}
HUGE = "1" + 20 * "0"
WRONG_SETTINGS = {  # by key: a part of the message, and values that are refused
    "name": ("a valid string", "{}", "true", "5", "1979-05-27"),
    "workload": ("a valid string", "{}", "['pretrain']", "1.5"),
    "data": ("a valid string", "{}", "[]", "true", "nan"),
    "model": ("must be", "['quick']", "true", "nan", "''", "5"),
    "budget": ("budget must be", "{}", "['1M']", "true", "-1", "0", "nan", "inf", "1.5", "'x'"),
    "batches": ("batch", "{}", "[]", "1.5", "true", "nan", "[1.5]", "[[4]]", "['x']", "[true]"),
    "lr": ("lr must be", "{}", "[1e-3]", "true", "-1", "0", "inf", "''"),
    "seeds": ("seeds", "{}", "[1]", "true", "-1", "1.5", "nan", "1001"),
    "vocabulary": ("vocabulary", "{}", "[512]", "-1", "'many'"),
    "grpo": ("grpo", "'words'", "3", "{}"),
    "model.d_ff": ("model.d_ff", "1e20", HUGE),
    "model.heads": ("heads", "{}", "5", "0"),
    "model.depth": ("'model.depth' is not a known key", "3"),
    "optimizer.beta1": ("optimizer.beta1", "{}", "[0.9]", "-0.1", "1.0", "nan", "'high'", "true"),
    "optimizer.beta3": ("Did you mean 'optimizer.beta", "0.9"),
    "schedule.warmup_fraction": ("schedule.warmup_fraction", "-0.1", "1.1", "nan", "'1 %'"),
    "schedule.warmup_min_steps": ("schedule.warmup_min_steps", "[]", "-1", "1.5", "inf"),
    "evaluation.points": ("evaluation.points", "{}", "true", "'1'", HUGE, "0", "2.5"),
    "evaluation.sequence": ("Did you mean 'evaluation.sequences'", "64"),
}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [(key, value, says) for key, (says, *values) in WRONG_SETTINGS.items() for value in values],
)
def test_settings_of_the_wrong_type_or_size(refuse, tmp_path, key, value, says):
    table, _, nested = key.partition(".")
    settings = {**SETTINGS, table: f"{{{nested} = {value}}}" if nested else value}
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{name} = {given}\n" for name, given in settings.items()))
    assert says in refuse("run", path, "--quiet", "--yes")


MODULES = {  # by flag and name: source, and a part of the message
    ("--model", "raises"): ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
    ("--model", "misspelt"): ("def (", "SyntaxError"),
    ("--model", "imports"): ("import no_such_package", "No module named 'no_such_package'"),
    ("--model", "lacks"): ("other = 1", "has no attribute 'build'"),
    ("--model", "exits"): ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ("--model", "number"): ("build = 5", "'int' object is not callable"),
    ("--model", "none"): ("def build(**sizes): return None", "type NoneType"),
    ("--model", "empty"): ("import torch\ndef build(**k): return torch.nn.Identity()", "weights"),
    ("--model", "fails"): ("def build(**sizes): raise ValueError('bad')", "ValueError: bad"),
    ("--workload", "number"): ("build = 5", "'int' object is not callable"),
    ("--workload", "none"): ("def build(config, device): return None", "type NoneType"),
    ("--workload", "fails"): ("def build(config, device): raise ValueError('a')", "ValueError: a"),
    ("--workload", "empty"): ("class build:\n def __init__(self, c, d): 0", "evaluate_finally"),
}


@pytest.mark.parametrize(("flag", "name"), MODULES)
def test_code_of_the_user_that_cannot_be_used(refuse, tmp_path, monkeypatch, flag, name):
    code, says = MODULES[flag, name]
    module = f"own{flag.replace('-', '_')}_{name}"  # imported once per process
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    assert says in refuse("run", "quick", flag, f"{module}:build", "--quiet", "--yes")


GRPO = 'workload = "grpo"\nmodel = "quick"\ndata = "synthetic"\nbudget = "60k"\nbatches = [8]\n'
GRPO += "[grpo]\nnew_tokens = 8\n"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ('reward = "nomodule:f"', "module 'nomodule' of 'nomodule:f' must be a Python file"),
        ('reward = "os:nothing"', "has no attribute 'nothing'"),
        ('reward = "os:name"', "reward 'os:name' must return a number"),
        ('task = "text"', "grpo.reward must be your module:function for the task 'text'"),
    ],
)
def test_what_cannot_be_asked_or_rewarded(refuse, tmp_path, monkeypatch, settings, says):
    monkeypatch.setitem(sys.modules, "chess", None)
    path = tmp_path / "mine.toml"
    path.write_text(f"{GRPO}{settings}\n")
    assert says in refuse("run", path, "--quiet", "--yes")


def test_prompts_are_tried_as_soon_as_their_text_is_prepared(refuse, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f"{GRPO}prompt_tokens = 3\n")
    settings = TokenizerSettings(kind="bpe", vocabulary=512)
    prepare_data(identify_data("synthetic"), None, settings)
    assert "prompt_tokens must hold the longest" in refuse("plan", path)


def test_an_out_that_is_a_file(refuse, tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file"
    assert "must be the path of a folder" in refuse("run", "quick", "--out", out)
    inside = out / "sweep"
    assert "can be written" in refuse("run", "quick", "--out", inside)


def test_an_out_that_cannot_be_written(tmp_path):
    """Root may write everywhere, so root gives that right up for the command's process."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    as_anybody = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command = [sys.executable, "-m", "sweep", "run", "quick", "--out", closed / "x"]
    command = [*(as_anybody if os.geteuid() == 0 else []), *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "written" in done.stderr and done.stderr.count("\n") == 1
    assert [*tmp_path.iterdir()] == [closed] and [*closed.iterdir()] == []


@pytest.mark.parametrize("content", ["{", "\x00\x01", json.dumps(seal({"trials": "none"}))])
@pytest.mark.parametrize("command", [("run", "quick", "--out"), ("status",), ("report",)])
def test_a_corrupt_plan(refuse, tmp_path, content, command):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "plan.json").write_text(content)
    assert "plan.json" in refuse(*command, folder)
    assert [file.name for file in folder.iterdir()] == ["plan.json"]


def test_more_than_an_hour_needs_a_yes_and_names_quick(refuse):
    sentence = refuse("run", "quick", "--budget", "10G", "--quiet")
    assert "--yes" in sentence and "sweep run quick" in sentence


def test_a_disk_that_is_too_small(refuse, monkeypatch):
    from sweep.orchestration import costs

    class Usage:
        free = 1000

    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: Usage)
    assert "the disk must have" in refuse("run", "quick", "--quiet")
