"""`sweep audit` as people and scripts use it."""

import json
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[1] / "analysis" / "tinystories-sweep.csv"


def test_audit_prints_one_json_document_and_exits_0_whatever_it_finds(call):
    code, out = call("audit", PUBLISHED, "--json")
    document = json.loads(out)
    assert code == 0 and document.keys() == {"findings", "not_checked", "notes"}
    for finding in document["findings"]:
        assert finding.keys() == {"code", "rows", "message", "remedy"}
        assert all(isinstance(batch, int) for batch in finding["rows"])
    assert all(check.keys() == {"code", "missing_columns"} for check in document["not_checked"])


def test_audit_prints_findings_remedies_and_what_was_not_checked(call, tmp_path):
    code, out = call("audit", PUBLISHED)
    assert code == 0 and out.count("remedy: ") == 7
    assert "code: missing_batch_size\n" in out and "code: adamw_time_scale\n" in out
    assert list(tmp_path.iterdir()) == []


def test_audit_names_columns_that_it_does_not_know(call, tmp_path):
    (tmp_path / "sweep.csv").write_text("batch_size,seeds,colour\n8,3,red\n")
    code, out = call("audit", "sweep.csv")
    assert code == 0 and "Columns ignored: colour." in out
    assert call("audit", ".")[1] == out


@pytest.mark.parametrize("name", ["image.csv", "missing.md", "", ".", "x" * 300, "no\nfile"])
def test_audit_refuses_what_is_no_table(refuse, tmp_path, name):
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    refuse("audit", name and tmp_path / name)
