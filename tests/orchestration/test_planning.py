"""Decisions that are made once, when plan.json is first written, and estimates of a plan."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sweep.api import run_sweep
from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.errors import SweepError
from sweep.orchestration import estimates, planning
from sweep.orchestration.estimates import UNCERTAIN, estimate_seconds, fit_step_time, time_steps
from sweep.orchestration.execution import (
    Machine,
    decide_execution,
    inspect_machine,
    reason_for_eager_steps,
)
from sweep.orchestration.executors.build import services_table
from sweep.orchestration.inspection import inspect_plan
from sweep.orchestration.memory import forecast_memory
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import Request, read_request
from sweep.plan.plan import Inputs, build_plan
from sweep.resources import sha256_of_file
from sweep.training.device import available_cores, has_compiler
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder
from sweep.usercode.objects import load_object, use_code_folder
from tests.fakes.results import result_of

NOWHERE = Path("nowhere")


def plan_here(path=NOWHERE, is_elsewhere=False, execution=None, name="quick", **settings):
    experiment = load_experiment(name, {"budget": "196608", **settings})
    chosen = Execution(**{"device": "cpu", **(execution or {})})
    return make_plan(Request(experiment, chosen, SweepFolder(path)), is_elsewhere).plan


@pytest.mark.parametrize(
    ("device", "budget", "can_compile", "compiles"),
    [
        ("cpu", "196608", True, False),  # too few FLOPs
        ("cpu", "100M", True, True),
        ("cpu", "100M", False, False),
        ("cuda", "196608", True, True),
        ("cuda", "196608", False, False),
        ("mps", "100M", True, False),
    ],
)
def test_compiling_is_decided_by_device_size_and_compiler(
    monkeypatch, device, budget, can_compile, compiles
):
    machine = Machine(device, cores=2, can_compile=can_compile)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)
    execution = plan_here(budget=budget, execution={"device": device}).execution
    assert execution.compile is compiles
    assert ("no compiler" in execution.compile_reason) is (not can_compile)


WIDE = {"name": "wide", "context": 1024, "d_model": 4096, "layers": 32, "heads": 32, "d_ff": 8192}


@pytest.mark.parametrize(
    ("device", "settings", "bound", "reason"),
    [
        ("cpu", {}, 0, "^$"),
        ("cuda", {}, 16_384 // 64, "up to batch size 256"),  # 0.2M parameters: by tokens
        ("cuda", {"model": "tinystories", "batches": "64"}, 34, "up to batch size 34"),  # by FLOPs
        ("cuda", {"model": WIDE, "batches": "64"}, 0, "none: launches do not bound"),
        ("cuda", {"optimizers": "sgd,muon"}, 0, "none: sgd and muon cannot"),
        ("cuda", {"optimizers": "sgd,adamw"}, 256, "up to"),  # the trials of adamw
        ("cuda", {"name": "quadratic", "budget": "8192"}, 0, "none: batches of quadratic"),
    ],
)
def test_updates_that_launches_bound_are_graphs(monkeypatch, device, settings, bound, reason):
    machine = Machine(device, cores=2, can_compile=True)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)
    execution = plan_here(execution={"device": device}, **settings).execution
    assert execution.graph_bound == bound
    assert re.search(reason, execution.graph_reason)


@pytest.mark.parametrize("chosen", [{"devices": 2}, {"activation_checkpointing": True}])
def test_updates_on_several_devices_or_that_recompute_are_not_graphs(monkeypatch, chosen):
    machine = Machine("cuda", cores=2, can_compile=True)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)
    execution = plan_here(execution={"device": "cuda", **chosen}).execution
    assert not execution.graph_bound and execution.graph_reason.startswith("none: ")


@pytest.mark.parametrize(
    ("seeds", "executor", "compiles"),
    [(4, "local", False), (7, "local", True), (7, "ray", False), (99, "ray", False)],
)
def test_compiling_counts_the_training_that_shares_it(monkeypatch, seeds, executor, compiles):
    machine = Machine("cpu", cores=2, can_compile=True)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)
    for batches in ("4", "4,8,16"):
        settings = {"seeds": seeds, "budget": 196_608, "batches": batches}
        experiment = load_experiment("quick", settings)
        services = services_table()(executor=executor)
        request = Request(experiment, Execution(device="cpu"), SweepFolder(NOWHERE), services)
        assert make_plan(request).plan.execution.compile is compiles


def test_compiling_pays_only_if_it_pays_at_every_batch_size():
    machine = Machine("cpu", cores=2, can_compile=True)
    plan = plan_here(batches="4,8", seeds=13)
    assert reason_for_eager_steps(plan, machine, shares_processes=True) is None
    rows = [row for row in plan.trials if row.batch_size == 4 or row.seed == 0]
    assert len(rows) == 14  # 7 of each are enough
    fewer = plan.model_copy(update={"trials": tuple(rows)})
    assert reason_for_eager_steps(fewer, machine, shares_processes=True)


def test_many_small_steps_and_later_budgets_count_for_compiling():
    machine = Machine("cpu", cores=2, can_compile=True)
    plan = plan_here(batches="1", context=16, budget=393_216)  # 24,576 steps of few FLOPs
    longer = plan.model_copy(update={"later_budgets": (1_572_864,)})
    assert reason_for_eager_steps(longer, machine, shares_processes=True) is None
    large = plan_here(batches="16", context=64, budget=393_216)  # 384 steps
    assert "384 steps" in reason_for_eager_steps(large, machine, shares_processes=True)
    longer = large.model_copy(update={"later_budgets": (100 * 393_216,)})
    assert reason_for_eager_steps(longer, machine, shares_processes=True) is None


def test_more_seeds_do_not_change_whether_steps_are_compiled(tmp_path):
    first = plan_here(tmp_path, seeds=1)
    save_plan(first, SweepFolder(tmp_path))
    grown = plan_here(tmp_path, seeds=40)
    assert len(grown.trials) == 40 * len(first.trials)
    assert not grown.execution.compile and grown.execution == first.execution


def test_a_device_of_another_machine_is_neither_resolved_nor_measured(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    chosen = Execution(device="cuda", device_memory_bytes=1 << 50)
    assert inspect_machine(chosen, is_elsewhere=True) == Machine("cuda", available_cores(), True)
    with pytest.raises(SweepError, match="device must be auto or one of this machine's"):
        inspect_machine(chosen, is_elsewhere=False)
    here = inspect_machine(Execution(device="cpu"), is_elsewhere=False)
    assert here == Machine("cpu", available_cores(), has_compiler("cpu"))


def test_decisions_are_read_again_and_others_are_refused(tmp_path, monkeypatch):
    first = plan_here(tmp_path)
    save_plan(first, SweepFolder(tmp_path))
    monkeypatch.setattr(planning, "inspect_machine", None)  # would fail if it were called
    assert plan_here(tmp_path, batches="128").execution == first.execution
    with pytest.raises(SweepError, match="device was decided as 'cpu'"):
        plan_here(tmp_path, execution={"device": "cuda:0"})
    assert plan_here(tmp_path, execution={"device": "auto"}).execution == first.execution


def test_only_a_request_that_the_command_line_can_make_is_recorded_as_a_command():
    typed = read_request("quadratic", {"batches": [4, 8], "lr": 0.1})
    assert typed.command == ("sweep", "run", "quadratic", "--batches", "4,8", "--lr", "0.1")
    assert read_request("quadratic", {"evaluation": {"points": 50}}).command == ()


def test_a_line_through_seconds_per_step_minimizes_relative_errors():
    exact = fit_step_time({4: 0.5 + 4 * 0.1, 8: 0.5 + 8 * 0.1, 64: 0.5 + 64 * 0.1})
    assert exact == pytest.approx((0.5, 0.1, 1))
    per_step, per_sequence, factor = fit_step_time({8: 2.0})
    assert per_step + 16 * per_sequence == pytest.approx(4.0) and factor == UNCERTAIN
    per_step, _, factor = fit_step_time({1: 1.0, 2: 4.0})  # the intercept would be negative
    assert per_step == 0 and factor > 1
    assert fit_step_time({1: 2.0, 8: 1.0})[1] == 0


def finish(folder, rows, seconds_per_step, overhead=0.0):
    for row in rows:
        training = seconds_per_step(row.batch_size) * row.steps
        result = result_of(
            row.id,
            batch_size=row.batch_size,
            steps=row.steps,
            seconds_training=training,
            seconds_total=training + overhead,
        )
        write_json(folder.trial(row.id).result_path, result)


def test_estimates_of_all_batch_sizes_come_from_one_source(tmp_path, monkeypatch):
    folder = SweepFolder(tmp_path / "s")
    plan = plan_here(folder.path, batches="8,16,32", seeds=3)
    measured = {1: 0.012, 4: 0.042}, 0.05  # 0.002 + 0.01 per sequence
    monkeypatch.setattr(estimates, "run_job", lambda function, *arguments, seconds: measured)
    text = SimpleNamespace(train=range(64 * 100 + 1), valid=range(64 * 30 + 1))
    monkeypatch.setattr(estimates, "find_prepared", lambda *_: text)
    sequences = plan.settings.evaluation.sequences * (plan.settings.evaluation.points + 4) + 30
    seconds, factor, reason = estimate_seconds(plan, plan.trials, folder)
    for row, estimated in zip(plan.trials, seconds, strict=True):
        training = row.steps * (0.002 + 0.01 * row.batch_size)
        assert estimated == pytest.approx(training + sequences * 0.01 / 3)
    assert factor == UNCERTAIN and not reason
    # Measurements of the noise scale take their share of the sequences.
    asked = plan.settings.noise_scale.model_copy(update={"measure": True, "share": 0.1})
    settings = plan.settings.model_copy(update={"noise_scale": asked})
    probed = plan.model_copy(update={"settings": settings})
    with_noise, _, _ = estimate_seconds(probed, plan.trials, folder)
    for row, before, after in zip(plan.trials, seconds, with_noise, strict=True):
        assert after - before == pytest.approx(0.1 * row.steps * row.batch_size * 0.01)
    # On a busy machine they are uncertain, with the reason.
    monkeypatch.setattr(estimates, "run_job", lambda *_, seconds: (measured[0], 0.5))
    busy, factor, reason = estimate_seconds(plan, plan.trials, folder)
    assert busy == seconds and factor == 2 * UNCERTAIN and "50%" in reason
    # The sweep's own complete trials replace the measurement, with the time outside of training.
    save_plan(plan, folder)
    finish(folder, plan.trials[:6], lambda batch: 0.5 + 0.25 * batch, overhead=7.0)
    seconds, factor, reason = estimate_seconds(plan, plan.trials, folder)
    for row, estimated in zip(plan.trials, seconds, strict=True):
        assert estimated == pytest.approx(row.steps * (0.5 + 0.25 * row.batch_size) + 7)
    assert factor == UNCERTAIN and not reason  # a line through two points has no error
    finish(folder, plan.trials[6:], lambda batch: 0.5 + 0.25 * batch, overhead=7.0)
    _, factor, _ = estimate_seconds(plan, plan.trials, folder)
    assert factor == pytest.approx(1)


def test_an_estimate_that_takes_too_long_is_unknown_with_the_reason(tmp_path, monkeypatch):
    plan = plan_here(tmp_path, batches="8")
    monkeypatch.setattr(estimates, "TIMING_SECONDS", 1e-3)
    seconds, factor, reason = estimate_seconds(plan, plan.trials, SweepFolder(tmp_path))
    assert seconds == [None] and factor is None and "took longer" in reason


def test_each_optimizer_has_its_own_estimate(tmp_path, monkeypatch):
    settings = {"budget": "196608", "batches": "8,16", "lr": "tuned", "optimizers": "adamw,muon"}
    experiment = load_experiment("quick", settings)
    request = Request(experiment, Execution(device="cpu"), SweepFolder(tmp_path / "s"))

    def measure(function, config, seconds=None):
        if function is not estimates.time_steps:
            raise SweepError("no forecast of memory")
        cost = {"adamw": 1.0, "muon": 2.0}[config.science.optimizer.name]
        return {1: 0.012 * cost, 4: 0.042 * cost}, 0.0

    monkeypatch.setattr(estimates, "run_job", measure)
    rows = estimates.estimate(make_plan(request).plan, request.folder).trials
    cells = {(row.optimizer, row.batch_size, row.stage): row.forecast_seconds for row in rows}
    for (name, *cell), seconds in cells.items():
        assert seconds == pytest.approx(cells["adamw", *cell] * (1 + (name == "muon")))
    assert len(cells) == 8


def test_estimates_follow_the_tokens_and_epochs_are_known_once_the_text_is_tokenized(
    tmp_path, monkeypatch
):
    folder = SweepFolder(tmp_path)
    plan = plan_here(tmp_path, lr="tuned", tuning={"budget": 49_152}, batches="8")
    save_plan(plan, folder)
    finish(folder, plan.trials[:1], lambda batch: 0.1)
    monkeypatch.setattr(estimates, "find_prepared", lambda *_: None)
    assert estimates.estimate(plan, folder).epochs is None
    text = SimpleNamespace(train=range(64 * 100 + 1))
    monkeypatch.setattr(estimates, "find_prepared", lambda *_: text)
    estimated = estimates.estimate(plan, folder)
    seconds = {row.stage: row.forecast_seconds for row in estimated.trials}
    assert seconds["final"] == pytest.approx(4 * seconds["tune"])
    assert estimated.forecast_factor == UNCERTAIN and estimated.epochs == 196_608 / 6400


def test_a_step_of_grpo_is_timed_with_its_sampling():
    grpo = {"kind": "grpo", "group_size": 4, "prompt_tokens": 40, "new_tokens": 4}
    fields = {"model": "quick", "data": "synthetic", "batches": "8", "budget": 8000}
    fields["workload"] = grpo
    plan = plan_here(name="grpo-words", **fields)
    seconds, load = time_steps(plan.trial_config(plan.trials[0]))
    assert seconds.keys() == {4, 8} and min(seconds.values()) > 0 and 0 <= load <= 1


def test_without_the_device_a_plan_is_bounded_by_the_memory_that_is_set(tmp_path, monkeypatch):
    machine = Machine("cuda", cores=2, can_compile=True)
    monkeypatch.setattr(planning, "inspect_machine", lambda *_: machine)

    def plan_elsewhere(memory):
        execution = {"device": "cuda", "device_memory_bytes": memory}
        return plan_here(
            tmp_path / str(memory), is_elsewhere=True, batches="64", execution=execution
        )

    small = plan_elsewhere(40 << 20)
    assert 1 <= small.trials[0].microbatch_size < 64
    unknown = plan_elsewhere(None).execution
    assert unknown.microbatch_bound is None and unknown.reason and not small.execution.reason


def test_the_disk_need_not_hold_again_what_is_already_written(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    plan = plan_here(tmp_path, batches="8")
    with pytest.raises(SweepError, match="the disk must have"):
        estimates.refuse_small_disk(plan, SweepFolder(tmp_path), 1)
    (tmp_path / "weights").write_bytes(b"x" * estimates.disk_bytes(plan, 1))
    estimates.refuse_small_disk(plan, SweepFolder(tmp_path), 1)


def test_a_larger_microbatch_than_was_forecast_is_forecast_when_the_plan_grows(tmp_path):
    first = plan_here(tmp_path, batches="8", execution={"device_memory_bytes": 24 << 20})
    assert [row.microbatch_size for row in first.trials] == [8]
    save_plan(first, SweepFolder(tmp_path))
    grown = plan_here(tmp_path, batches="8,64")
    assert [(row.batch_size, row.microbatch_size) for row in grown.trials] == [(8, 8), (64, 8)]
    assert grown.execution == first.execution


@pytest.mark.parametrize(
    ("batches", "execution", "sizes"),
    [
        ("8,16", {"devices": 2}, [(4, 2, 1), (8, 2, 1)]),
        ("8,16", {"devices": 2, "microbatch": 2}, [(2, 2, 2), (2, 2, 4)]),
        ("8,16", {"devices": 4, "accumulation": 2}, [(1, 4, 2), (2, 4, 2)]),
        ("16", {"microbatch": 2, "accumulation": 4}, [(2, 2, 4)]),
    ],
)
def test_any_two_of_microbatch_devices_and_accumulation_give_the_third(batches, execution, sizes):
    names = ("microbatch_size", "devices", "gradient_accumulation_steps")
    plan = plan_here(batches=batches, execution=execution)
    assert [tuple(getattr(row, name) for name in names) for row in plan.trials] == sizes
    cores = available_cores()
    assert plan.execution.threads == max(1, cores // plan.execution.devices)


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        ({"devices": 3}, r"multiple of devices \(3\), got 8. Use 6 or 9"),
        ({"devices": 2, "microbatch": 3}, r"divide .*\(4\), got 3. Use 2 or 4"),
        ({"microbatch": 2, "accumulation": 4}, "microbatch_size must be 4"),
        ({"zero": 1}, "Add --devices-per-trial"),
    ],
)
def test_executions_that_do_not_go_together_are_refused(execution, message):
    with pytest.raises(SweepError, match=message):
        plan_here(batches="8,16", execution=execution)


def test_grpo_runs_on_one_device():
    with pytest.raises(SweepError, match="a workload that does not sample, got 'grpo'"):
        plan_here(name="grpo-words", execution={"devices": 2}, batches=[16], data="synthetic")
    # Each refusal names the one condition that fails.
    with pytest.raises(SweepError, match="the device cpu or cuda, got 'mps'"):
        machine = Machine("mps", cores=2, can_compile=False)
        decide_execution(load_experiment("quick"), Execution(devices=2), machine)


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, vocabulary, context):
        super().__init__()
        embedding = nn.Embedding(vocabulary, {width})
        self.layers = nn.Sequential(embedding, nn.Linear({width}, vocabulary))

    def forward(self, ids):
        return self.layers(ids)
"""
OWN = """
data = "synthetic"
tokenizer = "bytes"
budget = 2048
batches = [8]
model = {{ kind = "object", name = "{name}", vocabulary = 256, context = 16 }}
"""


