"""The report holds the results of the analysis, in whatever state the sweep is."""

import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import sweep
from sweep.analysis import frames
from sweep.analysis.comparison import compare_batch_sizes
from sweep.plan.plan import load_plan
from sweep.report import report
from sweep.report.report import write_report, write_report_from_store
from sweep.tracking.mirror import Mirror
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import SweepFolder

HEADINGS = (
    *("Summary", "Checks", "Results", "Curves", "Time, throughput and memory"),
    *("Trials", "Set-up", "Reproduction"),
)
FIGURES = {"loss", "curves", "time", "pareto", "throughput"}


def section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def tables(text: str) -> list[list[dict[str, str]]]:
    """Read the markdown tables back."""
    documents = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in block.splitlines()]
        documents.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return documents


def written(path: Path) -> str:
    return write_report(path).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, write_fake_sweep: Any) -> Path:
    """One seed, one rate: the setting of the earlier sweep."""
    path: Path = tmp_path_factory.mktemp("plain") / "plain"
    write_fake_sweep(path)
    write_report(path)
    return path


@pytest.fixture(scope="module")
def plain_text(plain: Path) -> str:
    return (plain / "report.md").read_text(encoding="utf-8")


def test_the_report_has_all_files_and_sections(plain: Path, plain_text: str) -> None:
    assert re.findall(r"^## (.+)$", plain_text, re.MULTILINE) == list(HEADINGS)
    made = {path.name for path in plain.iterdir()}
    assert made == {"plan.json", "trials", "trials.csv", "report.md", "report.html", "figures"}
    assert {path.stem for path in (plain / "figures").iterdir()} == FIGURES
    for name in FIGURES:
        assert plain_text.count(f"](figures/{name}.png)") == 1
        assert (plain / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_failed_checks_come_first_and_weaken_the_recommendations(plain_text: str) -> None:
    summary = section(plain_text, "Summary")
    first = summary.split("\n| ")[0]
    assert "*single seed*" in first and "*fixed learning rate*" in first
    assert "--lr tuned --seeds 3" in first
    rows = tables(summary)[1]
    assert [row["question"] for row in rows] == ["best quality", "fastest", "balanced"]
    assert all(row["standing"].startswith("FAIL: ") for row in rows)
    assert "fixed learning rate" in rows[0]["standing"]


def test_numbers_in_the_tables_are_those_of_the_frames(plain: Path, plain_text: str) -> None:
    cells = compare_batch_sizes(sweep.load_sweep(plain).trials).set_index("batch_size")
    (quality,) = tables(section(plain_text, "Results"))
    (trials,) = tables(section(plain_text, "Trials"))
    (time,) = tables(section(plain_text, "Time, throughput and memory"))
    summary, _ = tables(section(plain_text, "Summary"))
    assert len(quality) == len(time) == len(summary) == len(trials) == 5
    for row in quality:
        cell = cells.loc[int(row["batch size"])]
        for column, name in (
            ("final valid", "final_valid_loss"),
            ("final train", "final_train_loss"),
            ("gap", "train_valid_gap"),
            ("best valid (biased)", "best_valid_loss"),
            ("bits/byte", "bits_per_byte"),
        ):
            assert float(row[column]) == pytest.approx(cell[name], abs=5.1e-5)
        assert int(row["steps"].replace(",", "")) == cell["steps"]
        assert float(row["rate"]) == cell["learning_rate"]
    for row, short in zip(time, summary, strict=True):
        cell = cells.loc[int(row["batch size"])]
        assert float(row["tokens/s"].replace(",", "")) == pytest.approx(
            cell["tokens_per_second"], abs=0.51
        )
        assert row["total"] == short["total time"]
        assert float(row["total"].removesuffix(" s")) == pytest.approx(
            cell["seconds_total"], rel=0.01
        )
        clipped = float(row["steps clipped"].removesuffix(" %")) / 100
        assert clipped == pytest.approx(cell["clipped_step_fraction"], rel=0.05)
        assert row["MFU"] == "–"


def test_the_warmup_is_the_true_one(plain: Path, plain_text: str) -> None:
    plan = sweep.load_sweep(plain).plan
    shares = [100 * row.warmup_steps / row.steps for row in plan.trials]
    assert f"warmup {min(shares):.2f}% to {max(shares):.2f}% of the steps" in plain_text


@pytest.mark.parametrize(("seeds", "has_spread"), [(2, False), (3, True)])
def test_a_standard_deviation_needs_three_seeds(
    tmp_path: Path, write_fake_sweep: Any, seeds: int, has_spread: bool
) -> None:
    write_fake_sweep(tmp_path / "s", seeds=seeds, batches="4,8")
    summary = section(written(tmp_path / "s"), "Summary")
    cells = compare_batch_sizes(sweep.load_sweep(tmp_path / "s").trials)
    spreads = [f"{c.final_valid_loss:.4f} ± {c.loss_sd:.4f}" for c in cells.itertuples()]
    assert all((spread in summary) is has_spread for spread in spreads)
    assert ("*single seed*" in summary) is not has_spread


def test_failed_diverged_and_unfinished_trials_stay_in_the_report(mixed_sweep: Path) -> None:
    text = written(mixed_sweep)
    (quality,) = tables(section(text, "Results"))
    (trials,) = tables(section(text, "Trials"))
    assert len(quality) == 10 and len(trials) == 30
    states = {row["state"] for row in trials}
    assert states == {
        *("COMPLETE", "WAITING", "RUNNING", "FAILED out_of_memory", "FAILED diverged")
    }
    status = {row["batch size"]: row["status"] for row in quality if row["policy"] == "fixed 1e-3"}
    assert status == {
        "4": "2 complete, 1 unfinished",
        "8": "2 complete, 1 unfinished",
        "16": "3 complete",
        "32": "2 complete, 1 failed",
        "64": "2 complete, 1 diverged",
    }
    assert "4 of the 10 rows below are not compared" in section(text, "Summary")
    fixed = {row["check"]: row for row in tables(section(text, "Checks"))[0]}
    assert fixed["diverged"]["status"] == "FAIL"
    assert fixed["diverged"]["evidence"].startswith("1 of 15")


def test_an_empty_sweep_gets_a_report_that_says_so(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "empty", outcome=lambda row: "WAITING")
    text = written(tmp_path / "empty")
    assert section(text, "Summary").strip().startswith("**Nothing can be compared yet")
    assert "5 trials: 5 WAITING" in text and "| question |" not in text


def test_one_batch_size_is_not_compared_with_anything(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "single", batches="16", seeds=3)
    text = written(tmp_path / "single")
    assert ", at batch size" not in section(text, "Summary")
    assert all("nothing to compare" in r["standing"] for r in tables(section(text, "Summary"))[1])


def test_batch_sizes_without_a_tuned_rate_are_named(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "tuning", lrs=("tuned",), outcome=lambda row: "diverged")
    folder = SweepFolder(tmp_path / "tuning")
    plan = read_json(folder.plan_path)
    plan["trials"] = [row for row in plan["trials"] if row["stage"] == "tune"]
    write_json(folder.plan_path, plan)
    summary = section(written(folder.path), "Summary")
    assert "25 tuning trials" in summary
    for batch_size in (4, 8, 16, 32, 64):
        assert f"Batch size {batch_size} has no tuned rate yet" in summary
    assert summary.count("5 diverged") == 5


def test_a_tuned_cell_is_not_weakened_by_the_checks_of_a_fixed_rate(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "both", seeds=3, batches="4,64")
    path = tmp_path / "both"
    loaded = sweep.load_sweep(path)
    tuned = loaded.trials.assign(policy="tuned", id="t" + loaded.trials["id"])
    tuned["final_valid_loss"] -= tuned["batch_size"] / 100
    both = frames.pd.concat([loaded.trials, tuned], ignore_index=True)
    text = report.write_report_of(
        frames.Sweep("both", loaded.plan, both, loaded.curves, ()), tmp_path
    ).read_text()
    best = tables(section(text, "Summary"))[1][0]
    assert best["answer"] == "batch size 64 (tuned)"
    assert best["standing"].startswith("FAIL: ") and "fixed" not in best["standing"]
    assert "fixed learning rate" not in section(text, "Summary")


@pytest.mark.parametrize(("target", "reached"), [(2.5, "3 of 3"), (0.5, "0 of 3")])
def test_a_sweep_to_a_target_reports_steps_to_it(
    tmp_path: Path, write_fake_sweep: Any, target: float, reached: str
) -> None:
    path = tmp_path / "s"
    write_fake_sweep(path, seeds=3, target=target, batches="4,16,64", lrs=("tuned",))
    text = written(path)
    summary = tables(section(text, "Summary"))
    steps = {row["batch size"]: row for row in summary[0]}
    assert steps.keys() == {"4", "16", "64"}
    assert {row["reached"] for row in steps.values()} == {reached}
    assert len(summary) == (2 if reached == "3 of 3" else 1)
    headings = re.findall(r"^### Losses at equal (\w+)", text, re.MULTILINE)
    assert headings == ["tokens", "steps", "seconds"] and "nan" not in text
    figures = {figure.stem for figure in (path / "figures").iterdir()}
    assert figures == {"curves", "time", "throughput", "steps"}  # no tuning trial reached it


def test_losses_of_the_quadratic_have_no_unit(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "quadratic", experiment="quadratic")
    text = written(tmp_path / "quadratic")
    assert "nats" not in text
    assert {row["bits/byte"] for row in tables(section(text, "Results"))[0]} == {"–"}


def test_many_batch_sizes_and_seeds_are_drawn(tmp_path: Path, write_fake_sweep: Any) -> None:
    def outcome(row: Any) -> str:
        return "diverged" if (row.batch_size, row.seed) == (64, 0) else "COMPLETE"

    write_fake_sweep(
        tmp_path / "wide", batches="1..4096", budget=4096 * 64 * 4, seeds=5, outcome=outcome
    )
    text = written(tmp_path / "wide")
    assert "trials.csv lists 5 more trials" in text


def test_each_policy_has_its_checks_and_tuned_rates_their_figure(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "s", lrs=("1e-3", "tuned"), seeds=3, batches="4,16,64")
    text = written(tmp_path / "s")
    fixed, tuned = tables(section(text, "Checks"))
    statuses = {row["check"]: row["status"] for row in fixed + tuned}
    assert set(statuses.values()) <= {"PASS", "FAIL", "NOT APPLICABLE"}
    assert "fixed_learning_rate" in {row["check"] for row in fixed if row["status"] == "FAIL"}
    assert len(tables(section(text, "Differences"))) == 2
    for name in ("rates", "differences"):
        assert text.count(f"](figures/{name}.png)") == 1
        assert (tmp_path / "s/figures" / f"{name}.png").stat().st_size > 10_000


def test_the_figure_of_an_earlier_report_is_removed(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "s", seeds=1, batches="4,8")
    (tmp_path / "s/figures").mkdir()
    (tmp_path / "s/figures/rates.png").write_bytes(b"old")
    assert "rates.png" not in written(tmp_path / "s")
    assert not (tmp_path / "s/figures/rates.png").exists()


def test_damaged_files_are_named_in_the_report(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "damaged", batches="4,8")
    trial = SweepFolder(tmp_path / "damaged").trials()[0]
    trial.metrics_path.write_text("?\n")
    assert trial.id in section(written(tmp_path / "damaged"), "Warnings")


def test_the_same_data_give_the_same_bytes(plain: Path) -> None:
    def contents() -> dict[str, bytes]:
        made = [*plain.glob("report.*"), *plain.glob("figures/*"), plain / "trials.csv"]
        return {str(path): path.read_bytes() for path in made}

    before = contents()
    write_report(plain)
    assert contents() == before
    assert list(plain.rglob(".*")) == []


def test_a_store_gives_the_same_report(plain: Path, tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "plain")
    shutil.copytree(plain, folder.path)
    plan = load_plan(folder)
    assert plan is not None and Mirror(folder, plan, None).deliver() == ""
    uri = f"sqlite:///{folder.path}/mlflow.db"
    write_report_from_store(uri, plan.experiment, None, tmp_path / "out")
    for name in (
        "report.md",
        "trials.csv",
        "report.html",
        *(f"figures/{name}.png" for name in FIGURES),
    ):
        assert (tmp_path / "out" / name).read_bytes() == (plain / name).read_bytes()


def test_the_page_is_well_formed_and_holds_its_figures(plain: Path) -> None:
    page = (plain / "report.html").read_text(encoding="utf-8").removeprefix("<!DOCTYPE html>")
    root = ElementTree.fromstring(page)
    sources = [image.attrib["src"] for image in root.iter("img")]
    assert len(sources) == len(FIGURES)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert len(list(root.iter("td"))) > 100
