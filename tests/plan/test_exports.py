"""Plans in the words of other trainers; those marked peers are read by the trainers themselves."""

import json
import subprocess
import sys
import tomllib

import pytest
import yaml

from sweep.api import plan_sweep
from sweep.cli.commands.running import plan
from sweep.errors import SweepError
from sweep.plan.exports import EXPORTS, export_plan

# The three configurations of the guide to per-device batch sizes, with accumulation.
EIGHT = {"gpu": "a100-80", "devices_per_trial": 8, "zero": 2, "batches": 64, "microbatch": 2}
FOUR = {"gpu": "4090", "devices_per_trial": 4, "zero": 3, "batches": 8, "microbatch": 1}
ONE = {"gpu": "4090", "batches": 4, "microbatch": 1}
NUMBERS = {"eight": (64, 2, 8, 4), "four": (8, 1, 4, 2), "one": (4, 1, 1, 4)}


@pytest.fixture(scope="module")
def plans():
    settings = {"eight": EIGHT, "four": FOUR, "one": ONE}
    return {name: plan_sweep("quick", **of, budget="64k") for name, of in settings.items()}


@pytest.mark.parametrize("name", [*NUMBERS])
def test_the_three_numbers_multiply_in_the_words_of_each_trainer(plans, name):
    batch, micro, devices, accumulation = NUMBERS[name]
    plan = plans[name]
    deepspeed = json.loads(export_plan(plan, "deepspeed"))
    assert deepspeed["train_batch_size"] == batch == micro * devices * accumulation
    assert deepspeed["train_micro_batch_size_per_gpu"] == micro
    assert deepspeed["gradient_accumulation_steps"] == accumulation
    assert deepspeed["zero_optimization"]["stage"] == plan.execution.zero

    trl = yaml.safe_load(export_plan(plan, "trl"))
    assert (trl["per_device_train_batch_size"], trl["gradient_accumulation_steps"]) == (
        micro,
        accumulation,
    )
    titan = tomllib.loads(export_plan(plan, "torchtitan"))
    degrees = titan["parallelism"]
    assert titan["training"]["local_batch_size"] == micro
    assert titan["training"]["global_batch_size"] == batch
    assert degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"] == (
        devices
    )
    accelerate = yaml.safe_load(export_plan(plan, "accelerate"))
    assert accelerate["num_processes"] == devices
    assert accelerate["mixed_precision"] == "bf16"
    assert trl["gradient_checkpointing"] is False


def test_words_of_accelerate_are_texts_in_yaml():
    plan = plan_sweep("quick", batches=16, microbatch=4, budget="64k", precision="fp32")
    accelerate = yaml.safe_load(export_plan(plan, "accelerate"))
    assert (accelerate["mixed_precision"], accelerate["distributed_type"]) == ("no", "NO")


def test_grpo_is_exported_with_its_groups():
    plan = plan_sweep(
        "grpo-words",
        model="quick",
        data="synthetic",
        batches=16,
        budget="16k",
        group_size=4,
        context=128,
    )
    trl = yaml.safe_load(export_plan(plan, "trl"))
    assert (trl["num_generations"], trl["generation_batch_size"]) == (4, 16)


def test_several_batch_sizes_are_not_exported():
    plan = plan_sweep("quick", batches=(8, 16), budget="64k")
    for name in EXPORTS:
        with pytest.raises(SweepError, match="writes one batch size, got 8, 16"):
            export_plan(plan, name)


def test_optimizers_and_policies_are_exported_apart():
    plan = plan_sweep("quick", batches=16, budget="64k", optimizers=("adamw", "sgd"))
    with pytest.raises(SweepError, match="writes one optimizer, got adamw, sgd"):
        export_plan(plan, "trl")


def test_numbers_are_numbers_in_the_formats_and_no_clip_is_none():
    settings = {"batches": 8, "budget": "64k", "lr": "1e-5", "optimizer": {"clip": 0.0}}
    plan = plan_sweep("quick", gpu="h100", devices_per_trial=2, zero=2, **settings)
    assert yaml.safe_load(export_plan(plan, "trl"))["learning_rate"] == 1e-5
    titan = tomllib.loads(export_plan(plan, "torchtitan"))
    assert titan["training"]["max_norm"] == float("inf")
    assert titan["parallelism"]["fsdp_reshard_after_forward"] == "never"


def test_torchtitan_has_no_first_stage():
    plan = plan_sweep("quick", gpu="h100", devices_per_trial=2, zero=1, batches=8, budget="64k")
    with pytest.raises(SweepError, match="Plan --zero 0 or 3"):
        export_plan(plan, "torchtitan")


class Processes:
    """The part of DeepSpeed's model-parallel unit that its configuration asks."""

    def __init__(self, count):
        self.count = count

    def get_data_parallel_world_size(self):
        return self.count


@pytest.fixture
def one_process(tmp_path):
    """A group of one process, of which DeepSpeed's configuration asks the rank."""
    import deepspeed
    import torch.distributed

    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        verbose=False,
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.peers
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", [*NUMBERS])
def test_deepspeed_accepts_the_file(plans, name):
    from deepspeed.runtime.config import DeepSpeedConfig

    document = json.loads(export_plan(plans[name], "deepspeed"))
    batch, micro, devices, accumulation = NUMBERS[name]
    config = DeepSpeedConfig(document, mpu=Processes(devices))
    assert config.train_batch_size == batch
    assert config.train_micro_batch_size_per_gpu == micro
    assert config.gradient_accumulation_steps == accumulation
    assert config.zero_optimization_stage == plans[name].execution.zero
    assert config.bfloat16_config.enabled


@pytest.mark.peers
@pytest.mark.parametrize("name", [*NUMBERS])
def test_accelerate_accepts_the_file(plans, name, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "config.yaml"
    path.write_text(export_plan(plans[name], "accelerate"))
    config = load_config_from_file(str(path))
    assert config.num_processes == NUMBERS[name][2]
    assert config.mixed_precision == "bf16"
    if plans[name].execution.zero:
        assert config.deepspeed_config["gradient_accumulation_steps"] == NUMBERS[name][3]


@pytest.mark.peers
def test_accelerate_launches_with_the_file_of_a_plan_in_float32(tmp_path):
    plan = plan_sweep("quick", batches=16, microbatch=4, budget="64k", precision="fp32")
    path = tmp_path / "config.yaml"
    path.write_text(export_plan(plan, "accelerate"))
    script = tmp_path / "script.py"
    script.write_text("from accelerate import Accelerator\nprint(Accelerator().mixed_precision)\n")
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path, script]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "no", done.stderr


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # TRL's own default
@pytest.mark.parametrize("name", [*NUMBERS])
def test_trl_accepts_the_file(plans, name, tmp_path):
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

    text = export_plan(plans[name], "trl").replace("bf16: true", "bf16: false")  # on a CPU
    path = tmp_path / "config.yaml"
    path.write_text(f"{text}dataset_name: any\noutput_dir: {tmp_path}\nuse_cpu: true\n")
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    _, args, _ = parser.parse_args_and_config(["--config", str(path)])
    assert args.per_device_train_batch_size == NUMBERS[name][1]
    assert args.gradient_accumulation_steps == NUMBERS[name][3]


def test_the_command_offers_all_trainers():
    (option,) = (parameter for parameter in plan.params if parameter.name == "export")
    assert [*option.type.choices] == [*EXPORTS]
