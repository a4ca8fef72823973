"""Tables of other people: what is read, what is not, and that both commands read the same."""

import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sweep
from sweep.analysis.any_table import read_cells, read_table, read_tables
from sweep.analysis.audit import audit
from sweep.analysis.cells import FACTORS, match_header, read_state
from sweep.analysis.checks import FAIL
from sweep.analysis.judge import judge_trials
from sweep.analysis.table_answer import answer_of
from sweep.analysis.text_tables import TextTable, cells_of, read_text_tables
from sweep.errors import SweepError
from sweep.trial.status import State
from tests.analysis.fake_sweeps import write_fake_sweep

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
    ("parameters", "model_size"),
    ("device", "hardware"),
    ("tokens_per_sequence", "context_length"),
    ("**Val. Loss** ↓", "final_valid_loss"),
    ("Loss ↑", "final_valid_loss"),
    ("ΔLoss", None),
    ("Val loss (Δ)", None),
    ("σ val loss", None),
    ("Val loss ±", None),
    ("Val loss*", None),
    ("- val loss", None),
    ("1 - val loss", None),
    ("Warmup %", None),
    ("% Steps", None),
    ("µSteps", None),
    ("∝ LR", None),
    ("B²", None),
    ("√B", None),
    ("min_time", None),
    ("time_min", None),
    ("Time (min)", "hours"),
    ("Tokens (b)", None),
    ("Tokens (m)", None),
    ("Tokens (B)", "token_budget"),
    ("Tokens (Mtokens)", "token_budget"),
    ("Context (k)", None),
    ("GPU(s)", "devices"),
    ("Clip rate %", "clipped_step_fraction"),
]


@pytest.mark.parametrize(("header", "column"), HEADERS)
def test_a_header_is_read_as_a_whole_or_not_at_all(header, column):
    titles = read(["batch_size", header], [["8", "3"]]).titles
    assert [name for name, title in titles.items() if title == header] == [column] * bool(column)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["Val Loss", "Batch Size", "Steps", "Time (s)", "GPUs", "LR", "Warmup"]),
    st.characters(min_codepoint=161, exclude_categories=["Z", "C", "M"])
    | st.sampled_from("%+=<>~^@"),
    st.booleans(),
)
def test_a_sign_in_a_header_that_is_not_known_hides_it(header, sign, is_first):
    if sign in "↓↑⬇⬆▼▲βηλ":
        return
    title = f"{sign}{header}" if is_first else f"{header} {sign}"
    assert match_header(header) and match_header(title) is None


