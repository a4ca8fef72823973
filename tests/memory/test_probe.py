"""Probing on a CPU within a real limit, held against brute force."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution, TokenizerSettings
from sweep.data.sources import identify_data
from sweep.data.synthetic import synthetic_identity
from sweep.data.tokens import prepare_data
from sweep.errors import SweepError
from sweep.memory.measure import measure
from sweep.memory.points import Measurement
from sweep.memory.probe import STEPS, Probe, find_leak
from sweep.orchestration.execution import Logistics
from sweep.orchestration.forecast import forecast_memory
from sweep.orchestration.memory import probe_memory
from sweep.plan.plan import build_plan
from sweep.report.memory import markdown_of

MIB = 1 << 20
COLOURS = ("red", "green", "brown", "white")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def timeless(monkeypatch):
    """Machines are shared: what did not fit is told by memory alone."""
    monkeypatch.setattr("sweep.memory.probe.COLLAPSE", 0.0)


@pytest.fixture
def stories(tmp_path):
    """The path of a text that nothing has prepared."""
    path = tmp_path / f"{tmp_path.name}.txt"
    texts = [f"The {one} cat of {path.stem} saw a {other} dog." for one in COLOURS
             for other in COLOURS]  # fmt: skip
    path.write_text("\n<|endoftext|>\n".join(texts * 20))
    return str(path)


def within(limit):
    return Logistics(device="cpu", device_memory=limit)


def brute_force(limit, cap, **settings):
    """Return the largest size that fits, by measuring every one of them."""
    from trial_configs import trial_config

    fits = [
        size
        for size in range(1, cap + 1)
        if measure(trial_config(size, **settings), limit, 3, lambda: None).status == "OK"
    ]
    assert fits == list(range(1, len(fits) + 1))
    return len(fits)


def test_the_maximum_is_proved_and_is_that_of_brute_force(timeless):
    limit = 24 * MIB
    document = probe_memory("quick", logistics=within(limit), batches=[8])
    largest = document["largest_microbatch_size"]
    points = {
        point["microbatch_size"]: point
        for point in document["points"]
        if point["batch_size"] == point["microbatch_size"]
    }
    assert points[largest]["status"] == "OK" and points[largest]["peak_bytes"] <= limit
    assert points[largest + 1]["status"] == "OUT_OF_MEMORY"
    assert points[largest]["optimizer_steps"] == 3 and points[largest]["loss"] > 0
    assert document["search_points"] <= 5 and "both measured" in document["verdict"]
    assert document["line"]["r_squared"] > 0.999
    assert largest == brute_force(limit, largest + 3)
    safe = document["safe_microbatch_size"]
    assert points[safe]["peak_bytes"] <= 0.9 * limit
    least = document["recommendations"][2]
    assert least["name"] == "conservative" and least["status"] == "OK"
    assert least["headroom_bytes"] >= 0.3 * limit and least["microbatch_size"] < safe
    assert document["accumulated"]["status"] == "OK"
    assert document["accumulated"]["batch_size"] == 2 * safe
    forecast = forecast_memory("quick", logistics=within(limit), batches=[8])
    assert forecast["largest_microbatch_size"] == largest


def test_memory_that_is_no_line_is_bisected(timeless):
    logistics = within(40 * MIB)
    document = probe_memory("quadratic", logistics=logistics, workload="odd:Pairs", batches=[4])
    points = {p["microbatch_size"]: p["status"] for p in document["points"]
              if p["batch_size"] == p["microbatch_size"]}  # fmt: skip
    largest = document["largest_microbatch_size"]
    assert points[largest] == "OK" and points[largest + 1] == "OUT_OF_MEMORY"
    assert "bisection" in document["verdict"]


def test_not_even_one_sequence_fits():
    document = probe_memory("quick", logistics=within(MIB), batches=[8])
    assert document["largest_microbatch_size"] == 0 and "one sequence" in document["verdict"]
    assert {point["status"] for point in document["points"]} == {"OUT_OF_MEMORY"}


def test_of_grpo_not_even_one_group_fits(stories):
    fields = {"model": "quick", "data": stories, "batches": [4], "precision": "fp32"}
    fields["grpo"] = {"group_size": 4, "prompt_tokens": 20, "new_tokens": 4}
    found = probe_memory("grpo-words", logistics=within(MIB), soak_steps=0, **fields)
    assert found["verdict"] == "not even one group of 4, in one microbatch, fits"
    forecast = forecast_memory("grpo-words", logistics=within(MIB), **fields)
    assert forecast["largest_microbatch_size"] == 0
    for document in (found, forecast):
        said = "not even one group of 4, in one microbatch, fits; equal parts of one were not tried"
        assert f"Largest microbatch size: {said}." in markdown_of(document)
    assert f"Nothing can be recommended: {said}." in markdown_of(found)


def test_a_point_that_dies_is_named_and_stops_nothing(timeless):
    document = probe_memory(
        "quadratic", logistics=within(100 * MIB), workload="odd:DiesAboveFour", batches=[4]
    )
    statuses = {point["microbatch_size"]: point["status"] for point in document["points"]}
    assert statuses[4] == "OK" and statuses[8] == "ERROR"
    assert document["largest_microbatch_size"] == 4
    assert document["verdict"].startswith("4 fits and 5 does not (ERROR), both measured")


def test_steps_that_always_fail_are_no_answer(tmp_path):
    """Nothing is said of memory where a step of any size dies of something else."""
    with pytest.raises(SweepError, match=r"ended ERROR .*sizes do not match"):
        probe_memory(
            "quadratic", logistics=within(100 * MIB), workload="odd:Broken", batches=[4]
        )  # fmt: skip


@pytest.mark.parametrize(("workload", "leaks"), [("odd:Leaky", True), ("quadratic", False)])
def test_a_soak_finds_a_leak_that_is_there_and_none_that_is_not(workload, leaks):
    document = probe_memory(
        "quadratic", logistics=within(50 * MIB), workload=workload, batches=[4],
        cap=8, soak_steps=30,
    )  # fmt: skip
    names = [one["name"] for one in document["recommendations"]]
    assert names == ["maximum", "balanced", "conservative"]
    assert all(one["soak"]["leak"]["is_found"] is leaks for one in document["recommendations"])
    leak = document["soak"]["leak"]
    assert leak["is_found"] is leaks and leak["steps"] == 30
    assert leak["bytes_per_step"] == pytest.approx(4096 if leaks else 0)


def test_noise_is_no_leak():
    rests = tuple(1000 + (7 * step) % 5 for step in range(40))
    assert not find_leak(rests).is_found
    assert find_leak(tuple(rest + 3 * step for step, rest in enumerate(rests))).is_found


def test_a_collapse_of_throughput_does_not_fit_when_it_is_seen_twice(monkeypatch):
    rates = {4: [100.0, 90.0], 8: [50.0, 150.0, 140.0], 16: [50.0, 40.0]}

    def fake(self, batch, size, steps):
        return Measurement(batch, size, "OK", peak_bytes=size, tokens_per_second=rates[size].pop(0))

    monkeypatch.setattr(Probe, "_measure", fake)
    probe = Probe(None, 100, None)
    assert [probe.measure(n, n).status for n in (4, 8, 16)] == ["OK", "OK", "COLLAPSED"]


def test_allocator_retries_do_not_fit(monkeypatch):
    point = Measurement(4, 4, "OK", peak_bytes=1, tokens_per_second=1.0)
    monkeypatch.setattr(Probe, "_measure", lambda *_: replace(point, allocator_retries=2))
    assert Probe(None, 100, None).measure(4, 4).status == "COLLAPSED"


def test_one_jump_is_no_leak():
    assert not find_leak((0,) * 20 + (1 << 20,) * 12).is_found


def test_a_size_below_one_that_fitted_does_not_collapse(monkeypatch):
    rates = {4: 100.0, 8: 100.0, 6: 10.0}

    def fake(self, batch, size, steps):
        return Measurement(batch, size, "OK", peak_bytes=size, tokens_per_second=rates[size])

    monkeypatch.setattr(Probe, "_measure", fake)
    probe = Probe(None, 100, None)
    assert [probe.measure(n, n).status for n in (4, 8, 6)] == ["OK", "OK", "OK"]


def test_a_smaller_choice_is_found_in_a_few_points_however_far_away_it_is(monkeypatch):
    measured = []

    def fake(self, batch, size, steps):
        measured.append(size)
        status = "OK" if batch <= 600 else "OUT_OF_MEMORY"
        return Measurement(batch, size, status, peak_bytes=size, tokens_per_second=1.0)

    monkeypatch.setattr(Probe, "_measure", fake)
    config = SimpleNamespace(telling_parts=lambda size: 2)
    found = Probe(config, 100, None).step_back(6000, 1, is_accumulated=True)
    assert found.batch_size <= 600 and len(measured) <= 15


def test_a_size_that_a_soak_does_not_get_through_is_not_chosen(monkeypatch):
    def fake(self, batch, size, steps):
        is_soak = steps > STEPS
        retries = 1 if is_soak and size > 12 else 0
        status = "OUT_OF_MEMORY" if is_soak and size > 16 else "OK"
        rests = (0,) * steps
        return Measurement(batch, size, status, peak_bytes=size, allocator_retries=retries,
                           tokens_per_second=1.0, rests=rests)  # fmt: skip

    monkeypatch.setattr(Probe, "_measure", fake)
    found = Probe(None, 100, None).choose("maximum", 1.0, 20, 4, 30)
    assert found.point.microbatch_size == 12 and found.soak.point.status == "OK"
    assert Probe(None, 100, None).choose("maximum", 1.0, 20, 4, 0).point.microbatch_size == 20


def test_a_choice_holds_no_more_than_its_share_and_is_left_out_where_nothing_does(monkeypatch):
    def fake(self, batch, size, steps):
        return Measurement(batch, size, "OK", peak_bytes=50 + size, tokens_per_second=1.0)

    monkeypatch.setattr(Probe, "_measure", fake)
    assert Probe(None, 100, None).choose("balanced", 0.9, 48, 8, 0).point.microbatch_size == 40
    assert Probe(None, 100, None).choose("conservative", 0.5, 48, 8, 0) is None


@pytest.mark.parametrize(("asked", "parts"), [(None, 4), (20, 3), (1000, 125), (4, 2)])
def test_accumulation_is_measured_with_all_the_sampling_that_it_does(asked, parts):
    experiment = load_experiment(
        "grpo-words", {"data": "synthetic", "batches": [64], "precision": "fp32"}
    )
    execution = Execution(device="cpu", threads=1, generation_batch_size=asked)
    plan = build_plan(experiment, execution, data=synthetic_identity(), microbatch=None)
    config = plan.trial_config(plan.trials[0], "probe")
    assert config.telling_parts(8) == parts
    trained = config.sized(64, 8)
    assert trained.sampled_at_once(8) <= parts * 8


def test_grpo_is_probed_in_whole_groups_and_what_is_recommended_was_soaked(stories):
    document = probe_memory(
        "grpo-words", logistics=within(24 * MIB), model="quick", data=stories, batches=[4],
        precision="fp32", cap=12, soak_steps=6,
        grpo={"group_size": 4, "prompt_tokens": 20, "new_tokens": 4},
    )  # fmt: skip
    points = document["points"]
    assert {point["batch_size"] % 4 for point in points} == {0} and document["group_size"] == 4
    assert all(set(p["phases"]) == {"generate", "log_probs", "update"} for p in points if p["loss"])
    for one in document["recommendations"]:
        assert 24 * MIB - one["headroom_bytes"] <= one["share"] * 24 * MIB
    assert document["recommendations"]
    assert all(one["soak"]["point"]["status"] == "OK" for one in document["recommendations"])
    parts = document["accumulated"]["batch_size"] // document["accumulated"]["microbatch_size"]
    assert parts == 4
    text = markdown_of(document)
    assert "completions/s" in text and "Soak of 6 steps: no leak was found" in text


def test_several_updates_on_one_sample_are_measured_as_one_step():
    experiment = load_experiment(
        "grpo-words",
        {"data": "synthetic", "batches": [4], "precision": "fp32", "model": "quick",
         "grpo": {"group_size": 4, "prompt_tokens": 20, "new_tokens": 4, "num_iterations": 2}},
    )  # fmt: skip
    execution = Execution(device="cpu", threads=1)
    plan = build_plan(experiment, execution, data=synthetic_identity())
    found = measure(plan.trial_config(plan.trials[0], "probe"), 1 << 30, 3, lambda: None)
    assert found.status == "OK", found.message
    assert found.optimizer_steps == 6 and found.loss is not None


def test_scoring_is_measured_once_the_text_is_prepared(stories):
    def probed(prompt_tokens):
        return probe_memory(
            "grpo-words", logistics=within(24 * MIB), model="quick", data=stories, batches=[4],
            precision="fp32", cap=4, soak_steps=0, tokenizer="bytes",
            grpo={"group_size": 4, "prompt_tokens": prompt_tokens, "new_tokens": 4},
        )  # fmt: skip

    without = probed(40)
    assert "not prepared" in without["unscored_because"]
    assert "leave scoring out: the text" in markdown_of(without)
    prepare_data(identify_data(stories), stories, TokenizerSettings(kind="bytes", vocabulary=512))
    scored = probed(40)
    assert scored["unscored_because"] is None and "hold the scoring" in markdown_of(scored)
    assert all(set(p["phases"]) == {"generate", "log_probs", "score", "update"}
               for p in scored["points"] if p["status"] == "OK")  # fmt: skip
    peaks = [[p["peak_bytes"] for p in one["points"]] for one in (without, scored)]
    assert peaks[1] == pytest.approx(peaks[0], rel=1e-3)
    with pytest.raises(SweepError, match="prompt_tokens must hold the longest prompt, got 8"):
        probed(8)


def test_a_largest_size_that_is_not_legal_is_refused():
    with pytest.raises(SweepError, match=r"multiple of 3, got 10\. Use 9 or 12"):
        probe_memory("quick", logistics=within(24 * MIB), batches=[8], multiple=3, cap=10)


def test_only_multiples_are_measured_where_only_they_are_legal():
    document = probe_memory("quick", logistics=within(24 * MIB), batches=[8], multiple=3, cap=30)
    sizes = {point["microbatch_size"] for point in document["points"]}
    largest = document["largest_microbatch_size"]
    assert {size % 3 for size in sizes} == {0} and largest + 3 in sizes
    assert f"{largest} fits and {largest + 3} does not" in document["verdict"]
