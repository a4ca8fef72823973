"""The commands as scripts use them: JSON keys, exit codes, environment variables."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sweep.analysis.answer_data import SIDES
from sweep.analysis.results import load_sweep
from sweep.analysis.tables import write_trials_csv
from sweep.cli import sweep
from sweep.config.experiment import AnswerSettings
from sweep.config.settings import choices_of
from sweep.tracking.store import default_tracking_uri
from sweep.trial.files import canonical_json, seal
from sweep.trial.folder import SweepFolder
from sweep.trial.lease import Lease
from sweep.trial.status import State
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.contracts.figures import NOT_IN_A_WORKER
from tests.contracts.sources import ROOT
from tests.servers import load_stored_sweep

PLAN_KEYS = {"experiment", "model", "tokens_per_sequence", "token_budget", "epochs", "disk_bytes"}
TRIAL_KEYS = {
    *("id", "stage", "policy", "batch_size", "seed", "learning_rate", "tokens", "steps"),
    *("warmup_steps", "devices", "microbatch_size", "gradient_accumulation_steps"),
    *("forecast_bytes", "forecast_seconds"),
}
STATUS_KEYS = {
    *("id", "stage", "batch_size", "seed", "learning_rate", "state", "cause", "tokens", "loss"),
    *("tokens_per_second", "eta_seconds"),
}
QUADRATIC = ("quadratic", "--batches", "4,8", "--budget", "400", "--device", "cpu")
THREE = ("quadratic", "--batches", "4,8,16", "--budget", "400", "--device", "cpu")
OWN = ("--lr", "sqrt:0.05@8", "--seeds", "2", "--precision", "fp32", "--keep", "checkpoints")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "s"
    arguments = ["run", *QUADRATIC, *OWN, "--out", str(folder), "--json", "--quiet"]
    result = CliRunner().invoke(sweep, arguments, standalone_mode=False)
    assert result.return_value == 0, result.output
    return SweepFolder(folder), json.loads(result.stdout)


def test_the_reference_command_prints_the_plan_of_the_design(call, tmp_path):
    batches = "1,8,32,64,128,256"
    code, out = call("plan", "--budget", "327.68M", "--batches", batches, "--json")
    plan = json.loads(out)
    assert code == 0 and plan.keys() >= PLAN_KEYS
    assert plan["model"]["parameters"] == 22_696_448
    assert plan["model"]["embedding_parameters"] == 2 * 10_000 * 512
    assert plan["experiment"] == "tinystories" and plan["tokens_per_sequence"] == 256
    trials = plan["trials"]
    assert all(trial.keys() >= TRIAL_KEYS for trial in trials)
    assert [t["steps"] for t in trials] == [1_280_000, 160_000, 40_000, 20_000, 10_000, 5_000]
    assert [t["warmup_steps"] for t in trials] == [12_800, 1_600, 400, 200, 100, 100]
    for trial in trials:
        micro, accumulation = trial["microbatch_size"], trial["gradient_accumulation_steps"]
        assert micro * accumulation * trial["devices"] == trial["batch_size"]
        assert trial["forecast_bytes"] > 3 * 4 * 22_696_448 and trial["forecast_seconds"] > 0
    assert plan["epochs"] is None and plan["disk_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_accumulation_gives_the_microbatch_by_flag_or_variable_and_stays(call, monkeypatch):
    def sizes(*more):
        out = call("plan", *QUADRATIC, *more, "--json")[1]
        names = ("microbatch_size", "gradient_accumulation_steps")
        return [tuple(trial[name] for name in names) for trial in json.loads(out)["trials"]]

    assert sizes("--accumulation", "2") == [(2, 2), (4, 2)]
    monkeypatch.setenv("SWEEP_PLAN_ACCUMULATION", "4")
    assert sizes() == [(1, 4), (2, 4)]
    assert sizes("--out", "here") == [(1, 4), (2, 4)]
    assert call("plan", *QUADRATIC, "--out", "here", "--accumulation", "2")[0] == 2


def test_tuned_is_planned_with_rates_to_come_in_the_dimensions_asked_for(call):
    flags = ("--lr", "tuned", "--tune", "lr,weight_decay", "--tune-budget", "49152", "--json")
    code, out = call("plan", "quick", *flags)
    plan = json.loads(out)
    trials = [(t["stage"], t["tokens"], t["learning_rate"] is None) for t in plan["trials"]]
    assert code == 0 and plan["settings"]["tuning"]["dimensions"] == ["lr", "weight_decay"]
    assert set(trials) == {("tune", 49152, False), ("final", 196_608, True)}


def test_stop_asks_what_a_dead_command_left_on_other_machines(call, tmp_path):
    call("plan", "quadratic", "--batches", "4,8,16", "--budget", "800", "--out", tmp_path / "s")
    folder = SweepFolder(tmp_path / "s")
    alive, ended, unbegun = folder.trials()
    for trial, owner in ((alive, {"counter": 3}), (ended, {"ended": True})):
        owner = {"host": "elsewhere", "pid": 1, "fencing": 2, "folder": trial.id, **owner}
        line = seal(owner)
        trial.lease_path.write_text(canonical_json(line))
    code, out = call("stop", folder.path)
    assert code == 0 and "1 attempts without a command were asked to stop" in out
    assert alive.is_asked_to_stop(2) and not alive.is_asked_to_stop(3)
    assert not ended.stop_path.exists() and not unbegun.stop_path.exists()
    alive.lease_path.unlink()
    with Lease(unbegun.lease_path, fencing=1):  # on this machine, as a worker of Ray's
        assert "1 attempts" in call("stop", folder.path)[1]
    assert unbegun.is_asked_to_stop(1)
    assert "attempts" not in call("stop", folder.path)[1]


def test_plan_with_out_lets_a_bare_worker_run_a_trial_and_report_mirrors_it(call, tmp_path):
    folder, one = SweepFolder(tmp_path / "s"), ("quadratic", "--batches", "4", "--budget", "400")
    assert call("plan", *one, "--device", "cpu", "--out", folder.path)[0] == 0
    (trial,) = folder.trials()
    program = f"import runpy, sys; sys.modules |= dict.fromkeys({NOT_IN_A_WORKER}); "
    program += "runpy.run_module('sweep.training', run_name='__main__')"
    bare = subprocess.run([sys.executable, "-c", program, trial.path], capture_output=True)
    assert bare.returncode == 0 and trial.read_status().state is State.COMPLETE, bare.stderr
    before = {*folder.path.rglob("*")}
    assert call("report", folder.path, "--out", tmp_path / "elsewhere")[0] == 0
    assert (tmp_path / "elsewhere" / "report.md").exists()
    assert {*folder.path.rglob("*")} == before
    assert call("report", folder.path)[0] == 0
    stored = load_stored_sweep(default_tracking_uri(folder), "quadratic")
    assert stored.trials.state.tolist() == ["COMPLETE"]


def test_run_prints_the_document_of_status(call, finished):
    folder, document = finished
    assert document["state"] == "COMPLETE" and document["report"] == str(folder.path / "report.md")
    assert all(trial.keys() >= STATUS_KEYS for trial in document["trials"])
    assert {trial["tokens"] for trial in document["trials"]} == {400}
    code, text = call("status", folder.path, "--json")
    assert code == 0 and json.loads(text)["trials"] == document["trials"]
    code, text = call("log", folder.path, document["trials"][0]["id"][:6])
    assert code == 0 and "batch size 4" in text
    assert all(trial.weights_path.exists() and trial.checkpoints() for trial in folder.trials())


def test_clean_removes_checkpoints_and_on_request_weights(call, finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished[0].path, folder)
    assert call("clean", folder)[0] == 2
    code, text = call("clean", folder, "--weights", "--yes")
    assert code == 0 and "Removed" in text
    assert not list(folder.glob("trials/*/*.safetensors"))
    part = next(folder.glob("trials/*")) / ".result.json.part"
    part.touch()
    with Lease(part.parent / "lease.json"):  # of a live worker, as of a SLURM job
        assert call("clean", folder)[1].startswith("Removed 0 files") and part.exists()
    assert call("clean", folder, "--yes")[0] == 0 and not part.exists()
    paused = SweepFolder(folder).trials()[0]
    paused.result_path.unlink()
    paused.write_status(paused.read_status().changed(state=State.PRUNED))
    (paused.path / "checkpoint-1-0").mkdir()
    assert call("clean", folder, "--yes")[0] == 0 and paused.checkpoints()  # tuning may continue it


def test_a_report_does_not_replace_published_results(call, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(ROOT / "results" / "published" / "quick-fixed-rate", published)
    before = {path: path.stat().st_mtime_ns for path in published.rglob("*")}
    for command in ("report", "status"):
        assert call(command, published)[0] == 2 and "is published" in call.stderr
    assert call("report", published, "--out", "again")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in published.rglob("*")} == before
    stored, again = (
        json.loads((f / "answer.json").read_text()) for f in (published, tmp_path / "again")
    )
    for old, new in zip(stored["batch_sizes"], again["batch_sizes"], strict=True):
        assert (old["mean"], old["seeds"]) == pytest.approx((new["mean"], new["seeds"]))


def test_run_ends_with_the_answer_and_keeps_the_files_that_it_was_told_to(call, tmp_path):
    code, text = call("run", *QUADRATIC, "--out", "s", "--quiet", "--keep", "none")
    lines = text[text.index("Provisionally, use batch size ") :].splitlines()
    assert code == 0 and 3 <= len(lines) <= 6
    assert any(line.startswith("This is provisional: The learning rate is") for line in lines)
    assert any(line.startswith("Also: The number of seeds is 1 at every") for line in lines)
    assert lines[-2].startswith("Next, at least ") and lines[-2].endswith("--seeds auto")
    assert lines[-1].startswith("Longer trainings: sweep run quadratic ")
    assert not list(tmp_path.glob("s/trials/*/*.safetensors"))
    assert call("run", *QUADRATIC, "--out", "s", "--keep", "weights")[0] == 2
    assert call("run", *QUADRATIC, "--out", "s")[0] == 0


def test_report_from_mlflow_alone_has_the_same_tables(call, finished, tmp_path):
    out, other = finished[0].path, tmp_path / "other"
    code, text = call("report", out)
    assert code == 0 and text.strip() == str(out / "report.md")
    store = ("--from-mlflow", f"sqlite:///{out}/mlflow.db", "--experiment", "quadratic")
    assert call("report", *store, "--out", other)[0] == 0
    assert (other / "trials.csv").read_bytes() == (out / "trials.csv").read_bytes()

    def tables(path):
        return [line for line in path.read_text().splitlines() if line.startswith("|")]

    assert tables(other / "report.md") == tables(out / "report.md")


def test_a_relative_data_path_is_kept_as_seen_from_the_sweep(call, tmp_path):
    (tmp_path / "text").mkdir()
    lines = "".join(f"story number {i} about {i % 7} cats\n<|endoftext|>\n" for i in range(400))
    (tmp_path / "text" / "train.txt").write_text(lines)
    flags = ("--data", "text", "--tokenizer", "bytes", "--budget", "2k", "--batches", "4")
    code, _ = call("run", "quick", *flags, "--out", "deep/in/sweep", "--quiet", "--device", "cpu")
    assert code == 0
    (trial,) = SweepFolder(tmp_path / "deep/in/sweep").trials()
    assert '"data_path": "../../../text"' in trial.config_path.read_text()
    assert trial.read_config().data_path == str(tmp_path / "text")
    assert str(tmp_path) not in (tmp_path / "deep/in/sweep/report.md").read_text()


def test_the_recorded_command_plans_the_same_trials_again(call, finished):
    folder, _ = finished
    (command,) = folder.read_plan()["commands"]
    assert command[:3] == ["sweep", "run", "quadratic"]
    words = [word for word in command[3:] if word not in ("--out", str(folder.path))]
    plan = json.loads(call("plan", "quadratic", *words, "--json")[1])
    assert [t["id"] for t in plan["trials"]] == [t.id for t in folder.trials()]


def test_dry_run_writes_nothing_and_only_runs_one_trial(call, tmp_path):
    code, out = call("run", *QUADRATIC, "--dry-run", "--json")
    first, second = (trial["id"] for trial in json.loads(out)["trials"])
    assert code == 0 and list(tmp_path.iterdir()) == []
    assert call("run", *QUADRATIC, "--quiet", "--out", "s", "--only", second)[0] == 0
    states = {t.id: t.read_status().state for t in SweepFolder(tmp_path / "s").trials()}
    assert states == {first: State.WAITING, second: State.COMPLETE}


def run_without_slow_imports(*words):
    """Return what a command prints, which fails if it imports a library that takes seconds."""
    program = (
        "import sys; from sweep.cli import sweep; "
        "code = sweep.main(sys.argv[1:], standalone_mode=False); "
        "slow = {'torch', 'mlflow', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'imported {slow}' if slow else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_is_made_without_slow_imports(tmp_path):
    words = ("plan", "quick", "--batches", "4", "--device", "cpu", "--out", tmp_path / "s")
    assert "1 trial" in run_without_slow_imports(*words)


def test_a_finished_sweep_is_recognised_without_slow_imports(finished):
    folder, document = finished
    text = run_without_slow_imports("run", *QUADRATIC, *OWN, "--out", str(folder.path))
    assert f"{len(document['trials'])} COMPLETE" in text


def test_doctor_finds_what_is_installed_and_what_to_repair(call):
    code, out = call("doctor", "--json")
    document = json.loads(out)
    assert code == 0 and document["packages"]["torch"]
    assert document["devices"][0]["device"] == "cpu"
    assert not document["devices"][0]["name"].startswith("cpu")
    lines = call("doctor")[1].splitlines()
    assert any(line.startswith("✓ cpu: ") for line in lines)
    assert sum(line.startswith("✗ ") for line in lines) == len(document["problems"])
    assert sum(line.startswith("– ") for line in lines) == len(document["notes"])


def test_doctor_names_the_command_that_repairs_each_problem(call, monkeypatch, tmp_path):
    def version(name):
        if name == "tokenizers":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    repairs = [line for line in call("doctor")[1].splitlines() if line.startswith("✗ ")]
    assert "✗ tokenizers is not installed: `pip install tokenizers`" in repairs
    cache = f"the cache {tmp_path / 'cache'} is not writable"
    assert f"✗ {cache}: `export SWEEP_CACHE=FOLDER`" in repairs
    assert all(line.endswith("`") for line in repairs)


def test_characters_that_the_terminal_lacks_are_replaced():
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    words = [sys.executable, "-m", "sweep", "doctor"]
    done = subprocess.run(words, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and b"? cpu: " in done.stdout


def test_data_prepare_and_info(call, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"story number {i}\n<|endoftext|>\n" for i in range(40)))
    arguments = (path, "--tokenizer", "bytes", "--vocabulary", "256")
    assert call("data", "prepare", *arguments)[0] == 0
    code, out = call("data", "info", *arguments, "--json")
    assert code == 0 and "sha256" in out


def test_data_and_plan_show_what_is_read_and_what_is_left_out(call, capsys, tmp_path):
    lines = [{"text": f"story number {i}, long enough"} for i in range(60)]
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "train_data.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"text": " "}])))
    (folder / "val_data.txt").write_text("a long story<|endoftext|> " * 20)
    (folder / "test.txt").write_text("never read")
    flags = ("--tokenizer", "bytes", "--vocabulary", "256")
    words = ("61 rows read, 60 documents, 1 empty", "test.txt (named like test data)", "20 times")
    plan = ("plan", "quick", "--data", folder, *flags, "--batches", "4", "--budget", "8k")
    plan = (*plan, "--device", "cpu", "--out", tmp_path / "s")
    code, shown = call(*plan)
    assert code == 0 and "not read yet" in shown and words[1] in shown
    code, out = call("data", "prepare", folder, *flags, "--json")
    document = json.loads(out)
    assert code == 0 and [file["role"] for file in document["files"]] == ["train", "valid"]
    assert document["left_out"].keys() == {"test.txt"}
    code, shown = call(*plan)
    assert code == 0 and all(word in " ".join(shown.split()) for word in words)


def test_the_plan_names_the_hashed_code_and_a_range_of_times(call, tmp_path):
    build = "def build(vocabulary, context): return torch.nn.Embedding(vocabulary, vocabulary)\n"
    (tmp_path / "planned_model.py").write_text(f"import torch\n{build}")
    flags = ("quick", "--model", "planned_model:build", "--context", "16", "--vocabulary", "300")
    command = ("plan", *flags, "--batches", "4,8", "--budget", "16384", "--device", "cpu")
    plan = json.loads(call(*command, "--json")[1])
    assert plan["code"]["files"].keys() == {"planned_model.py"}
    assert plan["code"]["packages"].keys() == {"torch"} and plan["forecast_factor"] >= 1
    code, shown = call(*command)
    assert code == 0 and "planned_model.py, torch " in shown
    assert re.search(r"estimated time .* to ", shown)


def test_the_cost_on_a_cluster_is_shown_one_line_per_number_without_finished_trials(call, tmp_path):
    out, flags = tmp_path / "s", ("--cluster", "nodes=2,gpus=1", "--price", "2.5")
    code, shown = call("plan", *THREE, "--out", out, *flags)
    names = ("Devices", "Trials to run", "Makespan", "Device-hours", "Price")
    subjects = [line.partition(":")[0] for line in shown.splitlines() if line.startswith(names)]
    assert code == 0
    assert subjects == [*names]
    first, *_ = SweepFolder(out).trials()
    first.write_status(first.read_status().changed(state=State.PRUNED))
    (total,) = re.findall(r"Total: (\d+) trials, (\d+) of", call("plan", *THREE, "--out", out)[1])
    assert total == ("3", "1")
    plan = json.loads(call("plan", *THREE, "--out", out, *flags, "--json")[1])
    cost, seconds = plan["cluster"], [trial["forecast_seconds"] for trial in plan["trials"][1:]]
    assert (cost["devices"], cost["trials"]) == (2, 2)
    assert cost["busy_device_hours"] == pytest.approx(sum(seconds) / 3600)
    assert cost["price"] == pytest.approx(2.5 * cost["device_hours"])


KEYS = {"experiment", "model", "device_memory_bytes", "points", "line", "largest_microbatch_size"}
POINT = {"batch_size", "microbatch_size", "peak_bytes", "by_category", "status"}
MEASURED = POINT | {
    *("rest_bytes", "reserved_bytes", "device_bytes", "headroom_bytes", "allocator_retries"),
    *("seconds_per_step", "tokens_per_second", "optimizer_steps", "loss"),
}
LINE = {"fixed_bytes", "bytes_per_sequence", "r_squared", "largest_residual_bytes"}
QUICK = ("quick", "--device", "cpu")


def test_forecast_takes_a_step_in_one_unless_memory_or_a_microbatch_is_named(call):
    code, out = call("forecast", *QUICK, "--batches", "4,8,16", "--json")
    document = json.loads(out)
    assert code == 0 and document.keys() >= KEYS and document["line"].keys() == LINE
    assert document["device_memory_bytes"] is None and document["largest_microbatch_size"] is None
    for point in document["points"]:
        assert point.keys() >= POINT and point["status"] == "FORECAST"
        assert point["microbatch_size"] == point["batch_size"] and point["fits"] is None
        assert sum(point["by_category"].values()) == point["peak_bytes"]
    halves = call("forecast", *QUICK, "--batches", "4", "--microbatch", "2", "--json")[1]
    assert [point["microbatch_size"] for point in json.loads(halves)["points"]] == [2]


def test_forecast_answers_what_fits_and_the_accumulation_that_it_needs(call, tmp_path):
    flags = ("--batches", "8,64,512", "--device-memory", "32MiB", "--json")
    document = json.loads(call("forecast", *QUICK, *flags)[1])
    largest = document["largest_microbatch_size"]
    assert 8 < largest < 64 and all(point["fits"] for point in document["points"])
    for point in document["points"]:
        assert point["batch_size"] % point["microbatch_size"] == 0
        assert point["microbatch_size"] <= largest
        assert point["peak_bytes"] <= 32 << 20
    out = tmp_path / "forecast"
    assert "# Memory forecast: quick" in call("forecast", *QUICK, "--out", out)[1]
    assert {path.name for path in out.iterdir()} == {"forecast.json", "forecast.md"}


def test_probe_prints_and_writes_what_was_measured(call, tmp_path):
    out = tmp_path / "probe"
    flags = ("--batches", "8", "--device-memory", "24MiB", "--largest", "8", "--json")
    code, text = call("probe", *QUICK, *flags, "--out", out)
    document = json.loads(text)
    assert code == 0 and document.keys() >= KEYS
    assert all(point.keys() >= MEASURED for point in document["points"])
    assert document["largest_microbatch_size"] == 8
    assert "no larger size was asked for" in document["verdict"]
    assert {path.name for path in out.iterdir()} == {"probe.json", "probe.md"}
    assert "Verdict" in (out / "probe.md").read_text()


PUBLISHED = Path(__file__).parents[1] / "analysis" / "tinystories-sweep.csv"


def test_audit_prints_findings_and_remedies_and_exits_0_whatever_it_finds(call, tmp_path):
    code, out = call("audit", PUBLISHED, "--json")
    document = json.loads(out)
    assert code == 0 and document.keys() == {"findings", "not_checked", "notes", "tables"}
    (table,) = document["tables"]
    assert table["rows"] == {"with_result": 6, "failed": 1, "left_out": 0}
    assert table["left_out"] == []
    for finding in document["findings"]:
        assert finding.keys() == {"code", "rows", "message", "remedy"}
        assert all(isinstance(batch, int) for batch in finding["rows"])
    assert all(check.keys() == {"code", "missing_columns"} for check in document["not_checked"])
    code, out = call("audit", PUBLISHED)
    assert code == 0 and out.count("remedy: ") == 7
    assert "code: missing_batch_size\n" in out and "code: adamw_time_scale\n" in out
    assert list(tmp_path.iterdir()) == []


def test_audit_names_columns_that_it_does_not_know(call, tmp_path):
    (tmp_path / "sweep.csv").write_text("batch_size,seeds,color\n8,3,red\n")
    code, out = call("audit", "sweep.csv")
    assert code == 0 and "Columns ignored: color." in out
    assert call("audit", ".")[1] == out


@pytest.mark.parametrize("name", ["image.csv", "missing.md", "", ".", "x" * 300, "no\nfile"])
def test_audit_refuses_what_is_no_table(refuse, tmp_path, name):
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    refuse("audit", name and tmp_path / name)


ARGUMENTS = {"audit": ["x"], "clean": ["x"], "log": ["x", "y"], "status": ["x"], "ui": ["x"]}
ARGUMENTS |= {"data": ["info"], "answer": ["x"], "time": ["x"], "recommend": ["x"], "merge": ["x"]}
OPTIONS = [
    (name, option)
    for name, command in sweep.commands.items()
    for option in command.get_params(click.Context(command))
    if isinstance(option, click.Option) and option.expose_value and option.name != "help"
]


def required_by(command, tested):
    """Return the required flags of a command with values, without the one that is tested."""
    words = []
    for name, option in OPTIONS:
        if name == command and option.required and option.name != tested:
            words += [option.opts[0], "1"]
    return words


def flags_of(command, tested, *arguments):
    words = [*ARGUMENTS.get(command, []), *required_by(command, tested), *arguments]
    prefix = f"SWEEP_{command.upper()}"
    context = sweep.commands[command].make_context(command, words, auto_envvar_prefix=prefix)
    return {name: value for name, value in context.params.items() if name != "folder"}


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_a_variable_does_what_the_flag_does(monkeypatch, command, option):
    value = option.type.choices[-1] if isinstance(option.type, click.Choice) else "7"
    value = "1" if option.is_flag else str(value)
    without = None if option.required else flags_of(command, option.name)
    by_flag = flags_of(command, option.name, option.opts[0], *([] if option.is_flag else [value]))
    words = option.opts[0].strip("-").replace("-", "_").upper()
    monkeypatch.setenv(f"SWEEP_{command.upper()}_{words}", value)
    assert flags_of(command, option.name) == by_flag != without


def test_the_side_that_counts_has_the_same_names_everywhere():
    names = ("auto", *SIDES)
    assert choices_of(AnswerSettings.model_fields["pursues"].annotation) == names
    options = {option.name: option for option in sweep.commands["answer"].params}
    assert tuple(options["pursues"].type.choices) == names


def test_a_table_and_a_folder_are_answered(call, tmp_path):
    write_fake_sweep(tmp_path / "s", lrs=("tuned",), seeds=3, batches="4,16,64")
    write_trials_csv(load_sweep(tmp_path / "s"), tmp_path / "trials.csv")
    code, text = call("answer", "trials.csv", "--json")
    answers = [json.loads(text), json.loads(call("answer", "s", "--json")[1])]
    assert code == 0 and answers[0]["policy"] == answers[1]["policy"] == "tuned"
    assert answers[0]["batch_sizes"] == answers[1]["batch_sizes"]
    code, text = call("answer", "trials.csv", "--tolerance", "9")
    assert code == 0 and text.startswith("Use batch size 64 (4,096 tokens): the fastest of those")


def test_a_table_that_cannot_be_answered_is_refused(refuse):
    assert "nothing.csv must exist" in refuse("answer", "nothing.csv")


def planned_batches(call, command="plan"):
    code, out = call(command, "quadratic", "--device", "cpu", "--json")
    assert code == 0
    document = json.loads(out)
    return [row["batch_size"] for row in document.get("trials") or document["points"]]


@pytest.mark.parametrize("command", ["plan", "forecast"])
def test_a_variable_of_run_is_read_by_commands_about_the_same_sweep(call, monkeypatch, command):
    monkeypatch.setenv("SWEEP_RUN_BATCHES", "4,8")
    assert planned_batches(call, command) == [4, 8] and not call.stderr
    monkeypatch.setenv(f"SWEEP_{command.upper()}_BATCHES", "16")  # its own comes first
    assert planned_batches(call, command) == [16]


def test_variables_that_are_not_read_are_named(call, monkeypatch):
    for name in ("SWEEP_RUN_OUT", "SWEEP_RUN_BATCHS", "SWEEP_PLAN_DEVISE", "SWEEP_RUNTIME"):
        monkeypatch.setenv(name, "4")
    planned_batches(call)
    lines = call.stderr.splitlines()
    assert len(lines) == 3 and "SWEEP_RUNTIME" not in call.stderr
    assert "does not read SWEEP_RUN_OUT" in call.stderr
    assert "SWEEP_RUN_BATCHES" in call.stderr and "SWEEP_PLAN_DEVICE" in call.stderr


@pytest.mark.parametrize("command", ["plan", "check", "forecast", "probe", "data"])
def test_every_setting_of_a_command_has_a_variable(command):
    context = click.Context(sweep, info_name="sweep")
    group, run = sweep.commands[command], sweep.commands["run"]
    params = {param.name: param for param in group.get_params(context)}
    shared = {param.name for param in run.get_params(context) if param.envvar} & params.keys()
    assert len(shared) >= 3
    for name in shared:
        names = [f"SWEEP_{command.upper()}_{name.upper()}", f"SWEEP_RUN_{name.upper()}"]
        assert params[name].envvar == names
