"""Tables of other people: what is read, what is not, and that both commands read the same."""

import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sweep
from sweep.analysis.any_table import read_one_table, read_table
from sweep.analysis.audit import audit
from sweep.analysis.cells import FACTORS, read_state
from sweep.analysis.text_tables import TextTable
from sweep.errors import SweepError
from sweep.trial.status import State

SIZES = (8, 16, 32, 64)


def read(header, body):
    return read_table(TextTable("the table", list(header), body, list(range(len(body)))))


def write(path, header, body):
    lines = [",".join(map(str, row)) for row in (header, *body)]
    path.write_text("\n".join(lines) + "\n")
    return path


HEADERS = [
    ("Loss [train]", "final_train_loss"),
    ("Loss (train)", "final_train_loss"),
    ("train/loss", "final_train_loss"),
    ("loss/train", "final_train_loss"),
    ("Loss [val]", "final_valid_loss"),
    ("valid/loss", "final_valid_loss"),
    ("eval_loss", "final_valid_loss"),
    ("Val loss (nats)", "final_valid_loss"),
    ("Best val loss", "best_valid_loss"),
    ("LR (peak)", "learning_rate"),
    ("max_lr", "learning_rate"),
    ("LR (min)", None),
    ("min_lr", None),
    ("LR (×1e-4)", None),
    ("Steps (warmup)", "warmup_steps"),
    ("Steps (optimizer)", "steps"),
    ("trainer/global_step", "steps"),
    ("max_iters", "steps"),
    ("_step", None),
    ("Micro steps", None),
    ("steps/s", None),
    ("Steps per epoch", None),
    ("Tokens (per second)", None),
    ("Tokens (M)", "token_budget"),
    ("Tokens (K/s)", None),
    ("tokens/s", None),
    ("Time (s)", "hours"),
    ("Time (s/step)", None),
    ("Time (per epoch)", None),
    ("Batch size (per GPU)", "microbatch_size"),
    ("per_device_train_batch_size", "microbatch_size"),
    ("micro_batch_size", "microbatch_size"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("Grad accum", "gradient_accumulation_steps"),
    ("# GPUs", "devices"),
    ("num_gpus", "devices"),
    ("world_size", "devices"),
    ("num_workers", None),
    ("GPU", "hardware"),
    ("accum_iter", "gradient_accumulation_steps"),
    ("update_freq", "gradient_accumulation_steps"),
    ("step", None),
    ("Params", "model_size"),
    ("cores", None),
    ("Test accuracy", None),
    ("Model", "model"),
    ("Data set", "dataset"),
    ("Optimiser", "optimizer"),
]


@pytest.mark.parametrize(("header", "column"), HEADERS)
def test_a_header_is_read_as_a_whole_or_not_at_all(header, column):
    titles = read(["batch_size", header], [["8", "3"]]).titles
    assert [name for name, title in titles.items() if title == header] == [column] * bool(column)


LOSSES = [
    (["Val Loss", "Test Loss"], "Val Loss"),
    (["Test Loss", "Val Loss"], "Val Loss"),
    (["test_loss", "loss", "eval_loss"], "eval_loss"),
    (["Loss", "Val loss"], "Val loss"),
    (["Test loss"], "Test loss"),
    (["Loss", "Train loss"], None),
    (["val_loss", "Val Loss"], None),
]


@pytest.mark.parametrize(("titles", "chosen"), LOSSES)
def test_a_batch_size_is_chosen_by_its_validation_loss(titles, chosen):
    table = read(["batch_size", *titles], [["8", *"123"[: len(titles)]]])
    assert table.titles.get("final_valid_loss") == chosen
    unread = {*titles} - {*table.titles.values()}
    named = " ".join((*table.ignored, *table.ambiguous))
    assert all(title in named for title in unread)


def test_a_test_loss_in_place_of_the_validation_loss_is_said():
    assert "Test Loss" in " ".join(read(["B", "Test Loss"], [["8", "1.5"]]).notes)
    assert "Test Loss" not in " ".join(read(["B", "Val Loss"], [["8", "1.5"]]).notes)


PARTS = [
    (["batch_size"], ["12"], 12),
    (["batch_size", "gradient_accumulation_steps"], ["12", "40"], None),
    (["batch_size", "gradient_accumulation_steps"], ["12", "1"], 12),
    (["batch_size", "GPUs"], ["12", "8"], None),
    (["batch_size", "GPUs"], ["12", "8×A100"], None),
    (["Effective batch size", "Grad accum"], ["480", "40"], 480),
    (["Micro batch size", "Grad accum", "GPUs"], ["12", "40", "2"], 960),
    (["Micro batch size", "Grad accum"], ["12", "40"], None),
    (["Batch size (per GPU)"], ["12"], None),
    (["batch_size", "micro_batch_size"], ["480", "12"], 480),
    (["batch_size", "micro_batch_size", "accumulation", "devices"], ["96", "12", "4", "2"], 96),
    (["batch_size", "micro_batch_size", "accumulation", "devices"], ["99", "12", "4", "2"], None),
    (["batch_size", "effective batch size"], ["12", "480"], 480),
]


@pytest.mark.parametrize(("titles", "cells", "size"), PARTS)
def test_a_batch_size_is_that_of_a_whole_step_or_is_not_known(titles, cells, size):
    table = read(titles, [cells])
    assert table.rows["batch_size"].to_list() == [size] * (size is not None)
    assert len(table.left_out) == (size is None)


CELLS = [
    ("8 (effective 64)", 64),
    ("8 (×16 accum = 128)", 128),
    ("8 (16 total)", None),
    ("16 (x8 GPUs)", None),
    ("32 (per device)", None),
    ("300 (full)", 300),
    ("8x8", None),
    ("64 (8 × 8)", None),
    ("1.5", None),
    ("-8", None),
    ("0", None),
    ("1,024", 1024),
    ("auto", None),
]


@pytest.mark.parametrize(("cell", "size"), CELLS)
def test_a_remark_after_a_batch_size_is_understood_or_the_row_is_left_out(cell, size):
    table = read(["Batch Size", "LR"], [[cell, "1e-3"]])
    assert table.rows["batch_size"].to_list() == [size] * (size is not None)
    assert (size is None) == any(cell in reason for reason in table.left_out)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        *((word, "COMPLETE") for word in ("finished", "COMPLETE", "Done ✓", "✅", "succeeded")),
        *((word, "FAILED") for word in ("crashed", "OOM", "diverged", "finished (diverged)")),
        *((word, "PRUNED") for word in ("PRUNED", "TrialState.PRUNED")),
        *((word, word.upper()) for word in ("running", "WAITING")),
        *((word, "unknown") for word in ("preempted", "CANCELLED", "early stopped", "?", "-")),
        *(
            (word, "unknown")
            for word in ("done, stopped early", "finished 3/10 epochs", "okay-ish")
        ),
    ],
)
def test_only_words_of_success_are_results(word, state):
    assert read_state(word)[0] == state


