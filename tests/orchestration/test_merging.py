"""Parts of a sweep in folders of their own, joined again, equal the sweep in one folder."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from sweep.analysis.next_step import next_step
from sweep.analysis.results import load_sweep
from sweep.api import plan_sweep, run_sweep
from sweep.errors import SweepError
from sweep.orchestration import merging
from sweep.orchestration.merging import merge_paths
from sweep.plan.shard import parse_shard
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import SweepFolder

SETTINGS = {"budget": 8192, "batches": "4,8,16", "seeds": 2, "show_progress": False}
TIMES = ("time", "perf/", "memory/")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return a sweep in one folder, and in three parts."""
    folder = tmp_path_factory.mktemp("parts")
    run_sweep("quick", out=folder / "whole", **SETTINGS)
    for index in (1, 2, 3):
        run_sweep("quick", out=folder / str(index), shard=f"{index}/3", **SETTINGS)
    return folder


@pytest.fixture
def copies(parts, tmp_path):
    for index in (1, 2, 3):
        shutil.copytree(parts / str(index), tmp_path / str(index))
    return [tmp_path / str(index) for index in (1, 2, 3)]


def curves(folder):
    found = {}
    for trial in SweepFolder(folder).trials():
        lines = [json.loads(line) for line in trial.metrics_path.read_text().splitlines()]
        found[trial.id] = [
            {name: value for name, value in line.items() if not name.startswith(TIMES)}
            for line in lines
        ]
    return found


def test_parts_joined_equal_one_folder_bit_for_bit(parts, tmp_path):
    merged = merge_paths([parts / "1", parts / "2", parts / "3"], tmp_path / "merged")
    assert (merged.copied, merged.present) == (6, 0)
    assert curves(tmp_path / "merged") == curves(parts / "whole")
    again = run_sweep("quick", out=tmp_path / "merged", **SETTINGS)
    assert {trial.read_status().attempts for trial in SweepFolder(again.path).trials()} == {1}
    whole = run_sweep("quick", out=parts / "whole", **SETTINGS)
    means = [row.mean for row in again.answer().batch_sizes]
    assert means == [row.mean for row in whole.answer().batch_sizes]


def test_times_of_parts_on_different_devices_are_not_compared(copies, tmp_path):
    for trial in SweepFolder(copies[1]).trials():
        result = trial.read_sealed(trial.result_path)
        write_json(trial.result_path, {**result, "device": "cuda: NVIDIA H100"})
    merge_paths(copies, tmp_path / "merged")
    answer = load_sweep(tmp_path / "merged").answer()
    assert {row.seconds for row in answer.batch_sizes} == {None}
    (reason,) = answer.times_reasons
    assert reason.startswith("Times on different devices are not compared: cp")
    assert len({row.mean for row in answer.batch_sizes}) == 3


def test_each_part_has_whole_cells_and_names_the_merge(parts):
    for index, size in ((1, 4), (2, 8), (3, 16)):
        part = load_sweep(parts / str(index))
        assert {row.batch_size for row in part.plan.trials} == {size} and part.plan.is_part
    assert "`sweep merge` joins all parts" in next_step(part, None).reason


def test_the_rates_of_a_tuned_part_need_no_other_part(tmp_path):
    settings = {"budget": 8192, "batches": "4,8,16", "lr": "tuned", "seeds": "auto"}
    part = plan_sweep("quick", out=tmp_path / "a", shard="2/3", **settings)
    whole = plan_sweep("quick", out=tmp_path / "b", centre="rule", **settings)
    tuning = {row.id for row in whole.trials if row.stage == "tune" and row.batch_size == 8}
    assert {row.id for row in part.trials if row.stage == "tune"} == tuning


