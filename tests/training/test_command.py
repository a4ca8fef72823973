"""Training by a command: what it reports is checked and kept, and how it ends is judged."""

import json
import re
import time
from pathlib import Path

import pytest

import sweep
from sweep.trial.files import read_metrics
from tests.commands import COMMAND, SCRIPT, Attempts
from tests.orchestration.clusters import wait_until


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """Plan a trial of SCRIPT, with one line replaced, in the current folder."""
    monkeypatch.chdir(tmp_path)

    def plan(old="", new="", command=COMMAND, out="results", **settings):
        assert old in SCRIPT
        (tmp_path / "train.py").write_text(SCRIPT.replace(old, new) if old else SCRIPT)
        return Attempts(tmp_path / out, command, **settings)

    return plan


def losses_of(trial):
    names = ("train/loss", "valid/loss")
    lines = read_metrics(trial.metrics_path)
    return [(line["step"], [line.get(name) for name in names]) for line in lines]


def test_the_lines_and_the_result_of_a_command_are_kept(attempts):
    own = attempts()
    assert own.run().kind == "complete"
    lines, result = read_metrics(own.trial.metrics_path), own.trial.read_result()
    assert [line["step"] for line in lines] == [*range(1, 21)]
    assert [line["tokens"] for line in lines] == [*range(4, 81, 4)]
    assert result.final_valid_loss == lines[-1]["valid/loss"] == lines[-1]["train/loss"]
    assert (result.state, result.steps, result.tokens) == ("COMPLETE", 20, 80)
    assert 0 < result.seconds_training < 60 and result.tokens_per_second > 0
    unknown = ("parameters", "final_train_loss", "torch_version", "beta2", "weight_decay", "mfu")
    unknown += ("clipped_step_fraction", "seconds_evaluation", "warmup_steps", "epochs")
    assert {name: getattr(result, name) for name in unknown} == dict.fromkeys(unknown)


@pytest.mark.parametrize(
    ("new", "problem"),
    {
        "text": ('print("loss 3", file=open(options.log, "a"))', "must be a JSON object"),
        "list": ('print("[1]", file=open(options.log, "a"))', "must be a JSON object"),
        "no step": ('print("{}", file=open(options.log, "a"))', "optimizer steps up to 20"),
        "step beyond the last": ("report(21, train_loss=1)", "optimizer steps up to 20"),
        "step as a text": ('report("3", train_loss=1)', "optimizer steps up to 20"),
        "tokens of one device": (
            "report(t + 1, examples=t + 1, tokens=t + 1)",
            r"count 4 tokens \(1 × 4 × 1\)",
        ),
        "examples of one device": ("report(t + 1, examples=t + 1)", r"4 examples \(1 × 4\)"),
        "a name without a group": ("report(t + 1, loss=1.0)", "by names such as train/loss"),
        "a metric that is a text": ('report(t + 1, train_lr="high")', "hold numbers"),
        "a metric that is a truth value": ("report(t + 1, train_lr=True)", "hold numbers"),
        "a time of sweep": ("report(t + 1, perf_seconds=1.0)", "'perf/seconds'"),
        "a result of sweep": ("report(t + 1, Final_valid=1.0)", "'Final/valid'"),
        "a system metric": ("report(t + 1, **{'SYSTEM/gpu': 1.0})", "'SYSTEM/gpu'"),
        "a name that is a path": ("report(t + 1, **{'train/..': 1.0})", r"'train/\.\.'"),
        "a name that is long": ("report(t + 1, **{'train/' + 300 * 'x': 1.0})", "up to 200"),
        "a name below another": ("report(t + 1, **{'train/loss/x': 1.0})", "'train/loss/x'"),
        "a name in other letters": ("report(t + 1, **{'train/Loss': 1.0})", "'train/Loss'"),
        "a long line": ("report(t + 1, **{'train/' + (1 << 20) * 'x': 1.0})", "less than 1 MiB"),
    }.values(),
)
def test_a_wrong_line_fails_the_trial_with_a_sentence_that_shows_it(attempts, new, problem):
    own = attempts("# here", new)
    outcome = own.run()
    assert outcome.kind == "error" and re.search(problem, outcome.message), outcome.message
    assert "\n" not in outcome.message and own.trial.find_result() is None


def test_a_command_must_evaluate_after_its_last_step(attempts):
    early = attempts("report(options.steps, valid_loss", "report(19, valid_loss").run()
    assert early.kind == "error" and "after step 19 with valid/loss" in early.message
    short = attempts("range(first, options.steps)", "range(first, 15)", out="short")
    assert short.run().kind == "complete"
    silent = attempts("report(options.steps, valid_loss=w * w / 2)", "", out="silent").run()
    assert silent.kind == "error" and "after step 20 with train/loss" in silent.message
    silent = attempts("def report", "def report(*_, **__): pass\ndef unused", out="none").run()
    assert silent.kind == "error" and "after step 0 with nothing" in silent.message