LOSSES = [
    (["Val Loss", "Test Loss"], "Val Loss"),
    (["Test Loss", "Val Loss"], "Val Loss"),
    (["test_loss", "loss", "eval_loss"], "eval_loss"),
    (["Loss", "Val loss"], "Val loss"),
    (["Test loss"], "Test loss"),
    (["Loss", "Train loss"], None),
    (["val_loss", "Val Loss"], None),
    (["Train loss", "Final loss"], None),
    (["Final loss"], "Final loss"),
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
    (["batch_size", "per_device_train_batch_size", "n_gpu"], ["8", "8", "4"], None),
    (["batch_size", "per_device_train_batch_size", "n_gpu"], ["64", "8", "4"], 64),
    (["batch_size", "micro_batch_size", "grad_accum", "gpus"], ["8", "", "4", "2"], None),
    (["batch_size", "micro_batch_size", "grad_accum", "gpus"], ["8", "auto", "4", "2"], None),
    (["micro_batch_size", "grad_accum", "gpus"], ["8", "", "2"], None),
    (["batch_size", "grad_accum", "ga"], ["8", "4", "2"], None),
    (["batch_size", "grad_accum", "ga"], ["8", "1", "1"], 8),
    (["batch_size", "num_gpus", "world_size"], ["8", "8", "16"], None),
    (["batch_size", "train_batch_size", "micro_batch_size", "ga", "gpus"], [*"84222"], None),
    (["batch_size", "GPU"], ["12", "8"], None),
    (["batch_size", "device"], ["12", "8"], None),
    (["batch_size", "GPU", "Hardware"], ["12", "A100", "8×A100"], None),
    (["batch_size", "GPU(s)"], ["12", "8"], None),
    (["batch_size", "GPUs per node", "Nodes"], ["12", "8", "1"], None),
    (["batch_size", "nodes"], ["12", ""], None),
    (["micro_batch_size", "grad_accum", "gpus", "nodes"], ["4", "2", "8", "2"], None),
    (["micro_batch_size", "grad_accum", "gpus", "nodes"], ["4", "2", "8", "1"], 64),
    (["batch_size", "micro_batch_size", "grad_accum", "gpus", "nodes"], [*"84212"], None),
    (["Micro batch", "Grad acc", "GPUs", "TP", "PP"], ["4", "8", "64", "8", "1"], None),
    (["Micro batch", "Grad acc", "GPUs", "TP", "PP"], ["4", "8", "64", "1", "2"], None),
    (["Micro batch", "Grad acc", "GPUs", "TP", "PP"], ["4", "8", "64", "1", "1"], 2048),
    (
        ["Global batch size", "Micro batch", "Grad acc", "GPUs", "TP"],
        ["256", *"48", "64", "8"],
        256,
    ),
    (["Global batch size", "GPUs"], ["256", ""], 256),
    (["Global batch size", "GPUs"], ["256", "96"], None),
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
    ("4 x 8 = 32", 32),
    ("4 × 8 × 2 GPUs = 64", 64),
    ("4 x 8 = 64", None),
    ("8 (global batch size: 64)", 64),
    ("64 (effective 8)", None),
    *((f"8 ({remark})", None) for remark in ("lr=3e-4", "n=5", "GA=4", "seq=1024", "=1M tokens")),
    *(
        (f"8 ({remark})", None)
        for remark in ("total 2 GPUs", "effective 64k tokens", "x2 seeds = 16")
    ),
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
    (["status", "Preempted"], ["ok", "True"]),
    (["Early stopped"], ["True"]),
    (["was_interrupted", "timed out"], ["no", "yes"]),
    (["Converged"], [""]),
    (["Converged"], ["nan"]),
    (["Success"], ["-"]),
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
    ("Time (s)", ["9.8k", "1,5"]),
    ("Time (h)", ["5M", "1,250"]),
    ("val_loss", ["1.2k"]),
    ("Context", ["4k", "0.5M"]),
    ("Tokens (B)", ["1,311"]),
    ("Steps", ["0"]),
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


ONE_DEVICE = [
    "A100",
    "NVIDIA H100 80GB HBM3",
    "80GB A100",
    "RTX 4090",
    "1 A100",
    "1×V100",
    "TPU v4",
]
SEVERAL = ["8", "8 A100", "8 A100s", "2x A100", "A100-SXM4 x 8", "A100x8", "A100 (8)", "TPU v3-8"]


@pytest.mark.parametrize("cell", [*ONE_DEVICE, *SEVERAL, "2 nodes", "dual-node, 2 GPUs"])
def test_a_count_in_the_name_of_a_device_is_not_overlooked(cell):
    assert len(read(["batch_size", "GPU"], [["8", cell]]).rows) == (cell in ONE_DEVICE)


QUANTITIES = [("Error", "5.2"), ("Error", "12 %"), ("Success", "0.85"), ("Failure", "0.02 ± 0.01")]


@pytest.mark.parametrize(("title", "cell"), QUANTITIES)
def test_a_metric_with_the_name_of_a_flag_is_no_outcome(title, cell):
    table = read(["batch_size", "val_loss", title], [["8", "1.5", cell], ["16", "1.6", "1"]])
    assert table.counts["with_result"] == 2 and title in table.ambiguous


def test_a_metric_may_have_the_name_of_a_flag():
    trials = REPORTS.rename(columns={"val_loss": "error"})
    assert sweep.answer(trials, "error")[8].mean == pytest.approx(1.5, abs=0.01)


def test_an_empty_cell_among_ticks_is_no_success():
    table = read(["B", "Loss", "Finished"], [["8", "1.5", "✓"], ["16", "1.4", ""]])
    assert table.rows["is_failed"].to_list() == [False, True]


def test_nan_is_an_empty_cell_of_a_state():
    for word in ("nan", "NaN"):
        table = read(["B", "Loss", "State"], [["8", "1.5", word]])
        assert table.rows["status"].to_list() == [""] and not table.rows["has_diverged"].any()
    with pytest.raises(SweepError, match="state must be given, got an empty cell in row 0"):
        sweep.answer(TUNED.assign(state=["nan", *["COMPLETE"] * (len(TUNED) - 1)]))
    with pytest.raises(SweepError, match="state must be given, got an empty cell in row 0"):
        sweep.answer(TUNED.assign(state=[None, *["COMPLETE"] * (len(TUNED) - 1)]))


@pytest.mark.parametrize("state", ["crashed", "failed", "killed", "preempted", "finished"])
def test_a_missing_loss_bounds_no_rates(state):
    is_it = (TUNED["stage"] == "tune") & (TUNED["learning_rate"] > 1.5e-3)
    trials = TUNED.astype({"final_valid_loss": object})
    trials.loc[is_it, "state"] = state
    answers = []
    for loss in ("", "NaN", "nan"):
        trials.loc[is_it, "final_valid_loss"] = loss
        answers.append(sweep.answer(trials))
    assert all("best rate" in " ".join(answer.reasons) for answer in answers)
    assert all(answer.batch_sizes == answers[0].batch_sizes for answer in answers)
    trials.loc[is_it, "state"] = "diverged"
    assert sweep.answer(trials).reasons == []


def test_nan_in_any_column_of_losses_is_a_failure():
    table = read(["B", "Val loss", "Train loss"], [["8", "1.5", "NaN"], ["16", "1.4", ""]])
    assert table.rows["is_failed"].to_list() == [True, False]
    assert not table.rows["has_diverged"].any()


def test_a_best_loss_that_is_still_infinite_shows_no_divergence():
    body = [["8", "crashed", "NaN", "Infinity"], ["16", "crashed", "inf", "1.5"]]
    table = read(["B", "State", "Val loss", "Best val loss"], body)
    assert table.rows["has_diverged"].to_list() == [False, True]


def test_a_row_whose_loss_is_not_read_has_not_failed():
    body = [["8", "1.5"], ["16", "<b>1.4</b>"], ["32", "NaN"], ["64", ""]]
    table = read(["B", "Val loss"], body)
    assert table.counts == {"with_result": 1, "failed": 2, "left_out": 1}


def test_two_validation_losses_are_not_chosen_between():
    table = read(["B", "val/loss", "eval/loss"], [["8", "1.5", "1.6"], ["16", "1.6", "1.5"]])
    assert table.rows["final_valid_loss"].isna().all() and len(table.ambiguous) == 2
    table = read(["B", "val_loss", "val_loss.1"], [["8", "1.5", "1.6"]])
    assert len(table.ambiguous) == 2


@pytest.mark.parametrize("cells", [["2,101", "2,000"], ["2.1%", "2.0%"]])
def test_a_training_loss_does_not_stand_in_for_a_validation_loss_that_is_not_read(cells):
    body = [["8", cells[0], "1.5"], ["16", cells[1], "1.4"]]
    header = ["B", "Val loss", "Train loss"]
    table = read(header, body)
    assert "No loss is compared, because no cell of Val loss is read." in table.notes
    assert table.rows[["final_valid_loss", "final_train_loss"]].isna().all(axis=None)
    table = read(header, [*body, ["32", "1.5", "1.5"]])
    assert table.counts == {"with_result": 1, "failed": 0, "left_out": 2}


@pytest.mark.parametrize("header", [["B", "Train loss"], ["B", "Train loss", "Final loss"]])
def test_a_comparison_of_training_losses_is_said(header):
    table = read(header, [["8", "1.5", "1.6"][: len(header)]])
    assert any("training loss is compared" in note for note in table.notes)
    assert table.rows["final_valid_loss"].isna().all()


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


EQUAL_STEPS = {"equal_steps_not_tokens", "tokens_differ"}


def sizes_with(findings, codes):
    return {size for finding in findings if finding["code"] in codes for size in finding["rows"]}


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.sampled_from([100, 500, 777, 1000, 4000]), min_size=4, max_size=4),
    st.sampled_from([62, 125, 777, 1000, 9999]),
    st.sampled_from(["", "256"]),
)
def test_a_further_batch_size_takes_back_no_finding_about_tokens(
    tmp_path_factory, steps, added, context
):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    body = [[b, n, context] for b, n in zip(SIZES, steps, strict=True)]
    before, after = (
        audit(write(path, ["batch_size", "steps", "seq_len"], [*body, *more]))["findings"]
        for more in ([], [[128, added, context]])
    )
    assert sizes_with(before, EQUAL_STEPS) <= sizes_with(after, EQUAL_STEPS)
    equal = sizes_with(before, {"equal_steps_not_tokens"})
    assert equal <= sizes_with(after, {"equal_steps_not_tokens"})


