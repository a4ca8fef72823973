"""Probes on a CPU within an enforced limit, compared with measuring every size."""

from dataclasses import replace
from pathlib import Path

import pytest

from sweep.errors import SweepError
from sweep.memory.probe import STEPS, Probe, find_leak, measure
from sweep.memory.search import Measurement
from sweep.orchestration.memory import forecast_memory, probe_memory
from sweep.report.report import markdown_of
from tests.workloads.trials import trial_config

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


def searched(document):
    points = document["points"]
    return {p["microbatch_size"]: p for p in points if p["batch_size"] == p["microbatch_size"]}


def test_the_maximum_is_proved_and_equals_that_of_measuring_every_size(timeless):
    limit = 24 * MIB
    document = probe_memory("quick", **within(limit), batches=[8])
    largest, points = document["largest_microbatch_size"], searched(document)
    assert points[largest]["status"] == "OK" and points[largest]["peak_bytes"] <= limit
    assert points[largest + 1]["status"] == "OUT_OF_MEMORY"
    assert points[largest]["optimizer_steps"] == 3 and points[largest]["loss"] > 0
    assert document["search_points"] <= 5 and document["line"]["r_squared"] > 0.999
    whole = trial_config("quick", 64, 64, {"evaluation_batch_size": 64, "loss_chunk_rows": 1024})
    for size in range(1, largest + 4):
        status = measure(whole.on_one_device(size, size), limit, 3, None).status
        assert (status == "OK") == (size <= largest)
    safe, conservative = document["safe_microbatch_size"], document["recommendations"][2]
    assert points[safe]["peak_bytes"] <= 0.9 * limit
    assert conservative["name"] == "conservative" and conservative["microbatch_size"] < safe
    assert conservative["headroom_bytes"] >= 0.3 * limit
    accumulated = document["accumulated"]
    assert accumulated["status"] == "OK" and accumulated["batch_size"] == 2 * safe
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
    largest, points = document["largest_microbatch_size"], searched(document)
    assert points[largest]["status"] == "OK" and points[largest + 1]["status"] == "OUT_OF_MEMORY"
    assert "bisected" in document["verdict"]


@pytest.mark.parametrize(
    ("experiment", "settings", "unit"),
    [("quick", {"batches": [8]}, 1), ("grpo-words", {**GRPO, "soak": 0}, 4)],
)
def test_not_even_one_sequence_or_group_fits(experiment, settings, unit):
    document = probe_memory(experiment, **within(MIB), **settings)
    assert {point["status"] for point in document["points"]} == {"OUT_OF_MEMORY"}
    settings.pop("soak", None)
    for page in (document, forecast_memory(experiment, **within(MIB), **settings)):
        assert page["largest_microbatch_size"] == 0
        assert f"A microbatch of {unit} does not fit." in markdown_of(page)


def test_a_point_that_is_killed_is_an_error_and_the_search_goes_on(timeless):
    settings = {"workload": "odd:DiesAboveFour", "batches": [4], **within(100 * MIB)}
    document = probe_memory("quadratic", **settings)
    statuses = {size: point["status"] for size, point in searched(document).items()}
    assert (statuses[4], statuses[5], statuses[8]) == ("OK", "ERROR", "ERROR")
    assert document["largest_microbatch_size"] == 4


def test_steps_that_fail_at_every_size_are_refused():
    with pytest.raises(SweepError, match=r"ERROR .*sizes do not match"):
        probe_memory("quadratic", **within(100 * MIB), workload="odd:Broken", batches=[4])


@pytest.mark.parametrize(("workload", "leaks"), [("odd:Leaky", True), ("quadratic", False)])
def test_a_soak_finds_a_leak_if_there_is_one(workload, leaks):
    settings = {"workload": workload, "batches": [4], "largest": 8, "soak": 30}
    document = probe_memory("quadratic", **within(50 * MIB), **settings)
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
    constant = find_leak((1000,) * 20)
    assert not constant["is_found"] and constant["interval"] == (0.0, 0.0)


def fake_probe(rates=None, fits=lambda batch, size, steps: True, limit=100, **fields):
    measured = []

    def fake(batch, size, steps):
        measured.append((batch, size, steps))
        rate = rates[size].pop(0) if rates else 1.0
        status = "OK" if fits(batch, size, steps) else "OUT_OF_MEMORY"
        point = Measurement(batch, size, status, peak_bytes=size)
        return replace(point, tokens_per_second=rate, rests=(0,) * steps, **fields)

    return Probe(fake, limit, lambda point: None), measured


def test_a_collapse_of_throughput_counts_if_it_is_measured_twice():
    rates = {4: [100], 8: [50, 150], 16: [80, 70]}
    probe, _ = fake_probe(rates)
    statuses = [probe.measure(size, size).status for size in rates]
    assert statuses == ["OK", "OK", "COLLAPSED"]
    retrying, _ = fake_probe(allocator_retries=2)
    assert retrying.measure(4, 4).status == "COLLAPSED"


def test_a_much_smaller_size_for_accumulation_is_found_in_few_points():
    probe, measured = fake_probe(fits=lambda batch, size, steps: batch <= 600)
    point = probe.accumulate(6000, 1, lambda size: 2)
    assert point.batch_size <= 600 and len(measured) <= 15


def test_a_size_that_does_not_complete_its_soak_is_not_chosen():
    def fits(batch, size, steps):
        return steps <= STEPS or size <= 12

    choice = fake_probe(fits=fits)[0].choose("maximum", 20, 4, 30)
    assert choice["microbatch_size"] == 12 and choice["soak"]["point"]["status"] == "OK"
    assert fake_probe(fits=fits)[0].choose("maximum", 20, 4, 0)["microbatch_size"] == 20


def test_a_choice_holds_at_most_its_share_or_is_left_out():
    probe, _ = fake_probe(context_bytes=50)
    assert probe.choose("balanced", 48, 8, 0)["microbatch_size"] == 40
    assert fake_probe(context_bytes=80)[0].choose("conservative", 48, 8, 0) is None


@pytest.mark.parametrize(("asked", "parts"), [(None, 4), (20, 3), (1000, 125), (4, 2)])
def test_accumulation_is_measured_with_as_many_microbatches_as_are_sampled_at_once(asked, parts):
    execution = {"generation_batch_size": asked}
    trial = trial_config("grpo-words", 8, 8, execution, data="synthetic").on_one_device(64, 8)
    assert trial.parts_to_peak(8) == parts
    assert trial.completions_at_once(8) <= parts * 8


def test_grpo_is_probed_in_whole_groups_and_its_recommendations_are_soaked():
    document = probe_memory("grpo-words", **within(24 * MIB), largest=12, soak=6, **GRPO)
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
    trial = trial_config("grpo-words", 4, 4, **{**GRPO, "batches": [4], "grpo": grpo})
    point = measure(trial, 1 << 30, 3, None)
    assert point.status == "OK", point.message
    assert point.optimizer_steps == 6 and point.loss is not None


def test_only_multiples_are_measured_if_asked_for():
    settings = {**within(24 * MIB), "batches": [8], "multiple": 3}
    with pytest.raises(SweepError, match=r"multiple of 3, got 10\. Use 9 or 12"):
        probe_memory("quick", **settings, largest=10)
    document = probe_memory("quick", **settings, largest=30)
    largest = document["largest_microbatch_size"]
    assert {size % 3 for size in searched(document)} == {0}
    assert {largest, largest + 3} <= searched(document).keys()
