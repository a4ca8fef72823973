"""What programs write by themselves, read into the lines of a log."""

import json

import pytest

from sweep.errors import SweepError
from sweep.script import metric_name
from sweep.usercode.readers import Places, build_reader, refuse_unknown_reader


@pytest.fixture
def places(tmp_path):
    output = tmp_path / "log.txt"
    output.write_text("an earlier attempt: step 9, loss 9.9\n")
    work = tmp_path / "work"
    work.mkdir()
    return Places((work, tmp_path / "resume"), output, output.stat().st_size)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "train/loss"),
        ("train_loss", "train/loss"),
        ("eval_loss", "valid/loss"),
        ("val/acc", "valid/acc"),
        ("validation loss", "valid/loss"),
        ("Loss/val", "valid/loss"),
        ("eval_rewards/accuracies", "valid/rewards_accuracies"),
        ("grad_norm", "train/grad_norm"),
        ("learning_rate", None),
        ("train/learning_rate", None),
        ("epoch", None),
        ("val_loss_epoch", "valid/loss"),
        ("train_loss_step", None),
        ("trainer/global_step", None),
        ("eval_samples_per_second", None),
        ("eval_runtime", None),
        ("valid", None),
        ("", None),
    ],
)
def test_a_metric_has_one_name_whatever_a_library_calls_it(name, expected):
    assert metric_name(name) == expected


def test_the_history_of_a_trainer_is_read_as_it_grows_and_again_if_it_shrinks(places):
    history = [
        {"epoch": 0.1, "step": 0, "eval_loss": 3.0, "eval_runtime": 1.0},
        {"epoch": 0.2, "step": 5, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3},
    ]
    state = places.folders[1] / "checkpoint-5" / "trainer_state.json"
    reader = build_reader("trainer_state.json", places)
    assert [*reader.read()] == []  # nothing is written yet
    state.parent.mkdir(parents=True)
    state.write_text('{"log_history": [')
    assert [*reader.read()] == []  # it is being written
    state.write_text(json.dumps({"log_history": history}))
    expected = [
        {"step": 0, "valid/loss": 3.0},
        {"step": 5, "train/loss": 2.5, "train/grad_norm": 1.0},
    ]
    assert [*reader.read()] == expected and [*reader.read()] == []
    history.append({"step": 10, "eval_loss": float("nan"), "eval_name": "x"})
    history.append({"step": 10, "train_runtime": 1.0, "train_loss": 2.7})
    state.write_text(json.dumps({"log_history": history}))
    assert [*reader.read()] == [{"step": 10, "valid/loss": None}]
    assert reader.describe() == "--read trainer_state.json: 3 lines, 2 left out"
    state.write_text(json.dumps({"log_history": history[:1]}))
    assert [*reader.read()] == expected[:1]


def test_the_rows_of_lightning_count_steps_from_0(places):
    path = places.folders[0] / "lightning_logs" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    reader = build_reader("metrics.csv", places)
    path.write_text("epoch,step,train_loss,val_loss\n0,4,2.5,\n0,9,,2.0\n0,14,1.")
    expected = [{"step": 5, "train/loss": 2.5}, {"step": 10, "valid/loss": 2.0}]
    assert [*reader.read()] == expected
    path.write_text("epoch,step,train_loss,val_loss\n0,4,2.5,\n0,9,,2.0\n0,14,1.5,oops\n")
    assert [*reader.read()] == [{"step": 15, "train/loss": 1.5}]
    assert reader.left_out == 1
    newer = path.parents[1] / "version_1" / "metrics.csv"
    newer.parent.mkdir()
    newer.write_text("step,val_loss\n19,1.0\n")
    assert [*reader.read()] == [{"step": 20, "valid/loss": 1.0}]


def test_groups_of_an_expression_are_read_from_whole_lines_of_this_attempt(places):
    pattern = r"regex:step (?P<step>\d+).* loss (?P<train_loss>\S+?)(, val (?P<valid_loss>\S+))?$"
    reader = build_reader(pattern, places)
    with places.output.open("a") as file:
        file.write("step 5: loss 2.5, val 3.0\rstep 6: loss nan\nstep x\nstep 7: lo")
    assert [*reader.read()] == [
        {"step": 5, "train/loss": 2.5, "valid/loss": 3.0},
        {"step": 6, "train/loss": None},
    ]
    with places.output.open("a") as file:
        file.write("ss 2.25\nstep 8: loss 2.5k\n")
    assert [*reader.read()] == [{"step": 7, "train/loss": 2.25}]
    assert reader.describe() == "--read regex: 3 lines, 1 left out"
    from_0 = build_reader(r"regex:it (?P<step_from_0>\d+) (?P<eval_acc>\S+)", places)
    with places.output.open("a") as file:
        file.write("it 0 0.5\n")
    assert [*from_0.read()] == [{"step": 1, "valid/acc": 0.5}]
    counting = build_reader(r"regex:at (?P<step>\d+) (?P<loss>\S+) (?P<tokens>\d+)", places)
    with places.output.open("a") as file:
        file.write("at 2 0.5 64\n")
    assert [*counting.read()] == [{"step": 2, "train/loss": 0.5, "tokens": 64.0}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("trainer_states.json", "Did you mean"),
        ("trainer_state.json:x", "must be trainer_state.json, metrics.csv"),
        ("tensorboard", "must be trainer_state.json"),
        ("regex:(", "must be a regular expression"),
        (r"regex:(?P<step>\d+)", "a group"),
        (r"regex:(?P<loss>\d+)", "a group"),
        (r"regex:(?P<step>\d+) (?P<step_from_0>\d+) (?P<loss>\d+)", "a group"),
        (r"regex:(?P<step>\d+) (?P<learning_rate>\S+)", "a group"),
    ],
)
def test_a_reader_that_is_unknown_or_incomplete_is_refused(text, problem):
    with pytest.raises(SweepError, match=problem):
        refuse_unknown_reader(text)


def test_a_last_line_without_an_end_counts_once_the_program_has_ended(places):
    reader = build_reader(r"regex:step (?P<step>\d+), loss (?P<loss>[\d.]+)", places)
    with places.output.open("a") as output:
        output.write("step 1, loss 2.5\nstep 2, loss 2.")
    assert [*reader.read()] == [{"step": 1, "train/loss": 2.5}]
    with places.output.open("a") as output:
        output.write("25")
    assert [*reader.read()] == []
    assert [*reader.read(is_last=True)] == [{"step": 2, "train/loss": 2.25}]


def test_entries_without_a_metric_are_counted(places):
    state = places.folders[1] / "trainer_state.json"
    state.parent.mkdir(parents=True)
    history = [{"step": 1, "learning_rate": 1e-3}, {"step": 1, "loss": 2.0}]
    state.write_text(json.dumps({"log_history": history}))
    reader = build_reader("trainer_state.json", places)
    assert len([*reader.read()]) == 1
    assert reader.describe() == "--read trainer_state.json: 1 lines, 1 left out"