@pytest.mark.parametrize(
    ("steps", "contexts", "sizes"),
    [
        ([1000, 2000, 1500], [1024] * 3, [8, 16, 32]),
        ([1000, 700, 450], [""] * 3, [8, 16, 32]),
        ([1000, 500, 250], [1024] * 3, []),
        ([1000, 500, 500], [1024, 1024, 512], []),
        ([1000, 500, 250], [1024, 512, 1024], [8, 16, 32]),
        ([7, 3, 1], [1024] * 3, []),  # a budget need not be whole steps
    ],
)
def test_tokens_that_follow_from_the_steps_are_compared(tmp_path, steps, contexts, sizes):
    rows = zip((8, 16, 32), steps, contexts, (2.0, 1.9, 2.1), strict=True)
    header = ["batch_size", "steps", "seq_len", "val_loss"]
    findings = audit(write(tmp_path / "t.csv", header, rows))["findings"]
    assert sorted(sizes_with(findings, EQUAL_STEPS)) == sizes


def test_a_second_batch_size_of_one_model_hides_no_fixed_rate(tmp_path):
    header = ["batch_size", "model", "lr", "val_loss"]
    body = [[b, f"m{b}", 1e-3, 1.5] for b in SIZES]
    for more in ([], [[128, "m8", 1e-3, 1.5]]):
        findings = audit(write(tmp_path / "t.csv", header, [*body, *more]))["findings"]
        assert {*SIZES} <= sizes_with(findings, {"fixed_learning_rate"})