def test_a_trial_with_two_results_is_refused_by_name(copies, tmp_path):
    (trial, _) = SweepFolder(copies[0]).trials()
    run_sweep("quick", out=tmp_path / "other", shard="1/3", **SETTINGS)
    other = SweepFolder(tmp_path / "other").trial(trial.id)
    result = other.read_sealed(other.result_path)
    merged = merge_paths([copies[0], tmp_path / "other"], tmp_path / "twice")
    assert merged.copied == 2  # trained twice, with equal losses

    for change in ({"final_valid_loss": 1.0}, {"final_valid_accuracy": 0.5}):
        write_json(other.result_path, {**result, **change})
        with pytest.raises(SweepError, match=f"trial {trial.id} must have one result"):
            merge_paths([copies[0], tmp_path / "other"], tmp_path / "merged")
    assert not (tmp_path / "merged" / "plan.json").exists()
    shutil.rmtree(other.path)  # as the message says
    merged = merge_paths([tmp_path / "other", copies[0]], tmp_path / "merged")
    assert (merged.copied, merged.unfinished) == (2, 0)
    with pytest.raises(SweepError, match="must be intact"):  # no part has it any more
        merge_paths([tmp_path / "other", copies[1]], tmp_path / "without")


def test_a_merge_tells_how_many_trials_have_no_result(copies, tmp_path):
    (trial, _) = SweepFolder(copies[0]).trials()
    trial.clear()
    trial.state_path.unlink()
    merged = merge_paths(copies, tmp_path / "merged")
    assert (merged.copied, merged.unfinished) == (6, 1)


def test_parts_of_several_budgets_are_joined_if_rates_are_fixed(tmp_path):
    settings = {**SETTINGS, "budget": "4096,16384", "batches": "4,8", "seeds": 1}
    run_sweep("quick", out=tmp_path / "whole", **settings)
    parts = [tmp_path / "1", tmp_path / "2"]
    for index, part in enumerate(parts, start=1):
        swept = run_sweep("quick", out=part, shard=f"{index}/2", **settings)
        assert len(swept.sentences()) > 0  # each budget has one batch size
    merge_paths(parts, tmp_path / "merged")
    assert curves(tmp_path / "merged") == curves(tmp_path / "whole")
    del settings["show_progress"]
    with pytest.raises(SweepError, match="--shard with tuned rates needs one --budget"):
        plan_sweep("quick", out=tmp_path / "tuned", shard="1/2", lr="tuned", **settings)


def test_the_next_command_after_a_merge_keeps_the_centre_of_the_rates(tmp_path):
    settings = {**SETTINGS, "lr": "tuned", "batches": "4,8"}
    parts = [tmp_path / "1", tmp_path / "2"]
    for index, part in enumerate(parts, start=1):
        run_sweep("quick", out=part, shard=f"{index}/2", **settings)
    merge_paths(parts, tmp_path / "merged")
    answer = load_sweep(tmp_path / "merged").answer()
    commands = [command for command in (answer.settle, answer.settle_longer) if command]
    assert commands and all("--centre rule" in command for command in commands)


def test_a_merge_that_is_killed_is_repeated(copies, tmp_path, monkeypatch):
    out = tmp_path / "merged"
    calls = []

    def fail(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    original = shutil.copytree
    monkeypatch.setattr(merging.shutil, "copytree", fail)
    with pytest.raises(KeyboardInterrupt):
        merge_paths(copies, out)
    assert not (out / "plan.json").exists()
    monkeypatch.undo()
    merged = merge_paths(copies, out)
    assert (merged.copied, merged.present) == (3, 3)
    assert len(curves(out)) == 6


@pytest.mark.slow
def test_six_parts_equal_one_folder_after_a_conflict_and_a_kill(tmp_path):
    settings = {**SETTINGS, "batches": "1,2,4,8,16,32", "lr": "tuned", "centre": "rule"}
    run_sweep("quick", out=tmp_path / "whole", **settings)
    names = "123456"
    for name in names:
        part = {key: value for key, value in settings.items() if key != "centre"}
        run_sweep("quick", out=tmp_path / name, shard=f"{name}/6", **part)
    shutil.copytree(tmp_path / "3", tmp_path / "conflict")
    ended = (one for one in SweepFolder(tmp_path / "conflict").trials() if one.result_path.exists())
    trial = next(ended)  # others were pruned
    result = trial.read_sealed(trial.result_path)
    write_json(trial.result_path, {**result, "final_valid_loss": 1.0})
    words = [sys.executable, "-m", "sweep", "merge", *names, "--out", "merged"]
    refused = subprocess.run([*words, "conflict"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and f"trial {trial.id} must have one result" in refused.stderr

    killed = subprocess.Popen(words, cwd=tmp_path)
    trials = tmp_path / "merged" / "trials"
    while killed.poll() is None and not (trials.exists() and any(trials.iterdir())):
        time.sleep(0.001)
    killed.kill()
    killed.wait()
    subprocess.run(words, cwd=tmp_path, check=True)
    assert curves(tmp_path / "merged") == curves(tmp_path / "whole")


def test_parts_of_another_question_are_refused(copies, tmp_path):
    settings = SETTINGS | {"budget": 16384, "batches": "4", "context": 32}
    run_sweep("quick", out=tmp_path / "other", **settings)
    with pytest.raises(SweepError, match="Choose another --out for another question"):
        merge_paths([copies[0], tmp_path / "other"], tmp_path / "merged")
    with pytest.raises(SweepError, match="named once"):
        merge_paths([copies[0], copies[0]], tmp_path / "merged")
    with pytest.raises(SweepError, match="another folder than the parts"):
        merge_paths(copies, copies[1])


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "1/2000"])
def test_a_part_that_does_not_exist_is_refused(text):
    with pytest.raises(SweepError, match="I from 1 to N"):
        parse_shard(text)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"shard": "4/4", "batches": "4,8,16"}, "Take fewer parts"),
        ({"shard": "1/2", "batches": "auto", "budget": "8k,32k"}, "Name --batches"),
        ({"shard": "1/2", "budget": "1min"}, "needs --timing FILE"),
    ],
)
def test_what_cannot_be_split_is_refused(settings, problem, tmp_path):
    with pytest.raises(SweepError, match=problem):
        plan_sweep("quick", out=tmp_path / "x", **{"budget": 8192, **settings})


