"""JSON files are whole or absent; metrics.jsonl is truncated on resume."""

import json
import math

import pytest

from sweep.errors import CorruptFile, Superseded, SweepError
from sweep.trial import files
from sweep.trial.files import (
    MetricsLog,
    is_start_intact,
    read_json,
    read_metrics,
    replacing,
    seal,
    sha256_of_file,
    write_json,
)
from sweep.version import FORMAT_VERSION


def test_what_is_written_is_read(tmp_path):
    document = {"x": [1, 2.5, None], "y": {"z": "ü"}}
    write_json(tmp_path / "a.json", document)
    assert read_json(tmp_path / "a.json") == {"format_version": FORMAT_VERSION, **document}


CHANGED = json.dumps({**seal({"x": 1}), "x": 2})


NESTED = "[" * 200_000
NOT_FINITE = json.dumps({**seal({"x": 1}), "x": math.nan})


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"x": 1}', "\x00\x01", CHANGED, NESTED, NOT_FINITE]
)
def test_damaged_and_changed_files_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CorruptFile, match=r"a\.json"):
        read_json(path)
    path.write_text(json.dumps(seal({"x": 1, "format_version": 99})))
    with pytest.raises(SweepError, match="format_version"):
        read_json(path)


@pytest.mark.parametrize(("version", "is_read"), [(1, False), (2, False), (3, True), (99, False)])
def test_a_file_of_another_format_names_the_version_that_reads_it(tmp_path, version, is_read):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(seal({"format_version": version})))
    with pytest.raises(SweepError) as caught:
        read_json(path)
    assert ("version 0.1 of sweep" in str(caught.value)) is is_read


def test_a_failed_check_or_write_keeps_the_old_file_and_leaves_no_part(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})

    def refuse():
        raise Superseded

    with pytest.raises(Superseded):
        write_json(path, {"x": 2}, refuse)
    with pytest.raises(Superseded):
        MetricsLog(path, 0, refuse)
    with pytest.raises(OSError), replacing(path) as part:
        part.write_text("half")
        raise OSError("disk full")
    assert read_json(path)["x"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_lines_are_read_back_and_non_finite_values_become_null(tmp_path):
    log = MetricsLog(tmp_path / "m", 0, lambda: None)
    log.append({"time": 1.5, "step": 1, "tokens": 8, "train/loss": 9.25})
    log.append({"time": 2.5, "step": 2, "tokens": 16, "train/loss": math.nan})
    log.close()
    assert [line["train/loss"] for line in read_metrics(tmp_path / "m")] == [9.25, None]
    assert log.length == (tmp_path / "m").stat().st_size
    assert log.sha256 == sha256_of_file(tmp_path / "m")


def test_resume_keeps_the_known_start_and_orphans_reach_nothing(tmp_path):
    path = tmp_path / "m"
    orphan = MetricsLog(path, 0, lambda: None)
    orphan.append(point(1))
    length, sha256 = orphan.length, orphan.sha256
    orphan.append(point(2))
    with path.open("ab") as file:
        file.write(b'{"step": 3, "torn')  # killed in the middle of a line
    assert is_start_intact(path, length, sha256)
    log = MetricsLog(path, length, lambda: None)
    orphan.append(point(4))
    log.append(point(2))
    assert read_metrics(path) == [point(1), point(2)]
    log.close()
    orphan.close()


def point(step):
    return {"time": 1.5, "step": step, "tokens": 8 * step}


def test_an_incomplete_last_line_is_left_out(tmp_path):
    lines = [json.dumps(point(step)) + "\n" for step in (1, 2, 3)]
    (tmp_path / "m").write_text("".join(lines)[:-5])
    assert read_metrics(tmp_path / "m") == [point(1), point(2)]
    assert read_metrics(tmp_path / "m", length=len(lines[0]) + 3) == [point(1)]


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", '{"step": 1}', "[" * 200_000, json.dumps({**point(1), "x": "text"})]
)
def test_a_damaged_line_is_refused(tmp_path, line):
    (tmp_path / "m").write_text(f"{json.dumps(point(1))}\n{line}\n")
    with pytest.raises(CorruptFile, match="damaged"):
        read_metrics(tmp_path / "m")


def test_a_changed_start_is_not_intact(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"abc")
    sha256 = sha256_of_file(path)
    path.write_bytes(b"abX")
    assert not is_start_intact(path, 3, sha256)
    assert not is_start_intact(path, 4, sha256)
    assert not is_start_intact(tmp_path / "missing", 3, sha256)


def test_a_curve_is_bounded_where_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_CURVE_BYTES", 1000)
    log = MetricsLog(tmp_path / "m", 0, lambda: None)
    position = {"time": 1.0, "step": 1, "tokens": 1}
    with pytest.raises(SweepError, match="less often"):
        for _ in range(100):
            log.append({**position, "train/loss": 1.0})
    log.close()
    assert 10 < len(read_metrics(tmp_path / "m")) < 20


@pytest.mark.parametrize("name", ["loss", "train/..", "train//x", "train/a b", "train/Loss"])
def test_no_curve_gets_a_metric_that_a_store_refuses(tmp_path, name):
    log = MetricsLog(tmp_path / "m", 0, lambda: None)
    position = {"time": 1.0, "step": 1, "tokens": 1}
    log.append({**position, "train/loss": 1.0, "perf/mfu": None})
    with pytest.raises(SweepError, match="metrics"):
        log.append({**position, "train/loss": 1.0, name: 1.0})
    log.close()
    assert read_metrics(tmp_path / "m") == [{**position, "train/loss": 1.0, "perf/mfu": None}]
