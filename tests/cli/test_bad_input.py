"""Nonsense gets one sentence with the remedy, exit code 2, no traceback, and nothing written."""

import os
import subprocess
import sys

import pytest
import torch

from sweep.cli import main
from sweep.config.trial import TokenizerSettings
from sweep.data.sources import identify_data
from sweep.data.tokens import prepare_data
from sweep.trial.files import write_json


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Run the command line in an empty folder; return exit code, stdout and stderr."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def call_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capfd.readouterr()  # other processes' too
        return ended.value.code, output.out, output.err

    return call_here


def assert_refused(result, says, work):
    code, out, err = result
    assert code == 2 and out == ""
    assert err.startswith("Error: ") and err.count("\n") == 1, err
    assert says in err
    assert list(work.iterdir()) == []


FLAGS = [
    ("--budget", "x", "budget must be"),
    ("--budget", "-1", "budget must be"),
    ("--budget", "0", "budget must be"),
    ("--budget", "63", "at least one step"),
    ("--budget", "1e30", "at most 1e18"),
    ("--batches", "4,4", "each batch size once"),
    ("--batches", "0", "batch size must be"),
    ("--batches", "-4", "batch size must be"),
    ("--batches", "four", "batch size must be"),
    ("--batches", "", "batch size must be"),
    ("--batches", "3..9", "powers of two"),
    ("--model", "huge", "model must be one of"),
    ("--model", "no.such:Model", "must be a Python file"),
    ("--workload", "sorting", "workload"),
    ("--workload", "os:nothing", "no 'nothing'"),
    ("--lr", "-1", "lr must be"),
    ("--lr", "nan", "lr must be"),
    ("--lr", "sqrt:1@", "lr must be"),
    ("--lr", "linear:1e308@1", "lr must be at most"),
    ("--out", "", "must be the path of a folder"),
    ("--out", "x" * 300, "File name too long"),
    ("--device-memory", "16GB of it", "device_memory must be"),
    ("--loss-chunk-rows", "-1", "loss_chunk_rows must be"),
    ("--seeds", "0", "seeds must be"),
    ("--seeds", "some", "seeds must be"),
    ("--context", "0", "context must be"),
    ("--context", "1.5", "context must be"),
    ("--vocabulary", "-3", "vocabulary must be"),
    ("--vocabulary", "100", "vocabulary must be at least"),
    ("--tokenizer", "words", "tokenizer"),
    ("--precision", "fp8", "precision"),
    ("--device", "tpu", "device must be"),
    ("--device", "cuda:99", "device must be"),
    ("--microbatch", "3", "microbatch_size must divide"),
    ("--microbatch", "0", "microbatch must be"),
    ("--accumulation", "3", "gradient_accumulation_steps must divide"),
    ("--accumulation", "0", "accumulation must be"),
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
    ("--model", ".x:y", "must be a Python file"),
    ("--workload", ".x:y", "must be a Python file"),
]


@pytest.mark.parametrize(("flag", "value", "says"), FLAGS)
def test_every_flag_refuses_nonsense(call, tmp_path, flag, value, says):
    assert_refused(call("run", "quick", flag, value), says, tmp_path / "work")


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--tune", "beta2", "must contain lr"),
        ("--tune", "lr,lr", "at most once"),
        ("--tune", "lr,clip", "clip"),
        ("--tune", "", "tuning.dimensions"),
        ("--tune-budget", "1G", "at most the budget"),
        ("--tune-budget", "no", "budget must be"),
        ("--storage", "nonsense://x", "--storage"),
        ("--storage", "sqlite:////no/such/folder/x.db", "--storage"),
    ],
)
def test_tuning_refuses_nonsense(call, tmp_path, flag, value, says):
    result = call("run", "quick", "--lr", "tuned", flag, value, "--yes")
    assert_refused(result, says, tmp_path / "work")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--cluster", ""), "cluster must be nodes=N,gpus=G"),
        (("--cluster", "16x8"), "cluster must be nodes=N,gpus=G"),
        (("--cluster", "nodes=16"), "cluster must be nodes=N,gpus=G"),
        (("--cluster", "gpus=8,gpus=4"), "cluster must be nodes=N,gpus=G"),
        (("--cluster", "gpus=8,cpus=4"), "cluster must be nodes=N,gpus=G"),
        (("--cluster", "nodes=0,gpus=8"), "nodes must be a positive whole number"),
        (("--cluster", "nodes=2,gpus=1.5"), "gpus must be a positive whole number"),
        (("--cluster", "gpus=8", "--price", "-1"), "price must be at least 0"),
        (("--cluster", "gpus=8", "--price", "nan"), "price must be at least 0"),
        (("--cluster", "gpus=8", "--price", "inf"), "price must be at least 0"),
        (("--cluster", "gpus=8", "--price", "much"), "--price"),
        (("--price", "2.5"), "needs --cluster"),
    ],
)
def test_a_cluster_that_cannot_be(call, tmp_path, flags, says):
    result = call("plan", "quick", "--out", "s", *flags)
    assert_refused(result, says, tmp_path / "work")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without the device")