SUCCESSES = {"ok", "okay", "done", "complete", "completed", "success", "successful"}
SUCCESSES |= {"successfully", "succeeded", "finished", "passed"}
REMARKS = {"trialstate", "best", "final", "ours", "full", "no", "oom", "error", "errors", "after"}
REMARKS |= {"crash", "crashes", "restart", "restarts", "retry", "retries", "resume", "resumes"}
KNOWN_WORDS = SUCCESSES | REMARKS | {"attempt", "attempts"}
WORDS = st.sampled_from([*sorted(KNOWN_WORDS), "crashed", "pct", "False", "10", "3/10", "?", "✗"])


@given(st.lists(WORDS, max_size=4).map(" ".join) | st.text(max_size=20))
def test_a_success_has_words_of_success_only(text):
    if read_state(text)[0] == State.COMPLETE:
        words = {*re.findall(r"[^\W\d_]+", text.lower())}
        assert words <= KNOWN_WORDS and "?" not in text and "✗" not in text
        assert words & SUCCESSES or {*text} & {*"✓✔✅"}


STATES = [
    (["state", "status"], ["COMPLETE", "crashed"]),
    (["State", "Run status"], ["finished", "preempted"]),
    (["State", "Crashed"], ["finished", "True"]),
    (["State", "finished"], ["finished", "no"]),
    (["status", "OOM"], ["ok", "1"]),
    (["status", "diverged"], ["ok", "maybe"]),
]


