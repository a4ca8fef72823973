"""`sweep plan --cluster`: makespan, device-hours and price."""

import json

import pytest

from sweep.trial.folder import State, SweepFolder

QUADRATIC = ("quadratic", "--batches", "4,8,16", "--budget", "400", "--device", "cpu")


def test_the_document_adds_up_and_is_shown_one_line_per_number(call):
    flags = ("--cluster", "nodes=2,gpus=1", "--price", "2.5", "--json")
    code, out = call("plan", *QUADRATIC, *flags)
    plan = json.loads(out)
    cost, seconds = plan["cluster"], [trial["forecast_seconds"] for trial in plan["trials"]]
    assert code == 0 and (cost["devices"], cost["trials"]) == (2, 3)
    assert cost["makespan_seconds"] >= max(*seconds, sum(seconds) / 2) * (1 - 1e-9)
    assert cost["device_hours"] == pytest.approx(2 * cost["makespan_seconds"] / 3600)
    assert cost["busy_device_hours"] == pytest.approx(sum(seconds) / 3600)
    assert cost["price"] == pytest.approx(2.5 * cost["device_hours"])
    shown = call("plan", *QUADRATIC, *flags[:-1])[1].splitlines()[-4:]
    assert [line.partition(":")[0] for line in shown] == [
        "Cluster",
        "Makespan",
        "Device-hours",
        "Price",
    ]


def test_finished_trials_are_left_out(call, tmp_path):
    out = tmp_path / "s"
    assert call("plan", *QUADRATIC, "--out", out)[0] == 0
    first, *_ = SweepFolder(out).trials()
    first.write_status(first.read_status().changed(state=State.COMPLETE))
    plan = json.loads(call("plan", *QUADRATIC, "--out", out, "--cluster", "gpus=8", "--json")[1])
    assert plan["cluster"]["trials"] == 2
