"""The faults of the published table are found, each rule finds its own, a clean table has none."""

import csv
import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.analysis.any_table import read_table, read_tables
from sweep.analysis.audit import audit
from sweep.analysis.checks import FAIL, check_rows
from sweep.analysis.checks.table import prepare
from sweep.analysis.results import load_sweep
from sweep.analysis.tables import write_trials_csv
from sweep.analysis.text_tables import TextTable
from sweep.errors import SweepError
from tests.analysis.fake_sweeps import write_fake_sweep

PUBLISHED = Path(__file__).with_name("tinystories-sweep.csv")
BATCHES = (8, 32, 128, 512)
BUDGET = 131_072_000
LOSS = {8: 1.33, 32: 1.3, 128: 1.35, 512: 1.37}
MARKDOWN = """# A sweep

| Batch Size | Status | Steps | Tokens | Ctx | Peak LR | Time | Final Val Loss | Best Val Loss |
|----:|:--:|--------|---------|-----|------|----------|--------|--------|
| 1 | ✓ | 25,701 | 327.68M | 256 | 3e-4 | 7.22 hrs | 1.3893 | 1.3778 |
| **8** | ✓ | **3,301** | 327.68M | 256 | 3e-4 | 3.06 hrs | **1.3199** | 1.3199 |
| 32 | ✓ | 901 | 327.68M | 256 | 3e-4 | 2.11 hrs | 1.3923 | 1.3902 |
| 64 | ✓ | 501 | 327.68M | 256 | 3e-4 | 1.67 hrs | 1.4370 | 1.4341 |
| 128 | ✓ | 251 | 327.68M | 256 | 3e-4 | 1.43 hrs | 1.5008 | 1.4868 |
| 256 | ✓ | 126 | 327.68M | 256 | 3e-4 | 7.56 hrs | 1.5965 | 1.5908 |
| 512 | ✗ | 0 | 327.68M | 256 | 3e-4 | N/A | N/A | N/A |

More text | with a pipe.
"""


def clean_rows(**changes):
    """Rows of a sound sweep: rates ∝ √B, β2 and τ constant; a change is a function of B."""
    sound = {
        "batch_size": lambda b: b,
        "status": lambda b: "OK",
        "steps": lambda b: BUDGET // (b * 256),
        "hours": lambda b: 4 / b**0.3,
        "final_valid_loss": lambda b: LOSS[b],
        "best_valid_loss": lambda b: LOSS[b],
        "learning_rate": lambda b: 1e-3 * (b / 32) ** 0.5,
        "context_length": lambda b: 256,
        "token_budget": lambda b: BUDGET,
        "warmup_steps": lambda b: round(0.01 * BUDGET / (b * 256)),
        "seeds": lambda b: 3,
        "weight_decay": lambda b: 0.1 * (b / 32) ** 0.5,
        "adam_beta2": lambda b: 0.999 ** (b / 32),
        "clipped_step_fraction": lambda b: 0.05,
    }
    columns = {name: rule for name, rule in (sound | changes).items() if rule is not None}
    return [{name: rule(batch) for name, rule in columns.items()} for batch in BATCHES]


NOT_PUBLISHED = ["policy", "cause", "epochs"]  # columns that are judged if a table has them


def read(header, body):
    table = read_table(TextTable("the table", list(header), body, list(range(len(body)))))
    return table.rows, table.notes


def find(rows):
    """Return the failed checks of a table by code, and the columns that the others lack."""
    header = list(rows[0])
    body = [["" if row[name] is None else str(row[name]) for name in header] for row in rows]
    checks = check_rows(prepare(read(header, body)[0].drop(columns=NOT_PUBLISHED), False))
    failed = {check.code: check for check in checks if check.status == FAIL}
    missing = {check.code: check.missing_columns for check in checks if check.missing_columns}
    return failed, missing


def faults(rows):
    return {code: list(check.batch_sizes) for code, check in find(rows)[0].items()}


def by_code(document):
    return {finding["code"]: finding for finding in document["findings"]}


