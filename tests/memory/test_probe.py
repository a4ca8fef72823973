"""Probes on a CPU within an enforced limit, compared with measuring every size."""

from dataclasses import replace
from pathlib import Path

import pytest

from sweep.config.execution import Execution
from sweep.config.experiment import load_experiment
from sweep.data.synthetic import synthetic_identity
from sweep.errors import SweepError
from sweep.memory.probe import STEPS, Probe, find_leak, measure
from sweep.memory.search import Measurement
from sweep.orchestration.memory import forecast_memory, probe_memory
from sweep.report.memory import markdown_of
from tests.plans import build_plan

MIB = 1 << 20
GRPO = {
    "model": "quick",
    "data": "synthetic",
    "batches": [4],
    "precision": "fp32",
    "grpo": {"group_size": 4, "prompt_tokens": 20, "new_tokens": 4},
}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def timeless(monkeypatch):
    """Judge by memory alone, because other processes may slow a point down."""
    monkeypatch.setattr("sweep.memory.probe.COLLAPSE", 0.0)


def within(limit):
    return {"device": "cpu", "device_memory": limit}


def config(experiment, batch, execution=None, **fields):
    settings = {"batches": [batch], "precision": "fp32", "budget": 10**9, **fields}
    plan = build_plan(
        load_experiment(experiment, {"data": "synthetic", **settings}),
        Execution(device="cpu", threads=2, **(execution or {})),
        data=synthetic_identity(),
        microbatch=batch,
    )
    return plan.trial_config(plan.trials[0], "probe")


def largest_of_all(limit, cap):
    """Return the largest size that fits, by measuring every size up to `cap`."""
    execution = {"evaluation_batch_size": cap, "loss_chunk_rows": 1024}
    whole = config("quick", cap, execution)
    configs = [whole.sized(size, size) for size in range(1, cap + 1)]
    statuses = [measure(one, limit, 3, lambda: None).status for one in configs]
    fits = [status == "OK" for status in statuses]
    assert fits == sorted(fits, reverse=True)
    return sum(fits)


def test_the_maximum_is_proved_and_equals_that_of_measuring_every_size(timeless):
    limit = 24 * MIB
    document = probe_memory("quick", **within(limit), batches=[8])
    largest = document["largest_microbatch_size"]
    points = {
        point["microbatch_size"]: point
        for point in document["points"]
        if point["batch_size"] == point["microbatch_size"]
    }
    assert points[largest]["status"] == "OK" and points[largest]["peak_bytes"] <= limit
    assert points[largest + 1]["status"] == "OUT_OF_MEMORY"
    assert points[largest]["optimizer_steps"] == 3 and points[largest]["loss"] > 0
    assert document["search_points"] <= 5 and document["line"]["r_squared"] > 0.999
    assert largest == largest_of_all(limit, largest + 3)
    safe = document["safe_microbatch_size"]
    assert points[safe]["peak_bytes"] <= 0.9 * limit
    conservative = document["recommendations"][2]
    assert conservative["name"] == "conservative" and conservative["status"] == "OK"
    assert conservative["headroom_bytes"] >= 0.3 * limit
    assert conservative["microbatch_size"] < safe
    assert document["accumulated"]["status"] == "OK"
    assert document["accumulated"]["batch_size"] == 2 * safe
    forecast = forecast_memory("quick", **within(limit), batches=[8])
    assert forecast["largest_microbatch_size"] == largest


def test_a_given_microbatch_is_measured_at_every_batch_size_without_a_search():
    document = probe_memory("quick", **within(24 * MIB), batches=[4, 8], microbatch=2)
    sizes = [(point["batch_size"], point["microbatch_size"]) for point in document["points"]]
    assert sizes == [(4, 2), (8, 2)] and document["largest_microbatch_size"] is None
    assert {point["status"] for point in document["points"]} == {"OK"}
    assert document["recommendations"] == []


