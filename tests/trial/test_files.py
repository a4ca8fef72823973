"""JSON files are whole or absent, and notice other hands."""

import json

import pytest

from sweep.config.trial import FORMAT_VERSION
from sweep.errors import CorruptFile, SweepError
from sweep.trial.files import read_json, replacing, write_json


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a.json"
    document = {"x": [1, 2.5, None], "y": {"z": "ü"}}
    write_json(path, document)
    assert read_json(path) == {"format_version": FORMAT_VERSION, **document}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"x": 1}', "\x00\x01"])
def test_damaged_files_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CorruptFile, match=r"a\.json"):
        read_json(path)


def test_a_changed_value_is_noticed(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    path.write_text(path.read_text().replace('"x": 1', '"x": 2'))
    with pytest.raises(CorruptFile, match="does not match its sha256"):
        read_json(path)


def test_a_newer_format_is_refused_with_the_way_on(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "format_version": 99}))
    with pytest.raises(SweepError, match="format_version"):
        read_json(path)


def test_a_failed_check_or_write_keeps_the_old_file_and_leaves_no_part(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})

    def refuse():
        raise RuntimeError("superseded")

    with pytest.raises(RuntimeError):
        write_json(path, {"x": 2}, refuse)
    with pytest.raises(OSError), replacing(path) as part:
        part.write_text("half")
        raise OSError("disk full")
    assert read_json(path)["x"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
