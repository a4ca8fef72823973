"""The page of a report in a real browser."""

import shutil

import pytest

from sweep.plan.commands import typed_command
from sweep.plan.plan import load_plan
from sweep.report.report import write_report
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import connect
from sweep.trial.files import write_json
from sweep.trial.folder import SweepFolder
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.servers import MlflowServer

pytestmark = pytest.mark.browser
MARKS = ".role-mark path"  # points and lines, without those of legends and axes


@pytest.fixture
def open_page(browser):
    """Open a page; it must load nothing and log nothing."""

    def open_it(path, **settings):
        page = browser.new_page(**settings)
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: page.problems.append(request.url))
        page.goto(path.as_uri())
        if settings.get("java_script_enabled", True):
            page.wait_for_selector("html[data-charts]")
        assert page.problems == [path.as_uri()]
        return page

    return open_it


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 900, 1600])
@pytest.mark.parametrize("name", ["plain", "tuned", "mixed"])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_window(
    request, open_page, name, width, scheme
):
    folder = request.getfixturevalue(name)
    if name == "mixed":
        write_report(folder)
    size = {"width": width, "height": 900}
    page = open_page(folder / "report.html", viewport=size, color_scheme=scheme)
    panels = page.locator(".panel")
    assert panels.count() == page.locator(".panel svg.marks").count() >= 5
    for index in range(panels.count()):
        assert panels.nth(index).locator(MARKS).count() > 1
        assert panels.nth(index).bounding_box()["width"] <= width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_one_control_selects_batch_sizes_in_all_figures(open_page, tuned):
    page = open_page(tuned / "report.html", viewport={"width": 1000, "height": 900})

    def counts():
        page.wait_for_timeout(200)
        panels = page.locator(".panel")
        return [panels.nth(index).locator(MARKS).count() for index in range(panels.count())]

    whole = counts()
    page.locator("#selection button", has_text="64").click()
    assert all(before > after for before, after in zip(whole, counts(), strict=True))
    page.locator("#selection button", has_text="64").click()
    assert counts() == whole


def test_a_point_tells_its_seed_on_hover_and_details_unfold(open_page, tuned):
    page = open_page(tuned / "report.html", viewport={"width": 1000, "height": 900})
    page.locator("#chart-loss .mark-symbol.role-mark path").last.hover()
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert {"batch size", "seeds", "low", "high", "policy"} <= set(
        text.strip(" :") for text in tooltip.locator("td.key").all_inner_texts()
    )
    settings = page.locator("details", has=page.locator("h4", has_text="Settings")).first
    assert settings.evaluate("details => details.open") is False
    settings.locator("summary").click()
    assert settings.locator("table").is_visible()


def test_it_prints_on_few_pages_with_all_details(open_page, tuned):
    page = open_page(tuned / "report.html", viewport={"width": 1000, "height": 900})
    pdf = page.pdf(format="A4", print_background=True)
    assert 2 <= pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") <= 8
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("main > details:not([open])").count() == 0


def test_a_command_breaks_only_between_its_options(open_page, tmp_path):
    folder, flags = SweepFolder(tmp_path / "s"), {"budget": 819_200, "batches": [4, 8, 16]}
    write_fake_sweep(folder.path, batches="4,8", points=5)
    words = typed_command("tinystories", flags | {"lr": "tuned", "data": "FOLDER", "out": "r/s"})
    write_json(folder.plan_path, folder.read_plan() | {"commands": [words]})
    write_report(folder.path)
    page = open_page(folder.path / "report.html", viewport={"width": 400, "height": 900})
    commands = page.locator("pre code", has_text="sweep run tinystories").all()
    # the next step, those for longer trainings, the soonest and the fewest steps, and the plan's
    assert len(commands) == 5
    for command in commands:
        lines = command.inner_text().strip().splitlines()
        assert [line.count("--") for line in lines] == [0] + [1] * (len(lines) - 1)
        for media in ("screen", "print"):  # a line that wraps would have boxes at two heights
            page.emulate_media(media=media)
            tops = "code => new Set(Array.from(code.getClientRects(), r => r.top)).size"
            assert command.evaluate(tops) == len(lines)


def test_without_scripts_it_shows_the_pictures(open_page, plain):
    page = open_page(plain / "report.html", java_script_enabled=False)
    pictures = page.locator("figure img")
    assert pictures.count() == page.locator("figure").count() == 5
    assert all(pictures.nth(index).bounding_box()["width"] > 300 for index in range(5))
    assert page.locator("details").count() == 0 and page.locator("#settings").is_visible()


def test_it_works_in_the_artifact_viewer_of_mlflow(browser, plain, tmp_path):
    folder = SweepFolder(tmp_path / "plain")
    shutil.copytree(plain, folder.path)
    plan, server = load_plan(folder), MlflowServer(tmp_path)
    try:
        server.start()
        assert plan is not None and Mirror(folder, plan, server.uri).deliver() == ""
        client = connect(server.uri)
        experiment = client.get_experiment_by_name(plan.experiment).experiment_id
        (run,) = client.search_runs([experiment], "tags.`sweep.role` = 'sweep'")
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        address = f"{server.uri}/#/experiments/{experiment}/runs/{run.info.run_id}"
        page.goto(f"{address}/artifacts/report.html")
        viewer = page.frame_locator("iframe")
        viewer.locator("html[data-charts]").wait_for(timeout=60_000)
        assert viewer.locator(".panel svg.marks").count() >= 5
    finally:
        server.die()


def test_markup_that_got_into_the_page_does_not_run(open_page, plain):
    page = open_page(plain / "report.html")
    title = page.title()
    markup = "<img src='data:,' onerror='document.title = 1'>"
    page.problems.clear()
    page.evaluate("markup => document.body.insertAdjacentHTML('beforeend', markup)", markup)
    page.wait_for_timeout(300)
    assert page.title() == title