def test_memory_that_is_not_linear_is_bisected(timeless):
    settings = {"workload": "odd:Pairs", "batches": [4], **within(40 * MIB)}
    document = probe_memory("quadratic", **settings)
    points = {
        point["microbatch_size"]: point["status"]
        for point in document["points"]
        if point["batch_size"] == point["microbatch_size"]
    }
    largest = document["largest_microbatch_size"]
    assert points[largest] == "OK" and points[largest + 1] == "OUT_OF_MEMORY"
    assert "bisected" in document["verdict"]


def test_not_even_one_sequence_fits():
    document = probe_memory("quick", **within(MIB), batches=[8])
    assert document["largest_microbatch_size"] == 0 and "of 1 does not" in document["verdict"]
    assert {point["status"] for point in document["points"]} == {"OUT_OF_MEMORY"}


def test_not_even_one_group_of_grpo_fits():
    probed = probe_memory("grpo-words", **within(MIB), soak_steps=0, **GRPO)
    forecast = forecast_memory("grpo-words", **within(MIB), **GRPO)
    for document in (probed, forecast):
        assert document["largest_microbatch_size"] == 0
        assert "A microbatch of 4 does not fit." in markdown_of(document)


def test_a_point_that_is_killed_is_an_error_and_the_search_goes_on(timeless):
    document = probe_memory(
        "quadratic", **within(100 * MIB), workload="odd:DiesAboveFour", batches=[4]
    )
    statuses = {point["microbatch_size"]: point["status"] for point in document["points"]}
    assert statuses[4] == "OK" and statuses[8] == "ERROR"
    assert document["largest_microbatch_size"] == 4
    assert "5 does not (ERROR)" in document["verdict"]


def test_steps_that_fail_at_every_size_are_refused():
    with pytest.raises(SweepError, match=r"ERROR .*sizes do not match"):
        probe_memory("quadratic", **within(100 * MIB), workload="odd:Broken", batches=[4])


@pytest.mark.parametrize(("workload", "leaks"), [("odd:Leaky", True), ("quadratic", False)])
def test_a_soak_finds_a_leak_if_there_is_one(workload, leaks):
    document = probe_memory(
        "quadratic",
        **within(50 * MIB),
        workload=workload,
        batches=[4],
        cap=8,
        soak_steps=30,
    )
    choices = document["recommendations"]
    assert [choice["name"] for choice in choices] == ["maximum", "balanced", "conservative"]
    assert all(choice["soak"]["leak"]["is_found"] is leaks for choice in choices)
    leak = document["soak"]["leak"]
    assert leak["is_found"] is leaks and leak["steps"] == 30
    assert leak["bytes_per_step"] == pytest.approx(4096 if leaks else 0)
    assert ("LEAK" in markdown_of(document)) is leaks


def test_noise_is_not_a_leak_and_a_slope_within_it_is():
    rests = tuple(1000 + (7 * step) % 5 for step in range(40))
    assert not find_leak(rests)["is_found"]
    leak = find_leak(tuple(rest + 3 * step for step, rest in enumerate(rests)))
    assert leak["is_found"] and leak["interval"][0] < 3 < leak["interval"][1]


def fake_probe(rates=None, fits=lambda batch, size, steps: "OK", limit=100, **fields):
    """Return a probe of made-up points, and the list of what it measures."""
    measured = []

    def fake(batch, size, steps):
        measured.append((batch, size, steps))
        rate = rates[size].pop(0) if rates else 1.0
        point = Measurement(batch, size, fits(batch, size, steps), peak_bytes=size)
        return replace(point, tokens_per_second=rate, rests=(0,) * steps, **fields)

    return Probe(fake, limit), measured


def test_a_collapse_of_throughput_counts_if_it_is_measured_twice():
    probe, _ = fake_probe({4: [100.0, 90.0], 8: [50.0, 150.0, 140.0], 16: [50.0, 40.0]})
    assert [probe.measure(n, n).status for n in (4, 8, 16)] == ["OK", "OK", "COLLAPSED"]


