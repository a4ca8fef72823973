"""Calling the command line in this process."""

import sys

import pytest

from sweep.cli import main


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command line in an empty folder; return exit code and stdout."""
    monkeypatch.chdir(tmp_path)

    def call_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        call_here.stderr = captured.err
        return ended.value.code, captured.out

    return call_here


@pytest.fixture
def refuse(tmp_path, monkeypatch, capfd):
    """Run a command that must end with exit code 2 and write nothing; return its one sentence."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def refuse_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["sweep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capfd.readouterr()  # other processes' too
        assert ended.value.code == 2 and output.out == ""
        lines = output.err.splitlines()
        (error,) = [line for line in lines if not line.startswith("This runs your code: ")]
        assert error.startswith("Error: ") and len(lines) <= 2, lines
        assert list(work.iterdir()) == []
        return error

    return refuse_here
