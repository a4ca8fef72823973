"""What is decided once, when plan.json is first written."""

from pathlib import Path

import pytest

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.errors import SweepError
from sweep.orchestration import costs, planning
from sweep.orchestration.costs import (
    UNCERTAIN,
    estimate_seconds,
    fit_step_time,
    record_measurement,
    time_one_step,
)
from sweep.orchestration.planning import Planned, make_plan, save_plan
from sweep.training import device as machine
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder


def plan_here(path, budget="196608", device="cpu", **settings):
    experiment = load_experiment("quick", {"budget": budget, **settings})
    return make_plan(experiment, Execution(device=device), SweepFolder(path)).plan


@pytest.mark.parametrize(
    ("device", "budget", "has_compiler", "compiles"),
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
    tmp_path, monkeypatch, device, budget, has_compiler, compiles
):
    monkeypatch.setattr(machine, "has_compiler", lambda _: has_compiler)
    monkeypatch.setattr(machine, "resolve_device", lambda asked: asked)
    execution = plan_here(tmp_path, budget, device).execution
    assert execution.compile is compiles
    assert ("no compiler" in execution.compile_reason) is (not has_compiler)


def test_what_was_decided_is_read_again_and_not_decided_anew(tmp_path, monkeypatch):
    first = plan_here(tmp_path)
    save_plan(first, SweepFolder(tmp_path))
    monkeypatch.setattr(planning, "decide_execution", None)  # would fail if it were asked
    again = make_plan(
        load_experiment("quick", {"batches": "128"}), Execution(), SweepFolder(tmp_path)
    )
    assert again.plan.execution == first.execution and not again.is_known


def test_another_device_than_the_decided_one_is_refused(tmp_path):
    save_plan(plan_here(tmp_path), SweepFolder(tmp_path))
    with pytest.raises(SweepError, match="device was decided as 'cpu'"):
        plan_here(tmp_path, device="cuda:0")


def test_a_line_through_seconds_per_step_minimises_relative_errors():
    exact = fit_step_time({4: 0.5 + 4 * 0.1, 8: 0.5 + 8 * 0.1, 64: 0.5 + 64 * 0.1})
    assert (exact.per_step, exact.per_sequence) == (pytest.approx(0.5), pytest.approx(0.1))
    assert exact.factor == pytest.approx(1) and exact.at(16) == pytest.approx(2.1)
    single = fit_step_time({8: 2.0})
    assert single.at(16) == pytest.approx(4.0) and single.factor == UNCERTAIN
    steep = fit_step_time({1: 1.0, 2: 4.0})  # a negative intercept would be cheaper than nothing
    assert steep.per_step == 0 and steep.factor > 1
    flat = fit_step_time({1: 2.0, 8: 1.0})
    assert flat.per_sequence == 0 and flat.at(1) == flat.at(8)


def finish(folder, rows, seconds_per_step, overhead=0.0):
    """Write results of these rows as if their training had taken so long."""
    for row in rows:
        training = seconds_per_step(row.batch_size) * row.steps
        result = {
            "state": "COMPLETE",
            "batch_size": row.batch_size,
            "steps": row.steps,
            "seconds_training": training,
            "seconds_total": training + overhead,
        }
        write_json(folder.trial(row.id).result_path, result)


