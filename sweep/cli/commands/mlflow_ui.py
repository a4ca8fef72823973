"""Open MLflow's UI on a sweep."""

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING

import click

from sweep.cli.commands.arguments import (
    folder_argument,
    open_page,
)
from sweep.cli.options import SettingsCommand, echo
from sweep.errors import SweepError
from sweep.signals import handle_unless_ignored

if TYPE_CHECKING:
    from sweep.trial.folder import SweepFolder

LOG = logging.getLogger(__name__)


@click.command(cls=SettingsCommand)
@folder_argument
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
@click.option("--no-open", is_flag=True, help="Only print the address; open no browser.")
def ui(folder: "SweepFolder", port: int, no_open: bool, tracking_uri: str | None) -> int:
    """Open MLflow's UI on the comparison of this sweep's batch sizes, on this machine only."""
    LOG.info("Starting MLflow")
    from sweep.plan.plan import parse_plan
    from sweep.tracking import store
    from sweep.tracking.addresses import check_tracking_uri

    plan = parse_plan(folder.require_plan(), str(folder.plan_path))
    if tracking_uri is None:
        uri = store.recorded_uri(folder, store.read_record(folder))
    else:
        uri = check_tracking_uri(tracking_uri)
    address = f"http://127.0.0.1:{port}"
    if uri.startswith("http"):
        echo(store.page_address(uri, uri, plan))
        return 0
    command = store.ui_command(folder, uri, port)
    if store.server_version(address):
        raise SweepError(f"port must be free, {port} is in use. Choose another --port.")
    handle_unless_ignored(signal.SIGHUP, signal.default_int_handler)  # the terminal is closed
    with tempfile.TemporaryDirectory() as empty:  # the server imports from its current folder first
        server = subprocess.Popen(command, cwd=empty, start_new_session=True, stdout=2)
        try:
            while server.poll() is None and not store.server_version(address):
                time.sleep(0.2)
            if server.poll() is None:
                show = echo if no_open else open_page
                show(store.page_address(address, uri, plan))
                echo("Ctrl-C ends the server.", err=True)
            code = server.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    if code > 0:
        remedy = "Choose another --port, or repair the store with `sweep report`."
        raise SweepError(f"MLflow's server ended with exit code {code}. {remedy}")
    return code
