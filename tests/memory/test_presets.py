"""Presets choose by forecast what fits, give up nothing that need not be, and say why."""

from pathlib import Path

import pytest

from sweep.config.experiment import load_experiment
from sweep.errors import SweepError
from sweep.memory.forecast import forecast_rows
from sweep.orchestration.execution import Logistics
from sweep.orchestration.planning import make_plan, save_plan
from sweep.plan.plan import Plan
from sweep.trial.folder import SweepFolder

MIB = 1 << 20
BATCH = 64


def planned(path: Path, memory: int, **logistics: object) -> Plan:
    fields = {"batches": [BATCH], "budget": 64 * BATCH * 10}
    fields |= {"precision": logistics.pop("precision", "auto")}
    asked = Logistics(device="cpu", device_memory=memory, **logistics)
    return make_plan(load_experiment("quick", fields), asked, SweepFolder(path)).plan


def forecast_of(plan: Plan) -> int:
    """Return what a planned step takes; no more is evaluated at once than is trained at once."""
    config, row = plan.sample_config(plan.trials[0]), plan.trials[0]
    sized = config.sized(row.batch_size // row.devices, row.microbatch_size)
    [found] = forecast_rows([sized])
    return found.needed_bytes


@pytest.fixture(scope="module")
def whole_bytes(tmp_path_factory):
    """What a whole batch takes, kept as it is."""
    return forecast_of(planned(tmp_path_factory.mktemp("x"), 1 << 40, microbatch=BATCH))


@pytest.mark.parametrize(("preset", "share"), [("speed", 1.0), ("balanced", 0.7), ("memory", 0.5)])
def test_each_stays_within_its_share_and_takes_what_is_left(tmp_path, whole_bytes, preset, share):
    memory = whole_bytes // 3
    plan = planned(tmp_path, memory, preset=preset)
    row, execution = plan.trials[0], plan.execution
    assert forecast_of(plan) <= share * memory
    assert execution.activation_checkpointing == (preset == "memory")
    assert 1 < row.microbatch_size < BATCH
    assert plan.settings.precision == "fp32"
    larger = plan.model_copy(
        update={"trials": (row.model_copy(update={"microbatch_size": 2 * row.microbatch_size}),)}
    )
    assert forecast_of(larger) > share * memory / 1.02  # what a limit on a CPU leaves free
    assert execution.reason.startswith(f"{preset}: {row.microbatch_size} sequences at once")
    assert execution.preset == preset


def test_what_fits_is_taken_whole(tmp_path, whole_bytes):
    plan = planned(tmp_path, 2 * whole_bytes, preset="speed")
    assert plan.trials[0].microbatch_size == BATCH
    assert (plan.execution.zero, plan.execution.activation_checkpointing) == (0, False)


def test_what_loses_something_comes_last(tmp_path):
    """Where not one sequence fits activations are recomputed, then weights are in bfloat16."""
    small = forecast_of(planned(tmp_path, 1 << 40, microbatch=1))
    recomputed = planned(tmp_path, int(0.98 * small), preset="speed").execution
    assert recomputed.activation_checkpointing and "without it not one fits" in recomputed.reason
    plan = planned(tmp_path, int(0.7 * small), preset="speed")
    assert (
        plan.settings.precision == "bf16-pure" and "in fp32 not one fits" in plan.execution.reason
    )
    asked = planned(tmp_path, int(0.7 * small), preset="speed", precision="fp32")
    assert asked.settings.precision == "fp32" and "nothing fits" in asked.execution.reason
    assert asked.trials[0].microbatch_size == 1


def test_over_several_devices_the_least_stage_that_helps_is_taken(tmp_path):
    several = {"preset": "speed", "devices": 2}
    tight = forecast_of(planned(tmp_path, 1 << 40, microbatch=4, devices=2))
    none = planned(tmp_path, int(1.03 * tight), **several)
    assert (none.execution.zero, none.trials[0].microbatch_size) == (0, 4)
    split = planned(tmp_path, int(0.99 * tight), **several)
    assert (split.execution.zero, split.trials[0].microbatch_size) == (1, 4)
    assert "ZeRO 1, without which 2 would fit" in split.execution.reason
    least = planned(tmp_path, tight, preset="memory", devices=2)
    assert least.execution.zero == 3


def test_what_was_given_is_not_chosen(tmp_path, whole_bytes):
    given = {"zero": 2, "devices": 2, "activation_checkpointing": True, "microbatch": 2}
    plan = planned(tmp_path, whole_bytes, preset="speed", **given)
    execution = plan.execution
    assert (execution.zero, execution.activation_checkpointing) == (2, True)
    assert plan.trials[0].microbatch_size == 2


def test_a_preset_stays_as_it_was_decided(tmp_path, whole_bytes):
    plan = planned(tmp_path, whole_bytes // 3, preset="memory")
    save_plan(plan, SweepFolder(tmp_path))
    assert planned(tmp_path, whole_bytes // 3).execution == plan.execution
    with pytest.raises(SweepError, match="preset was decided as 'memory'"):
        planned(tmp_path, whole_bytes // 3, preset="speed")
