"""The report holds the results of the analysis; number formats, escaping, HTML."""

import json
import math
import re
import shlex
import shutil

import pytest
from jinja2 import UndefinedError

from sweep.analysis.noise_scale import noise_scales
from sweep.analysis.results import load_sweep
from sweep.analysis.tables import Estimate, compare_batch_sizes, find_gains
from sweep.decision.proposal import recorded_out
from sweep.plan.commands import parse_command
from sweep.plan.plan import load_plan
from sweep.report.report import MARKDOWN, to_html, write_report
from sweep.tracking.mirror import Mirror
from sweep.tracking.store import restore_sweep
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import SweepFolder
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.report.conftest import NOISE_SCALE

HEADINGS = (
    *("What the answer rests on", "Results", "What this sweep cannot show"),
    "How to repeat it",
)
FIGURES = {"frontier", "answer", "loss", "curves", "throughput"}


def section(text, heading):
    """Return a section, or without a heading what the report begins with."""
    if not heading:
        return text.split("\n## ", 1)[0]
    return re.split(r"\n##+ ", re.split(rf"##+ {re.escape(heading)}\n", text, maxsplit=1)[1])[0]


def tables(text):
    documents = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in block.splitlines()]
        documents.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return documents


def written(path):
    return write_report(path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plain_text(plain):
    return (plain / "report.md").read_text(encoding="utf-8")


def test_the_report_has_all_files_and_sections(plain, plain_text):
    assert re.findall(r"^## (.+)$", plain_text, re.MULTILINE) == list(HEADINGS)
    files = {path.name for path in plain.iterdir()}
    written = {"trials.csv", "answer.json", "report.md", "report.html", "figures"}
    assert files == {"plan.json", "trials"} | written
    assert {path.stem for path in (plain / "figures").iterdir()} == FIGURES
    for name in FIGURES:
        assert plain_text.count(f"](figures/{name}.png)") == 1
        assert (plain / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_one_seed_and_one_rate_are_reported_as_seen_and_with_what_is_missing(plain, plain_text):
    start = section(plain_text, "")
    assert start.splitlines()[2].startswith("**The final validation loss was 1.6")
    assert "Provisionally, use batch size 8 (512 tokens): " in start
    assert "this one has the best estimate" in start and "at batch size 4" in start
    assert "its error is not known" in start
    assert "    --lr tuned \\\n    --seeds auto\n" in start and "at least" in start
    document = read_json_document(plain)
    assert document["provisional"] and document["candidates"] == [4, 8, 16, 32, 64]
    checks = tables(section(plain_text, "What the answer rests on"))[0]
    codes = [row["check"] for row in checks if "provisional" in row["check"]]
    assert [code.split()[0] for code in codes] == ["fixed_learning_rate", "single_seed"]


def read_json_document(folder):
    return json.loads((folder / "answer.json").read_text())


def test_answer_json_is_the_answer_of_python(tuned):
    answer = load_sweep(tuned).answer()
    assert answer is not None and answer.policy == "tuned"
    assert read_json_document(tuned) == json.loads(json.dumps(answer.as_json()))
    (rows, *_) = tables((tuned / "report.md").read_text())
    assert [row["batch size"].strip("*") for row in rows] == ["4", "16", "64"]


def test_numbers_in_the_tables_are_those_of_the_frames(plain, plain_text):
    sweep = load_sweep(plain)
    cells = compare_batch_sizes(sweep.trials).set_index("batch_size")
    (quality,) = tables(section(plain_text, "Results"))
    (time,) = tables(section(plain_text, "Table of times and memory"))
    assert len(quality) == len(time) == 5
    losses = {"final valid": "final_valid_loss", "final train": "final_train_loss"}
    losses |= {"gap": "train_valid_gap", "best valid (biased)": "best_valid_loss"}
    losses |= {"bits/byte": "bits_per_byte"}
    numbers = {column: (name, 5.1e-5) for column, name in losses.items()} | {
        "steps": ("steps", 0),
        "lr": ("learning_rate", 0),
        "tokens/s": ("tokens_per_second", 0.51),
        "total": ("seconds_total", 0.051),
    }
    for losses, costs in zip(quality, time, strict=True):
        row, cell = losses | costs, cells.loc[int(losses["batch size"])]
        for column, (name, tolerance) in numbers.items():
            number = float(row[column].replace(",", "").removesuffix(" s"))
            assert number == pytest.approx(cell[name], abs=tolerance), column
        clipped = float(row["steps clipped"].removesuffix(" %")) / 100
        assert clipped == pytest.approx(cell["clipped_step_fraction"], rel=0.05)
        assert row["MFU"] == "–"
    shares = [100 * row.warmup_steps / row.steps for row in sweep.plan.trials]
    assert f"warmup {min(shares):.2f}% to {max(shares):.2f}% of the steps" in plain_text


def test_failed_diverged_and_unfinished_trials_stay_in_the_report(mixed):
    text = written(mixed)
    (quality,) = tables(section(text, "Results"))
    assert len(quality) == 10
    status = {row["batch size"]: row["status"] for row in quality if row["policy"] == "fixed 1e-3"}
    assert status == {
        "4": "2 complete, 1 unfinished",
        "8": "2 complete, 1 unfinished",
        "16": "3 complete",
        "32": "2 complete, 1 failed",
        "64": "2 complete, 1 diverged",
    }
    checks = tables(section(text, "What the answer rests on"))[0]
    (diverged,) = (row for row in checks if row["check"].startswith("diverged"))
    assert diverged["evidence"].startswith("1 of 15")


def test_an_empty_sweep_gets_a_report_that_says_so(tmp_path):
    path = tmp_path / "empty"
    write_fake_sweep(path, outcome=lambda row: "WAITING")
    (path / "figures").mkdir()
    (path / "figures/rates.png").write_bytes(b"of an earlier report")
    text = written(path)
    assert "**Nothing can be compared: 5 WAITING.**" in section(text, "")
    assert read_json_document(path) is None
    assert not (path / "figures/rates.png").exists()


def test_batch_sizes_without_a_tuned_rate_are_named(tmp_path):
    write_fake_sweep(tmp_path / "tuning", lrs=("tuned",), outcome=lambda row: "diverged")
    folder = SweepFolder(tmp_path / "tuning")
    plan = read_json(folder.plan_path)
    plan["trials"] = [row for row in plan["trials"] if row["stage"] == "tune"]
    write_json(folder.plan_path, plan)
    checks = section(written(folder.path), "What the answer rests on")
    for batch_size in (4, 8, 16, 32, 64):
        assert f"{batch_size} (no rate decided yet)" in checks


@pytest.mark.parametrize(("target", "reached"), [(2.5, "3 of 3"), (0.5, "0 of 3")])
def test_a_sweep_to_a_target_reports_steps_to_it(tmp_path, target, reached):
    path = tmp_path / "s"
    write_fake_sweep(path, seeds=3, target=target, batches="4,16,64", lrs=("tuned",))
    text = written(path)
    steps = {row["batch size"]: row for row in tables(text) for row in row if "reached" in row}
    assert steps.keys() == {"4", "16", "64"}
    assert {row["reached"] for row in steps.values()} == {reached}
    headings = re.findall(r"^### Losses at equal (\w+)", text, re.MULTILINE)
    assert headings == ["tokens", "steps", "seconds"] and "nan" not in text
    figures = {figure.stem for figure in (path / "figures").iterdir()}
    figures -= {"answer", "rates"}  # no batch size or no tuning trial may have reached it
    assert figures == {"frontier", "curves", "throughput", "steps"}


def test_a_sweep_without_text_reports_no_unit(tmp_path):
    write_fake_sweep(tmp_path / "many", experiment="quadratic", seeds=3, points=5)
    text = written(tmp_path / "many")
    assert "nats" not in text
    assert {row["bits/byte"] for row in tables(section(text, "Results"))[0]} == {"–"}


def test_each_policy_has_its_checks_and_tuned_rates_their_figure(tuned):
    text = (tuned / "report.md").read_text()
    checks = section(text, "What the answer rests on")
    fixed = tables(checks)[0]
    assert fixed[0]["check"].startswith("fixed_learning_rate")
    assert "Checks that fail (fixed 1e-3)" in checks
    assert tables(section(text, "Checks that hold (tuned)"))
    assert len(tables(section(text, "Pairs: tuned"))[0]) == 3
    assert "is a contrast of policies" in section(text, "What this sweep cannot show")
    for name in ("answer", "rates"):
        assert text.count(f"](figures/{name}.png)") == 1
        assert (tuned / "figures" / f"{name}.png").stat().st_size > 10_000


def test_damaged_files_are_named_in_the_report(tmp_path):
    write_fake_sweep(tmp_path / "damaged", batches="4,8")
    trial = SweepFolder(tmp_path / "damaged").trials()[0]
    trial.metrics_path.write_text("?\n")
    assert trial.id in section(written(tmp_path / "damaged"), "What the answer rests on")


def contents(folder):
    files = [*folder.glob("report.*"), *folder.glob("figures/*")]
    files += [folder / "trials.csv", folder / "answer.json"]
    return {path.name: path.read_bytes() for path in files}


def test_the_same_data_give_the_same_bytes(plain):
    before = contents(plain)
    write_report(plain)
    assert contents(plain) == before
    assert list(plain.rglob(".*")) == []


def test_a_store_gives_the_same_report(plain, tmp_path):
    folder = SweepFolder(tmp_path / "plain")
    shutil.copytree(plain, folder.path)
    plan = load_plan(folder)
    assert plan is not None and Mirror(folder, plan, None).deliver() == ""
    uri, parent = f"sqlite:///{folder.path}/mlflow.db", tmp_path / "stored"
    parent.mkdir()
    stored = restore_sweep(uri, plan.experiment, None, parent)
    write_report(stored.path, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(plain)


def main_of(page):
    """Return the part of a page that comes from the Markdown."""
    return page[page.index("<main>") : page.index("</main>")]


def test_the_page_holds_its_figures_and_a_contents_of_its_sections(plain):
    page = (plain / "report.html").read_text(encoding="utf-8")
    pictures = re.findall(r'<noscript><img src="data:image/png;base64,', main_of(page))
    assert len(pictures) == len(re.findall("<figure", page)) == len(FIGURES)
    assert len(re.findall("<td", main_of(page))) > 100
    contents = page[page.index("<nav>") : page.index("</nav>")]
    links = dict(re.findall(r'<a href="#([^"]*)">([^<]*)</a>', contents))
    assert list(links.values()) == list(HEADINGS)
    assert all(f'id="{name}"' in main_of(page) for name in links)
    assert "vega 6" in page and "BSD" in page  # the notices of the libraries in it
    assert len(page) < 3_000_000


def test_the_noise_scale_is_given_for_each_half_of_training(tuned):
    rows = [row for row in noise_scales(load_sweep(tuned)) if row["label"] == "tuned"]
    scales = {row["batch_size"]: row["scale"] for row in rows if row["is_late"]}
    assert set(scales) == {4, 16, 64} and scales[4].value is None  # not resolved
    assert scales[16].value.value == pytest.approx(NOISE_SCALE)
    earlier = {row["batch_size"]: row["scale"] for row in rows if not row["is_late"]}
    assert earlier.keys() == scales.keys() and earlier[16].value.low > NOISE_SCALE
    text = (tuned / "report.md").read_text()
    noise = tables(section(text, "Gradient noise scale"))[0]
    assert [row["half of training"] for row in noise] == ["first", "second"] * 6
    assert "24 [24, 24]" in text and text.count("| unresolved |") == 4


def test_a_sweep_that_was_not_asked_for_the_noise_scale_names_the_command_that_measures_it(plain):
    text = (plain / "report.md").read_text()
    assert "Gradient noise scale" not in text and "noise probes" not in text
    plan = load_plan(SweepFolder(plain))
    (command,) = re.findall("`(sweep run .*?)`", section(text, "What this sweep cannot show"))
    experiment, flags = parse_command(shlex.split(command))
    assert experiment == plan.experiment and flags["noise"] is True
    assert flags["out"] != recorded_out(plan)


def test_the_time_of_measurements_of_the_noise_scale_has_a_column_if_there_were_any(tmp_path):
    write_fake_sweep(tmp_path / "s", change=lambda row: {"seconds_noise": 2.0})
    times = section(written(tmp_path / "s"), "Table of times and memory")
    assert {row["noise probes"] for row in tables(times)[0]} == {"2 s"}


def test_a_sweep_that_was_asked_for_the_noise_scale_says_so_if_no_trial_has_it(tmp_path):
    write_fake_sweep(tmp_path / "s", noise_scale={"measure": True})
    text = written(tmp_path / "s")
    assert "No batch size has 4 measurements" in section(text, "Gradient noise scale")
    assert "noise scale" not in section(text, "What this sweep cannot show")


def test_only_a_sweep_with_rewards_has_a_section_on_them(tmp_path, plain_text):
    settings = {"experiment": "grpo-words", "batches": [16, 32], "data": "synthetic"}
    before = {"initial_valid_reward": 0.05}
    write_fake_sweep(tmp_path / "words", seeds=3, change=lambda row: before, **settings)
    gain = find_gains(load_sweep(tmp_path / "words"))[0]
    rewards = section(written(tmp_path / "words"), "Rewards")
    assert f"| {gain['difference'].value:+.3f} [" in rewards and "# Rewards" not in plain_text


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1.23456 | loss", "1.2346"),
        ("nan | loss", "–"),
        ("1.5 | loss(0.01, 3)", "1.5000 ± 0.0100"),
        ("1.5 | loss(0.01, 2)", "1.5000"),
        ("1234567.0 | count", "1,234,567"),
        ("nan | count", "–"),
        ("none | seconds", "–"),
        ("0.0043 | percent", "0.43 %"),
        ("1.0 | percent", "100 %"),
        ("7.0710678e-4 | rate", "0.000707"),
        ("3e-4 | rate", "3e-4"),
        ("[3, nan, 1, none] | range", "1 to 3"),
        ("[2, 2.1] | range", "2"),
        ("[] | range", "–"),
        ("interval | estimate('.3g')", "24 [20, 30]"),
        ("point | estimate", "24"),
        ("none | estimate", "–"),
        ("12.345 | number", "12.3"),
        ("12345 | number", "12.35k"),
        ("none", "–"),
        ("nan", "–"),
    ],
)
def test_numbers_are_written_briefly_and_missing_ones_as_a_dash(expression, expected):
    template = MARKDOWN.from_string("{{ " + expression + " }}")
    estimates = {"interval": Estimate(24, 20, 30), "point": Estimate(24, math.nan, math.nan)}
    assert template.render(nan=math.nan, **estimates) == expected


HOSTILE = "a|b\n# c <script>alert(1)</script> ![x](http://example.com/x.png) [y](http://e.com) \\"


def test_text_in_a_table_stays_one_cell_of_text(tmp_path):
    template = MARKDOWN.from_string("| a | b |\n| :-- | :-- |\n| {{ text }} | {{ text }} |\n")
    page = main_of(to_html(template.render(text=HOSTILE), "<t>|", {}))
    assert page.count("<td") == 2 and page.count("a|b # c &lt;script&gt;") == 2
    assert not any(tag in page for tag in ("<script", "<img", "<a ", "<h1"))
    page = to_html("a <script>alert(1)</script> b", "<t>|", {})
    assert "<script>" not in main_of(page) and "<title>&lt;t&gt;|</title>" in page


def test_commands_cannot_leave_their_code_block(tmp_path):
    words = ["sweep", "run", "--out", "b\n```\n# c", "--lr", "3e-4"]
    folder = SweepFolder(tmp_path / "s")
    write_fake_sweep(folder.path, batches="4,8", points=5)
    plan = folder.read_plan()
    write_json(folder.plan_path, plan | {"commands": [words]})
    text = write_report(folder.path).read_text()
    page = main_of(to_html(text, "t", {}))
    assert page.count("<h1") == 1 and "# c</h1>" not in page
    assert "sweep run \\\n    --out 'b ``` # c' \\\n    --lr 3e-4\n" in text


def test_every_template_compiles_and_an_unknown_variable_is_an_error():
    names = MARKDOWN.list_templates()
    assert {"report.md.j2", "page.html.j2", "probe.md.j2"} <= set(names)
    assert all(map(MARKDOWN.get_template, names))
    with pytest.raises(UndefinedError):
        MARKDOWN.from_string("{{ unknown }}").render()