def test_estimates_of_all_batch_sizes_come_from_one_source(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    folder = SweepFolder(tmp_path / "s")
    plan = plan_here(folder.path, batches="8,16,32", seeds=3)
    jobs_run = []

    def measure(function, *arguments, seconds):
        jobs_run.append(function)
        return {"seconds_per_sequence": 0.01, "seconds_per_update": 0.002}

    monkeypatch.setattr(costs, "run_job", measure)

    def seconds_of_8_16_32():
        seconds, factor = estimate_seconds(plan, folder)
        return [seconds[row.batch_size, row.tokens] for row in plan.trials[::3]], factor

    sequences = plan.settings.evaluation.sequences * (plan.settings.evaluation.points + 4)
    steps = [row.steps for row in plan.trials[::3]]
    for _ in range(2):  # the machine is measured once
        measured, factor = seconds_of_8_16_32()
        expected = [n * (0.002 + 0.01 * b) for n, b in zip(steps, (8, 16, 32), strict=True)]
        assert measured == pytest.approx([e + sequences * 0.01 / 3 for e in expected])
        assert factor == UNCERTAIN
    assert jobs_run == [time_one_step]
    # What this machine trained before replaces the measurement for every batch size.
    record_measurement(plan, {"batch_size": 8, "steps": 10, "seconds_training": 8.0})
    record_measurement(plan, {"batch_size": 64, "steps": 10, "seconds_training": 0.1})  # too short
    stored, _ = seconds_of_8_16_32()
    per_step = [0.1 * batch for batch in (8, 16, 32)]
    forward = [s - n * p for s, n, p in zip(stored, steps, per_step, strict=True)]
    assert forward == pytest.approx([sequences * 0.1 / 3] * 3)
    # The sweep's own complete trials replace both; they include the time outside of training.
    save_plan(plan, folder)
    finish(folder, plan.trials[:6], lambda batch: 0.5 + 0.25 * batch, overhead=7.0)
    own, factor = seconds_of_8_16_32()
    assert own == pytest.approx(
        [n * (0.5 + 0.25 * b) + 7 for n, b in zip(steps, (8, 16, 32), strict=True)]
    )
    assert factor == pytest.approx(1)


def test_without_the_device_a_plan_is_bounded_by_the_memory_that_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "is_here", lambda _: False)

    def execution(memory):
        settings = load_experiment("quick", {"batches": "64"})
        elsewhere = Execution(device="cuda", device_memory_bytes=memory)
        folder = SweepFolder(tmp_path / str(memory))
        return make_plan(settings, elsewhere, folder, is_elsewhere=True).plan.execution

    unknown, small = execution(None), execution(40 << 20)
    assert unknown.microbatch_bound is None and unknown.reason
    assert small.microbatch_bound is not None and not small.reason


def test_a_preset_without_the_device_needs_the_memory_that_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "is_here", lambda _: False)
    unknown = Execution(device="cuda", preset="speed")
    settings = load_experiment("quick", {"batches": "64"})
    with pytest.raises(SweepError, match="--device-memory"):
        make_plan(settings, unknown, SweepFolder(tmp_path), is_elsewhere=True)
    given = Execution(device="cuda", preset="speed", device_memory_bytes=40 << 20)
    plan = make_plan(settings, given, SweepFolder(tmp_path), is_elsewhere=True).plan
    assert plan.execution.preset == "speed" and 1 <= plan.trials[0].microbatch_size < 64


class Compared(str):
    """Counts how often it is compared with another."""

    __hash__ = str.__hash__
    count = 0

    def __eq__(self, other):
        Compared.count += 1
        return str.__eq__(self, other)


def test_which_rows_a_command_names_is_found_without_comparing_all_with_all(tmp_path):
    plan = plan_here(tmp_path, seeds=50, batches="8")
    requested = tuple(Compared(row.id) for row in plan.trials[::2])
    assert len(Planned(plan, requested, False).command_rows().trials) == len(requested) == 25
    assert 0 < Compared.count <= 2 * len(plan.trials)