@pytest.mark.parametrize(("titles", "cells"), STATES)
def test_every_column_that_tells_how_a_row_ended_counts(titles, cells):
    table = read(["batch_size", "val_loss", *titles], [["8", "1.5", *cells]])
    assert table.rows["is_failed"].all() and table.rows["final_valid_loss"].isna().all()


NOT_NUMBERS = [
    ("batch_size", ["4*32", "8~16", "32_64", "~~32~~", "128 tokens", "256 MB", "512 ms", "1.3B"]),
    ("batch_size", ["32k", "16 (diverged)", "24 (crashed)", "40 (OOM)"]),
    ("steps", ["5k epochs", "10 min", "1.5", "100 (of 500)"]),
    ("tokens", ["1 GB", "3 epochs", "5 GiB"]),
    ("warmup_steps", ["2 epochs", "0.1", "1%"]),
    ("val_loss", ["2 ppl", "2 acc", "2 bpc", "~~2.0~~", "1.5 (epoch 3)", "1.5 (train 1.2)"]),
    ("lr", ["1e-3 (min)", "1e-3 decay", "1e-3 → 1e-5"]),
    ("Time (h)", ["3 months", "2 h (per epoch)", "2 epochs"]),
    ("vram", ["12000 MiB", "24 GB"]),
    ("final_valid_loss", ["1." + "2" * 50 + "e-3"]),
]


@pytest.mark.parametrize(
    ("title", "cell"), [(title, cell) for title, cells in NOT_NUMBERS for cell in cells]
)
def test_a_cell_with_another_unit_or_remark_is_not_read_and_is_named(title, cell):
    header, row = ["batch_size", title], ["8", cell]
    if title == "batch_size":
        header, row = ["batch_size"], [cell]
    table = read(header, [row])
    (column,) = {*table.titles} - ({"batch_size"} if title != "batch_size" else set())
    assert table.rows[column].isna().all()
    assert any(cell[:20] in text for text in (*table.unread, *table.left_out))


@pytest.mark.parametrize(("cell", "size"), [("**32**", 32), ("`8`", 8), ("~3", 3), ("1_024", 1024)])
def test_emphasis_around_a_number_changes_nothing(cell, size):
    assert read(["B"], [[cell]]).rows["batch_size"].to_list() == [size]


ACCUMULATION = ["accum_iter", "update_freq", "grad_accum_every", "accumulate_grad_batches"]


@pytest.mark.parametrize("title", [*ACCUMULATION, "nodes", "dp_size", "num_replicas"])
def test_a_batch_size_next_to_any_number_of_parts_is_not_known(title):
    table = read(["batch_size", title], [["8", "4"], ["16", "1"]])
    assert table.rows["batch_size"].to_list() == [16] and len(table.left_out) == 1


@pytest.mark.parametrize(
    ("cell", "is_known"), [("8×A100", False), ("A100 x8", False), ("A100", True)]
)
def test_a_number_of_gpus_in_their_name_counts(cell, is_known):
    assert len(read(["batch_size", "Hardware"], [["8", cell]]).rows) == is_known


def test_a_row_whose_loss_is_not_read_has_not_failed():
    body = [["8", "1.5"], ["16", "<b>1.4</b>"], ["32", "NaN"], ["64", ""]]
    table = read(["B", "Val loss"], body)
    assert table.counts == {"with_result": 1, "failed": 2, "left_out": 1}