@pytest.mark.parametrize("value", ["float('nan')", "float('-inf')", "None"])
def test_a_loss_that_is_not_finite_ends_the_command_as_diverged(attempts, value):
    own = attempts("# here", f"if t == 9: report(10, train_loss={value}); time.sleep(60)")
    start = time.monotonic()
    assert own.run().kind == "diverged" and time.monotonic() - start < 30
    result = own.trial.read_result()
    assert (result.state, result.cause, result.steps) == ("FAILED", "diverged", 10)
    assert read_metrics(own.trial.metrics_path)[-1]["train/loss"] is None


def test_a_failed_command_is_an_error_with_its_last_line_and_the_log(attempts):
    own = attempts("# here", "if t == 3: raise KeyError('weights')")
    outcome = own.run()
    assert outcome.kind == "error" and "exit code 1" in outcome.message
    assert "KeyError: 'weights'" in outcome.message and str(own.trial.log_path) in outcome.message
    assert "Traceback" in own.trial.log_path.read_text()
    row = sweep.load_sweep(own.trial.path.parents[1]).trials.iloc[0]
    assert (row["steps"], row["tokens"], row["planned_tokens"]) == (4, 16, 80)
    assert 0 < row["seconds_total"] < 60
    killed = attempts("# here", "os.kill(os.getpid(), 9)", out="killed").run()
    assert killed.kind == "error" and "SIGKILL" in killed.message


@pytest.mark.parametrize(
    "message",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried",
        "MemoryError",
        "RESOURCE_EXHAUSTED: Out of memory",
    ],
)
def test_output_about_memory_means_out_of_memory(attempts, message):
    own = attempts("# here", f"sys.exit({message!r})")
    assert own.run().kind == "out_of_memory"
    harmless = "print('out of memory, not really\\n' + 20000 * 'x', file=sys.stderr)"
    assert attempts("# here", harmless, out="harmless").run().kind == "complete"


def test_every_value_of_a_trial_has_a_placeholder(attempts):
    names = (
        *("batch_size", "learning_rate", "steps", "warmup_steps", "tokens", "examples", "seed"),
        *("microbatch_size", "accumulation", "beta2", "weight_decay", "device", "folder", "log"),
    )
    shown = " ".join(f"{name}={{{name}}}" for name in names)
    own = attempts(command=f"sh -c 'echo {shown}'", context=3, microbatch=2, budget=240)
    assert own.run().kind == "error"
    lines = own.trial.log_path.read_text().splitlines()
    (echoed,) = [line for line in lines if line.startswith("batch_size=")]
    folder = own.trial.path
    assert dict(word.split("=") for word in echoed.split()) == {
        "batch_size": "4",
        "learning_rate": "0.1",
        "steps": "20",
        "warmup_steps": "1",
        "tokens": "240",
        "examples": "80",
        "seed": "0",
        "microbatch_size": "2",
        "accumulation": "2",
        "beta2": "0.999",
        "weight_decay": "0.1",
        "device": "cpu",
        "folder": str(folder / "work"),
        "log": str(folder / "reported.jsonl"),
    }


def test_a_command_reaches_no_shell_and_keeps_the_current_folder(attempts, tmp_path):
    own = attempts(command=f"{COMMAND} ';' touch '$HOME' '{{\"a\": 1}}'")
    own.run()
    words = own.trial.log_path.read_text()
    assert "unrecognized arguments: ; touch $HOME" in words and '{"a": 1}' in words


def test_a_command_may_be_written_on_several_lines(attempts):
    assert attempts(command=COMMAND.replace(" --seed", " \\\n --seed")).run().kind == "complete"


def test_sweep_log_reports_without_a_log_option(attempts, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(sweep.__file__).parents[1]))
    new = "import sweep\n    sweep.log({'train/loss': w}, step=float(t + 1), examples=4 * (t + 1))"
    own = attempts("# here", new, command=COMMAND.replace("{log}", "/dev/null"))
    outcome = own.run()
    assert outcome.kind == "error" and "after step 20 with train/loss" in outcome.message
    final = "import sweep; sweep.log(step=options.steps, **{'valid/loss': w})\nreport(options.steps"
    own = attempts(
        "report(options.steps", final, command=COMMAND.replace("{log}", "/dev/null"), out="x"
    )
    assert own.run().kind == "complete"


WAIT = "(open('once', 'w'), time.sleep(900)) if t == 11 and not os.path.exists('once') else 0"


