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
        return ended.value.code, capsys.readouterr().out

    return call_here