def test_two_validation_losses_are_not_chosen_between():
    table = read(["B", "val/loss", "eval/loss"], [["8", "1.5", "1.6"], ["16", "1.6", "1.5"]])
    assert table.rows["final_valid_loss"].isna().all() and len(table.ambiguous) == 2
    table = read(["B", "val_loss", "val_loss.1"], [["8", "1.5", "1.6"]])
    assert len(table.ambiguous) == 2


def test_a_table_without_a_loss_says_so():
    assert "No column of losses is read." in read(["B", "Accuracy"], [["8", "0.5"]]).notes


@pytest.mark.parametrize(
    "title", ["Val Loss (mean)", "Val loss (mean ± std)", "Val loss [nats/token]", "val loss"]
)
def test_a_mean_loss_is_a_loss(title):
    assert read(["B", title], [["8", "1.5 ± 0.1"]]).rows["final_valid_loss"].to_list() == [1.5]


def test_points_of_a_curve_are_not_trainings():
    points = [("100", "1.7"), ("200", "1.5")]
    body = [[b, "1e-3", step, loss] for b in "48" for step, loss in points]
    table = read(["B", "lr", "Step", "Val Loss"], body)
    assert len(table.rows) == 0 and len(table.left_out) == 4


def test_rows_that_nothing_tells_apart_are_not_averaged():
    body = [["8", "1e-3", "1.0"], ["8", "1e-3", "1.2"], ["16", "1e-3", "1.1"]]
    table = read(["B", "LR", "Loss"], body)
    assert table.rows["batch_size"].to_list() == [16] and len(table.left_out) == 2
    seeds = read(["B", "LR", "Loss", "Seed"], [[*row, str(k)] for k, row in enumerate(body)])
    assert len(seeds.rows) == 3 and seeds.left_out == ()
    same = read(["B", "LR", "Loss"], [body[0], body[0], body[2]])
    assert same.rows["batch_size"].to_list() == [8, 16]


@pytest.mark.parametrize("column", ["optimizer", "Model", "Dataset", "LR schedule", "policy"])
def test_rows_that_differ_in_more_than_the_batch_size_are_compared_apart(tmp_path, column):
    header = ["batch_size", column, "learning_rate", "val_loss", "seeds"]
    body = [[b, x, 1e-3, 1 + k / 10 + (x == "a"), 3] for k, b in enumerate(SIZES) for x in "ab"]
    body[-1][3] = 0.5  # b at the largest
    document = audit(write(tmp_path / "t.csv", header, body))
    edges = {f["message"].partition(":")[0]: f["rows"] for f in document["findings"]}
    assert edges[f"{column} a"] == [8] and edges[f"{column} b"] == [64]


def test_a_name_for_each_row_does_not_tear_a_table_apart(tmp_path):
    body = [[b, f"run-{b}", 1e-3, 1.5] for b in SIZES]
    document = audit(write(tmp_path / "t.csv", ["batch_size", "model", "lr", "val_loss"], body))
    assert [f["rows"] for f in document["findings"] if f["code"] == "fixed_learning_rate"]
    assert any("model" in note for note in document["notes"])


def test_another_number_of_steps_at_one_batch_size_hides_no_equal_steps(tmp_path):
    header = ["batch_size", "lr", "steps", "val_loss"]
    body = [[b, 1e-3, 5000, 2 - k / 10] for k, b in enumerate(SIZES)]
    rows = {}
    for name, more in (("a", []), ("b", [[16, 1e-3, 8000, 0.5]])):
        findings = audit(write(tmp_path / f"{name}.csv", header, [*body, *more]))["findings"]
        rows[name] = {f["code"]: f["rows"] for f in findings}["equal_steps_not_tokens"]
    assert rows["a"] == rows["b"] == [*SIZES]