@pytest.mark.parametrize(
    ("flags", "says"), [((), "that this machine has"), (("--cluster", "gpus=8"), "time estimate")]
)
def test_a_device_need_not_be_here_for_a_cluster_whose_times_are_known(call, tmp_path, flags, says):
    result = call("plan", "quadratic", "--batches", "4", "--device", "cuda", *flags)
    assert_refused(result, says, tmp_path / "work")


def test_plan_refuses_as_run_does(call, tmp_path):
    assert_refused(call("plan", "quick", "--budget", "x"), "budget must be", tmp_path / "work")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"a\x00b" * 100, "UTF-8"),
        (b"\xff\xfe" * 100, "UTF-8"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_texts_that_cannot_be_trained_on(call, tmp_path, content, says, command):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert_refused(call(command, "quick", "--data", path), says, tmp_path / "work")


@pytest.mark.parametrize("stories", [1, 4])
def test_a_text_shorter_than_one_window_of_tokens(call, tmp_path, stories):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"story {i} is short\n<|endoftext|>\n" for i in range(stories)))
    assert_refused(call("run", "quick", "--data", path, "--quiet"), "65 tokens", tmp_path / "work")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("bugdet = 1", "'bugdet' is not a known key"),
        ("budget = [", "TOML"),
        ("\x00", "TOML"),
        ("model = 5", "model must be"),
        ("batches = 1.5\nbudget = 100", "batches must be"),
        ("schedule = 3\nbatches = 8\nbudget = '1M'", "schedule"),
    ],
)
def test_experiment_files_that_are_none(call, tmp_path, content, says):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    assert_refused(call("run", path), says, tmp_path / "work")


SETTINGS = {"model": "'quick'", "data": "'synthetic'", "budget": "196_608", "batches": "[4]"}
# By key: what it must be, and what it must not.
HUGE = "1" + 20 * "0"
WRONG_SETTINGS = {
    "name": ("a valid string", "{}", "[]", "true", "5", "1979-05-27"),
    "question": ("a valid string", "{a = 1}", "['a']", "false", "nan"),
    "workload": ("a valid string", "{}", "['pretrain']", "true", "1.5"),
    "data": ("a valid string", "{}", "[]", "true", "nan"),
    "tokenizer": ("'bpe', 'bytes' or 'pretrained'", "{}", "['bpe']", "true", "0", "'words'"),
    "precision": ("'auto', 'fp32'", "{}", "[]", "false", "32"),
    "model": ("must be", "['quick']", "true", "nan", "''", "'huge'"),
    "budget": ("budget must be", "{}", "['1M']", "true", "-1", "0", "nan", "inf", "1.5", "'x'"),
    "batches": ("batch", "{}", "[]", "true", "nan", "[1.5]", "[-4]", "[[4]]", "['x']", "[true]"),
    "lr": ("lr must be", "{}", "[]", "[1e-3]", "true", "-1", "0", "nan", "inf", "'x'", "''"),
    "seeds": (
        "seeds",
        "{}",
        "[1]",
        "true",
        "false",
        "-1",
        "0",
        "1.5",
        "nan",
        "1001",
        "'some'",
    ),
    "vocabulary": ("vocabulary", "{}", "[512]", "false", "-1", "nan", "'many'"),
    "context": ("context", "{}", "[64]", "false", "0", "1.5", "inf", "''"),
    "optimizer": ("optimizer", "'adamw'", "[]", "true", "5", "nan"),
    "schedule": ("schedule", "'cosine'", "[1]", "false", "0.1"),
    "evaluation": ("evaluation", "'often'", "[20]", "true", "20"),
    "model.kind": ("does not match", "{}", "true", "5", "'huge'"),
    "model.d_ff": ("model.d_ff", "1e20", HUGE),
    "model.layers": (
        "model.layers",
        "{}",
        "100000000000000000000",
        "[3]",
        "false",
        "-3",
        "0",
        "2.5",
        "nan",
        "'three'",
    ),
    "model.heads": ("heads", "{}", "5", "0"),
    "model.depth": ("not a known key", "3"),
    "optimizer.name": ("'adamw', 'sgd' or 'none'", "{}", "true", "1", "'adam'"),
    "optimizer.beta1": ("optimizer.beta1", "{}", "[0.9]", "-0.1", "1.0", "nan", "'high'", "true"),
    "optimizer.eps": ("optimizer.eps", "{}", "true", "0", "-1e-8", "nan", "inf"),
    "optimizer.clip": ("optimizer.clip", "[1.0]", "-1", "nan", "inf", "'off'"),
    "optimizer.beta3": ("Did you mean 'beta", "0.9"),
    "schedule.warmup_fraction": ("schedule.warmup_fraction", "{}", "-0.1", "1.1", "nan", "'1 %'"),
    "schedule.warmup_min_steps": ("schedule.warmup_min_steps", "[]", "-1", "1.5", "inf"),
    "schedule.warmup": ("not a known key", "{fraction = 0.1}"),
    "evaluation.train_points": ("evaluation.train_points", HUGE),
    "evaluation.points": (
        "evaluation.points",
        "{}",
        "true",
        "'1'",
        "100000000000000000000",
        "[20]",
        "false",
        "0",
        "-1",
        "2.5",
        "nan",
    ),
    "evaluation.sequence": ("Did you mean 'sequences'", "64"),
}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [(key, value, says) for key, (says, *values) in WRONG_SETTINGS.items() for value in values],
)
def test_settings_of_the_wrong_type_or_size(call, tmp_path, key, value, says):
    table, _, nested = key.partition(".")
    settings = {**SETTINGS, table: f"{{{nested} = {value}}}" if nested else value}
    path = tmp_path / "mine.toml"
    path.write_text("".join(f"{name} = {given}\n" for name, given in settings.items()))
    assert_refused(call("run", path, "--quiet", "--yes"), says, tmp_path / "work")