def test_every_fault_of_the_published_table_is_found_and_nothing_else():
    document = audit(PUBLISHED)
    findings = by_code(document)
    six = [1, 8, 32, 64, 128, 256]
    assert {code: finding["rows"] for code, finding in findings.items()} == {
        "steps_are_log_rows": six,
        "fixed_learning_rate": six,
        "single_seed": six,
        "warmup_fraction": [256],
        "seconds_per_step_outlier": [256],
        "best_of_evaluations": [1, 32, 64, 128, 256],
        "missing_batch_size": [512],
    }
    assert document["not_checked"] == [
        {"code": "adamw_time_scale", "missing_columns": ["weight_decay"]},
        {"code": "beta2_half_life", "missing_columns": ["adam_beta2"]},
        {"code": "clip_rate_differs", "missing_columns": ["clipped_step_fraction"]},
    ]
    says = {code: finding["message"] for code, finding in findings.items()}
    assert "25,701 rows for 1,280,000 steps" in says["steps_are_log_rows"]
    assert "2.000% at batch size 256" in says["warmup_fraction"]
    for number in ("5.443 s", "0.515 s", "10.6 times", "2 times the work", "15.99 GiB"):
        assert number in says["seconds_per_step_outlier"]
    assert all(finding["remedy"].endswith(".") for finding in findings.values())


def test_time_scales_are_checked_if_their_columns_are_given():
    with PUBLISHED.open() as file:
        added = {"weight_decay": 0.1, "adam_beta2": 0.999, "clipped_step_fraction": 0.1}
        rows = [{**row, **added} for row in csv.DictReader(file)]
    failed, missing = find(rows)
    assert missing == {}
    evidence = failed["adamw_time_scale"].evidence
    assert "0.026 at batch size 1 to 6.67 at batch size 256" in evidence
    evidence = failed["beta2_half_life"].evidence
    assert "177,357 at batch size 1 to 45,403,377 at batch size 256" in evidence


def test_a_markdown_page_is_read_like_the_same_csv(tmp_path):
    page = tmp_path / "sweep.md"
    page.write_text(MARKDOWN)
    document, published = audit(page), by_code(audit(PUBLISHED))
    rows = {code: finding["rows"] for code, finding in by_code(document).items()}
    absent = {"single_seed", "warmup_fraction"}
    assert rows == {code: item["rows"] for code, item in published.items() if code not in absent}
    assert absent <= {check["code"] for check in document["not_checked"]}


def test_every_table_of_a_page_is_audited_by_its_own_line(tmp_path):
    page = tmp_path / "sweep.md"
    page.write_text(
        "| B | LR | Seeds |\n|--|--|--|\n| 8 | 1e-3 | 1 |\n| 16 | 1e-3 | 1 |\n\n"
        "| x |\n|--|\n| 1 |\n\n"
        "| BS | Val Loss | Warmup |\n|--|--|--|\n| 8 | 1.5 | 10 |\n| 16 | OOM | 10 |\n"
    )
    document = audit(page)
    findings = [(f["code"], f["message"].partition(":")[0]) for f in document["findings"]]
    assert findings == [
        ("fixed_learning_rate", "the table at line 1"),
        ("single_seed", "the table at line 1"),
        ("missing_batch_size", "the table at line 10"),
    ]
    absent = {check["code"]: check["missing_columns"] for check in document["not_checked"]}
    assert "single_seed" not in absent and "steps" in absent["warmup_fraction"]


HEADERS = [
    ("Steps (k)", "16", "steps", 16_000),
    ("Gradient updates", "1.6e4", "steps", 16_000),
    ("Tokens (M)", "131.072", "token_budget", BUDGET),
    ("Training tokens", "131.072M", "token_budget", BUDGET),
    ("Time (min)", "90", "hours", 1.5),
    ("Wall-clock (s)", "5,400", "hours", 1.5),
    ("Training time", "1.5 hrs", "hours", 1.5),
    ("duration_seconds", "5400.0", "hours", 1.5),
    ("Time", "1.5", "hours", None),
    ("Time per step", "1.5 s", "hours", None),
    ("Peak LR", "**3e-4**", "learning_rate", 3e-4),
    ("η", "0.0003", "learning_rate", 3e-4),
    ("LR (×1e-4)", "3", "learning_rate", None),
    ("LR", "3×10⁻⁴", "learning_rate", None),
    ("LR", "1e-4, 3e-4", "learning_rate", None),
    ("LR", "0,001", "learning_rate", None),
    ("Val. Loss ↓", "1.35 ± 0.01", "final_valid_loss", 1.35),
    ("best validation loss", "−0.5", "best_valid_loss", -0.5),
    ("Val Loss", "1,389", "final_valid_loss", None),
    ("Seq len", "1_024", "context_length", 1024),
    ("Warm-up", "1%", "warmup_steps", None),
    ("# seeds", "~3", "seeds", 3),
    ("Adam β2", ".999", "adam_beta2", 0.999),
    ("WD", "0", "weight_decay", 0),
    ("Steps", "1,280,000", "steps", 1_280_000),
    ("Steps", "1e400", "steps", None),
    ("Steps", "-5", "steps", None),
    ("Steps", "nan", "steps", None),
    ("Steps", "7" * 100_000, "steps", None),
    ("Steps", "x" * 200_000 + "1", "steps", None),
]