BAD = [
    ("remark.csv", b"# run on A100, 2025\nbatch_size,lr,loss\n8,1,2\n", "line 2"),
    ("short.csv", b"batch_size,lr\n8,1e-3\n16\n", "line 3"),
    ("quote.csv", b'batch_size,lr\n8,"1e-3\n', "line 2"),
    ("utf16.csv", "batch_size,lr\n8,1e-3\n".encode("utf-16"), "UTF-16"),
    ("latin1.csv", b"batch_size,lr\n8,1e-3\n16,caf\xe9\n", "line 3"),
    ("accumulation.csv", b"batch_size,accumulation\n8,4\n", "accumulation 4"),
]


@pytest.mark.parametrize(("name", "content", "says"), BAD, ids=[name for name, *_ in BAD])
def test_a_refusal_says_what_is_wrong_and_where(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SweepError, match=says):
        audit(tmp_path / name)


def test_a_row_of_a_page_with_other_cells_than_the_header_is_left_out_and_named(tmp_path):
    page = tmp_path / "t.md"
    page.write_text("| B | LR |\n|-|-|\n| 8 | 1e-3 |\n| 16 | a | 1e-3 |\n| 32 | a\\|b |\n")
    notes = audit(page)["notes"]
    assert any("line 4" in note and "3 cells" in note for note in notes)
    assert "Rows: 2 with a result, 0 failed, 1 left out." in notes


# ---- properties -------------------------------------------------------------------------------

NUMBERS = st.sampled_from(["8", "16", "32", "64", "8 (effective 64)", "", "x", "1.5", "0.5M"])
VALUES = {
    "batch_size": NUMBERS,
    "lr": st.sampled_from(["1e-3", "3e-4", "0,001", "", "auto"]),
    "steps": st.sampled_from(["100", "200", "1k", "640.000", ""]),
    "val loss": st.sampled_from(["1.5", "1.4", "NaN", "OOM", "", "1,5"]),
    "status": st.sampled_from(["finished", "preempted", "crashed", "", "PRUNED", "RUNNING"]),
    "seed": st.sampled_from(["0", "1", "2", ""]),
    "optimizer": st.sampled_from(["adamw", "sgd", ""]),
    "stage": st.sampled_from(["report", "tune", "", "train"]),
    "accumulation": st.sampled_from(["1", "4", ""]),
}
BODIES = st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=8)


def body_of(rows):
    return [[row[name] for name in VALUES] for row in rows]


@settings(deadline=None, max_examples=60)
@given(BODIES, st.sets(st.sampled_from(sorted(VALUES)), min_size=1))
def test_every_row_has_a_result_or_failed_or_is_left_out_with_a_reason(rows, names):
    names = ["batch_size", *sorted(names - {"batch_size"})]
    table = read(names, [[row[name] for name in names] for row in rows])
    assert sum(table.counts.values()) == len(rows)
    places = [int(re.match(r"line (\d+) \(.+\)", reason)[1]) for reason in table.left_out]
    assert sorted([*table.rows.index, *places]) == list(range(len(rows)))


def findings_of(path, header, body):
    try:
        document = audit(write(path, header, body))
    except SweepError:
        return None
    return document["findings"], document["not_checked"], [t["rows"] for t in document["tables"]]


@settings(deadline=None, max_examples=25)
@given(BODIES, st.text("abc 0123456789.", max_size=8), st.data())
def test_an_ignored_column_changes_no_finding(tmp_path_factory, rows, word, data):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    body = [[f'"{cell}"' for cell in row] for row in body_of(rows)]
    plain = findings_of(path, [*VALUES], body)
    notes = data.draw(
        st.lists(st.text("abc 0123.", max_size=5), min_size=len(body), max_size=len(body))
    )
    with_note = [[*row, note] for row, note in zip(body, notes, strict=True)]
    assert findings_of(path, [*VALUES, f"remark {word}"], with_note) == plain


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(["3e-4", "1e-3", "2e-3"]),
    st.sampled_from(["finished", "crashed", "preempted", "diverged"]),
    st.sampled_from(["0", "7"]),
    st.sampled_from(["", "100", "9999"]),
)
def test_a_row_more_changes_no_finding_about_other_batch_sizes(
    tmp_path_factory, size, rate, status, seed, steps
):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    header = ["batch_size", "lr", "val loss", "status", "seed", "steps"]
    body = [
        [b, "1e-3", 1.5 + (k - 1.4) ** 2 / 10, "finished", 0, 1000] for k, b in enumerate(SIZES)
    ]
    documents = [
        findings_of(path, header, [*body, *more])[0]
        for more in ([], [[size, rate, "1.9", status, seed, steps]])
    ]
    before, after = (
        {f["code"]: {*f["rows"]} - {size} for f in findings if {*f["rows"]} - {size}}
        for findings in documents
    )
    assert before == after


