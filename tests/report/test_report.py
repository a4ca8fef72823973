"""The report says what the data show, and no more."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import sweep
from sweep.analysis import frames
from sweep.analysis.comparison import compare_batch_sizes
from sweep.plan.plan import load_plan
from sweep.report import report
from sweep.report.report import FIGURES, write_report, write_report_from_store
from sweep.tracking.mirror import Mirror
from sweep.trial.folder import SweepFolder

HEADINGS = (
    *("Summary", "Set-up", "Results", "Claims and their gates", "Curves"),
    "Time, throughput and memory",
    *("Recommendations", "What this sweep cannot show", "Reproduction"),
)
# Words of a verdict. They may stand only in a sentence that denies them.
CLAIMS = re.compile(
    r"\b(better|best batch|optimal|superior|outperform\w*|significant\w*|proves?|generalise\w*|"
    r"recommend using|winner)\b",
    re.IGNORECASE,
)
DENIALS = re.compile(r"\b(cannot|not|nor|no|would)\b", re.IGNORECASE)


def section(text: str, heading: str) -> str:
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def tables(text: str) -> list[list[dict[str, str]]]:
    """Read the markdown tables back."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in block.splitlines()]
        found.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return found


def written(path: Path) -> str:
    return write_report(path).read_text(encoding="utf-8")


