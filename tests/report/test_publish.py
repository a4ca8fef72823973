"""A published folder gives the report of its sweep again, or names what it lacks."""

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from sweep.analysis.results import load_sweep
from sweep.analysis.tables import CURVES, find_gains, load_tables
from sweep.config.arms import Arm
from sweep.errors import SweepError
from sweep.report.publish import publish
from sweep.report.report import write_report
from sweep.trial.files import read_json, write_json
from sweep.trial.folder import SweepFolder
from sweep.trial.timing import read_timing, write_timing
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.fakes.times import timing_of

ROOT = Path(__file__).parents[2]
PUBLISHED = sorted(path.parent for path in (ROOT / "results/published").glob("**/plan.json"))
FIGURES = {
    "frontier",
    "answer",
    "budgets",
    "loss",
    "steps",
    "rates",
    "curves",
    "throughput",
}  # of the present version
KEYS = {"policy", "metric", "direction", "unit", "tolerance", "candidates", "recommended"}


def files_of(folder):
    names = ("report.md", "answer.json", "trials.csv")
    figures = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    return {name: (folder / name).read_bytes() for name in names} | figures


def write_sweep(path, kind):
    settings = {"seeds": 3, "batches": "4,16,64"}
    match kind:
        case "fixed":
            return write_fake_sweep(path, **settings)
        case "tuned":
            return write_fake_sweep(path, lrs=("1e-3", "tuned"), **settings)
        case "target":
            return write_fake_sweep(path, lrs=("tuned",), target=2.5, **settings)
        case "missed target":
            return write_fake_sweep(path, target=0.5, **settings)
        case "quadratic":
            return write_fake_sweep(path, experiment="quadratic", **settings)
        case "rewards":
            settings = {"experiment": "grpo-words", "batches": [16, 32], "data": "synthetic"}
            start = {"initial_valid_reward": 0.05}
            return write_fake_sweep(path, seeds=3, change=lambda row: start, **settings)
        case "failures":
            ends = {(4, 2): "WAITING", (16, 0): "out_of_memory", (64, 1): "diverged"}
            ends |= {(64, 2): "RUNNING"}
            message = {"message": "=1+1 failed: -1 | 'x'"}
            return write_fake_sweep(
                path,
                outcome=lambda row: ends.get((row.batch_size, row.seed), "COMPLETE"),
                change=lambda row: message if row.batch_size == 64 and row.seed == 1 else {},
                **settings,
            )


FURTHER_KINDS = ("fixed", "missed target", "quadratic")
KINDS = ["tuned", "target", "rewards", "failures"]
KINDS += [pytest.param(kind, marks=pytest.mark.slow) for kind in FURTHER_KINDS]


@pytest.fixture(scope="module", params=KINDS)
def published(tmp_path_factory, request):
    """A published sweep of each kind, next to the folder `s` of the sweep; not to be changed."""
    path = tmp_path_factory.mktemp("kind")
    write_sweep(path / "s", request.param)
    publish(path / "s", path / "published" / "s")
    return path / "published" / "s"


@pytest.fixture(scope="module")
def plain_published(plain, tmp_path_factory):
    """The sweep `plain`, published; not to be changed."""
    path = tmp_path_factory.mktemp("plain") / "published"
    publish(plain, path)
    return path


@pytest.fixture
def plain_curves(plain_published, tmp_path):
    """The table of curves in a copy of a published sweep, for tests that damage it."""
    return shutil.copytree(plain_published, tmp_path / "published") / CURVES


def test_a_published_folder_gives_the_same_report_as_its_sweep(published, tmp_path):
    sweep = published.parents[1] / "s"
    write_report(sweep, tmp_path / "s")
    write_report(published, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "s")
    assert load_tables(published).warnings == ()


def test_the_times_of_steps_are_published_if_there_are_any(plain, plain_published, tmp_path):
    assert not SweepFolder(plain_published).timing_path.exists()
    folder = SweepFolder(shutil.copytree(plain, tmp_path / "plain"))
    uid = folder.require_plan()["sweep_uid"]
    timing = timing_of({Arm(None, 4): [0.1], Arm(None, 16): [0.2]}, sweep_uid=uid)
    write_timing(folder, timing)
    publish(folder.path, tmp_path / "published")
    assert read_timing(SweepFolder(tmp_path / "published"), uid) == timing


