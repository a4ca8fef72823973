"""Time the steps of a sweep."""

import logging
from typing import TYPE_CHECKING

import click

from sweep.cli.commands.arguments import FiniteRange, folder_argument, json_option, number_option
from sweep.cli.options import SettingsCommand, print_document

if TYPE_CHECKING:
    from sweep.trial.folder import SweepFolder

LOG = logging.getLogger(__name__)
SECONDS = FiniteRange(86_400)
THREADS = click.IntRange(1, 1024)
THREADS_HELP = "CPU threads; by default those of a trial that runs alone."
SECONDS_HELP = "Seconds for each batch size, unless its least steps take longer."


@click.command("time", cls=SettingsCommand)
@folder_argument
@json_option
@number_option("--threads", type=THREADS, help=THREADS_HELP)
@click.option("--seconds", type=SECONDS, default=5.0, metavar="N", help=SECONDS_HELP)
def time_steps(
    folder: "SweepFolder",
    json: bool,
    threads: int | None,
    seconds: float,
    device: str | None,
    no_user_code: bool | None,
) -> None:
    """Measure the seconds per step of each batch size, side by side, into DIR/timing.json.

    On another machine it needs only the plan.json of the sweep. With another --device steps run as
    a sweep planned for that device would run them.
    """
    from sweep.cli.show import print_times
    from sweep.orchestration.request import announce_code
    from sweep.orchestration.timing import time_folder
    from sweep.plan.plan import parse_plan

    plan = parse_plan(folder.require_plan(), str(folder.plan_path))
    announce_code(plan.settings.user_code, folder.located(plan).code_path, bool(no_user_code))
    LOG.info("Timing steps")
    timing = time_folder(folder, plan, device, threads, seconds)
    if json:
        print_document(timing.model_dump(mode="json"))
    else:
        print_times(timing, plan, folder)
