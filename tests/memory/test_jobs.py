"""The plan bounds the microbatch by a forecast of its largest step."""

from pathlib import Path

import pytest

from sweep.orchestration.estimates import forecast_rows
from sweep.orchestration.memory import forecast_memory
from sweep.orchestration.planning import make_plan, save_plan
from sweep.orchestration.request import read_request
from sweep.plan.plan import Plan
from sweep.trial.folder import SweepFolder

MIB = 1 << 20
BATCH = 64


def planned(path: Path, memory: int, **settings: object) -> Plan:
    fields = {"batches": [BATCH], "budget": 64 * BATCH * 10, "device": "cpu"}
    settings = {**fields, "device_memory": memory, **settings}
    return make_plan(read_request("quick", settings, path)).plan


def forecast_of(plan: Plan) -> int:
    config, row = plan.trial_config(plan.trials[0]), plan.trials[0]
    sized = config.on_one_device(row.batch_size // row.devices, row.microbatch_size)
    [forecast] = forecast_rows([sized])
    return forecast.needed_bytes


@pytest.fixture(scope="module")
def whole_bytes(tmp_path_factory):
    return forecast_of(planned(tmp_path_factory.mktemp("x"), 1 << 40, microbatch=BATCH))


def test_a_plan_takes_the_largest_microbatch_that_fits_by_forecast(tmp_path, whole_bytes):
    memory = whole_bytes // 3
    plan = planned(tmp_path, memory)
    [row] = plan.trials
    assert 1 < row.microbatch_size < BATCH and forecast_of(plan) <= memory
    larger = row.model_copy(update={"microbatch_size": 2 * row.microbatch_size})
    larger_plan = plan.model_copy(update={"trials": (larger,)})
    assert forecast_of(larger_plan) > memory / 1.02  # a limit on a CPU leaves that much free
    save_plan(plan, SweepFolder(tmp_path))
    assert planned(tmp_path, memory).execution == plan.execution


def test_a_batch_that_fits_is_one_microbatch(tmp_path, whole_bytes):
    plan = planned(tmp_path, 2 * whole_bytes)
    assert plan.trials[0].microbatch_size == BATCH and plan.execution.microbatch_bound is None


def test_memory_does_not_change_the_microbatch_that_the_user_gave(tmp_path, whole_bytes):
    plan = planned(tmp_path, whole_bytes // 8, microbatch=BATCH // 2)
    assert plan.trials[0].microbatch_size == BATCH // 2


BATCHES = [4, 6, 8, 12, 16, 24, 32, 48, 64]


@pytest.mark.parametrize(
    ("experiment", "device", "limits"),
    [
        ("quadratic", "cpu", range(100_000, 800_000, 210_000)),
        # Further cases.
        pytest.param("quick", "cuda", [20 * MIB], marks=pytest.mark.slow),
        pytest.param("quadratic", "cpu", range(100_000, 800_000, 70_000), marks=pytest.mark.slow),
        pytest.param("quadratic", "cuda", range(100_000, 800_000, 70_000), marks=pytest.mark.slow),
        # Where 16 fits alone and 12 as a part.
        pytest.param("quick", "cpu", [24 * MIB], marks=pytest.mark.slow),
    ],
)
def test_forecast_and_plan_use_the_same_microbatches_for_one_limit(experiment, device, limits):
    sizes = set()
    for limit in limits:
        settings = {"device": device, "device_memory": limit, "batches": BATCHES}
        document = forecast_memory(experiment, **settings)
        request = read_request(experiment, settings, "nowhere")
        plan = make_plan(request, is_elsewhere=True).plan
        planned = {row.batch_size: row.microbatch_size for row in plan.trials}
        assert {p["batch_size"]: p["microbatch_size"] for p in document["points"]} == planned
        largest = document["largest_microbatch_size"]
        whole = [size for size in BATCHES if size <= largest]
        assert all(planned[size] == size for size in whole)
        assert max(planned.values()) <= max(1, largest)
        assert all(point["fits"] for point in document["points"]) or not largest
        sizes.add(largest)
    assert len(sizes) > len(limits) / 2
