"""Plans and forecasts for a GPU that is not here."""

import json
from pathlib import Path

import pytest

from sweep.config.gpus import GPUS
from sweep.trial.folder import SweepFolder

PLAN = ("plan", "quick", "--budget", "100k", "--batches", "4,16", "--json")


def test_a_plan_for_a_named_gpu_has_its_memory_and_an_assumed_time(call):
    code, text = call(*PLAN, "--gpu", "RTX 4090")
    plan = json.loads(text)
    assert code == 0
    seconds = {trial["batch_size"]: trial["forecast_seconds"] for trial in plan["trials"]}
    steps = {trial["batch_size"]: trial["steps"] for trial in plan["trials"]}
    assert all(seconds[size] == pytest.approx(0.003 * steps[size]) for size in (4, 16))
    code, text = call(*PLAN[:-1], "--gpu", "4090")
    assert "20% to 45% of the peak of 4090 are assumed, and at least 2 ms a step" in text
    assert "23.6 GiB (25.34 GB) in PyTorch; nothing is measured" in text
    assert "bf16 on cuda" in text and "sweep run quick --budget 100k --batches 4,16" in text


def test_a_plan_for_a_gpu_without_a_name_has_no_time(call):
    code, text = call(*PLAN[:-1], "--device", "cuda")
    text = " ".join(text.split())
    assert code == 0 and "estimated time unknown, because a step cannot run here" in text
    assert "by --gpu or --device-memory" in text
    code, text = call(*PLAN, "--device", "cuda", "--device-memory", "24GB")
    assert code == 0 and {t["forecast_seconds"] for t in json.loads(text)["trials"]} == {None}


def test_the_microbatches_of_a_plan_are_bounded_by_the_memory_of_the_gpu(call):
    sizes = {}
    for gpu in ("h200", "t4"):
        arguments = ("plan", "tinystories", "--batches", "256", "--budget", "10M", "--json")
        plan = json.loads(call(*arguments, "--gpu", gpu, "--context", "1024")[1])
        sizes[gpu] = plan["trials"][0]["microbatch_size"]
    assert sizes["t4"] <= sizes["h200"] <= 64  # 65,536 tokens


def test_a_forecast_for_a_gpu_says_what_fits_it(call):
    arguments = ("forecast", "quick", "--batches", "4,16", "--json")
    forecast = json.loads(call(*arguments, "--gpu", "l4")[1])
    assert forecast["gpu"] == "l4" and forecast["device"] == "cuda"
    assert forecast["device_memory_bytes"] == GPUS["l4"].memory_bytes
    assert forecast["usable_bytes"] == int(0.9 * GPUS["l4"].memory_bytes)
    assert "limit 22 GiB (23.62 GB), for the GPU l4." in call(*arguments[:-1], "--gpu", "l4")[1]


def test_a_gpu_is_no_flag_of_a_run(refuse):
    assert "No such option" in refuse("run", "quick", "--gpu", "h100")


def test_an_unknown_gpu_is_refused(refuse):
    assert "Name one of a100-80, a100-40" in refuse("plan", "quick", "--gpu", "a100")


def test_an_export_prints_one_file(call):
    arguments = ("plan", "quick", "--batches", "16", "--budget", "64k", "--gpu", "h100")
    code, text = call(*arguments, "--export", "deepspeed")
    assert code == 0 and json.loads(text)["train_batch_size"] == 16


def test_a_plan_for_a_gpu_that_is_not_here_does_not_bind_the_folder(call):
    plan = PLAN[:-1]
    for flags in (["--gpu", "h100"], ["--gpu", "4090"], [], ["--gpu", "h100"]):
        assert call(*plan, *flags, "--precision", "fp32", "--out", "out")[0] == 0
        stored = json.loads(Path("out/plan.json").read_text())
        assert stored["execution"]["gpu"] == (flags[-1] if flags else None)
        for row in stored["trials"]:
            config = json.loads(Path(f"out/trials/{row['id']}/config.json").read_text())
            assert config["execution"]["device"] == stored["execution"]["device"]


def test_a_microbatch_above_the_batch_size_is_said_next_to_an_export(call):
    arguments = ("plan", "quick", "--batches", "16", "--budget", "64k", "--microbatch", "32")
    code, text = call(*arguments, "--export", "deepspeed")
    assert code == 0 and json.loads(text)["train_micro_batch_size_per_gpu"] == 16
    assert "Microbatch: less than 32 at batch size 16" in call.stderr


def test_a_gpu_without_units_for_a_precision_is_said(call):
    arguments = ("plan", "quick", "--budget", "64k", "--gpu", "t4", "--precision", "bf16")
    _, text = call(*arguments)
    assert "has no units for bf16 (--precision fp32)" in " ".join(text.split())


def test_a_size_without_its_unit_is_refused(refuse):
    assert "such as 24GB" in refuse("forecast", "quick", "--device-memory", "24")


def test_a_plan_replaces_no_trial_that_has_begun(call):
    words = ("quick", "--budget", "64k", "--seeds", "1", "--lr", "5e-3", "--out", "out")
    assert call("plan", *words, "--batches", "4,8")[0] == 0
    folder = SweepFolder(Path("out"))
    trial = folder.trials()[0]
    trial.write_status(trial.read_status())  # as an attempt does, long before any result
    code, _ = call("plan", *words, "--batches", "16", "--gpu", "h100")
    assert code == 2 and "was decided as" in call.stderr
    assert {row["batch_size"] for row in folder.read_plan()["trials"]} == {4, 8}


def test_a_gpu_and_a_cpu_are_not_planned_together(refuse):
    assert "Leave one of the two out" in refuse("plan", "quick", "--gpu", "h100", "--device", "cpu")


def test_an_export_is_of_one_budget(refuse):
    words = ("plan", "quick", "--batches", "16", "--budget", "4096,16384", "--export", "trl")
    assert "writes one budget" in refuse(*words)


@pytest.mark.parametrize("memory", ["6MiB", "5MiB"])
def test_a_plan_and_a_forecast_agree_on_what_fits(call, memory):
    words = ("quick", "--batches", "16", "--microbatch", "1", "--device-memory", memory)
    plan = json.loads(call("plan", *words, "--budget", "64k", "--json")[1])
    forecast = json.loads(call("forecast", *words, "--json")[1])
    (point,) = forecast["points"]
    assert point["fits"] == ("does not fit" not in plan["execution"]["reason"])