def wait_for_end(path):
    """Wait until the process with the id in a file has ended."""
    status = Path(f"/proc/{path.read_text().strip()}/status")

    def has_ended():
        try:
            return "(zombie)" in status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(has_ended)


def reported_steps(trial):
    return [json.loads(line)["step"] for line in trial.reported_path.read_text().splitlines()]


@pytest.mark.parametrize("word", ["stopped", "preempted"])
def test_a_stopped_command_resumes_with_the_same_curve(attempts, tmp_path, word):
    command = COMMAND + " --resume {resume}"
    whole = attempts(command=command, out="whole")
    assert whole.run().kind == "complete"
    own = attempts("# here", WAIT, command=command)
    own.start(attempts=1)
    while not (tmp_path / "once").exists():
        time.sleep(0.02)
    own.process.stop(word)
    assert own.end().kind == word
    assert losses_of(own.trial)[-1][0] == 12
    assert own.run().kind == "complete"
    assert losses_of(own.trial) == losses_of(whole.trial)
    ends = [attempt.trial.read_result() for attempt in (own, whole)]
    assert ends[0].final_valid_loss == ends[1].final_valid_loss
    assert reported_steps(own.trial) == [*range(1, 13), *range(11, 21), 20]
    assert not own.trial.resume_path.exists()


def test_a_killed_attempt_resumes_with_the_same_curve_and_leaves_no_process(attempts, tmp_path):
    command = COMMAND + " --resume {resume}"
    whole = attempts(command=command, out="whole")
    whole.run()
    pid = f"print(os.getpid(), file=open('pid', 'w')); {WAIT}"
    is_first = "t == 11 and not os.path.exists('once')"
    half = f"open(options.log, 'a').write('{{\"st') if {is_first} else 0; {pid}"
    own = attempts("# here", half, command=command)
    own.start(attempts=1)
    while not (tmp_path / "once").exists():
        time.sleep(0.02)
    own.process.kill()
    assert own.end().kind == "lost"
    wait_for_end(tmp_path / "pid")
    assert own.run().kind == "complete"
    assert losses_of(own.trial) == losses_of(whole.trial)


def test_the_time_of_a_stopped_command_counts_although_it_reported_nothing(attempts, tmp_path):
    slow = f"report(t + 1, train_loss=1.0) if t == 0 else time.sleep(0.1); {WAIT}"
    line = "report(t + 1, train_loss=w * w / 2)"
    own = attempts(line, slow, command=COMMAND + " --resume {resume}")
    own.start(attempts=1)
    while not (tmp_path / "once").exists():
        time.sleep(0.02)
    own.process.stop()
    own.end()
    assert own.run().kind == "complete"
    # ten steps before, and ten from the checkpoint on
    assert own.trial.read_result().seconds_training > 1.9


def test_a_wrong_line_of_an_earlier_attempt_does_not_fail_the_next_one(attempts, tmp_path):
    command = COMMAND + " --resume {resume}"
    whole = attempts(command=command, out="whole")
    whole.run()
    wrong = "open(options.log, 'a').write('wrong\\n') and time.sleep(60)"
    is_first = "t == 11 and not os.path.exists('once')"
    own = attempts("# here", f"({is_first}) and open('once', 'w') and {wrong}", command=command)
    assert "must be a JSON object, got 'wrong'" in own.run().message
    assert own.run().kind == "complete"
    assert losses_of(own.trial) == losses_of(whole.trial)


def test_without_resume_an_attempt_begins_again_in_an_empty_folder(attempts, tmp_path):
    command = COMMAND + " --resume {folder}/state"
    own = attempts("# here", WAIT, command=command)
    own.start(attempts=1)
    while not (tmp_path / "once").exists():
        time.sleep(0.02)
    own.process.stop()
    assert own.end().kind == "stopped"
    assert own.run().kind == "complete"
    assert reported_steps(own.trial) == [*range(1, 21), 20]


@pytest.mark.slow
def test_a_command_that_ignores_the_request_to_stop_is_killed(attempts, tmp_path, monkeypatch):
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); " + WAIT
    own = attempts("# here", deaf)
    own.start(attempts=1)
    while not (tmp_path / "once").exists():
        time.sleep(0.02)
    start = time.monotonic()
    own.process.stop()
    assert own.end().kind == "stopped" and 25 < time.monotonic() - start < 50


def test_children_of_a_command_end_with_it(attempts, tmp_path):
    child = "subprocess.Popen(['sleep', '900'])"
    write = f"import subprocess; print({child}.pid, file=open('child', 'w')); sys.exit(1)"
    own = attempts("# here", write)
    assert own.run().kind == "error"
    wait_for_end(tmp_path / "child")


