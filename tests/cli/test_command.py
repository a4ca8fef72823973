"""A sweep over a training script: what is refused, planned, run, reported and checked."""

import json
import re
import shlex
import sys

import pandas as pd
import pytest

from sweep import SweepError, plan_sweep
from tests.commands import COMMAND, SCRIPT

RUN = ("--batches", "4,8", "--device", "cpu")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write SCRIPT, with a line replaced, into the current folder."""

    def write(old="", new=""):
        assert old in SCRIPT
        (tmp_path / "train.py").write_text(SCRIPT.replace(old, new) if old else SCRIPT)

    monkeypatch.chdir(tmp_path)
    write()
    return write


@pytest.mark.parametrize(
    ("command", "words", "problem"),
    [
        (COMMAND.replace("{seed}", "1"), (), "must contain {seed}"),
        (COMMAND.replace("{learning_rate}", "1"), (), "must contain {learning_rate}"),
        (COMMAND.replace("{batch_size}", "1"), (), "must contain {batch_size}"),
        (COMMAND.replace("{steps}", "1"), (), "must contain {steps} or {tokens} or {examples}"),
        (COMMAND + " {rate}", (), "got {rate}"),
        (COMMAND.replace("{batch_size}", "{accumulation}"), (), "must contain {batch_size}"),
        (COMMAND + " 'open", (), "No closing quotation"),
        (f"sh -c '{COMMAND} \"open'", (), "No closing quotation"),
        ("", (), "must contain {batch_size}"),
        (COMMAND.replace(sys.executable, "pyton"), (), "must exist, got 'pyton'"),
        (COMMAND.replace("train.py", "trian.py"), (), "must exist, got 'trian.py'"),
        (COMMAND, ("quick",), "does not apply to a command"),
        (COMMAND, ("--model", "quick"), "model does not apply to a command"),
        (COMMAND, ("--data", "synthetic"), "data does not apply to a command"),
        (COMMAND, ("--noise",), "noise does not apply to a command"),
        (COMMAND, ("--workload", "pretrain"), "workload does not apply to a command"),
        (COMMAND, ("--precision", "bf16"), "precision does not apply to a command"),
        (COMMAND, ("--target", "1"), "target does not apply to a command"),
        (COMMAND, ("--zero", "1", "--devices-per-trial", "2"), "zero does not apply to a command"),
        (COMMAND, ("--activation-checkpointing",), "activation_checkpointing does not apply"),
        (COMMAND, ("--generation-batch-size", "2"), "does not apply to a command"),
        (COMMAND, ("--microbatch", "2"), "need {microbatch_size} or {accumulation}"),
        (COMMAND, ("--tune", "lr,beta2"), "needs {beta2} in the command"),
        (COMMAND, ("--no-user-code",), "refuses"),
        (None, ("quick", "--objective", "accuracy"), "objective does not apply to 'pretrain'"),
        (None, ("--workload", "command", "--budget", "80"), "needs a command"),
    ],
)
def test_what_a_command_cannot_do_is_refused_in_one_sentence(
    refuse, script, command, words, problem
):
    words = words if command is None else (*words, "--command", command, "--budget", "80")
    assert problem in refuse("plan", *words, *RUN)


def test_only_a_command_can_be_checked(refuse):
    assert "only a command" in refuse("check", "quick")


def test_a_command_in_a_file_is_an_experiment_without_memory_forecast(refuse, script, tmp_path):
    toml = f'budget = 80\nbatches = [4]\n[workload]\ncommand = "{COMMAND}"\n'
    (tmp_path / "own.toml").write_text(toml)
    assert "no steps that can be measured or forecast" in refuse("forecast", tmp_path / "own.toml")


def test_the_plan_names_the_command_and_leaves_out_what_is_not_known(call, script):
    plan = ("plan", "--command", COMMAND, *RUN, "--budget", "240", "--context", "3")
    code, text = call(*plan)
    assert code == 0 and "3 tokens per sequence" in text and "train.py" in text
    assert not {"adamw", "fp32", "eager:", "tinystories", "β2"} & {*text.replace(",", " ").split()}
    document = json.loads(call(*plan, "--json")[1])
    assert document["model"]["name"] == f"command: {COMMAND}"
    assert document["model"]["parameters"] is None and document["disk_bytes"] is None
    rows = document["trials"]
    assert [row["steps"] for row in rows] == [20, 10]
    assert {(row["forecast_bytes"], row["forecast_seconds"]) for row in rows} == {(None, None)}
    assert [row["microbatch_size"] for row in rows] == [4, 8]
    assert document["code"] == {"files": document["code"]["files"], "packages": {}}


def test_changed_code_is_another_trial(script, tmp_path):
    (tmp_path / "network.py").write_text("WIDTH = 1\n")
    script("import argparse", "from network import WIDTH; import argparse")
    settings = {"command": COMMAND, "budget": 80, "batches": [4], "device": "cpu"}
    ids = [plan_sweep(**settings).trials[0].id]
    assert sorted(plan_sweep(**settings).code["files"]) == ["network.py", "train.py"]
    (tmp_path / "network.py").write_text("WIDTH = 2\n")
    ids += [plan_sweep(**settings).trials[0].id]
    ids += [plan_sweep(**{**settings, "command": COMMAND + " "}).trials[0].id]
    assert len({*ids}) == 3


def test_a_folder_refuses_changed_code_once_a_trial_has_a_result(call, script, tmp_path):
    run = ("run", "--command", COMMAND, *RUN, "--budget", "80", "--out", "sweep", "--yes")
    script("import argparse", "import argparse, unknown_module")
    code, text = call(*run)
    (words,) = re.findall(r"`(sweep log .*?)`", text)
    assert code == 1 and call(*shlex.split(words)[1:])[0] == 0
    script()
    assert call(*run)[0] == 0
    rows = json.loads((tmp_path / "sweep" / "plan.json").read_text())["trials"]
    assert len(rows) == 2  # those of the crashed code are gone
    script("# here", "# changed")
    assert call(*run)[0] == 2 and "train.py has changed" in call.stderr


def test_the_packages_of_the_commands_own_python_are_part_of_its_identity(script):
    script("import argparse", "import numpy, argparse")
    command = COMMAND + " --config=train.py"
    code = plan_sweep(command=command, budget=80, batches=[4]).code
    assert [*code["packages"]] == ["numpy"] and [*code["files"]] == ["train.py"]
    module = f"{sys.executable} -m train {{batch_size}} {{learning_rate}} {{steps}} {{seed}}"
    assert [*plan_sweep(command=module, budget=80, batches=[4]).code["files"]] == ["train.py"]
    installed = module.replace("train", "numpy")
    assert [*plan_sweep(command=installed, budget=80, batches=[4]).code["packages"]] == ["numpy"]
    script("import argparse", "import argparse (")
    with pytest.raises(SweepError, match="must be valid"):
        plan_sweep(command=COMMAND, budget=80, batches=[4])


def test_modules_in_src_and_in_pythonpath_are_part_of_the_identity(script, tmp_path, monkeypatch):
    for folder, name in (("src", "mine"), ("lib", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", "lib")
    script("import argparse", "import mine, other, argparse")
    files = plan_sweep(command=COMMAND, budget=80, batches=[4]).code["files"]
    assert sorted(files) == ["lib/other.py", "mine.py", "train.py"]
    module = f"{sys.executable} -m mine {{batch_size}} {{learning_rate}} {{steps}} {{seed}}"
    assert [*plan_sweep(command=module, budget=80, batches=[4]).code["files"]] == ["mine.py"]


def test_files_of_one_name_outside_the_folder_are_told_apart(script, tmp_path, tmp_path_factory):
    paths = [tmp_path_factory.mktemp(name) / "data.txt" for name in ("one", "two")]
    for path in paths:
        path.write_text(path.parent.name)
    command = f"{COMMAND} {paths[0]} {paths[1]}"
    files = plan_sweep(command=command, budget=80, batches=[4]).code["files"]
    assert {*map(str, paths)} < {*files} and len({*files.values()}) == 3


def test_a_script_that_changes_during_a_sweep_fails_the_next_trial(call, script, tmp_path):
    script("# here", "open('train.py', 'a').write('#') if t == 3 else 0")
    code, _ = call("run", "--command", COMMAND, *RUN, "--budget", "80", "--out", "out", "--yes")
    states = [row["state"] for row in json.loads(call("status", "out", "--json")[1])["trials"]]
    assert code == 1 and states == ["COMPLETE", "FAILED"]
    assert "train.py has changed since the sweep was planned" in call("status", "out")[1]


def test_the_versions_are_those_of_the_python_beside_the_program(script, tmp_path):
    bin_path, log = tmp_path / "bin", tmp_path / "asked"
    bin_path.mkdir()
    for name, text in (("launch", ""), ("python", f"touch {log}\nexec {sys.executable} $@")):
        (bin_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_path / name).chmod(0o755)
    command = COMMAND.replace(sys.executable, str(bin_path / "launch"))
    assert "train.py" in plan_sweep(command=command, budget=80, batches=[4]).code["files"]
    assert log.exists()


def test_the_programs_that_a_shell_starts_are_part_of_the_identity(script):
    script("import argparse", "import numpy, argparse")
    for text in (f"cd .;{COMMAND}", f"{COMMAND} && ls", f"({COMMAND}) | cat"):
        code = plan_sweep(command=f"env A=1 sh -ec '{text}'", budget=80, batches=[4]).code
        assert [*code["packages"]] == ["numpy"] and [*code["files"]] == ["train.py"], text


def test_microbatch_and_accumulation_replace_the_batch_size(script):
    command = COMMAND.replace("{batch_size}", "{microbatch_size} --times {accumulation}")
    assert [
        row.microbatch_size for row in plan_sweep(command=command, budget=80, batches=[4]).trials
    ]


def test_a_tuned_sweep_over_a_command_is_answered_reported_and_mirrored(call, script, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    options = ("--budget", "80", "--lr", "tuned", "--seeds", "3", "--yes", "--quiet")
    code, text = call("run", "--command", COMMAND, *RUN, *options, "--tune-centre", "0.1")
    assert code == 0 and "batch size 4" in text
    folder = tmp_path / "results/train"
    table = pd.read_csv(folder / "trials.csv")
    assert set(table["state"]) == {"COMPLETE"}  # a command cannot pause to be pruned
    assert (table["stage"] == "final").sum() == 6 and (table["stage"] == "tune").sum() >= 10
    absent = ["beta2", "weight_decay", "warmup_steps", "parameters", "optimizer", "epochs"]
    assert table[absent].isna().all(axis=None)
    answer = json.loads((folder / "answer.json").read_text())
    assert [row["batch_size"] for row in answer["batch_sizes"]] == [4, 8]
    assert f"command: {COMMAND}" in answer["scope"]
    report = (folder / "report.md").read_text()
    for word in ("optimizer", "cosine", "model ", "tokenizer", "eager", "--target", "MFU"):
        assert word not in report, word
    assert "Not checked: sweep check --command" in report
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "train"]
    runs = client.search_runs([experiment.experiment_id], "tags.`sweep.trial_id` != ''")
    assert len(runs) == len(table)
    names = {*runs[0].data.metrics, *runs[0].data.params}
    assert {"train/loss", "valid/loss", "final/valid_loss", "examples"} <= names
    assert not {"beta2", "weight_decay", "warmup_steps"} & names
    parents = client.search_runs([experiment.experiment_id], "tags.`sweep.role` = 'sweep'")
    params = {*parents[0].data.params}
    assert {"workload", "budget", "batches", "lr", "tuning", "model"} <= params
    assert not {"optimizer", "schedule", "evaluation", "precision", "text_column"} & params


def test_memory_that_runs_out_lowers_the_microbatch_of_this_and_of_later_trials(
    call, script, tmp_path
):
    full = "if options.microbatch and options.microbatch > 2: sys.exit('CUDA out of memory')"
    script("# here", full)
    command = COMMAND + " --microbatch {microbatch_size}"
    run = ("run", *RUN, "--budget", "80", "--yes", "--quiet")
    assert call(*run, "--command", command)[0] == 0
    table = pd.read_csv(tmp_path / "results/train/trials.csv")
    assert list(table["microbatch_size"]) == [2, 2] and list(table["attempts"]) == [2, 1]
    script("# here", "sys.exit('CUDA out of memory')")
    assert call(*run, "--command", COMMAND, "--out", "full")[0] == 1
    status = json.loads(call("status", "full", "--json")[1])
    assert {row["cause"] for row in status["trials"]} == {"out_of_memory"}
    assert "{microbatch_size} or {accumulation}" in status["trials"][0]["message"]
    states = [json.loads(path.read_text()) for path in tmp_path.glob("full/trials/*/state.json")]
    assert {state["attempts"] for state in states} == {1}


CHECKED = COMMAND + " --microbatch {microbatch_size} --resume {resume}"


def check(call, *options):
    code, text = call("check", "--command", CHECKED, *RUN, "--budget", "192", "--json", *options)
    assert code == 0, call.stderr
    return {name: row["status"] for name, row in json.loads(text)["checks"].items()}


@pytest.mark.parametrize(
    ("old", "new", "failed"),
    [
        ("# here", "pass", None),
        ("w, first = json.load(file)", "_, first = json.load(file)", "command_resumes"),
        ("# here", "w += random.random() / 1e4", "command_repeats"),
        pytest.param(
            *("# here", "w += options.microbatch / 1e4", "command_accumulation"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_check_passes_a_good_command_and_finds_each_broken_promise(
    call, script, tmp_path, old, new, failed
):
    slow = SCRIPT.replace("# here", "time.sleep(0.05)\n    # here")
    (tmp_path / "train.py").write_text(slow.replace(old, new))
    statuses = check(call)
    names = {"command_repeats", "command_accumulation", "command_resumes"}
    if failed == "command_repeats":
        assert {name: statuses[name] for name in names} == dict.fromkeys(names, "FAIL")
    else:
        assert {name for name in names if statuses[name] != "PASS"} == {failed} - {None}


def test_the_report_shows_the_checks_of_the_same_code_only(call, script, tmp_path):
    check(call)
    script("# here", "pass  # other code")
    statuses = check(call, "--out", "other")
    assert statuses["command_repeats"] == "PASS"
    script()
    run = ("run", "--command", CHECKED, *RUN, "--budget", "80", "--quiet", "--yes")
    for folder, is_current in (("results/train", True), ("other", False)):
        assert call(*run, "--out", folder)[0] == 0
        report = (tmp_path / folder / "report.md").read_text()
        assert ("| command_repeats | The largest" in report) is is_current
        assert ("Not checked: sweep check --command" in report) is not is_current
    assert call("status", "other", "--verify")[0] == 0
    (tmp_path / "results/train/check.json").write_text("{}")
    assert call("report", "results/train")[0] == 0
    report = (tmp_path / "results/train/report.md").read_text()
    assert "Not checked: sweep check --command" in report


def test_a_kill_after_the_last_step_does_not_show_that_a_command_resumes(call, script, tmp_path):
    write = 'with open(options.log, "a") as file:\n        file.write(json.dumps(line) + "\\n")'
    script(write, 'lines.append(json.dumps(line) + "\\n")')
    text = (tmp_path / "train.py").read_text().replace("w, first = 1", "lines = []\nw, first = 1")
    at_once = "open(options.log, 'a').write(''.join(lines)); time.sleep(1)"
    (tmp_path / "train.py").write_text(f"{text}{at_once}\n")
    assert check(call)["command_resumes"] == "NOT APPLICABLE"


def test_a_check_without_split_batches_and_checkpoints_says_so(call, script, tmp_path):
    other = tmp_path / "results" / "train" / "check" / "notes.txt"
    other.parent.mkdir(parents=True)
    other.write_text("not of sweep")
    code, text = call("check", "--command", COMMAND, *RUN, "--budget", "80", "--steps", "8")
    assert other.exists()
    assert code == 0 and "first: 8 steps of batch size 4" in call.stderr
    assert text.count("NOT APPLICABLE") == text.count("PASS") == 4
    assert "FAIL: command_steps" in text  # the rate of the script is constant
    assert "NOT CHECKED: Whether the script reads the same examples" in text