@pytest.mark.parametrize("column", ["seq_len", "epochs"])
def test_other_lengths_of_training_are_compared_with_a_word(tmp_path, column):
    notes = []
    for values in ((1, 2, 1), (1, 1, 1)):
        body = [[b, value, 1.5] for b, value in zip((8, 16, 32), values, strict=True)]
        path = write(tmp_path / "t.csv", ["batch_size", column, "val_loss"], body)
        notes.append(" ".join(audit(path)["notes"]))
    assert f"differ in {column} too" in notes[0] and column not in notes[1]


COMMAS = [
    ("B;Time (s)\n8;7,225\n", "hours", None),
    ("B;Tokens\n8;327,680\n", "token_budget", None),
    ('B,Time (s)\n8,"7,225"\n', "hours", 7225 / 3600),
    ('B,Steps,Val loss\n8,"7,225","1,5"\n', "steps", None),  # here a comma separates decimals
]


@pytest.mark.parametrize(("text", "column", "number"), COMMAS)
def test_a_comma_is_read_unless_it_may_separate_decimals(tmp_path, text, column, number):
    (tmp_path / "t.csv").write_text(text)
    (table,) = [read_table(cells) for cells in read_text_tables(tmp_path / "t.csv")]
    values = table.rows[column].dropna().to_list()
    assert values == ([] if number is None else [pytest.approx(number)])
    assert bool(table.unread) == (number is None)


SCALES = [
    ("Tokens (Mtokens)", "100", "token_budget", 1e8),
    ("Tokens (B)", "1.5", "token_budget", 1.5e9),
    ("Batch size (ktok)", "512", "batch_size", 512_000),
    ("Batch size (M tokens)", "0.5", "batch_size", 500_000),
    ("Batch size (M)", "0.5", "batch_size", None),
    ("Batch size (k)", "4", "batch_size", None),
]


@pytest.mark.parametrize(("title", "cell", "column", "number"), SCALES)
def test_a_scale_of_a_header_is_applied_or_the_cell_is_not_read(title, cell, column, number):
    header, row = [title], [cell]
    if column != "batch_size":
        header, row = ["B", title], ["8", cell]
    assert read(header, [row]).rows[column].to_list() == [number] * (number is not None)


def test_one_column_of_batch_sizes_has_one_unit():
    body = [["65536", "1024"], ["131072", ""], ["262144", "4k"]]
    table = read(["Batch size (tokens)", "Context"], body)
    assert table.rows["batch_size"].to_list() == [64] and len(table.left_out) == 2
    assert all("without a context length" in reason for reason in table.left_out)
    assert not any("in tokens" in remark for remark in table.remarks)
    table = read(["Batch size (tokens)"], [["65536"]])
    assert table.rows["batch_size"].to_list() == [65536]
    assert any("in tokens" in remark for remark in table.remarks)


def test_zero_is_a_number_where_a_setting_may_be_zero():
    for column in ("warmup_steps", "weight_decay", "beta2"):
        table = read(["B", column], [["8", "0"]])
        assert table.unread == () and sweep.answer(TUNED.assign(**{column: 0.0})) is not None