def test_trials_of_fewer_tokens_are_estimated_to_take_less(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    plan = plan_here(tmp_path / "s", lr="tuned", tuning={"budget": 49_152}, batches="8")
    save_plan(plan, SweepFolder(tmp_path / "s"))
    finish(SweepFolder(tmp_path / "s"), plan.trials[:1], lambda batch: 0.1)
    estimated = costs.estimate(Planned(plan, (), False), SweepFolder(tmp_path / "s")).plan
    seconds = {row.stage: row.forecast_seconds for row in estimated.trials}
    assert seconds["report"] == pytest.approx(4 * seconds["tune"])
    assert estimated.forecast_factor == UNCERTAIN


def test_a_step_of_grpo_is_timed_with_its_sampling():
    grpo = {"group_size": 4, "prompt_tokens": 40, "new_tokens": 4}
    fields = {"model": "quick", "data": "synthetic", "batches": "8", "budget": 8000, "grpo": grpo}
    folder = SweepFolder(Path("nowhere"))
    plan = make_plan(load_experiment("grpo-words", fields), Execution(device="cpu"), folder).plan
    found = time_one_step(plan.trial_config(plan.trials[0]), lambda: None)
    assert found["seconds_per_sequence"] > 0 and found["seconds_per_update"] > 0


def test_what_was_held_already_is_not_asked_of_the_disk_again(tmp_path, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr(costs.shutil, "disk_usage", lambda _: Usage)
    plan = plan_here(tmp_path).model_copy(update={"disk_bytes": 5000})
    with pytest.raises(SweepError, match="the disk must have"):
        costs.check_disk(plan, SweepFolder(tmp_path))
    (tmp_path / "weights").write_bytes(b"x" * 4000)
    costs.check_disk(plan, SweepFolder(tmp_path))


def test_a_larger_microbatch_than_was_forecast_is_forecast_when_the_plan_grows(tmp_path):
    folder, within = SweepFolder(tmp_path), Execution(device="cpu", device_memory_bytes=24 << 20)
    first = make_plan(load_experiment("quick", {"batches": "8"}), within, folder).plan
    assert [row.microbatch_size for row in first.trials] == [8]
    save_plan(first, folder)
    both = load_experiment("quick", {"batches": "8,64"})
    grown = make_plan(both, Execution(), folder).plan
    assert [(row.batch_size, row.microbatch_size) for row in grown.trials] == [(8, 8), (64, 8)]
    assert grown.execution == first.execution


def several(**logistics):
    fields = {"batches": [8, 16], "budget": 64 * 16 * 10}
    asked = Execution(device="cpu", **logistics)
    return make_plan(load_experiment("quick", fields), asked, SweepFolder(Path("nowhere"))).plan


def test_any_two_of_microbatch_devices_and_accumulation_give_the_third():
    def sizes(**given):
        names = ("microbatch_size", "devices", "gradient_accumulation_steps")
        return [tuple(getattr(row, name) for name in names) for row in several(**given).trials]

    assert sizes(devices=2) == [(4, 2, 1), (8, 2, 1)]
    assert sizes(devices=2, microbatch=2) == [(2, 2, 2), (2, 2, 4)]
    assert sizes(devices=4, accumulation=2) == [(1, 4, 2), (2, 4, 2)]
    one = load_experiment("quick", {"batches": [16], "budget": 64 * 16 * 10})
    asked = Execution(device="cpu", microbatch=2, accumulation=4)
    row = make_plan(one, asked, SweepFolder(Path("nowhere"))).plan.trials[0]
    assert (row.microbatch_size, row.devices, row.gradient_accumulation_steps) == (2, 2, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 3}, r"multiple of devices \(3\), got 8. Use 6 or 9"),
        ({"devices": 2, "microbatch": 3}, r"divide .*\(4\), got 3. Use 2 or 4"),
        ({"microbatch": 2, "accumulation": 4}, "Leave one of the two out"),
        ({"zero": 1}, "Add --devices-per-trial"),
        ({"strategy": "deepspeed"}, "Add --devices-per-trial"),
        ({"devices": 2, "strategy": "deepspeed"}, "zero must be 1, 2 or 3|extra deepspeed"),
    ],
)
def test_what_does_not_divide_or_split_is_refused(given, message):
    with pytest.raises(SweepError, match=message):
        several(**given)


def test_grpo_runs_on_one_device():
    with pytest.raises(SweepError, match="one device per trial"):
        experiment = load_experiment("grpo-words", {"batches": [16], "data": "synthetic"})
        make_plan(experiment, Execution(device="cpu", devices=2), SweepFolder(Path("nowhere")))


def test_cores_are_shared_by_the_processes_of_a_trial():
    threads = several().execution.threads
    assert several(devices=2).execution.threads == max(1, threads // 2)
    assert several(devices=8).execution.threads == max(1, threads // 8)
