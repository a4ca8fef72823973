"""Presets choose the cheapest settings that fit by forecast, and give the reason."""

from pathlib import Path

import pytest

from sweep.errors import SweepError
from sweep.memory.presets import forecast_rows
from sweep.memory.search import PRESETS, SHARES
from sweep.orchestration.planning import read_request, save_plan
from sweep.plan.plan import Plan
from sweep.trial.folder import SweepFolder

MIB = 1 << 20
BATCH = 64


def planned(path: Path, memory: int, **settings: object) -> Plan:
    fields = {"batches": [BATCH], "budget": 64 * BATCH * 10, "device": "cpu"}
    settings = {**fields, "device_memory": memory, **settings}
    return read_request("quick", settings, path).plan().plan


def forecast_of(plan: Plan) -> int:
    config, row = plan.trial_config(plan.trials[0]), plan.trials[0]
    sized = config.on_one_device(row.batch_size // row.devices, row.microbatch_size)
    [forecast] = forecast_rows([sized])
    return forecast.needed_bytes


@pytest.fixture(scope="module")
def whole_bytes(tmp_path_factory):
    return forecast_of(planned(tmp_path_factory.mktemp("x"), 1 << 40, microbatch=BATCH))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_takes_the_largest_microbatch_within_its_share(tmp_path, whole_bytes, preset):
    share, memory = SHARES[PRESETS[preset]], whole_bytes // 3
    plan = planned(tmp_path, memory, preset=preset)
    row, execution = plan.trials[0], plan.execution
    assert forecast_of(plan) <= share * memory
    assert execution.activation_checkpointing == (preset == "memory")
    assert 1 < row.microbatch_size < BATCH
    assert plan.settings.precision == "fp32" and execution.preset == preset
    larger = plan.model_copy(
        update={"trials": (row.model_copy(update={"microbatch_size": 2 * row.microbatch_size}),)}
    )
    assert forecast_of(larger) > share * memory / 1.02  # a limit on a CPU leaves that much free
    assert f"microbatches of {row.microbatch_size} fit" in execution.reason


def test_a_batch_that_fits_is_one_microbatch(tmp_path, whole_bytes):
    plan = planned(tmp_path, 2 * whole_bytes, preset="speed")
    assert plan.trials[0].microbatch_size == BATCH
    assert (plan.execution.zero, plan.execution.activation_checkpointing) == (0, False)


@pytest.mark.slow
def test_recomputing_comes_before_narrower_weights(tmp_path):
    small = forecast_of(planned(tmp_path, 1 << 40, microbatch=1))
    recomputed = planned(tmp_path, int(0.98 * small), preset="speed")
    assert recomputed.execution.activation_checkpointing
    assert recomputed.settings.precision == "fp32"
    narrow = planned(tmp_path, int(0.7 * small), preset="speed")
    assert narrow.settings.precision == "bf16-pure" and "in bf16-pure" in narrow.execution.reason
    fixed = planned(tmp_path, int(0.7 * small), preset="speed", precision="fp32")
    assert fixed.settings.precision == "fp32"
    assert "no microbatch fits" in fixed.execution.reason
    assert fixed.trials[0].microbatch_size == 1


def test_the_smallest_zero_stage_that_helps_is_chosen(tmp_path):
    several = {"preset": "speed", "devices_per_trial": 2}
    tight = forecast_of(planned(tmp_path, 1 << 40, microbatch=4, devices_per_trial=2))
    none = planned(tmp_path, int(1.03 * tight), **several)
    assert (none.execution.zero, none.trials[0].microbatch_size) == (0, 4)
    split = planned(tmp_path, int(0.99 * tight), **several)
    assert (split.execution.zero, split.trials[0].microbatch_size) == (1, 4)
    least = planned(tmp_path, tight, preset="memory", devices_per_trial=2)
    assert least.execution.zero == 3


def test_settings_that_the_user_gave_are_kept(tmp_path, whole_bytes):
    given = {"zero": 2, "devices_per_trial": 2, "activation_checkpointing": True, "microbatch": 2}
    plan = planned(tmp_path, whole_bytes, preset="speed", **given)
    execution = plan.execution
    assert (execution.zero, execution.activation_checkpointing) == (2, True)
    assert plan.trials[0].microbatch_size == 2


def test_a_preset_is_kept_once_decided(tmp_path, whole_bytes):
    plan = planned(tmp_path, whole_bytes // 3, preset="memory")
    save_plan(plan, SweepFolder(tmp_path))
    assert planned(tmp_path, whole_bytes // 3).execution == plan.execution
    with pytest.raises(SweepError, match="preset was decided as 'memory'"):
        planned(tmp_path, whole_bytes // 3, preset="speed")