def test_our_own_numbers_are_read_as_they_are_written(tmp_path):
    write_fake_sweep(tmp_path / "s", lrs=("1e-3",))
    trials = sweep.load_sweep(tmp_path / "s").trials
    trials = trials.assign(beta2=0.0, warmup_steps=0, steps=0, tokens=0)
    table = read_table(cells_of(trials))
    assert table.unread == () and table.left_out == ()
    assert table.trials()["beta2"].eq(0).all() and table.trials()["steps"].eq(0).all()


@pytest.mark.parametrize("column", ["device", "Hardware"])
def test_other_devices_are_found_in_tables_of_other_people(tmp_path, column):
    trials = TUNED.assign(execution="{}", **{column: ["A100", "H100"] * 12})
    path = tmp_path / "t.csv"
    trials.to_csv(path, index=False)
    findings = [f for f in audit(path)["findings"] if f["code"] == "mixed_execution"]
    assert findings and "A100, H100" in findings[0]["message"]
    (mixed,) = [
        check
        for result in judge_trials(read_table(cells_of(trials)).trials())
        for check in result.checks
        if check.code == "mixed_execution"
    ]
    assert mixed.status == FAIL


def test_a_column_target_of_other_people_changes_no_objective():
    answer = sweep.answer(TUNED.assign(target=3.0))
    assert answer.metric == "final_valid_loss" and not answer.provisional
    assert "target" in read_table(cells_of(TUNED.assign(target=3.0))).ignored


def test_a_tolerance_is_in_the_unit_of_the_metric():
    trials = TUNED.rename(columns={"final_valid_loss": "ppl"})
    answer = sweep.answer(trials, "ppl")
    assert answer.provisional and any("unit of ppl" in reason for reason in answer.reasons)
    assert "unit of ppl" in answer.scope
    chosen = sweep.answer(trials, "ppl", tolerance=0.01)
    assert not chosen.provisional and "unit of ppl" in chosen.scope
    assert "unit of" not in sweep.answer(TUNED).scope


def test_a_table_of_a_page_whose_rows_are_all_left_out_is_listed(tmp_path):
    page = tmp_path / "t.md"
    rows = "".join(f"| {b} | 4 |\n" for b in range(1, 9))
    page.write_text(f"| B | LR |\n|-|-|\n| 8 | 1 |\n\n| B | Grad accum |\n|-|-|\n{rows}")
    first, second = audit(page)["tables"]
    assert first["rows"]["with_result"] == 1
    assert second["rows"] == {"with_result": 0, "failed": 0, "left_out": 8}
    assert len(second["left_out"]) == 8 and "line 14" in second["left_out"][-1]


BAD = [
    ("remark.csv", b"# run on A100, 2025\nbatch_size,lr,loss\n8,1,2\n", "line 2"),
    ("short.csv", b"batch_size,lr\n8,1e-3\n16\n", "line 3"),
    ("quote.csv", b'batch_size,lr\n8,"1e-3\n', "line 2"),
    ("utf16.csv", "batch_size,lr\n8,1e-3\n".encode("utf-16"), "UTF-16"),
    ("sheet.xlsx", b"PK\x03\x04" + bytes(300), "spreadsheet.*as CSV"),
    ("sheet.csv", b"PK\x03\x04" + bytes(300), "spreadsheet.*as CSV"),
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
    "stage": st.sampled_from(["final", "report", "tune", "", "train"]),
    "accumulation": st.sampled_from(["1", "4", ""]),
}
BODIES = st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=8)


def body_of(rows):
    return [[row[name] for name in VALUES] for row in rows]


@pytest.mark.parametrize(
    ("stages", "is_read", "left_out"),
    [
        (("initial", "initial", "final", "final"), False, 0),
        (("", "", "", "final"), True, 0),
        (("", "", "", ""), True, 0),
        (("tune", "train", "final", "final"), True, 1),
        (("report", "train", "tune", "final"), True, 1),
    ],
)
def test_a_column_stage_is_read_if_its_words_are_ours(stages, is_read, left_out):
    body = [[str(b), stage, "1.5"] for b, stage in zip(SIZES, stages, strict=True)]
    table = read(["batch_size", "stage", "loss"], body)
    assert ("stage" in table.titles) == is_read and ("stage" in table.ambiguous) != is_read
    assert len(table.left_out) == left_out and len(table.rows) == len(SIZES) - left_out


