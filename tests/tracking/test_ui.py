"""MLflow's UI: the saved view, the address of the comparison, `sweep ui`, and the page itself."""

import base64
import http.server
import json
import os
import signal
import sys
import threading
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from sweep.cli import sweep as command
from sweep.config.arms import batch_colors
from sweep.errors import SweepError
from sweep.tracking.store import connect, default_tracking_uri, page_address, ui_command
from sweep.trial.files import read_metrics
from tests.servers import Service
from tests.tracking.conftest import FakeSweep, until

# the axes and points of each plot on the page
PLOTS = """() => [...document.querySelectorAll(".js-plotly-plot")].map(plot => ({
    x: plot.layout.xaxis.title.text, y: plot.layout.yaxis.title?.text,
    traces: plot.data.map(trace => ({
        x: [...trace.x].map(Number), y: [...trace.y].map(Number), color: trace.marker?.color})),
}))"""


def experiment_of(sweep: FakeSweep):
    return connect(sweep.record["tracking_uri"]).get_experiment_by_name("words")


def view_of(sweep: FakeSweep) -> dict:
    view = json.loads(experiment_of(sweep).tags[f"mlflow.sharedViewState.{sweep.plan.sweep_uid}"])
    packed = view["state"].removeprefix("deflate;")
    return {**view, "state": json.loads(zlib.decompress(base64.b64decode(packed)))}


def parts_of(address: str) -> tuple[str, dict[str, str]]:
    page, _, query = address.partition("?")
    return page, dict(urllib.parse.parse_qsl(query))


