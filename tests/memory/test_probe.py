"""Probes on a CPU within an enforced limit, compared with measuring every size."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.api import plan_sweep
from sweep.errors import SweepError
from sweep.memory.probe import STEPS, Probe, find_leak, measure
from sweep.memory.search import DOES_NOT_FIT, LINEAR, UNKNOWN, Measurement, SearchResult
from sweep.orchestration.memory import forecast_memory, probe_memory
from sweep.report.report import markdown_of
from tests.workloads.trials import trial_config

MIB = 1 << 20
GRPO = {
    "model": "quick",
    "data": "synthetic",
    "batches": [4],
    "precision": "fp32",
    "workload": {"kind": "grpo", "group_size": 4, "prompt_tokens": 20, "new_tokens": 4},
}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def within(limit):
    return {"device": "cpu", "device_memory": limit}


def searched(document):
    points = document["points"]
    return {p["microbatch_size"]: p for p in points if p["batch_size"] == p["microbatch_size"]}


def test_the_maximum_is_proved_and_equals_that_of_measuring_every_size():
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
    usable = forecast["usable_bytes"]  # it leaves 2 % for the error of a forecast
    assert limit / 1.03 < usable < limit
    fitting = [size for size in points if size < largest and points[size]["peak_bytes"] <= usable]
    assert max(fitting) <= forecast["largest_microbatch_size"] <= largest


def test_a_given_microbatch_is_measured_at_every_batch_size_without_a_search():
    document = probe_memory("quick", **within(24 * MIB), batches=[4, 8], microbatch=2)
    sizes = [(point["batch_size"], point["microbatch_size"]) for point in document["points"]]
    assert sizes == [(4, 2), (8, 2)] and document["largest_microbatch_size"] is None
    assert {point["status"] for point in document["points"]} == {"OK"}
    assert document["recommendations"] == []


def test_memory_that_is_not_linear_is_bisected():
    settings = {"workload": "odd:Pairs", "batches": [4], **within(40 * MIB)}
    document = probe_memory("quadratic", **settings)
    largest, points = document["largest_microbatch_size"], searched(document)
    assert points[largest]["status"] == "OK" and points[largest + 1]["status"] == "OUT_OF_MEMORY"
    assert "bisected" in document["verdict"]


@pytest.mark.parametrize(
    ("experiment", "settings", "unit"),
    [
        ("quick", {"batches": [8]}, 1),
        pytest.param("grpo-words", {**GRPO, "soak": 0}, 4, marks=pytest.mark.slow),
    ],
)
def test_not_even_one_sequence_or_group_fits(experiment, settings, unit):
    document = probe_memory(experiment, **within(MIB), **settings)
    assert {point["status"] for point in document["points"]} == {"OUT_OF_MEMORY"}
    settings.pop("soak", None)
    for page in (document, forecast_memory(experiment, **within(MIB), **settings)):
        assert page["largest_microbatch_size"] == 0
        assert f"A microbatch of {unit} does not fit." in markdown_of(page)


def test_a_point_that_is_killed_is_an_error_and_the_search_goes_on():
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

    return Probe(fake, limit), measured


def test_low_speed_is_noted_and_is_a_collapse_only_on_a_full_device():
    rates = {4: [100], 8: [50], 16: [80]}
    probe, measured = fake_probe(rates)
    points = [probe.measure(size, size) for size in rates]
    assert [point.status for point in points] == ["OK", "OK", "OK"] and len(measured) == 3
    assert [point.message[:4] for point in points] == ["", "slow", ""]

    full = {"device_bytes": 99 * MIB, "free_bytes": MIB}
    probe, measured = fake_probe({4: [100], 8: [50, 150], 16: [80, 70]}, **full)
    statuses = [probe.measure(size, size).status for size in (4, 8, 16)]
    assert statuses == ["OK", "OK", "COLLAPSED"]  # it must be measured twice
    spacious, _ = fake_probe({4: [100], 8: [50]}, device_bytes=50 * MIB, free_bytes=50 * MIB)
    assert [spacious.measure(size, size).status for size in (4, 8)] == ["OK", "OK"]


def test_an_allocator_that_retries_has_collapsed():
    retrying, _ = fake_probe(allocator_retries=2)
    assert retrying.measure(4, 4).status == "COLLAPSED"


def simulated_probe(peaks, limit, rates, failures, cap):
    """Search with a `measure` that enforces the limit and fails at some sizes."""
    speeds = itertools.cycle(rates)

    def fake(batch, size, steps):
        if size in failures:
            return Measurement(batch, size, failures[size], "for a reason other than memory")
        if peaks(size) > limit:
            return Measurement(batch, size, "OUT_OF_MEMORY")
        point = Measurement(batch, size, "OK", peak_bytes=peaks(size))
        return replace(point, tokens_per_second=next(speeds), rests=(0,) * steps)

    probe = Probe(fake, limit)
    probe.find_largest(1, cap, 0, lambda size: 2)
    return probe


MEMORY = st.one_of(
    st.tuples(st.integers(0, 500), st.integers(1, 60)).map(lambda p: lambda n: p[0] + p[1] * n),
    st.tuples(st.integers(0, 500), st.integers(1, 9)).map(lambda p: lambda n: p[0] + p[1] * n * n),
    st.tuples(st.integers(1, 60), st.integers(1, 80)).map(  # a jump, as of an allocator's segment
        lambda p: lambda n: p[0] * n + 300 * (n > p[1])
    ),
)
SPEEDS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)


@given(
    peaks=MEMORY,
    limit=st.integers(1, 5000),
    rates=SPEEDS,
    failures=st.dictionaries(st.integers(1, 90), st.sampled_from(UNKNOWN), max_size=4),
    cap=st.one_of(st.none(), st.integers(1, 60)),
)
def test_a_verdict_agrees_with_the_points_of_its_table(peaks, limit, rates, failures, cap):
    probe = simulated_probe(peaks, limit, rates, failures, cap)
    alone = {p.microbatch_size: p for p in probe.points if p.batch_size == p.microbatch_size}
    fitting = [size for size, point in alone.items() if point.status == "OK"]
    largest = probe.search.largest
    assert largest == max(fitting, default=0)
    if not largest:
        if alone[1].status == "OUT_OF_MEMORY":
            assert probe.verdict(1) == "a microbatch of 1 does not fit"
        else:
            with pytest.raises(SweepError, match=r"must run to be measured"):
                probe.verdict(1)
        return

    verdict = probe.verdict(1)
    assert verdict.startswith(f"{largest} fits")
    larger = alone.get(largest + 1)
    assert (larger is None) == probe.search.is_capped
    status = larger.status if larger else None
    assert ("both measured" in verdict) == (status in DOES_NOT_FIT)
    assert ("is not known" in verdict) == (status in UNKNOWN)
    if "not linear" in verdict:
        assert probe.search.line.r_squared < LINEAR
    for size, point in alone.items():
        assert size >= largest or point.status == "OK" or f"{size} failed" in verdict
    assert all(choice["microbatch_size"] <= largest for choice in probe.choices)


@given(peaks=MEMORY, limit=st.integers(1, 5000), rates=st.tuples(SPEEDS, SPEEDS))
def test_speed_changes_no_size_on_a_cpu(peaks, limit, rates):
    first, second = (simulated_probe(peaks, limit, speeds, {}, None) for speeds in rates)
    assert first.search == second.search
    sizes = [[choice["microbatch_size"] for choice in p.choices] for p in (first, second)]
    assert sizes[0] == sizes[1]
    proved = max((size for size in range(1, 5001) if peaks(size) <= limit), default=0)
    assert first.search.largest == proved


def test_a_peak_above_the_limit_does_not_fit_although_the_step_ran():
    probe, _ = fake_probe(limit=6)
    assert [probe.measure(size, size).status for size in (6, 7)] == ["OK", "SPILLED"]


@pytest.mark.parametrize("searching", [{"largest": 8}, {"multiple": 2}, {"soak": 30}])
def test_settings_of_the_search_are_refused_with_a_microbatch(searching):
    with pytest.raises(SweepError, match="belong to the search"):
        probe_memory("quick", **within(24 * MIB), microbatch=2, **searching)


def test_a_soak_is_as_long_as_asked_for_or_refused():
    with pytest.raises(SweepError, match="at least 5 steps, got 2"):
        probe_memory("quick", **within(24 * MIB), soak=2)


@pytest.mark.parametrize(
    ("rates", "unit", "fast"),
    [
        ({16: 100, 8: 98, 4: 96, 2: 50}, 1, 4),
        ({16: 60, 8: 100, 4: 97, 2: 80}, 1, 4),  # the largest is not the fastest
        ({16: 100, 8: 90}, 1, 16),
        ({12: 100, 4: 99}, 4, 4),
    ],
)
def test_the_smallest_fast_size_is_found_by_halving(rates, unit, fast):
    probe, measured = fake_probe({size: [rate] for size, rate in rates.items()})
    largest = max(rates)
    probe.search = SearchResult({largest: largest}, largest)
    probe.measure(largest, largest)
    probe.find_fast(unit)
    assert probe.fast.microbatch_size == fast
    assert [size for _, size, _ in measured] == list(rates)


def test_a_probe_recommends_the_fast_size_or_the_largest_that_accumulates():
    document = probe_memory("quick", **within(24 * MIB), batches=[9, 20])
    accumulated, fast = document["accumulated"], document["fast"]
    recommended = document["recommended_microbatch_size"]
    assert recommended <= min(accumulated["microbatch_size"], fast["microbatch_size"])
    plan_sweep("quick", batches=(9, 20), budget="64k", microbatch=recommended)  # is accepted
    sizes = [point["batch_size"] for point in document["points"]]
    assert sizes == sorted(sizes)
    page = markdown_of(document)
    assert f"`--microbatch {recommended}`" in page and "% of the limit)" in page


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
    grpo = {**GRPO["workload"], "num_iterations": 2}
    trial = trial_config("grpo-words", 4, 4, **{**GRPO, "batches": [4], "workload": grpo})
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
