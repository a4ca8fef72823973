"""metrics.jsonl: whole lines, truncated on resume, out of reach of orphans."""

import math

import pytest

from sweep.errors import Superseded
from sweep.trial.files import (
    MetricsLog,
    is_start_intact,
    read_metrics,
    sha256_of_file,
)


def allow():
    pass


def test_lines_are_read_back_and_non_finite_values_become_null(tmp_path):
    log = MetricsLog(tmp_path / "m", 0, allow)
    log.append({"time": 1.5, "step": 1, "tokens": 8, "train/loss": 9.25})
    log.append({"time": 2.5, "step": 2, "tokens": 16, "train/loss": math.nan})
    log.close()
    assert [line["train/loss"] for line in read_metrics(tmp_path / "m")] == [9.25, None]
    assert log.length == (tmp_path / "m").stat().st_size
    assert log.sha256 == sha256_of_file(tmp_path / "m")


def test_resume_keeps_the_known_start_and_orphans_reach_nothing(tmp_path):
    path = tmp_path / "m"
    orphan = MetricsLog(path, 0, allow)
    orphan.append({"step": 1})
    length, sha256 = orphan.length, orphan.sha256
    orphan.append({"step": 2})
    with path.open("ab") as file:
        file.write(b'{"step": 3, "torn')  # killed in the middle of a line
    assert is_start_intact(path, length, sha256)
    log = MetricsLog(path, length, allow)
    orphan.append({"step": 4})
    log.append({"step": 2})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    log.close()
    orphan.close()


def test_an_incomplete_last_line_is_left_out(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    assert read_metrics(path, length=15) == [{"step": 1}]


def test_a_superseded_attempt_leaves_the_log_alone(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n')

    def refuse():
        raise Superseded

    with pytest.raises(Superseded):
        MetricsLog(path, 0, refuse)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_changed_start_is_not_intact(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"abc")
    sha256 = sha256_of_file(path)
    path.write_bytes(b"abX")
    assert not is_start_intact(path, 3, sha256)
    assert not is_start_intact(path, 4, sha256)
    assert not is_start_intact(tmp_path / "missing", 3, sha256)