@pytest.mark.parametrize(("header", "cell", "column", "value"), HEADERS)
def test_documented_headers_and_numbers_are_read_and_others_never_guessed(
    header, cell, column, value
):
    rows, notes = read(["Batch Size", header], [["8", cell]])
    numbers = rows[column].dropna().to_list()
    assert numbers == ([] if value is None else [pytest.approx(value, rel=1e-12)])
    is_named = any("Cells not read" in note or "Columns ignored" in note for note in notes)
    assert is_named is (value is None and cell != "nan")


ENDED_WELL = ["OK", "**OK** after 2 crashes", "✓ (no OOM)", "completed", "done (best)", "FINISHED"]
FAILED = ["OOM", "CUDA out of memory", "CUDA_OOM", "failed", "✗", "finished, diverged", "timeout"]
FAILED += ["early stopped", "stopped at ep 3", "preempting", "CANCELLED", "done 3/10", "n/a"]
FAILED += ["?", "finished (crashed)", "ok?", "✗ ok"]
FAILED += ["completed 50 pct", "success = False", "passed out", "completed w/ OOM retries"]


@pytest.mark.parametrize("status", [*ENDED_WELL, *FAILED])
def test_words_of_failure_in_a_status_mark_the_row(status):
    rows = clean_rows(status=lambda b: status if b == 32 else "OK")
    assert faults(rows).get("missing_batch_size", []) == [32] * (status in FAILED)


@pytest.mark.parametrize("cell", ["nan", "inf", "diverged", "OOM"])
def test_a_loss_that_is_no_number_is_a_failed_run(cell):
    rows = clean_rows(final_valid_loss=lambda b: cell, best_valid_loss=None, status=None)
    assert find(rows)[0]["missing_batch_size"].batch_sizes == BATCHES
    empty = clean_rows(final_valid_loss=lambda b: "", best_valid_loss=None, status=None)
    assert "missing_batch_size" in find(empty)[1]


def test_the_more_specific_of_two_columns_counts_and_the_other_is_named():
    header = ["Batch Size", "Effective Batch Size", "LR", "Peak LR", "Note"]
    rows, notes = read(header, [["8", "32", "1", "1e-3", "a"], ["mean", "", "", "", ""]])
    assert rows["batch_size"].to_list() == [32]
    assert rows["learning_rate"].to_list() == [1e-3]
    assert notes == [
        "Rows: 1 with a result, 0 failed, 1 left out.",
        "No column of losses is read.",
        "Rows left out: line 1 (without a batch size).",
        "Columns ignored: Batch Size, LR, Note.",
    ]


def test_neither_of_two_columns_that_could_be_the_same_is_read_unless_they_agree():
    rows, notes = read(["B", "LR", "LR"], [["8", "1e-3", "1"]])
    assert rows["learning_rate"].isna().all()
    assert any("learning_rate" in note and "not read" in note for note in notes)
    rows, _ = read(["B", "LR", "lr"], [["8", "1e-3", "1e-3"]])
    assert rows["learning_rate"].to_list() == [1e-3]


