"""`sweep forecast` and `sweep probe` as scripts use them."""

import json

KEYS = {"experiment", "model", "device_memory_bytes", "points", "line", "largest_microbatch_size"}
POINT = {"batch_size", "microbatch_size", "peak_bytes", "by_category", "status"}
MEASURED = POINT | {
    *("rest_bytes", "reserved_bytes", "device_bytes", "headroom_bytes", "allocator_retries"),
    *("seconds_per_step", "tokens_per_second", "optimizer_steps", "loss"),
}
LINE = {"fixed_bytes", "bytes_per_sequence", "r_squared", "largest_residual_bytes"}
QUICK = ("quick", "--device", "cpu")


def test_forecast_takes_a_step_in_one_unless_memory_or_a_microbatch_is_named(call):
    code, out = call("forecast", *QUICK, "--batches", "4,8,16", "--json")
    document = json.loads(out)
    assert code == 0 and document.keys() >= KEYS and document["line"].keys() == LINE
    assert document["device_memory_bytes"] is None and document["largest_microbatch_size"] is None
    for point in document["points"]:
        assert point.keys() >= POINT and point["status"] == "FORECAST"
        assert point["microbatch_size"] == point["batch_size"] and point["fits"] is None
        assert sum(point["by_category"].values()) == point["peak_bytes"]
    halves = call("forecast", *QUICK, "--batches", "4", "--microbatch", "2", "--json")[1]
    assert [point["microbatch_size"] for point in json.loads(halves)["points"]] == [2]


def test_forecast_answers_what_fits_and_the_accumulation_that_it_needs(call):
    flags = ("--batches", "8,64,512", "--device-memory", "32MiB", "--json")
    document = json.loads(call("forecast", *QUICK, *flags)[1])
    largest = document["largest_microbatch_size"]
    assert 8 < largest < 64 and all(point["fits"] for point in document["points"])
    for point in document["points"]:
        assert point["batch_size"] % point["microbatch_size"] == 0
        assert point["microbatch_size"] <= largest
        assert point["peak_bytes"] <= 32 << 20


def test_forecast_writes_a_page_and_json_where_out_is_named(call, tmp_path):
    out = tmp_path / "forecast"
    code, text = call("forecast", *QUICK, "--out", out)
    assert code == 0 and "# Memory forecast: quick" in text
    assert {path.name for path in out.iterdir()} == {"forecast.json", "forecast.md"}


def test_probe_prints_what_was_measured_and_draws_it(call, tmp_path):
    out = tmp_path / "probe"
    flags = ("--batches", "8", "--device-memory", "24MiB", "--largest", "8", "--json")
    code, text = call("probe", *QUICK, *flags, "--out", out)
    document = json.loads(text)
    assert code == 0 and document.keys() >= KEYS
    assert all(point.keys() >= MEASURED for point in document["points"])
    assert document["largest_microbatch_size"] == 8
    assert "no larger size was asked for" in document["verdict"]
    assert (out / "figures" / "memory.png").stat().st_size > 10_000
    assert "Verdict" in (out / "probe.md").read_text()
