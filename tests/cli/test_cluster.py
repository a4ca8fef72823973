"""`sweep plan --cluster`: what a plan takes on machines that are not here."""

import json
import re
from pathlib import Path

import pytest

from sweep.trial.folder import State, SweepFolder

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
QUADRATIC = ("quadratic", "--batches", "4,8,16", "--budget", "400", "--device", "cpu")
KEYS = {
    *("nodes", "gpus", "devices_per_trial", "slots", "unused_gpus_per_node", "price", "devices"),
    *("makespan_seconds", "idle_share", "device_hours", "busy_device_hours", "cost", "fewest"),
    *("times_from", "assumption", "finished_trials", "schedule"),
}


def planned(call, *flags):
    code, out = call("plan", *flags, "--json")
    assert code == 0
    return json.loads(out)


def test_the_document_adds_up_and_its_keys_are_those_that_are_documented(call):
    plan = planned(call, *QUADRATIC, "--cluster", "nodes=2,gpus=1", "--price", "2.5")
    found, seconds = plan["cluster"], [trial["forecast_seconds"] for trial in plan["trials"]]
    assert found.keys() == KEYS and not KEYS - set(re.findall(r"`(\w+)`", PAGE.read_text("utf-8")))
    assert found["makespan_seconds"] >= max(*seconds, sum(seconds) / 2) * (1 - 1e-9)
    assert found["device_hours"] == pytest.approx(2 * found["makespan_seconds"] / 3600)
    assert found["busy_device_hours"] == pytest.approx(sum(seconds) / 3600)
    assert found["idle_share"] == pytest.approx(1 - sum(seconds) / 2 / found["makespan_seconds"])
    assert found["cost"] == pytest.approx(2.5 * found["device_hours"])
    assert sorted(one["trial"] for one in found["schedule"]) == [0, 1, 2]
    assert max(one["end_seconds"] for one in found["schedule"]) == found["makespan_seconds"]
    assert "cluster" not in planned(call, *QUADRATIC)


def test_it_is_shown_below_the_plan(call):
    code, out = call("plan", *QUADRATIC, "--cluster", "nodes=16,gpus=8", "--price", "2.5")
    assert code == 0
    _, shown = out.split("Cluster: 16 nodes × 8 devices, 1 per trial, the longest first\n")
    header, first, second, *notes = shown.splitlines()
    assert header.split() == ["devices", "makespan", "idle", "device-hours", "cost"]
    assert first.split()[0] == "128" and int(second.split()[0]) <= 3
    assert "Times are estimates of this machine (cpu," in " ".join(notes)
    assert "no --price" in call("plan", *QUADRATIC, "--cluster", "gpus=8")[1]


def test_trials_that_have_ended_are_left_out(call, tmp_path):
    out = tmp_path / "s"
    assert call("plan", *QUADRATIC, "--out", out)[0] == 0
    first, *_ = SweepFolder(out).trials()
    first.write_status(first.read_status().changed(state=State.COMPLETE))
    plan = planned(call, *QUADRATIC, "--out", out, "--cluster", "gpus=8")
    left = [plan["trials"][one["trial"]]["id"] for one in plan["cluster"]["schedule"]]
    assert first.id not in left and len(left) == 2 and plan["cluster"]["finished_trials"] == 1
    for trial in SweepFolder(out).trials():
        trial.write_status(trial.read_status().changed(state=State.COMPLETE))
    assert "Nothing is left to run." in call("plan", *QUADRATIC, "--cluster", "gpus=8", "--out",
                                             out)[1]  # fmt: skip
