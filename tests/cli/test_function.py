"""Python functions as trials, and scripts that read the values of their trial by themselves."""

import json
import subprocess
import sys

import nbclient
import nbformat
import pytest

from sweep import SweepError, plan_sweep
from sweep.trial.folder import SweepFolder

FUNCTION = """
import random

def train(trial):
    x = 1.0
    rng = random.Random(trial.seed)
    trial.log({"valid/loss": x * x / 2}, step=0)
    for step in range(1, trial.steps + 1):
        # here
        noise = sum(rng.gauss(0, 1) for _ in range(trial.batch_size)) / trial.batch_size
        rate = trial.learning_rate * (1 - step / trial.steps)
        x -= rate * (x + noise)
        if step % trial.eval_steps == 0:
            trial.log({"valid/loss": x * x / 2, "examples": step * trial.batch_size}, step=step)
"""
SCRIPT = """
import sweep

trial = sweep.settings()
x = 1.0
for step in range(trial.steps):
    x -= trial.learning_rate * (x + (step % 3 - 1) / trial.batch_size + trial.seed / 10)
    sweep.log({"train/loss": x * x}, step=step + 1)
sweep.log({"valid/loss": x * x}, step=trial.steps)
"""
RUN = ("--budget", "80", "--batches", "4,8", "--device", "cpu", "--quiet", "--yes")
SETTINGS = {"budget": 80, "batches": [4, 8], "device": "cpu"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(FUNCTION)
    return tmp_path


def run_python(folder, text):
    """Run a script in a process of its own, which may define functions."""
    (folder / "script.py").write_text(text)
    program = [sys.executable, "script.py"]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=300)


def test_a_function_is_a_trial_that_every_command_can_read(call, folder):
    code, text = call("run", "--train", "mine:train", *RUN, "--out", "out", "--json")
    document = json.loads(text)
    assert code == 0 and {row["state"] for row in document["trials"]} == {"COMPLETE"}
    plan = plan_sweep(train="mine:train", out="other", **SETTINGS)
    ids = {trial.id for trial in SweepFolder(folder / "out").trials()}
    assert {row.id for row in plan.trials} == ids
    assert [*plan.code["files"]] == ["mine.py"]
    (folder / "mine.py").write_text(FUNCTION.replace("# here", "pass"))
    changed = plan_sweep(train="mine:train", out="other", **SETTINGS)
    assert not {row.id for row in changed.trials} & ids
    assert call("report", "out")[0] == 0