@contextmanager
def server_that_says(version: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/version" else 404)
            self.end_headers()
            self.wfile.write(version.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_view_shows_the_final_trials_of_this_sweep_by_batch_size(sweep):
    sweep.train(0, 3)
    sweep.sync()
    view = view_of(sweep)
    assert view["name"] == "words sweep: batch sizes"
    assert experiment_of(sweep).tags["mlflow.experimentKind"] == "custom_model_development"
    state = view["state"]
    assert state["groupBy"]["groupByKeys"] == [{"mode": "param", "groupByData": "batch_size"}]
    lines = [chart["metricKey"] for chart in state["compareRunCharts"] if chart["type"] == "LINE"]
    assert lines == ["valid/loss", "train/loss"]
    dots = [chart for chart in state["compareRunCharts"] if chart["type"] == "SCATTER"]
    assert [(chart["xaxis"]["key"], chart["yaxis"]["key"]) for chart in dots] == [
        ("batch_size", "final/valid_loss"),
        ("final/seconds_training", "final/valid_loss"),
    ]
    client, experiment = connect(sweep.record["tracking_uri"]), experiment_of(sweep)
    found = client.search_runs([experiment.experiment_id], state["searchFilter"])
    assert [run.data.tags["sweep.trial_id"] for run in found] == [sweep.ids[0]]


def test_the_view_that_a_user_has_changed_is_kept(sweep):
    sweep.sync()
    client, experiment = connect(sweep.record["tracking_uri"]), experiment_of(sweep)
    for key in experiment.tags:
        client.set_experiment_tag(experiment.experiment_id, key, "mine")
    sweep.sync()
    assert {*experiment_of(sweep).tags.values()} == {"mine"}


def test_a_server_that_refuses_the_view_gets_everything_else(sweep, monkeypatch):
    from mlflow import MlflowClient
    from mlflow.exceptions import RestException

    def refuse(*_):
        raise RestException({"error_code": "INVALID_PARAMETER_VALUE"})

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    sweep.train(0, 3)
    sweep.sync()
    sweep.assert_mirrored(0)
    with server_that_says("3.17.2") as address:
        query = parts_of(page_address(address, sweep.record["tracking_uri"], sweep.plan))[1]
    assert "viewStateShareKey" not in query and sweep.plan.sweep_uid in query["searchFilter"]


@pytest.mark.parametrize(
    ("version", "has_view"),
    [("3.17.2", True), ("4.0.0rc1", True), ("3.14.1", False), ("2.9.2", False), ("", False)],
)
def test_only_a_server_that_reads_the_view_is_asked_for_it(sweep, version, has_view):
    sweep.sync()
    with server_that_says(version) as address:
        page, query = parts_of(page_address(address, sweep.record["tracking_uri"], sweep.plan))
    assert page == f"{address}/#/experiments/{experiment_of(sweep).experiment_id}/runs"
    assert (query["compareRunsMode"], query["workflowType"]) == ("CHART", "machine_learning")
    uid = sweep.plan.sweep_uid
    own = {"searchFilter": f"tags.`sweep.uid` = '{uid}' AND params.stage = 'final'"}
    assert query.items() >= ({"viewStateShareKey": uid} if has_view else own).items()


def test_the_ui_needs_a_store_and_serves_on_loopback(sweep):
    uri = default_tracking_uri(sweep.folder)
    words = ui_command(sweep.folder, uri, 5000)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    (sweep.folder.path / "mlflow.db").unlink()
    with pytest.raises(SweepError, match="must have an MLflow store"):
        ui_command(sweep.folder, uri, 5000)


def test_a_port_in_use_is_refused(sweep):
    with server_that_says("3.17.2") as address:
        words = ["ui", str(sweep.folder.path), "--port", address.rpartition(":")[2]]
        result = CliRunner().invoke(command, words)
    assert isinstance(result.exception, SweepError) and "--port" in str(result.exception)


def test_the_page_of_a_sweep_on_a_server_is_printed(sweep, server):
    server.start()
    sweep.train(0, 3)
    sweep.sync(server.uri)
    words = ["ui", str(sweep.folder.path), "--tracking-uri", server.uri]
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    page, query = parts_of(result.output.strip())
    assert page.startswith(f"{server.uri}/#/experiments/")
    assert query["viewStateShareKey"] == sweep.plan.sweep_uid


@contextmanager
def running_ui(sweep: FakeSweep, tmp_path: Path, **variables: str) -> Iterator[tuple[Service, str]]:
    """Run `sweep ui`, by default without a desktop; yield it and the address that it prints."""
    service, log = Service(tmp_path), tmp_path / "log"
    words = [sys.executable, "-m", "sweep", "ui", str(sweep.folder.path)]
    desktop = {"DISPLAY", "WAYLAND_DISPLAY"}
    environment = {name: value for name, value in os.environ.items() if name not in desktop}
    try:
        service.launch(
            [*words, "--port", str(service.port)],
            lambda: f"{service.uri}/#/" in log.read_text(),
            env=environment | variables,
        )
        (line,) = (line for line in log.read_text().splitlines() if line.startswith(service.uri))
        yield service, line
    finally:
        if service.process is not None:  # SIGKILL would leave its server
            service.process.terminate()
            service.process.wait()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_the_whole_server_ends_with_the_command(sweep, tmp_path, request, number):
    before = signal.signal(number, signal.SIG_DFL)  # a command inherits that it is ignored
    request.addfinalizer(lambda: signal.signal(number, before))
    sweep.sync()
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {opened}\n')
    browser.chmod(0o755)
    variables = {"BROWSER": f"{browser} %s"}
    if number == signal.SIGTERM:
        variables["DISPLAY"] = ":0"
    with running_ui(sweep, tmp_path, **variables) as (service, address):
        with urllib.request.urlopen(service.uri) as page:
            assert b"<html" in page.read()
        assert service.process is not None
        processes = psutil.Process(service.process.pid).children(recursive=True)
        assert len(processes) >= 2  # the server and its worker
        if "DISPLAY" in variables:
            until(opened.exists)
            assert opened.read_text().splitlines() == [address]
        service.process.send_signal(number)
        assert service.process.wait() == 130
        until(lambda: not any(process.is_running() for process in processes))
    assert opened.exists() == ("DISPLAY" in variables)


@pytest.mark.browser
def test_the_page_draws_every_trial_in_the_color_of_its_batch_size(sweep, tmp_path, browser):
    sweep.grow(seeds=2)
    finals = sweep.plan.known_trials
    rates = {"id": "a" * 12, "stage": "tune", "seed": 1000, "learning_rate": 2e-3}
    tune = finals[0].model_copy(update=rates)
    sweep.set_plan(sweep.plan.model_copy(update={"trials": (*finals, tune)}))
    for index in range(len(sweep.ids)):
        sweep.train(index, 12)
    sweep.sync()
    errors: list[str] = []
    with running_ui(sweep, tmp_path) as (_, address):
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot .trace').length >= 14")
        plots, text = page.evaluate(PLOTS), page.inner_text("body")
    colors = batch_colors([4, 8, 16])
    for plot, metric in zip(plots[:2], ("valid/loss", "train/loss"), strict=True):
        assert plot["x"] == "Step"  # tokens
        # MLflow also draws each curve in a transparent color, without smoothing
        traces = [trace for trace in plot["traces"] if len(trace["color"]) == len("#rrggbb")]
        drawn = [(t["color"], list(zip(t["x"], t["y"], strict=True))) for t in traces]
        curves = []
        for row in finals:
            lines = read_metrics(sweep.folder.trial(str(row.id)).metrics_path)
            points = [(line["tokens"], line[metric]) for line in lines if metric in line]
            curves.append((colors[row.batch_size], points))
        assert sorted(drawn) == sorted(curves)
    (dots,) = plots[2]["traces"]
    assert (plots[2]["x"], plots[2]["y"]) == ("batch_size", "final/valid_loss")
    final = [(row.batch_size, 2 / 3 + index) for index, row in enumerate(finals)]
    assert sorted(zip(dots["x"], dots["y"], strict=True)) == sorted(final)
    assert (plots[3]["x"], plots[3]["y"]) == ("final/seconds_training", "final/valid_loss")
    assert [text.count(f"Group: {size}") for size in colors] == [1, 1, 1]
    assert "tune:" not in text and "You're viewing a shared view" in text
    assert errors == []