def test_allocator_retries_are_a_collapse():
    probe, _ = fake_probe(allocator_retries=2)
    assert probe.measure(4, 4).status == "COLLAPSED"


def test_a_slow_size_below_one_that_fits_is_not_a_collapse():
    probe, _ = fake_probe({4: [100.0], 8: [100.0], 6: [10.0]})
    assert [probe.measure(n, n).status for n in (4, 8, 6)] == ["OK", "OK", "OK"]


def test_a_much_smaller_size_for_accumulation_is_found_in_few_points():
    def fits(batch, size, steps):
        return "OK" if batch <= 600 else "OUT_OF_MEMORY"

    probe, measured = fake_probe(fits=fits)
    found = probe.accumulate(6000, 1, lambda size: 2)
    assert found.batch_size <= 600 and len(measured) <= 15


def test_a_size_that_does_not_complete_its_soak_is_not_chosen():
    def fits(batch, size, steps):
        return "OUT_OF_MEMORY" if steps > STEPS and size > 12 else "OK"

    choice = fake_probe(fits=fits)[0].choose("maximum", 20, 4, 30)
    assert choice["microbatch_size"] == 12 and choice["soak"]["point"]["status"] == "OK"
    assert fake_probe(fits=fits)[0].choose("maximum", 20, 4, 0)["microbatch_size"] == 20


def test_a_choice_holds_at_most_its_share_or_is_left_out():
    probe, _ = fake_probe(context_bytes=50)
    assert probe.choose("balanced", 48, 8, 0)["microbatch_size"] == 40
    assert fake_probe(context_bytes=80)[0].choose("conservative", 48, 8, 0) is None


@pytest.mark.parametrize(("asked", "parts"), [(None, 4), (20, 3), (1000, 125), (4, 2)])
def test_accumulation_is_measured_with_as_many_microbatches_as_are_sampled_at_once(asked, parts):
    trial = config("grpo-words", 8, {"generation_batch_size": asked}).sized(64, 8)
    assert trial.telling_parts(8) == parts
    assert trial.sampled_at_once(8) <= parts * 8


def test_grpo_is_probed_in_whole_groups_and_its_recommendations_are_soaked():
    document = probe_memory("grpo-words", **within(24 * MIB), cap=12, soak_steps=6, **GRPO)
    points, choices = document["points"], document["recommendations"]
    assert {point["batch_size"] % 4 for point in points} == {0} and document["group_size"] == 4
    assert all(set(p["phases"]) == {"generate", "log_probs", "update"} for p in points if p["loss"])
    assert choices and all(choice["soak"]["point"]["status"] == "OK" for choice in choices)
    for choice in choices:
        assert 24 * MIB - choice["headroom_bytes"] <= choice["share"] * 24 * MIB
    parts = document["accumulated"]["batch_size"] // document["accumulated"]["microbatch_size"]
    assert parts == 4 and "completions/s" in markdown_of(document)


def test_several_updates_on_one_sample_are_one_step():
    grpo = {**GRPO["grpo"], "num_iterations": 2}
    found = measure(config("grpo-words", 4, model="quick", grpo=grpo), 1 << 30, 3, lambda: None)
    assert found.status == "OK", found.message
    assert found.optimizer_steps == 6 and found.loss is not None


def test_a_largest_size_that_is_not_a_multiple_is_refused():
    with pytest.raises(SweepError, match=r"multiple of 3, got 10\. Use 9 or 12"):
        probe_memory("quick", **within(24 * MIB), batches=[8], multiple=3, cap=10)


def test_only_multiples_are_measured_if_asked_for():
    document = probe_memory("quick", **within(24 * MIB), batches=[8], multiple=3, cap=30)
    sizes = {point["microbatch_size"] for point in document["points"]}
    largest = document["largest_microbatch_size"]
    assert {size % 3 for size in sizes} == {0} and {largest, largest + 3} <= sizes
