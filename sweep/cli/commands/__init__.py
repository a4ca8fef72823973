"""The commands of `sweep`. Each imports what it needs when it is called, so that help is fast."""

from sweep.cli.commands.folder import clean, log, merge, open_report, status, stop
from sweep.cli.commands.larger_runs import recommend, suggest
from sweep.cli.commands.machine import data, doctor
from sweep.cli.commands.memory import forecast, probe
from sweep.cli.commands.mlflow_ui import ui
from sweep.cli.commands.results import answer, audit, report
from sweep.cli.commands.running import check, plan, run
from sweep.cli.commands.timing import time_steps

COMMANDS = (
    *(run, plan, check, forecast, probe, status, stop, log, clean, report, open_report, answer),
    *(merge, recommend, suggest, time_steps, audit, ui, data, doctor),
)

__all__ = ["COMMANDS"]