def test_a_function_of_the_script_that_runs_is_named_by_its_file(folder):
    start = "if __name__ == '__main__':\n    import sweep\n    "
    run = "run = sweep.run_sweep(train=train, show_progress=False, out='out', {})\n    print(run)"
    settings = ", ".join(f"{name}={value!r}" for name, value in SETTINGS.items())
    done = run_python(folder, f"{FUNCTION}\n{start}{run.format(settings)}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "<sweep out: 2 trials>"
    (command,) = SweepFolder(folder / "out").read_plan()["commands"]
    assert command[:4] == ["sweep", "run", "--train", "script:train"]


def test_a_script_that_sweeps_when_it_is_imported_is_refused(folder):
    settings = ", ".join(f"{name}={value!r}" for name, value in SETTINGS.items())
    done = run_python(folder, f"{FUNCTION}\nimport sweep\nsweep.run_sweep(train=train, {settings})")
    assert done.returncode != 0
    assert "must not start a sweep when it is imported" in done.stderr


def test_a_function_of_a_session_without_a_file_is_refused(folder):
    text = "import sweep\ndef f(trial): pass\nsweep.run_sweep(train=f, budget=8, batches=[1, 2])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert "Put it into a file, in a notebook by %%writefile, and import it." in done.stderr
    with pytest.raises(SweepError, match="at the top level of a module"):
        plan_sweep(train=lambda trial: None, **SETTINGS)


def test_a_function_that_its_name_does_not_mean_is_refused(folder):
    (folder / "wrapped.py").write_text(
        "import functools\n"
        "def train(trial, k=1): pass\n"
        "@functools.wraps(train)\n"
        "def changed(trial): train(trial, k=5)\n"
        "partial = functools.partial(train, k=5)\n"
    )
    sys.path.insert(0, str(folder))
    import wrapped

    with pytest.raises(SweepError, match="called train, which is another object in wrapped"):
        plan_sweep(train=wrapped.changed, **SETTINGS)
    with pytest.raises(SweepError, match=r"must have a name, got functools\.partial"):
        plan_sweep(train=wrapped.partial, **SETTINGS)


def test_a_function_that_raises_fails_its_trial_with_the_reason(call, folder):
    (folder / "mine.py").write_text(FUNCTION.replace("# here", "raise ValueError('no such data')"))
    assert call("run", "--train", "mine:train", *RUN, "--out", "out")[0] == 1
    (message, _) = (
        row["message"] for row in json.loads(call("status", "out", "--json")[1])["trials"]
    )
    assert message.endswith("ValueError: no such data")


def test_a_plan_does_not_call_the_function(call, folder):
    text = FUNCTION.replace("(trial)", "(trial, verbose=False)", 1)
    (folder / "mine.py").write_text(text.replace("# here", "open('called', 'w').close()"))
    assert call("plan", "--train", "mine:train", "--budget", "80", "--batches", "4,8")[0] == 0
    assert not (folder / "called").exists()


def test_a_function_is_checked(call, folder):
    words = ("check", "--train", "mine:train", "--budget", "800", "--batches", "4,8", "--json")
    code, text = call(*words)
    statuses = {name: row["status"] for name, row in json.loads(text)["checks"].items()}
    assert code == 0 and "FAIL" not in statuses.values()
    assert statuses["command_validation"] == statuses["command_counts"] == "PASS"
    assert statuses["command_accumulation"] == "NOT APPLICABLE"  # it never reads microbatch_size
    ignores = FUNCTION.replace("trial.learning_rate * (1 - step / trial.steps)", "0.1")
    depends = ignores.replace(
        '"valid/loss": x * x / 2}, step=0', '"valid/loss": trial.batch_size}, step=0'
    )
    (folder / "mine.py").write_text(depends)
    checks = json.loads(call(*words)[1])["checks"]
    failed = {name for name, row in checks.items() if row["status"] == "FAIL"}
    assert failed == {"command_learning_rate", "command_steps", "command_validation"}
    evidence = checks["command_validation"]["evidence"]
    assert evidence == "valid/loss at step 0 is 4 at batch size 4 and 8 at 8."


def test_a_script_that_reads_its_settings_needs_no_placeholders(call, folder):
    (folder / "train.py").write_text(SCRIPT)
    assert call("run", "--command", f"{sys.executable} train.py", *RUN, "--out", "out")[0] == 0
    trials = SweepFolder(folder / "out").trials()
    assert {trial.read_config().science.batch_size for trial in trials} == {4, 8}


def test_a_script_that_does_not_read_all_settings_is_refused(refuse, folder):
    command = f"{sys.executable} train.py"
    (folder / "train.py").write_text(SCRIPT.replace("trial.seed / 10", "0"))
    assert "must contain {seed}" in refuse("run", "--command", command, *RUN)
    (folder / "train.py").write_text(SCRIPT.replace("sweep.settings()", "None"))
    assert "or let the script call sweep.settings()" in refuse("run", "--command", command, *RUN)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--train", "mine"), "train must be MODULE:FUNCTION, got 'mine'."),
        (("--train", "mine:nothing"), "cannot be imported"),
        (("--train", "mine:train", "--command", "python x.py"), "Leave one out"),
        (("--train", "mine:train", "--model", "quick"), "model does not apply to a function"),
        (("--train", "mine:train", "--microbatch", "2"), "need {microbatch_size}"),
        (("--train", "mine:train", "--tune", "lr,beta2"), "needs {beta2} in the function"),
        (("--train", "mine:train", "--examples-per-epoch", "12"), "batches must divide the 12"),
        (
            ("--command", "true {epochs} {batch_size} {seed} {learning_rate}"),
            "--examples-per-epoch",
        ),
    ],
)
def test_what_a_function_cannot_do_is_refused_in_one_sentence(refuse, folder, words, problem):
    assert problem in refuse("run", *words, *RUN)


@pytest.mark.slow
def test_a_notebook_sweeps_a_function_that_it_has_written_to_a_file(folder):
    settings = ", ".join(f"{name}={value!r}" for name, value in SETTINGS.items())
    run = f"sweep.run_sweep(train=written.train, show_progress=False, out='out', {settings})"
    cells = [f"%%writefile written.py\n{FUNCTION}", "import sweep, written", f"print({run})"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    printed = [output.get("text", "") for output in notebook.cells[2].outputs]
    assert "<sweep out: 2 trials>\n" in printed