def test_parts_of_a_budget_that_is_rounded_resume_and_merge_in_any_order(tmp_path):
    settings = SETTINGS | {"budget": 10_300, "seeds": 1}
    run_sweep("quick", out=tmp_path / "whole", **settings)
    for index in (1, 2, 3):
        for _ in range(2):  # the second time nothing is left
            run_sweep("quick", out=tmp_path / str(index), shard=f"{index}/3", **settings)
    for name, order in (("m", (1, 2, 3)), ("n", (2, 3, 1))):
        merge_paths([tmp_path / str(index) for index in order], tmp_path / name)
        assert curves(tmp_path / name) == curves(tmp_path / "whole")


def test_a_merge_into_a_merged_folder_leaves_it_the_same_sweep(parts, tmp_path):
    merge_paths([parts / "1", parts / "2"], tmp_path / "merged")
    before = SweepFolder(tmp_path / "merged").read_plan()["sweep_uid"]
    merge_paths([parts / "2", parts / "3"], tmp_path / "merged")
    assert SweepFolder(tmp_path / "merged").read_plan()["sweep_uid"] == before


def test_parts_of_a_budget_of_time_equal_one_folder_and_need_one_file_of_times(tmp_path):
    settings = {"budget": "1s", "batches": "4,8", "device": "cpu", "show_progress": False}
    run_sweep("quick", out=tmp_path / "whole", **settings)
    times = tmp_path / "whole" / "timing.json"
    for index in (1, 2):
        out = tmp_path / str(index)
        run_sweep("quick", out=out, shard=f"{index}/2", timing=str(times), **settings)
    merge_paths([tmp_path / "1", tmp_path / "2"], tmp_path / "merged")
    assert curves(tmp_path / "merged") == curves(tmp_path / "whole")

    path = tmp_path / "2" / "timing.json"
    document = {key: value for key, value in read_json(path).items() if key != "sha256"}
    write_json(path, document | {"measured_at": "2026-01-01T00:00:00+00:00"})
    with pytest.raises(SweepError, match=r"the tokens of one timing\.json"):
        merge_paths([tmp_path / "1", tmp_path / "2"], tmp_path / "other")


def test_a_damaged_part_is_refused_by_name(copies, tmp_path):
    trial = SweepFolder(copies[1]).trials()[0]
    trial.result_path.write_text(trial.result_path.read_text().replace("1", "2", 1))
    with pytest.raises(SweepError, match=f"2 must be intact, but .*{trial.id}.* Copy it again"):
        merge_paths(copies, tmp_path / "merged")
    shutil.rmtree(trial.path)
    with pytest.raises(SweepError, match="must be intact"):
        merge_paths(copies, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