SOUND = [
    {},
    {"weight_decay": lambda b: 0.1 * (b / 32) ** (1 / 3)},  # τ ∝ B^⅙: ×2 over 8 … 512
    {"adam_beta2": lambda b: 0.999 ** ((b / 32) ** (5 / 6))},
    {"warmup_steps": lambda b: 650 if b == 8 else 5120 // b + (b == 512)},  # within 2 %, a step
]


@pytest.mark.parametrize("change", SOUND)
def test_a_clean_table_has_no_finding_and_nothing_unchecked(change):
    assert find(clean_rows(**change)) == ({}, {})


FIXED_RATE = {"learning_rate": lambda b: 3e-4, "weight_decay": lambda b: 0.1 * b / 32}
NO_BEST = {"best_valid_loss": None}
FAULTS = [
    ("tokens_mismatch", [8, 32, 128, 512], {"steps": lambda b: BUDGET // (b * 256) // 8}),
    ("tokens_mismatch", [512], {"steps": lambda b: BUDGET // (b * 256) + 30 * (b == 512)}),
    ("steps_are_log_rows", [8, 32, 128, 512], {"steps": lambda b: BUDGET // (b * 25_600) + 11}),
    ("fixed_learning_rate", list(BATCHES), FIXED_RATE),
    ("single_seed", [8], {"seeds": lambda b: 1 if b == 8 else 5}),
    ("single_seed", [8, 32, 128, 512], {"seeds": lambda b: 2}),
    ("warmup_fraction", [512], {"warmup_steps": lambda b: 5120 // b if b < 512 else 100}),
    ("warmup_fraction", [8, 32, 128, 512], {"warmup_steps": lambda b: 200}),
    ("seconds_per_step_outlier", [128], {"hours": lambda b: 9 if b == 128 else 4 / b**0.3}),
    ("adamw_time_scale", [8, 32, 128, 512], {"weight_decay": lambda b: 0.1}),
    ("beta2_half_life", [8, 32, 128, 512], {"adam_beta2": lambda b: 0.95}),
    ("clip_rate_differs", list(BATCHES), {"clipped_step_fraction": lambda b: 8 * 0.9 / b}),
    ("best_of_evaluations", [32], {"best_valid_loss": lambda b: LOSS[b] - 0.005 * (b == 32)}),
    ("best_of_evaluations", [8, 32, 128, 512], {"final_valid_loss": None}),
    ("missing_batch_size", [512], {"status": lambda b: "CUDA OOM" if b == 512 else "ok"} | NO_BEST),
    ("missing_batch_size", [8], {"final_valid_loss": lambda b: None if b == 8 else 1.3} | NO_BEST),
]


@pytest.mark.parametrize(("code", "batches", "change"), FAULTS)
def test_each_rule_finds_its_fault_alone_and_blames_its_rows(code, batches, change):
    assert faults(clean_rows(**change)) == {code: batches}


def test_equal_steps_are_not_equal_tokens():
    steps = {"steps": lambda b: 2000, "warmup_steps": lambda b: 20, "weight_decay": None}
    rows = clean_rows(**steps, token_budget=lambda b: 2000 * b * 256)
    assert faults(rows) == {"equal_steps_not_tokens": list(BATCHES)}
    codes = set(faults(clean_rows(**steps | {"warmup_steps": None})))
    assert codes == {"equal_steps_not_tokens", "tokens_mismatch"}


def test_steps_to_a_target_without_a_budget_are_no_mismatch():
    steps = {"steps": lambda b: 600 + 400_000 // b, "token_budget": None, "warmup_steps": None}
    failed, missing = find(clean_rows(**steps, weight_decay=None, hours=None))
    assert set(failed) == {"tokens_differ"} and missing["tokens_mismatch"] == ("token_budget",)


def tuned_rows(grids, seeds=3, **changes):
    """A grid of rates around √-scaled ones; `grids` gives factors and losses by batch size."""
    return [
        {**row, "learning_rate": row["learning_rate"] * factor, "final_valid_loss": loss}
        | {"seeds": seeds, "weight_decay": row["weight_decay"] / factor}
        for row in clean_rows(best_valid_loss=None, **changes)
        for factor, loss in grids(row["batch_size"])
    ]


def test_one_rate_that_won_everywhere_was_not_the_only_one_tried():
    rates = {"learning_rate": lambda b: 1e-3, "weight_decay": lambda b: 0.1 * b / 32}
    rows = tuned_rows(lambda b: zip((0.5, 1, 2), (1.4, 1.3, 1.35), strict=True), **rates)
    assert faults(rows) == {}


def test_a_best_rate_at_the_edge_of_its_grid_is_named_by_its_batch_size():
    def grids(batch):
        losses = (1.4, 1.35, 1.3) if batch == 128 else (1.4, 1.3, 1.35)
        return zip((0.5, 1, 2), losses, strict=True)

    failed, _ = find(tuned_rows(grids))
    assert set(failed) == {"learning_rate_at_edge"}
    assert failed["learning_rate_at_edge"].batch_sizes == (128,)
    evidence = failed["learning_rate_at_edge"].evidence
    assert "128: 0.004 is the best rate of 3 trials, with results at 0.001 to 0.004" in evidence


@pytest.mark.parametrize(
    ("status", "loss", "bounds"),
    [
        *(("diverged", None, True), ("diverged", 0.1, True), ("crashed", "inf", True)),
        *((None, word, True) for word in ("inf", "diverged")),
        *((status, "NaN", False) for status in (None, "crashed", "killed", "finished", "")),
        *((status, None, False) for status in ("pruned", "error", "OOM", "")),
    ],
)
def test_only_a_rate_that_diverged_bounds_the_grid_without_a_loss(status, loss, bounds):
    rows = tuned_rows(lambda batch: zip((0.5, 1, 2), (1.4, 1.3, loss), strict=True))
    for row in rows:
        if status is None:
            del row["status"]
        elif row["final_valid_loss"] == loss:
            row["status"] = status
    assert faults(rows).get("learning_rate_at_edge", []) == ([] if bounds else list(BATCHES))


def test_tuning_trials_count_for_the_rates_tried_and_nothing_else():
    tuning = tuned_rows(lambda batch: zip((0.5, 1, 2), (1.31, 1.3, 1.4), strict=True), seeds=1)
    tuning = [{**row, "stage": "tune", "steps": 7} for row in tuning]
    reported = clean_rows(final_valid_loss=lambda b: 1.5, best_valid_loss=None)
    rows = [*tuning, *({**row, "stage": "final"} for row in reported)]
    assert find(rows) == ({}, {"best_of_evaluations": ("best_valid_loss",)})


@pytest.mark.parametrize(
    "rows",
    [
        {1_280_000: 25_701, 20_000: 501},  # two numbers of steps
        {1_280_000: 25_600, 20_000: 400, 5_000: 100},  # one share of the steps
        {1_280_000: 25_701, 20_000: 501, 5_000: 5_000},  # steps in one row
        {1_280_000: 126, 20_000: 501, 5_000: 2_000},  # more rows for fewer steps
        {1_280_000: 2_000, 20_000: 2_000, 5_000: 2_000},  # the same steps everywhere
        {1_280_000: 2_561_000, 20_000: 50_100, 5_000: 12_600},  # more than the steps
    ],
)
def test_wrong_steps_that_no_log_would_have_are_a_mismatch(rows):
    (row,) = clean_rows(token_budget=lambda b: 2_560_000 * 256, warmup_steps=None, hours=None)[:1]
    table = [{**row, "batch_size": 2_560_000 // t, "steps": rows[t]} for t in rows]
    codes = set(faults(table))
    assert "tokens_mismatch" in codes
    assert "steps_are_log_rows" not in codes


def test_equal_rows_of_logs_are_no_equal_steps():
    rows = [
        {"batch_size": b, "steps": steps, "context_length": 128, "token_budget": 40_960_000}
        | {"loss": loss}
        for b, steps, loss in ((8, 55, 1.5), (16, 53, 1.4), (32, 52, 1.6))
    ]
    assert set(faults(rows)) == {"steps_are_log_rows"}


def test_steps_that_are_log_rows_make_a_recommendation_provisional():
    failed, _ = find(clean_rows(steps=lambda b: BUDGET // (b * 25_600) + 11))
    assert failed["steps_are_log_rows"].blocks_claims


def test_sgd_has_no_adamw_time_scale():
    rows = clean_rows(weight_decay=lambda b: 0.1)
    assert "adamw_time_scale" in faults(rows)
    assert "adamw_time_scale" not in faults([{**row, "Optimizer": "SGD"} for row in rows])
    mixed = [{**row, "Optimizer": "SGD" if row["batch_size"] == 8 else "adamw"} for row in rows]
    assert "adamw_time_scale" in faults(mixed)


def test_sgd_has_no_half_life_of_a_second_moment():
    rows = clean_rows(adam_beta2=lambda b: 0.999)
    assert "beta2_half_life" in faults(rows)
    assert "beta2_half_life" not in faults([{**row, "Optimizer": "sgd"} for row in rows])


def test_half_of_the_steps_may_be_those_of_two_devices_and_are_no_log_rows():
    halved = faults(clean_rows(steps=lambda b: BUDGET // (b * 256) // 2))
    assert "tokens_mismatch" in halved and "steps_are_log_rows" not in halved


def test_thousands_are_not_guessed_below_headers_with_words_in_parentheses():
    rows, notes = read(["B", "Steps (optimizer)"], [["8", "64.000"], ["16", "32.000"]])
    assert rows["steps"].isna().all() and "64.000" in " ".join(notes)
    rows, _ = read(["B", "Tokens (M)"], [["8", "1.024"]])
    assert rows["token_budget"].tolist() == [1_024_000]


@pytest.mark.parametrize(
    ("title", "cell", "share"),
    [
        ("Clip rate", "1e-3", 0.001),
        ("Clip rate", "0.02 ± 0.01", 0.02),
        ("Steps clipped", "2 %", 0.02),
    ],
)
def test_shares_of_clipped_steps_are_read_as_people_write_them(title, cell, share):
    rows, _ = read(["B", title], [["8", cell]])
    assert rows["clipped_step_fraction"].tolist() == [pytest.approx(share)]


def test_batch_sizes_in_tokens_are_divided_by_the_context():
    rows, _ = read(["Batch size (tokens)", "ctx", "iters"], [["524,288", "1024", "640"]])
    assert rows["batch_size"].to_list() == [512] and rows["steps"].to_list() == [640]
    rows, _ = read(["Batch size (M tokens)", "ctx"], [["0.524288", "1024"]])
    assert rows["batch_size"].to_list() == [512]


@pytest.mark.parametrize(
    ("title", "cells", "context", "sizes"),
    [
        ("Batch size (tokens)", ["0.5M", "1M", "2M", "3.2M"], "2048", [256, 512, 1024]),
        ("Batch (k tokens)", ["64", "128"], "1024", [64, 128]),
        ("BS (tok)", ["65536"], "1024", [64]),
        ("batch_size_tokens", ["100000"], "100", [1000]),
        ("Tokens per batch", ["65,536"], "", [65536]),  # the context is missing
    ],
)
def test_tokens_per_batch_are_read_as_people_write_them(title, cells, context, sizes):
    header, end = ([title, "ctx"], [context]) if context else ([title], [])
    rows, _ = read(header, [[cell, *end] for cell in cells])
    assert rows["batch_size"].tolist() == sizes


def test_a_rate_that_stands_outside_of_the_table_can_be_given(tmp_path):
    page = tmp_path / "sweep.csv"
    page.write_text("batch_size,steps,loss\n8,100,1.0\n16,50,1.1\n")
    assert "fixed_learning_rate" in {item["code"] for item in audit(page, 3e-4)["findings"]}
    assert "fixed_learning_rate" in {item["code"] for item in audit(page)["not_checked"]}


def test_seeds_as_rows_are_counted_and_one_that_failed_is_missing():
    rows = [{**row, "seed": seed, "seeds": None} for row in clean_rows() for seed in range(3)]
    assert find(rows) == ({}, {})
    rows[0] |= {"status": "error", "final_valid_loss": None}
    assert faults(rows) == {"single_seed": [8], "missing_batch_size": [8]}


def test_hours_are_known_no_better_than_they_are_written():
    hours = {8: 0.1, 32: 0.1, 128: 0.1, 512: 0.2}
    assert find(clean_rows(hours=lambda b: hours[b])) == ({}, {})
    slow = clean_rows(hours=lambda b: hours[b] + 0.001)
    assert set(faults(slow)) == {"seconds_per_step_outlier"}


def test_a_ranking_that_changes_is_a_finding_however_small_the_bias():
    loss = {8: 1.3004, 32: 1.3, 128: 1.4, 512: 1.5}
    best = loss | {8: 1.2999}
    rows = clean_rows(final_valid_loss=lambda b: loss[b], best_valid_loss=lambda b: best[b])
    evidence = find(rows)[0]["best_of_evaluations"].evidence
    assert "(8, 32, 128, 512, not 32, 8, 128, 512)" in evidence


def test_an_older_trials_csv_with_fewer_columns_is_recognised(tmp_path):
    write_fake_sweep(tmp_path / "s", lrs=("1e-3", "sqrt"))
    write_trials_csv(load_sweep(tmp_path / "s"), tmp_path / "new.csv")
    table = pd.read_csv(tmp_path / "new.csv").drop(columns=["tokens_to_target", "seconds_noise"])
    table.to_csv(tmp_path / "old.csv", index=False)
    old, new = audit(tmp_path / "old.csv"), audit(tmp_path / "new.csv")
    assert old["findings"] == new["findings"] != []


def test_a_folder_gives_its_trials_then_another_csv_then_a_page(tmp_path):
    (tmp_path / "b.md").write_text("| batch | seeds |\n|-|-|\n| 8 | 2 |\n")
    assert "2 at every" in audit(tmp_path)["findings"][0]["message"]
    (tmp_path / "c.csv").write_text("batch_size;seeds\n8;1\n")
    assert "1 at every" in audit(tmp_path)["findings"][0]["message"]
    (tmp_path / "trials.csv").write_text("batch_size,seeds\n8,3\n")
    assert audit(tmp_path)["findings"] == []


BAD = [
    ("empty.csv", b"", "must be CSV"),
    ("header.csv", b"batch_size,steps\n", "column batch_size"),
    ("words.md", b"# No table\n\nx | y\n", "column batch_size"),
    ("rule.md", b"\n|" + b"-" * 300_000 + b"x|\n|-|\n", "column batch_size"),
    ("other.csv", b"model,loss\na,1\n", "column batch_size"),
    ("nan.csv", b"batch_size\nnan\n1.5\n-8\n0\n1e300\n", "column batch_size"),
    ("binary.csv", bytes(range(256)), "UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "says"), BAD, ids=[name for name, *_ in BAD])
def test_a_file_without_a_table_is_refused_in_one_sentence(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SweepError, match=says):
        audit(tmp_path / name)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(SweepError, match=r"must be a \.csv, \.tsv or \.md file"):
        audit(tmp_path)
    with pytest.raises(SweepError, match=r"missing\.csv must exist"):
        audit(tmp_path / "missing.csv")


@settings(deadline=None, max_examples=25)
@given(
    budget=st.integers(30_000_000, 2_000_000_000),
    context=st.sampled_from([64, 256, 2048]),
    batches=st.sets(st.integers(1, 2048), min_size=1, max_size=8),
    exponent=st.floats(0.25, 1),
    fraction=st.floats(0.002, 0.05),
    half_life=st.floats(1e6, 2e7),
    factors=st.sampled_from([(1,), (0.5, 1, 2)]),
)
def test_clean_tables_have_no_findings(
    budget, context, batches, exponent, fraction, half_life, factors
):
    rows = []
    for k, batch in enumerate(sorted(batches)):
        steps = max(1, budget // (batch * context))
        for factor in factors:
            loss = 1.3 + abs(k - len(batches) // 2) / 50 + (factor != 1) / 10
            row = {"batch_size": batch, "steps": steps, "context_length": context, "seeds": 3}
            row |= {"token_budget": budget, "final_valid_loss": loss, "best_valid_loss": loss}
            row["hours"] = round(5 / min(batch, 64) ** 0.5, 3)
            row["learning_rate"] = 1e-3 * (batch / 32) ** exponent * factor
            row["weight_decay"] = 0.1 * (batch / 32) ** (1 - exponent) / factor
            row["warmup_steps"] = max(1, math.floor(fraction * steps + 0.5))
            row["adam_beta2"] = 0.5 ** (batch * context / half_life)
            row["clipped_step_fraction"] = 0.01
            rows.append(row)
    assert find(rows) == ({}, {})


CELLS = st.sampled_from(["1", "8", "1e300", "nan", "", "OOM", "-3", "0", "1e-18", "é|", '"', "✗"])
TITLES = "steps hours LR seeds seed WD beta2 ctx loss tokens warmup status stage best_val_loss"


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(CELLS, min_size=9, max_size=9), min_size=1, max_size=6),
    st.lists(st.sampled_from(TITLES.split()), min_size=8, max_size=8),
)
def test_nonsense_in_cells_never_raises(rows, names):
    table, _ = read(["batch_size", *names], rows)
    checks = check_rows(prepare(table.drop(columns=NOT_PUBLISHED), False))
    assert not [check for check in checks if check.status == FAIL and check.missing_columns]


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet='|-:,;"\n\r \tb8batch size', max_size=80), st.sampled_from(["md", "csv"]))
def test_any_text_is_read_or_refused(tmp_path_factory, text, suffix):
    path = tmp_path_factory.mktemp("text") / f"t.{suffix}"
    path.write_text(text)
    try:
        assert any(len(table.rows) for table in read_tables(path))
    except SweepError as error:
        assert "must" in str(error)