UNIMPORTABLE = {
    "raises": ("raise RuntimeError('broken')", "RuntimeError: broken"),
    "misspelt": ("def (", "SyntaxError"),
    "imports": ("import no_such_package", "No module named 'no_such_package'"),
    "lacks": ("other = 1", "has no 'build'"),
    "says_much": ("raise RuntimeError('broken\\non two lines')", "broken on two lines"),
    "leaves": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "refuses": ("def __getattr__(name): raise ValueError(name)", "has no 'build'"),
}
NO_WORKLOADS = {
    "number": ("build = 5", "type int"),
    "returns_none": ("def build(config, device): return None", "type NoneType"),
    "fails": ("def build(config, device): raise ValueError('bad')", "ValueError: bad"),
    "lacks_all": ("class build:\n  def __init__(self, config, device): pass", "evaluate_finally"),
}
NO_MODELS = {
    "number": ("build = 5", "'int' object is not callable"),
    "returns_none": ("def build(**sizes): return None", "type NoneType"),
    "returns_class": ("import torch\ndef build(**sizes): return torch.nn.Linear", "type type"),
    "is_empty": ("import torch\ndef build(**sizes): return torch.nn.Identity()", "weights"),
    "takes_nothing": ("def build(): pass", "unexpected keyword argument"),
    "fails": ("def build(**sizes): raise ValueError('bad')", "ValueError: bad"),
    "exits": ("def build(**sizes): raise SystemExit(4)", "SystemExit: 4"),
    "unprintable": (
        "class Odd:\n  def __repr__(self): raise ValueError\ndef build(**sizes): return Odd()",
        "type Odd",
    ),
}
USER_CODE = [
    *(("--model", name, *rest) for name, rest in {**UNIMPORTABLE, **NO_MODELS}.items()),
    *(("--workload", name, *rest) for name, rest in {**UNIMPORTABLE, **NO_WORKLOADS}.items()),
]


@pytest.mark.parametrize(("flag", "name", "code", "says"), USER_CODE)
def test_code_of_the_users_that_is_none(call, tmp_path, monkeypatch, flag, name, code, says):
    module = f"own{flag.replace('-', '_')}_{name}"  # imported once per process
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    flags = (flag, f"{module}:build", "--quiet", "--yes")
    assert_refused(call("run", "quick", *flags), says, tmp_path / "work")


