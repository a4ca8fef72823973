"""The printed commands plan the same trials again."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from sweep.analysis.frames import Sweep, load_sweep
from sweep.config.experiment import load_experiment
from sweep.config.trial import Execution
from sweep.plan.plan import build_plan
from sweep.report.reproduction import answering_command, run_commands


def planned_ids(command: str, found: Sweep) -> set[str | None]:
    """Plan what a command says, on other hardware."""
    words = shlex.split(command)
    assert words[:2] == ["sweep", "run"]
    flags = {k.removeprefix("--"): v for k, v in zip(words[3::2], words[4::2], strict=True)}
    assert flags.pop("out") == f"results/{found.name}"
    for name in ("seeds", "context", "vocabulary"):
        if name in flags:
            flags[name] = int(flags[name])  # type: ignore[assignment]
    plan = build_plan(
        load_experiment(words[2], flags), Execution(device="cuda", threads=9), data=found.plan.data
    )
    return {row.id for row in plan.trials}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lrs": ("3e-4", "sqrt:0.002@16", "linear:0.001@32"), "seeds": 2},
        {"model": "small", "context": 32, "tokenizer": "bytes", "batches": "2,6", "seeds": 2},
        {"experiment": "tinystories", "batches": "8,32", "budget": "2M", "data": "synthetic"},
        {"experiment": "quadratic", "seeds": 2, "lrs": ("0.01",)},
    ],
)
def test_commands_plan_the_same_trials(
    tmp_path: Path, write_fake_sweep: Any, options: dict[str, Any]
) -> None:
    write_fake_sweep(tmp_path / "s", outcome=lambda row: "WAITING", **options)
    found = load_sweep(tmp_path / "s")
    commands = run_commands(found)
    assert all(is_exact for _, is_exact in commands)
    ids = set[str | None]().union(*(planned_ids(command, found) for command, _ in commands))
    assert ids == {row.id for row in found.plan.trials}


def test_settings_that_no_flag_gives_are_not_called_reproduced(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "s", optimizer={"weight_decay": 0.5})
    assert [is_exact for _, is_exact in run_commands(load_sweep(tmp_path / "s"))] == [False]


def test_the_answering_command_tunes_every_batch_size(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "s", lrs=("1e-3", "sqrt"), seeds=5)
    command = answering_command(load_sweep(tmp_path / "s"))
    assert "--batches 4,8,16,32,64 --lr tuned --seeds 5" in command


def test_an_absolute_path_of_data_shows_only_its_last_part(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "s", data="/home/somebody/stories.txt")
    ((command, is_exact),) = run_commands(load_sweep(tmp_path / "s"))
    assert "--data PATH/stories.txt" in command and "somebody" not in command
    assert is_exact
