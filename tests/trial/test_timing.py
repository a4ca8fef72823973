"""timing.json: what it covers, and damage that its reader refuses."""

import pytest

from sweep.config.arms import Arm
from sweep.config.execution import Execution
from sweep.errors import CorruptFile, SweepError
from sweep.trial.files import read_json, seal, write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.timing import ArmTimes, read_timing, write_timing
from tests.fakes.times import timing_of

EIGHT, SIXTEEN = Arm(None, 8), Arm(None, 16)
ON_CPU = Execution(device="cpu", threads=2)


@pytest.fixture
def folder(tmp_path):
    return SweepFolder(tmp_path)


def test_times_are_read_as_they_were_written(folder):
    assert read_timing(folder, "uid") is None
    timing = timing_of({EIGHT: [0.1, 0.2], SIXTEEN: [0.3, 0.4]}, sweep_uid="uid")
    write_timing(folder, timing)
    assert read_timing(folder, "uid") == timing
    times = timing.times_of(SIXTEEN)
    assert times.seconds_per_step == (0.3, 0.4)
    assert times.seconds_per_sequence == (0.3 / 16, 0.4 / 16)
    assert timing.times_of(Arm("muon", 8)) is None


def test_it_covers_arms_with_the_same_microbatch_and_may_have_more():
    timing = timing_of({EIGHT: [0.1], SIXTEEN: [0.2]}, microbatch_sizes={EIGHT: 8, SIXTEEN: 8})
    assert timing.covers({EIGHT: 8, SIXTEEN: 8}) and timing.covers({EIGHT: 8})
    assert not timing.covers({EIGHT: 4, SIXTEEN: 8})
    assert not timing.covers({EIGHT: 8, Arm(None, 32): 8})
    assert not timing.covers({Arm("adamw", 8): 8})


@pytest.mark.parametrize(
    ("changes", "is_alike"),
    [
        ({}, True),
        ({"keep": "none", "checkpoint_seconds": 1.0}, True),
        ({"threads": 1}, False),
        ({"device": "cuda"}, False),
        ({"compile": True}, False),
        ({"loss_chunk_rows": 256}, False),
        ({"graph_bound": 4}, False),
    ],
)
def test_it_is_of_an_execution_that_takes_the_same_time(changes, is_alike):
    timing = timing_of({EIGHT: [0.1]}, execution=ON_CPU)
    other = ON_CPU.model_copy(update=changes)
    assert timing.is_of(other.model_dump(mode="json")) == is_alike


def test_a_setting_that_an_older_version_lacks_had_its_default():
    timing = timing_of({EIGHT: [0.1]}, execution=ON_CPU)
    older = timing.model_copy(update={"execution": dict(timing.execution)})
    del older.execution["graph_bound"]
    assert older.is_of(ON_CPU.model_dump(mode="json"))
    assert not older.is_of(ON_CPU.model_copy(update={"graph_bound": 4}).model_dump(mode="json"))


def test_gpus_of_one_machine_count_as_the_same_device():
    timing = timing_of({EIGHT: [0.1]}, execution=Execution(device="cuda:1"))
    assert timing.is_of(Execution(device="cuda").model_dump(mode="json"))


def test_times_of_another_sweep_are_refused(folder):
    write_timing(folder, timing_of({EIGHT: [0.1]}, sweep_uid="other"))
    with pytest.raises(CorruptFile, match=r"timing\.json belongs to another sweep"):
        read_timing(folder, "uid")


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": -1},
        {"rounds": 2},
        {"arms": [{"batch_size": 8}]},
        {"arms": None},
        {"device": None},
        {"unknown": 1},
    ],
)
def test_a_sealed_file_without_what_times_have_is_refused(folder, change):
    write_timing(folder, timing_of({EIGHT: [0.1]}, sweep_uid="uid"))
    document = read_json(folder.timing_path) | change
    write_json(folder.timing_path, document)
    with pytest.raises(CorruptFile, match="lacks what measured times have"):
        read_timing(folder, "uid")


def test_changed_bytes_and_another_format_are_refused(folder):
    write_timing(folder, timing_of({EIGHT: [0.1]}, sweep_uid="uid"))
    text = folder.timing_path.read_text()
    folder.timing_path.write_text(text.replace("0.1", "0.2"))
    with pytest.raises(CorruptFile, match="does not match its sha256"):
        read_timing(folder, "uid")
    folder.timing_path.write_text(str(seal({"format_version": 1})).replace("'", '"'))
    with pytest.raises(SweepError, match="format_version"):
        read_timing(folder, "uid")


def test_times_are_positive_and_finite():
    fields = timing_of({EIGHT: [0.1]}).arms[0].model_dump()
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="seconds_per_step"):
            ArmTimes.model_validate({**fields, "seconds_per_step": [wrong]})


def test_every_round_has_a_time_of_each_arm():
    with pytest.raises(ValueError, match="every round"):
        timing_of({EIGHT: [0.1, 0.2], SIXTEEN: [0.3]})