def test_a_command_may_go_back_to_its_checkpoint_by_itself(attempts):
    plain = attempts(out="plain")
    plain.run()
    again = (
        "if t == 9: [report(n, train_loss=7.0) for n in (11, 12)]; report(10, train_loss=w * w / 2)"
    )
    own = attempts("# here", again)
    assert own.run().kind == "complete"
    assert losses_of(own.trial) == losses_of(plain.trial)


def test_a_command_without_a_new_line_is_ended_and_tried_once_more(attempts, tmp_path):
    pid = "print(os.getpid(), file=open('pid', 'w')); time.sleep(900)"
    outcome = attempts("# here", pid).run(stall_minutes=0.02)
    assert outcome.kind == "lost" and "--stall-minutes" in outcome.message
    wait_for_end(tmp_path / "pid")


def test_the_peak_memory_is_that_of_the_command_or_not_known(attempts):
    own = attempts("# here", "x = b'x' * (900 << 20) if t == 3 else b''")
    assert own.run().kind == "complete"
    assert 900 << 20 < own.trial.read_result().peak_memory_bytes < 1100 << 20
    small = attempts(out="small")
    small.run()
    assert small.trial.read_result().peak_memory_bytes is None


def test_many_lines_are_thinned_but_validation_values_are_kept(attempts):
    new = "if t % 500 == 7: report(t + 1, valid_loss=w * w)"
    own = attempts("# here", new, budget=20_000)
    assert own.run().kind == "complete"
    lines = read_metrics(own.trial.metrics_path)
    assert 1000 <= len(lines) < 1030 and lines[-1]["step"] == 5000
    assert [line["step"] for line in lines if "valid/loss" in line] == [
        *range(8, 5000, 500),
        5000,
    ]


def test_validation_values_of_every_step_are_thinned_evenly_and_this_is_said(attempts):
    line = "report(t + 1, train_loss=w * w / 2)"
    own = attempts(line, "report(t + 1, valid_loss=float(t))", budget=20_000)
    assert own.run().kind == "complete"
    lines = read_metrics(own.trial.metrics_path)
    assert [line["step"] for line in lines][:3] == [5, 10, 15]
    assert [line["step"] for line in lines][-3:] == [4995, 4999, 5000]
    assert all(line["step"] == line["valid/loss"] + 1 for line in lines[:-1])
    assert len(lines) == 1001
    assert "leaves out 3999 reported steps" in own.trial.log_path.read_text()


def test_a_long_output_is_cut_and_an_objective_may_have_another_name(attempts):
    loud = "if t == 3: print(10**6 * 'a line of output\\n')"
    own = attempts("# here", loud)
    assert own.run().kind == "complete"
    own = attempts(
        "valid_loss=", "valid_accuracy=", objective="accuracy", direction="maximize", out="x"
    )
    assert own.run().kind == "complete"
    result = own.trial.read_result()
    assert result.final_valid["accuracy"] > 0 and result.final_valid_loss is None


AWK = """
BEGIN {
    srand(seed); w = 1
    for (step = 1; step <= steps; step++) {
        w -= rate * (w + (rand() - 0.5) / sqrt(size))
        printf "{\\"step\\": %d, \\"train/loss\\": %.17g}\\n", step, w * w / 2 >> log_file
    }
    printf "{\\"step\\": %d, \\"valid/loss\\": %.17g}\\n", steps, w * w / 2 >> log_file
}
"""


def test_a_program_in_any_language_can_be_the_command(attempts, tmp_path):
    (tmp_path / "train.awk").write_text(AWK)
    values = "-v size={batch_size} -v rate={learning_rate} -v steps={steps} -v seed={seed}"
    own = attempts(command=f"awk {values} -v log_file={{log}} -f train.awk")
    assert own.run().kind == "complete"
    assert [*own.plan.code["files"]] == ["train.awk"]
    assert own.plan.experiment == "train"


def test_a_trial_of_several_devices_starts_one_command_that_sees_them(attempts):
    own = attempts(devices_per_trial=2, batches="8", budget=160)
    assert own.run().kind == "complete"
    assert own.trial.read_result().devices == 2


def test_a_command_sees_only_the_numbered_gpu_of_its_trial(attempts, monkeypatch):
    shown = 'import os; print("sees", os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[-1])'
    own = attempts("# here", shown, command=f"{COMMAND} --resume {{device}}")
    config = own.trial.read_config()
    execution = config.execution.model_copy(update={"device": "cuda:1"})
    own.trial.write_config(config.model_copy(update={"execution": execution}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    own.run()  # fails where there is no such GPU, after the command
    assert "sees 5 cuda\n" in own.trial.log_path.read_text()