GRPO = 'workload = "grpo"\nmodel = "quick"\ndata = "synthetic"\nbudget = "60k"\nbatches = [8]\n'
GRPO += "[grpo]\nnew_tokens = 8\n"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ('reward = "nomodule:f"', "module 'nomodule' of 'nomodule:f' must be a Python file"),
        ('reward = "os:nothing"', "has no 'nothing'"),
        ('reward = "os:name"', "reward 'os:name' must be a function, got 'posix'"),
        ('task = "text"', "grpo.reward must be your module:function for the task 'text'"),
        ("prompt_tokens = 3", "prompt_tokens must hold the longest prompt, got 3"),
    ],
)
def test_what_cannot_be_asked_or_rewarded(call, tmp_path, monkeypatch, settings, says):
    monkeypatch.setitem(sys.modules, "chess", None)
    path = tmp_path / "mine.toml"
    path.write_text(f"{GRPO}{settings}\n")
    assert_refused(call("run", path, "--quiet", "--yes"), says, tmp_path / "work")


def test_prompts_are_tried_as_soon_as_their_text_is_prepared(call, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f"{GRPO}prompt_tokens = 3\n")
    settings = TokenizerSettings(kind="bpe", vocabulary=512)
    prepare_data(identify_data("synthetic"), None, settings)
    assert_refused(call("plan", path), "prompt_tokens must hold the longest", tmp_path / "work")


def test_an_unknown_experiment_is_answered_with_the_known_ones(call, tmp_path):
    assert_refused(call("run", "quik"), "quick", tmp_path / "work")


def test_an_out_that_is_a_file(call, tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file"
    assert_refused(call("run", "quick", "--out", out), "must be a folder", tmp_path / "work")
    inside = out / "sweep"
    assert_refused(call("run", "quick", "--out", inside), "can be written", tmp_path / "work")


def test_an_out_that_cannot_be_written(tmp_path):
    """Root may write everywhere, so root gives that right up for the command's process."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    as_anybody = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command = [sys.executable, "-m", "sweep", "run", "quick", "--out", closed / "x"]
    command = [*(as_anybody if os.geteuid() == 0 else []), *command]
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    assert_refused((done.returncode, done.stdout, done.stderr), "written", work)
    assert list(closed.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "", '{"format_version": 1, "trials": []}', "\x00\x01"])
@pytest.mark.parametrize("command", [("run", "quick", "--out"), ("status",), ("report",)])
def test_a_corrupt_plan(call, tmp_path, content, command):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "plan.json").write_text(content)
    assert_refused(call(*command, folder), "plan.json", tmp_path / "work")
    assert [file.name for file in folder.iterdir()] == ["plan.json"]


def test_a_plan_that_is_sealed_but_is_none(call, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    write_json(folder / "plan.json", {"trials": "none"})
    for command in (("run", "quick", "--out"), ("status",), ("report",)):
        assert_refused(call(*command, folder), "plan.json", tmp_path / "work")


@pytest.mark.parametrize("command", ["status", "stop", "report", "clean", "ui"])
def test_folders_that_hold_no_sweep(call, tmp_path, command):
    assert_refused(call(command, tmp_path / "nothing"), "plan.json", tmp_path / "work")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "quadratic", "--precision", "bf16"), "needs the precision fp32"),
        (("run", "elman", "--batches", "1", "--quiet"), "trains nothing"),
        (("forecast", "quick", "--device-memory", "0"), "device_memory must be"),
        (("probe", "quick", "--soak", "many"), "soak must be"),
        (("ui", "x", "--port", "70000"), "70000"),
        (("report", "x", "--run", "abc"), "need --from-mlflow"),
        (("report", "x", "--tracking-uri", "foo"), "tracking URI must be"),
    ],
)
def test_what_no_single_flag_refuses(call, tmp_path, arguments, says):
    assert_refused(call(*arguments), says, tmp_path / "work")


def test_more_than_an_hour_needs_a_yes_and_names_quick(call, tmp_path):
    result = call("run", "quick", "--budget", "10G", "--quiet")
    assert_refused(result, "--yes", tmp_path / "work")
    assert "sweep run quick" in result[2]


def test_a_disk_that_is_too_small(call, tmp_path, monkeypatch):
    from sweep.orchestration import costs

    class Usage:
        free = 1000

    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: Usage)
    result = call("run", "quick", "--quiet")
    assert_refused(result, "the disk must have", tmp_path / "work")


@pytest.mark.parametrize("arguments", [("report",), ("report", "--from-mlflow", "sqlite:///x.db")])
def test_reports_need_a_source(call, tmp_path, arguments):
    assert_refused(call(*arguments), "--from-mlflow", tmp_path / "work")