REPORTS = pd.DataFrame(
    [
        {"batch_size": b, "seed": s, "val_loss": 1.5 + k / 10 + (7 * k + 3 * s) % 5 / 5000}
        for k, b in enumerate(SIZES)
        for s in range(3)
    ]
).assign(stage="report", policy="mine", learning_rate=1e-3, state="COMPLETE")


@settings(deadline=None, max_examples=40)
@given(st.text(min_size=1).filter(lambda text: text.strip()))
def test_a_policy_of_any_name_is_untuned_without_tuning_trials(name):
    try:
        answer = sweep.answer(REPORTS.assign(policy=name), "val_loss")
    except SweepError:  # no name that can be printed
        return
    assert answer.provisional and "learning rate" in " ".join(answer.reasons)


@pytest.mark.parametrize("name", ["tuned", "fixed 3e-4", "constant", "mup", "a, tuned", "sqrt"])
@pytest.mark.parametrize("rates", [[1e-3] * 4, [1e-3, 2e-3, 3e-3, 4e-3]])
def test_neither_names_nor_rates_that_differ_make_a_policy_tuned(name, rates):
    rate = REPORTS["batch_size"].map(dict(zip(SIZES, rates, strict=True)))
    answer = sweep.answer(REPORTS.assign(policy=name, learning_rate=rate), "val_loss")
    assert answer.provisional and answer.optimizers is None


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=12) | st.sampled_from(["finished (crashed)", "completed 50 pct", "ok?"]))
def test_a_state_that_is_not_known_only_weakens(word):
    trials = REPORTS.copy()
    trials.loc[trials.index[-1], "state"] = word
    words = {*re.findall(r"[^\W\d_]+", word.lower())}
    if (words and words <= KNOWN_WORDS) or {*word} & {*"✓✔✅"}:
        return  # it may be a success
    try:
        answer = sweep.answer(trials, "val_loss")
    except SweepError:
        return
    assert answer[64].seeds == 2 and answer.provisional


TUNED = pd.concat(
    [REPORTS]
    + [
        REPORTS[REPORTS["seed"] == 0]
        .assign(stage="tune", seed=1000, learning_rate=1e-3 * 2.0**k)
        .assign(val_loss=lambda trials, k=k: trials["val_loss"] + 0.1 * (k * 0.69) ** 2)
        for k in (-1, 0, 1)
    ],
    ignore_index=True,
).rename(columns={"val_loss": "final_valid_loss"})


def test_a_rate_outside_of_those_tried_was_not_tuned():
    assert not sweep.answer(TUNED).provisional
    is_it = (TUNED["batch_size"] == 8) & (TUNED["stage"] == "report")
    for rate in (8e-3, 1e-5):
        trials = TUNED.copy()
        trials.loc[is_it, "learning_rate"] = rate
        trials.loc[is_it, "final_valid_loss"] += 1.0
        answer = sweep.answer(trials)
        assert answer.provisional and answer.recommended != 8
        assert any("outside of those tried" in reason for reason in answer.reasons)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss_unit": "furlongs"}, "furlongs"),
        ({"steps": 100, "tokens_per_sequence": 64}, "Steps: 100"),
        ({"tokens": TUNED["batch_size"] * 1000}, "tokens"),
    ],
)
def test_what_is_unknown_or_unequal_makes_an_answer_provisional(change, says):
    answer = sweep.answer(TUNED.assign(**change))
    assert answer.provisional and says in " ".join(answer.reasons)


