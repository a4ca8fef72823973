"""`--seeds auto` on noisy quadratics, whose best loss at every batch size is known."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from sweep.analysis.results import load_sweep
from sweep.decision.decision import LOOKS
from sweep.orchestration.looks import trials_after_look
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import read_request
from sweep.plan.plan import load_plan
from tests.orchestration.test_tuning import Interrupted, run_in

LOSS = runpy.run_path(str(Path(__file__).parents[1] / "analysis" / "noisy_quadratic.py"))[
    "quadratic_loss"
]
TOKENS = 1600
DIMENSIONS = 30
OPTIONS = {"dimensions": DIMENSIONS}
AUTO = {
    "batches": "4,16,64",
    "budget": TOKENS,
    "lr": "tuned",
    "seeds": "auto",
    "max_seeds": 12,
    "model_option": OPTIONS,
    "tuning": {"centre": 0.2, "prune": False},
    "tolerance": 0.01,
}


def best_loss(batch_size, **powers):
    """Return the least expected loss over constant rates."""

    def loss(log_rate):
        rates = np.exp([log_rate])
        return float(
            LOSS(np.array([TOKENS / batch_size]), batch_size, rates, DIMENSIONS, **powers)[0]
        )

    return minimize_scalar(loss, bounds=np.log([0.01, 1.9]), method="bounded").fun


def decide_in(path, stop_at=0, **settings):
    return run_in(path, Interrupted(stop_at), **{**AUTO, **settings})


def rows_of(summary):
    return sorted(str(row.id) for row in load_plan(summary.folder).trials)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sweep with seeds added until the answer was clear; not to be changed."""
    return decide_in(tmp_path_factory.mktemp("whole") / "sweep")


@pytest.mark.parametrize(
    "powers",
    [
        {},
        pytest.param({"curvature_power": 0.5, "noise_power": 0.5}, marks=pytest.mark.slow),
        pytest.param({"noise": 4.0}, marks=pytest.mark.slow),
    ],
)
def test_the_answer_agrees_with_the_closed_form(powers, whole, tmp_path):
    summary = whole
    if powers:
        summary = decide_in(tmp_path / "sweep", model_option={**OPTIONS, **powers})
    assert summary.exit_code == 0
    answer = load_sweep(summary.folder.path).answer()
    truth = {size: best_loss(size, **powers) for size in (4, 16, 64)}
    best = min(truth, key=truth.__getitem__)
    assert best in answer.candidates
    for row in answer.batch_sizes:
        gap = truth[row.batch_size] - min(truth[n] for n in truth if n != row.batch_size)
        low, high = row.gap_to_best
        assert low <= gap <= high, row
        if row.tolerance_verdict != "undecided":
            assert (row.tolerance_verdict == "within") == (gap <= answer.tolerance)
    assert answer.recommended in (best, *(n for n in truth if truth[n] <= truth[best] + 0.01))


def test_seeds_end_at_looks_and_only_undecided_batch_sizes_have_more(whole):
    finals = [row for row in load_plan(whole.folder).trials if row.stage == "final"]
    seeds = {size: {r.seed for r in finals if r.batch_size == size} for size in (4, 16, 64)}
    assert all(
        len(numbers) in LOOKS and numbers == {*range(len(numbers))} for numbers in seeds.values()
    )
    result = load_sweep(whole.folder.path).leading
    is_open = [row.tolerance_verdict == "undecided" for row in result.answer.batch_sizes]
    low, high = result.decision.reach(without_noise=True, known_rates=True)
    may_be_decided = ((high <= 0.01) | (low > 0.01)) & is_open
    assert max(map(len, seeds.values())) == 12 or not may_be_decided.any()


def test_a_finished_sweep_needs_nothing_more_and_a_tighter_tolerance_does(whole):
    def following(**changes):
        request = read_request("quadratic", {**AUTO, "device": "cpu", **changes}, whole.folder.path)
        planned = make_plan(request)
        return trials_after_look(planned.plan, planned.experiment, whole.folder)

    assert following() == []
    assert following(tolerance=1e-5, max_seeds=20) != []


def test_a_report_offers_all_verdicts_only_if_further_trials_may_tell_them(whole, tmp_path):
    """At 0.01 the rates are not known well enough; at 0.02 further seeds may tell."""
    wider = decide_in(tmp_path / "sweep", tolerance=0.02)
    for summary, tolerance, is_offered in ((whole, 0.01, False), (wider, 0.02, True)):
        sweep = load_sweep(summary.folder.path)
        assert sweep.answer().decided
        assert any("With --answer order" in line for line in sweep.sentences()) is is_offered

        order = {**AUTO, "tolerance": tolerance, "device": "cpu", "answer": "order"}
        planned = make_plan(read_request("quadratic", order, summary.folder.path))
        more = trials_after_look(planned.plan, planned.experiment, summary.folder)
        assert bool(more) is is_offered


@pytest.mark.parametrize(
    "stop_at", [24, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 32))]
)
def test_an_interrupted_sweep_decides_the_same(whole, tmp_path, stop_at):
    path = tmp_path / whole.folder.path.name
    first = decide_in(path, stop_at)
    assert first.is_interrupted
    again = decide_in(path)
    assert rows_of(again) == rows_of(whole)
    assert load_sweep(path).answer() == load_sweep(whole.folder.path).answer() or [
        row.gap_to_best for row in load_sweep(path).answer().batch_sizes
    ] == [row.gap_to_best for row in load_sweep(whole.folder.path).answer().batch_sizes]


def test_no_time_left_starts_no_further_seeds(tmp_path):
    summary = decide_in(tmp_path / "sweep", batches="16,64", max_hours=1e-9, tolerance=1e-6)
    finals = [row for row in load_plan(summary.folder).trials if row.stage == "final"]
    assert {row.seed for row in finals} == {0, 1, 2} and summary.exit_code == 0


def test_seeds_are_added_to_a_fixed_rate_without_tuning(tmp_path):
    fixed = {"lr": "0.2", "tuning": {}, "budget": 2 * TOKENS}
    summary = decide_in(tmp_path / "sweep", **fixed, batches="4,16", tolerance=1e-6, max_seeds=5)
    rows = load_plan(summary.folder).trials
    assert {row.stage for row in rows} == {"final"} and {row.seed for row in rows} == {*range(5)}
    assert load_plan(summary.folder).has_looks