def test_the_noise_scale_and_its_intervals_are_published(tuned, tmp_path):
    publish(tuned, tmp_path / "tuned")
    write_report(tmp_path / "tuned", tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tuned)


def test_publishing_replaces_nothing_and_needs_intact_trials(plain, tmp_path):
    with pytest.raises(SweepError, match="exists already"):
        publish(plain, tmp_path)
    publish(plain, tmp_path / "plain")
    with pytest.raises(SweepError, match="folders of its trials"):
        publish(tmp_path / "plain", tmp_path / "other")
    shutil.copytree(plain, tmp_path / "damaged")
    SweepFolder(tmp_path / "damaged").trials()[0].metrics_path.write_text("?\n")
    with pytest.raises(SweepError, match=r"the same report\.md"):
        publish(tmp_path / "damaged", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_curves_the_report_says_so_and_claims_nothing_from_no_trial(published, tmp_path):
    lacking = shutil.copytree(published, tmp_path / "published")
    (lacking / CURVES).unlink()
    text = write_report(lacking, tmp_path / "again").read_text()
    assert f"{CURVES} is missing" in text
    assert "0 of 0" not in text and "No trial has ended" not in text and "nan" not in text
    assert "in common" not in text  # of losses at equal tokens


def answers(folder):
    return json.loads((folder / "answer.json").read_text())


@pytest.mark.parametrize(("target", "too_early"), [(2.5, "FAIL"), (1.7, "PASS")])
def test_the_critical_batch_size_follows_from_the_tokens_of_the_table(tmp_path, target, too_early):
    path = tmp_path / "s"
    write_fake_sweep(path, lrs=("tuned",), target=target, seeds=3, batches="4,16,64")
    record_crossings(path)
    publish(path, tmp_path / "published")
    (tmp_path / "published" / CURVES).unlink()
    (whole,), (without,) = (
        load_sweep(folder).policies for folder in (path, tmp_path / "published")
    )
    assert without.curve.fit.b_crit == pytest.approx(whole.curve.fit.b_crit)
    assert without.curve.excess == whole.curve.excess
    assert without.answer.batch_sizes == whole.answer.batch_sizes
    status = {check.code: check.status for check in without.checks}
    assert {check.code: check.status for check in whole.checks}["crossing_too_early"] == too_early
    assert status["crossing_too_early"] == too_early  # by the plan's evaluations
    assert status["crossing_unresolved"] == "NOT APPLICABLE"


def record_crossings(path):
    """Let each result have the tokens to the target, as a worker writes them."""
    steps = load_sweep(path).policies[0].curve.trials.set_index("id")
    for trial in SweepFolder(path).trials():
        if trial.id in steps.index:
            result = read_json(trial.result_path) | {
                "tokens_to_target": float(steps.loc[trial.id, "tokens"])
            }
            write_json(trial.result_path, result)


def test_a_missed_target_without_its_bound_prevents_the_fit(tmp_path):
    path = tmp_path / "s"
    write_fake_sweep(path, lrs=("tuned",), target=2.5, seeds=3, batches="4,16,64")
    record_crossings(path)
    trial = next(t for t in SweepFolder(path).trials() if t.read_result().stage == "final")
    write_json(trial.result_path, read_json(trial.result_path) | {"tokens_to_target": None})
    publish(path, tmp_path / "published")
    (tmp_path / "published" / CURVES).unlink()
    (result,) = load_sweep(tmp_path / "published").policies
    assert result.curve.fit is None and "1 trials did not reach" in result.curve.no_fit
    evidence = {check.code: check.evidence for check in result.checks}
    assert evidence["target_not_reached"].startswith("8 of 9 trials")


def test_rewards_follow_from_the_table_where_the_last_evaluation_has_the_same_prompts(tmp_path):
    write_sweep(tmp_path / "s", "rewards")
    for trial in SweepFolder(tmp_path / "s").trials():
        last = trial.read_metrics()[-1]["valid/reward"]
        write_json(trial.result_path, read_json(trial.result_path) | {"final_valid_reward": last})
    publish(tmp_path / "s", tmp_path / "published")
    (tmp_path / "published" / CURVES).unlink()
    whole, without = (find_gains(load_sweep(f)) for f in (tmp_path / "s", tmp_path / "published"))
    assert whole == without and whole


DAMAGES = {
    "column": lambda table: table.drop(columns="tokens"),
    "text": lambda table: table.assign(**{"valid/loss": "low"}),
    "infinite": lambda table: table.assign(**{"train/loss": "inf"}),
    "position": lambda table: table.assign(step=""),
    "order": lambda table: table[::-1],
    "stranger": lambda table: table.assign(id="0" * 12),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_table_of_curves_that_was_damaged_is_refused(plain_curves, damage):
    table = pd.read_csv(plain_curves, dtype=str)
    DAMAGES[damage](table).to_csv(plain_curves, index=False)
    with pytest.raises(SweepError, match=r"curves\.csv must have .* Restore it"):
        load_tables(plain_curves.parent)


def test_a_trial_without_points_in_the_table_of_curves_is_named(plain_curves):
    table = pd.read_csv(plain_curves, dtype=str)
    first = table["id"][0]
    table[table["id"] != first].to_csv(plain_curves, index=False)
    (warning,) = load_tables(plain_curves.parent).warnings
    assert first in warning and CURVES in warning


def test_tokens_of_trials_that_ended_early_are_those_of_the_table(tmp_path):
    write_fake_sweep(tmp_path / "s", seeds=3, batches="4,16", change=lambda row: {"tokens": 4096})
    publish(tmp_path / "s", tmp_path / "published")
    assert set(load_tables(tmp_path / "published").trials["tokens"]) == {4096}


# ---- the published studies -----------------------------------------------------------------------


def rows_of(answer):
    return {row["batch_size"]: row for row in answer["batch_sizes"]}


def numbers(answer):
    """Return the numbers of each batch size of an answer."""
    return {
        size: {key: value for key, value in row.items() if isinstance(value, int | float)}
        for size, row in rows_of(answer).items()
    }


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda path: path.name)
def test_a_published_report_can_be_written_again(folder, tmp_path):
    text = write_report(folder, tmp_path).read_text()
    old, new = answers(folder), answers(tmp_path)
    lacks_curves = not (folder / CURVES).exists()
    assert (f"{CURVES} is missing" in text) == lacks_curves
    missing = {"curves"} if lacks_curves else set()
    assert "0 of 0" not in text
    if old is not None:
        assert {key: old[key] for key in KEYS} == {key: new[key] for key in KEYS}
        assert old["provisional"] == new["provisional"] and old["decided"] == new["decided"]
        for size, row in numbers(old).items():
            assert numbers(new)[size] == pytest.approx(row, rel=1e-6), size
            verdicts = [a[size]["tolerance_verdict"] for a in (rows_of(old), rows_of(new))]
            assert verdicts[0] == verdicts[1]
    drawn = {path.stem for path in (tmp_path / "figures").iterdir()}
    committed = {path.stem for path in (folder / "figures").iterdir()} & FIGURES
    if len(load_tables(folder).batch_sizes) > 1:  # figures compare batch sizes
        assert drawn == committed - missing


def test_the_results_that_need_no_curves_are_in_the_reports_written_again(tmp_path):
    study = ROOT / "results/published/critical-batch-size"
    text = write_report(study, tmp_path / "critical").read_text()
    assert "critical batch size is 51 [47.9, 54.4] sequences" in text
    assert "8.38 [7.97, 8.81]" in text and "45.8 [43.8, 47.9]" in text
    old = (study / "report.md").read_text()
    rows = re.findall(r"^\| \d+ \| tuned \| [\d.]+ \| 3 of 3 .*$", old, re.MULTILINE)
    assert len(rows) == 7 and all(row in text for row in rows)
    words = write_report(ROOT / "results/published/grpo-words", tmp_path / "words").read_text()
    assert "**At batch size 64 training changed the mean reward by +0.070 [+0.021, +0.120].**" in (
        words
    )
    assert "| +0.070 [+0.021, +0.120] | +0.091, +0.051, +0.068 |" in words