def overclaims(text: str) -> list[str]:
    sentences = re.split(r"(?<=[.:;!?])\s+|\n", text)
    return [s for s in sentences if CLAIMS.search(s) and not DENIALS.search(s)]


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
    assert {path.stem for path in (plain / "figures").iterdir()} == set(FIGURES)
    for name in FIGURES:
        assert plain_text.count(f"](figures/{name}.png)") == 1
        assert (plain / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_one_seed_and_a_fixed_rate_are_the_first_thing_said(plain_text: str) -> None:
    first = section(plain_text, "Summary").strip().splitlines()[0]
    assert first.startswith("**This sweep has one seed and a fixed learning rate: it cannot say")
    assert "chance" in first and "larger batches generalise worse" in first
    assert "--lr tuned --seeds 3" in section(plain_text, "Summary")


def test_every_recommendation_of_one_seed_is_inconclusive(plain_text: str) -> None:
    (rows,) = tables(section(plain_text, "Recommendations"))
    assert [row["question"] for row in rows] == ["best quality", "fastest", "balanced"]
    assert all(row["standing"].startswith("INCONCLUSIVE: one seed") for row in rows)
    assert "fixed learning rate" in rows[0]["standing"]


def test_no_sentence_claims_more_than_one_seed_shows(plain_text: str) -> None:
    prose = re.sub(r"^\|.*$|^- \*\w.*$", "", plain_text, flags=re.MULTILINE)
    assert CLAIMS.search(prose)  # the denials are there
    assert overclaims(prose) == []


def test_the_check_for_claims_finds_the_earlier_report() -> None:
    earlier = (
        "Batch size 8 achieved the best validation loss, demonstrating better generalization. "
        "Larger batches generalise worse. The optimal quality is at 8."
    )
    assert len(overclaims(earlier)) == 3


def test_numbers_in_the_tables_are_those_of_the_frames(plain: Path, plain_text: str) -> None:
    cells = compare_batch_sizes(sweep.load_sweep(plain).trials).set_index("batch_size")
    quality, trials = tables(section(plain_text, "Results"))
    (time,) = tables(section(plain_text, "Time, throughput and memory"))
    (summary,) = tables(section(plain_text, "Summary"))
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


def test_the_numbers_of_the_prose_are_those_of_the_frames(plain: Path, plain_text: str) -> None:
    found = sweep.load_sweep(plain)
    cells = compare_batch_sizes(found.trials)
    best = cells.loc[cells["final_valid_loss"].idxmin()]
    quick = cells.loc[cells["seconds_total"].idxmin()]
    text = section(plain_text, "Summary")
    assert (
        f"final validation loss measured is {best['final_valid_loss']:.4f}, at batch size "
        f"{best['batch_size']}." in text
    )
    assert f"at batch size {quick['batch_size']}, with a final validation loss" in text
    assert f"({found.plan.model['parameters']:,} parameters)" in text


def test_the_warmup_is_the_true_one(plain: Path, plain_text: str) -> None:
    plan = sweep.load_sweep(plain).plan
    shares = [100 * row.warmup_steps / row.steps for row in plan.trials]
    assert f"true {min(shares):.2f} to {max(shares):.2f} %" in plain_text


def test_three_seeds_print_a_spread_and_whether_ranges_meet(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "three", seeds=3)
    text = written(tmp_path / "three")
    cells = compare_batch_sizes(sweep.load_sweep(tmp_path / "three").trials)
    best = cells.loc[cells["final_valid_loss"].idxmin()]
    summary = section(text, "Summary")
    assert f"{best['final_valid_loss']:.4f} ± {best['loss_sd']:.4f}" in summary
    assert "overlaps with" in summary and "one seed" not in text
    assert overclaims(re.sub(r"^\|.*$|^- \*\w.*$", "", text, flags=re.MULTILINE)) == []


def test_two_seeds_print_no_standard_deviation(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "two", seeds=2, batches="4,8")
    text = written(tmp_path / "two")
    assert not re.search(r"\d ± \d", text)
    assert "INCONCLUSIVE: 2 seeds" in text


def test_failed_diverged_and_unfinished_trials_stay_in_the_report(mixed_sweep: Path) -> None:
    text = written(mixed_sweep)
    quality, trials = tables(section(text, "Results"))
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
    assert "4 of 10 rows below take no part" in section(text, "Summary")
    assert "1 of 30 reporting trials diverged" in section(text, "What this sweep cannot show")
    assert "no tuned learning rate" in section(text, "Summary")


def test_an_empty_sweep_gets_a_report_that_says_so(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "empty", outcome=lambda row: "WAITING")
    text = written(tmp_path / "empty")
    assert section(text, "Summary").strip().startswith("**Nothing can be compared yet")
    assert "5 trials: 5 WAITING" in text
    (rows,) = tables(section(text, "Recommendations"))
    assert {row["the rule picks"] for row in rows} == {"–"}


def test_a_sweep_of_one_batch_size_compares_nothing(tmp_path: Path, write_fake_sweep: Any) -> None:
    write_fake_sweep(tmp_path / "single", batches="16", seeds=3)
    text = written(tmp_path / "single")
    assert "The lowest" not in section(text, "Summary")
    (rows,) = tables(section(text, "Recommendations"))
    assert all("nothing to compare" in row["standing"] for row in rows)


def test_a_sweep_with_only_tuning_trials_gets_a_report(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "tuning", lrs=("tuned",))
    text = written(tmp_path / "tuning")
    assert "25 tuning trials" in section(text, "Summary")


def test_a_tuned_cell_is_not_doubted_for_the_fixed_rate_beside_it(
    tmp_path: Path, write_fake_sweep: Any
) -> None:
    write_fake_sweep(tmp_path / "both", seeds=3, batches="4,64")
    path = tmp_path / "both"
    found = sweep.load_sweep(path)
    tuned = found.trials.assign(policy="tuned", id="t" + found.trials["id"])
    tuned["final_valid_loss"] -= tuned["batch_size"] / 100
    both = frames.pd.concat([found.trials, tuned], ignore_index=True)
    text = report.write_report_of(
        frames.Sweep("both", found.plan, both, found.curves, ()), tmp_path
    ).read_text()
    best = tables(section(text, "Recommendations"))[0][0]
    assert best["the rule picks"] == "batch size 64 (tuned)"
    assert best["standing"].startswith("INCONCLUSIVE: gate"), "of the tuned rates, not the fixed"
    assert "cannot say which" not in text


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
    assert "5 more trials are in trials.csv" in text


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


class Page(HTMLParser):
    """Checks that elements close in order, and collects images and cells."""

    VOID = ("meta", "img", "br", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.cells = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.images.append(str(dict(attrs)["src"]))
        self.cells += tag == "td"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_holds_its_figures(plain: Path) -> None:
    page = Page()
    page.feed((plain / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert len(page.images) == len(FIGURES)
    assert all(source.startswith("data:image/png;base64,") for source in page.images)
    assert page.cells > 100
