"""Advice about memory: every row is a forecast of its own, and the least change that fits."""

import pytest

from sweep.config.numbers import parse_bytes
from sweep.errors import SweepError
from sweep.orchestration.advice import advise_memory
from sweep.orchestration.memory import forecast_memory
from sweep.report.report import markdown_of

QUICK = {"batches": (64,), "context": 64}
GRPO = {
    "model": "quick",
    "batches": (16,),
    "workload": {"kind": "grpo", "task": "words", "new_tokens": 8, "prompt_tokens": 8},
}


def rows_by_flags(document):
    return {row["flags"] or row["name"]: row for row in document["advice"]["rows"]}


@pytest.fixture(scope="module")
def advised():
    return advise_memory("quick", **QUICK, device_memory="30MiB")


def test_each_row_equals_a_forecast_of_its_own(advised):
    rows = rows_by_flags(advised)
    whole = "--microbatch 64"
    assert {whole, "--microbatch 32", f"{whole} --activation-checkpointing"} < {*rows}
    assert {f"{whole} --loss-chunk-rows 256", f"{whole} --precision bf16-pure"} < {*rows}
    assert [row["name"] for row in rows.values()][-3:] == ["speed", "balanced", "memory"]
    for row in rows.values():
        own = forecast_memory("quick", **QUICK, **row["settings"], device_memory="30MiB")
        assert row["peak_bytes"] == own["points"][0]["peak_bytes"]
        assert row["largest_microbatch_size"] == own["largest_microbatch_size"]
        assert row["saved_bytes"] == rows[whole]["peak_bytes"] - row["peak_bytes"]
    assert "a second forward pass" in [*rows.values()][-1]["effect"]


def test_the_plans_microbatch_is_the_least_change_if_it_fits(advised):
    least = advised["advice"]["least"]
    assert least["fits"] and least["flags"] == "" and least["gradient_accumulation_steps"] > 1


def test_a_given_microbatch_is_made_smaller_together_with_other_settings():
    settings = {"batches": (16,), "microbatch": 16, "device_memory": "3.95MiB"}
    least = advise_memory("quick", **settings)["advice"]["least"]
    assert least["fits"] and "--microbatch 1 " in f"{least['flags']} "
    assert least["effect"].startswith("the same losses")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "flags", "is_split"),
    [("1GiB", "", False), ("3.4MiB", "--precision bf16-pure", True)],
)
def test_the_least_change_is_the_first_that_fits(memory, flags, is_split):
    document = advise_memory("quick", **QUICK, device_memory=memory)
    least = document["advice"]["least"]
    assert least["fits"] and least["flags"] == flags
    assert least["peak_bytes"] <= parse_bytes(memory)
    assert (least["gradient_accumulation_steps"] > 1) is is_split


@pytest.mark.slow
def test_where_nothing_fits_that_is_said():
    assert advise_memory("quick", **QUICK, device_memory="1MiB")["advice"]["least"] is None
    assert advise_memory("quick", **QUICK)["advice"]["least"] is None  # no limit


@pytest.mark.slow
def test_grpo_has_settings_of_its_own():
    rows = rows_by_flags(advise_memory("grpo-words", **GRPO, data="synthetic"))
    alone = {flags.removeprefix("--microbatch 16 ") for flags in rows}
    assert {"--group-size 4", "--generation-batch-size 8", "[workload] kl = 0.0"} < alone
    names = [row["name"] for row in rows.values() if row["name"]]
    assert names == ["as one microbatch", "speed", "balanced", "memory"]


def test_the_page_shows_the_rows_and_the_least_change(advised):
    text = markdown_of(advised)
    assert "--activation-checkpointing` |" in text and "| speed: `--microbatch 64 --loss-" in text
    assert "The least change that fits: a microbatch of" in text


def test_a_microbatch_that_was_given_may_be_smaller_in_the_least_change():
    document = advise_memory("quick", batches=(64,), microbatch=64, device_memory="30MiB")
    assert "microbatch" in document["advice"]["least"]["settings"]


def test_accumulation_is_refused_with_the_remedy():
    with pytest.raises(SweepError, match="Give --microbatch"):
        advise_memory("quick", batches=(64,), accumulation=4)