@settings(deadline=None, max_examples=60)
@given(BODIES, st.sets(st.sampled_from(sorted(VALUES)), min_size=1))
def test_every_row_has_a_result_or_failed_or_is_left_out_with_a_reason(rows, names):
    names = ["batch_size", *sorted(names - {"batch_size"})]
    table = read(names, [[row[name] for name in names] for row in rows])
    assert sum(table.counts.values()) + table.skipped == len(rows)
    places = [int(re.match(r"line (\d+) \(.+\)", reason)[1]) for reason in table.left_out]
    present = {*table.rows.index, *places}
    assert len(present) == len(table.rows) + len(places) == len(rows) - table.skipped
    skipped = [rows[place] for place in {*range(len(rows))} - present]
    assert all(row["batch_size"] == "" for row in skipped)


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
).assign(stage="final", policy="mine", learning_rate=1e-3, state="COMPLETE")


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
    is_it = (TUNED["batch_size"] == 8) & (TUNED["stage"] == "final")
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
        ({"steps": TUNED["batch_size"].map({8: 9, 16: 50, 32: 70, 64: 30})}, "Training sequences"),
    ],
)
def test_what_is_unknown_or_unequal_makes_an_answer_provisional(change, says):
    answer = sweep.answer(TUNED.assign(**change))
    assert answer.provisional and says in " ".join(answer.reasons)


def test_an_answer_from_a_metric_without_values_names_the_flag_for_another(tmp_path):
    path = tmp_path / "trials.csv"
    rewards = -TUNED["final_valid_loss"]
    TUNED.assign(final_valid_loss="", final_valid_reward=rewards).to_csv(path, index=False)
    lacking = answer_of(path, "final_valid_loss", "minimize", None)
    assert lacking.answer is None and "--metric names another column" in lacking.sentences[0]
    assert answer_of(path, "final_valid_reward", "maximize", None).answer is not None


OTHER_TRAININGS = [
    {"n_layer": [4, 8] * 12},
    {"parameters": [1000, 2000] * 12},
    {"epochs": [1, 2] * 12},
    {"tokens_per_sequence": [64, 128] * 12},
]


@pytest.mark.parametrize("change", OTHER_TRAININGS)
def test_rows_of_other_models_or_epochs_are_refused(change):
    with pytest.raises(SweepError, match="must be the same in all rows"):
        sweep.answer(TUNED.assign(**change))


@pytest.mark.parametrize("stage", ["final", "tune"])
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
        read_cells(page)


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ("params_batch_size", "batch_size"),
        ("config/batch_size", "batch_size"),
        ("params.lr", "learning_rate"),
        ("metrics.val_loss", "final_valid_loss"),
        ("user_attrs_seed", "seed"),
        ("hparams/optimizer", "optimizer"),
        ("per_device_train_batch_size", "microbatch_size"),
        ("params", "model_size"),
        ("config", None),
    ],
)
def test_headers_of_exporters_are_read_without_their_prefix(header, column):
    match = match_header(header)
    assert (None if match is None else match[0]) == column


@pytest.mark.parametrize(
    ("cell", "hours"),
    [("00:20:30", 20.5 / 60), ("1 days 01:00:00.000000", 25.0), ("0 days 00:00:36", 0.01)],
)
def test_times_of_a_clock_are_read(tmp_path, cell, hours):
    (tmp_path / "t.csv").write_text(f"batch_size,duration\n8,{cell}\n")
    (table,) = read_tables(tmp_path / "t.csv")
    assert table.rows["hours"].to_list() == [pytest.approx(hours)]


def test_decimal_commas_of_a_file_with_semicolons_are_read_and_said(tmp_path):
    (tmp_path / "t.csv").write_text("Batch Size;Val Loss;Steps\n8;1,551;1000\n16;1,62;500\n")
    (table,) = read_tables(tmp_path / "t.csv")
    assert table.rows["final_valid_loss"].to_list() == [1.551, 1.62]
    assert any(
        "Commas separate decimals" in note and "1,62 is 1.62" in note for note in table.notes
    )


@pytest.mark.parametrize("name", ["t.txt", "t.tsv", "t"])
def test_tabs_and_markdown_are_read_whatever_the_suffix(tmp_path, name):
    for text in ("batch_size\tval_loss\n8\t1.5\n", "| batch | val loss |\n|--|--|\n| 8 | 1.5 |\n"):
        (tmp_path / name).write_text(text)
        (table,) = read_tables(tmp_path / name)
        assert table.rows["final_valid_loss"].to_list() == [1.5]