OTHER_TRAININGS = [
    {"n_layer": [4, 8] * 12},
    {"epochs": [1, 2] * 12},
    {"tokens_per_sequence": [64, 128] * 12},
]


@pytest.mark.parametrize("change", OTHER_TRAININGS)
def test_rows_of_other_models_or_epochs_are_refused(change):
    with pytest.raises(SweepError, match="must be the same in all rows"):
        sweep.answer(TUNED.assign(**change))


@pytest.mark.parametrize("stage", ["report", "tune"])
@pytest.mark.parametrize("state", ["PRUNED", "RUNNING", "FAILED", "preempted"])
def test_a_loss_on_the_way_is_no_result(stage, state):
    tuning = REPORTS[REPORTS["seed"] == 0].assign(stage="tune", seed=1000)
    tuning = pd.concat(
        tuning.assign(learning_rate=rate, val_loss=tuning["val_loss"] + 0.1 * abs(k))
        for k, rate in ((-1, 5e-4), (0, 1e-3), (1, 2e-3))
    )
    trials = pd.concat([REPORTS, tuning], ignore_index=True)
    extra = trials[(trials["stage"] == stage) & (trials["batch_size"] == 64)].iloc[:1]
    extra = extra.assign(state=state, val_loss=0.1, seed=77)
    answers = [sweep.answer(pd.concat([trials, *more]), "val_loss") for more in ([], [extra])]
    assert answers[0][64].mean == answers[1][64].mean
    assert answers[0][64].learning_rate == answers[1][64].learning_rate
    assert answers[0].recommended == answers[1].recommended == 8


@pytest.mark.parametrize("unit", [["nats", "bits"], ["nats", "accuracy"]])
def test_units_that_differ_are_not_mixed(unit):
    trials = REPORTS.rename(columns={"val_loss": "final_valid_loss"})
    with pytest.raises(SweepError, match="loss_unit must be the same"):
        sweep.answer(trials.assign(loss_unit=[unit[k % 2] for k in range(len(trials))]))


def test_the_audit_and_the_answer_read_the_same(tmp_path):
    header = [
        "Batch Size",
        "Stage",
        "Policy",
        "Seed",
        "Peak LR",
        "State",
        "Loss [train]",
        "Loss [val]",
    ]
    body = [
        [b, "report", "mine", s, "1e-3", "finished", 0.1, 1.5 + k / 10 + s / 1000]
        for k, b in enumerate(SIZES)
        for s in range(3)
    ]
    path = write(tmp_path / "t.csv", header, body)
    answer = sweep.answer(path)
    assert answer.recommended == 8 and answer[8].mean == pytest.approx(1.501)
    (edge,) = [f for f in audit(path)["findings"] if f["code"] == "batch_size_at_edge"]
    assert edge["rows"] == [8]
    path.write_text(path.read_text().replace(",", ";"))
    assert sweep.answer(path).batch_sizes == answer.batch_sizes


@pytest.mark.parametrize(
    "column", [name for name in FACTORS if name not in ("policy", "optimizer")]
)
def test_an_answer_is_about_one_model_data_set_and_schedule(column):
    trials = REPORTS.assign(**{column: ["a", "b", "a"] * 4})
    with pytest.raises(SweepError, match="must be the same in all rows"):
        sweep.answer(trials, "val_loss")


def test_an_answer_needs_headers_with_one_meaning():
    models = {"Model": ["a", "b"] * 12, "Architecture": ["c", "d"] * 12}
    with pytest.raises(SweepError, match="each header must have one meaning"):
        sweep.answer(TUNED.assign(**models))


def test_a_page_with_two_tables_has_no_one_answer(tmp_path):
    page = tmp_path / "t.md"
    page.write_text("| B | LR |\n|-|-|\n| 8 | 1e-3 |\n\n| B | LR |\n|-|-|\n| 8 | 1e-3 |\n")
    with pytest.raises(SweepError, match=r"line 1.*line 5"):
        read_one_table(page, "final_valid_loss")