def test_each_experiment_of_a_process_has_the_code_of_its_own_folder(tmp_path, caplog):
    widths = {"a": 4, "b": 12}
    for name, width in widths.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.py").write_text(NET.format(width=width))
        (tmp_path / name / "own.toml").write_text(OWN.format(name="net:Net"))
    path = [*sys.path]

    for name, width in widths.items():
        experiment = str(tmp_path / name / "own.toml")
        caplog.clear()
        request = read_request(experiment, {"device": "cpu"}, tmp_path / f"out-{name}")
        assert str(tmp_path / name / "net.py") in caplog.text
        plan = make_plan(request).plan
        digest = sha256_of_file(tmp_path / name / "net.py")
        assert plan.code["files"] == {"net.py": digest}
        assert plan.model.parameters == 256 * width + 256 * (width + 1)

    point = forecast_memory(experiment, batches="8")["points"][0]
    assert point["by_category"]["weights"] == 4 * plan.model.parameters
    trained = run_sweep(experiment, out=tmp_path / "out-b", device="cpu")
    assert [*trained.trials.state] == ["COMPLETE"]
    assert sys.path == path and "net" not in sys.modules


def test_a_process_refuses_the_code_of_a_second_experiment_with_equal_names(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net_of_two.py").write_text(f"Net = {name!r}")
    use_code_folder(str(tmp_path / "a"))
    assert load_object("net_of_two:Net") == "a"
    with pytest.raises(SweepError, match=r"b/net_of_two.py.*a/net_of_two.py"):
        use_code_folder(str(tmp_path / "b"))
    use_code_folder(None)
    assert not {str(tmp_path / "a"), str(tmp_path / "b")} & {*sys.path}


def test_the_code_of_shipped_experiments_is_not_the_users(tmp_path, caplog):
    settings = {"no_user_code": True, "device": "cpu"}
    read_request("elman", settings)
    assert not caplog.text
    (tmp_path / "own.py").write_text("")
    (tmp_path / "own.toml").write_text(OWN.format(name="own:Net"))
    with pytest.raises(SweepError, match="own:Net"):
        read_request(str(tmp_path / "own.toml"), settings)
    with pytest.raises(SweepError, match="another:Net"):
        read_request("elman", {**settings, "model": "another:Net"})


MODELS = """
import torch
from torch import nn

class Huge(nn.Module):
    def __init__(self, vocabulary, context):
        super().__init__()
        width = 1 << 30
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        return self.head(self.embedding(ids))

class Reads(nn.Module):
    def __init__(self, vocabulary, context):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocabulary, vocabulary))

    def forward(self, ids):
        assert self.table.sum().item() == 0
        return self.table[ids]
"""


@pytest.mark.parametrize(
    ("name", "parameters", "has_flops"), [("Huge", 2 * (256 << 30), True), ("Reads", 256**2, False)]
)
def test_a_users_model_is_counted_without_weights_unless_it_reads_them(
    tmp_path, monkeypatch, name, parameters, has_flops
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sized.py").write_text(MODELS)
    settings = {"model": f"sized:{name}", "vocabulary": 256, "context": 16, "precision": "fp32"}
    experiment = load_experiment("quick", {"tokenizer": "bytes", **settings})
    plan = build_plan(experiment, Execution(device="cpu"), Inputs(code={"files": {}}))
    model = inspect_plan(plan, SweepFolder(tmp_path))
    assert model.parameters == parameters
    assert model.flops_per_token is not None
    assert (model.flops_per_token > 0) is has_flops
