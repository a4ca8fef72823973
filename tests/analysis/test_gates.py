"""The eight gates: a claim is made only where each of them passes."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from sweep.analysis.claims import headline
from sweep.analysis.comparison import compare_batch_sizes
from sweep.analysis.frames import load_sweep
from sweep.analysis.gates import INCONCLUSIVE, NOT_APPLICABLE, PASS, judge
from sweep.report.report import write_report

FAKE = runpy.run_path(str(Path(__file__).parent / "fake_sweeps.py"))
LOSSES = {4: 1.50, 16: 1.45, 64: 1.60}


@pytest.fixture
def judged(tmp_path):
    """Judge a made-up sweep whose final losses are given by batch size, seed and stage."""

    def judge_here(
        noise=0.001, lr="tuned", seeds=3, losses=LOSSES, outcome=lambda row: "COMPLETE", **settings
    ):
        rng = np.random.default_rng(0)
        shared = rng.normal(0, 0.02, 50)  # of a seed, at every batch size

        def change(row):
            if outcome(row) != "COMPLETE":
                return {}
            loss = losses[row.batch_size]
            if row.stage == "report":
                loss += shared[row.seed] + rng.normal(0, noise)
            else:
                loss += 0.05 * np.log2(row.learning_rate / 1e-3) ** 2
            return {"final_valid_loss": float(loss), "initial_train_loss": 6.3}

        batches = ",".join(map(str, losses))
        FAKE["write_fake_sweep"](
            tmp_path / "s", lrs=(lr,), change=change, outcome=outcome, seeds=seeds,
            batches=batches, **settings,
        )  # fmt: skip
        sweep = load_sweep(tmp_path / "s")
        return judge(sweep, compare_batch_sizes(sweep.trials))[0]

    return judge_here


def verdicts(judged):
    return {gate.number: gate.verdict for gate in judged.gates}


def test_a_tuned_sweep_with_three_seeds_and_clear_differences_makes_its_claim(judged):
    found = judged()
    assert verdicts(found) == dict.fromkeys(range(1, 9), PASS), found.gates
    said = headline(found)
    assert said.startswith("At rates tuned for each, batch size 16 has the lowest final loss")
    assert "4 by 0.0" in said and "64 by 0.1" in said
    assert not any(gate.settle for gate in found.gates)


def test_batch_sizes_within_the_margin_are_called_no_different(judged):
    found = judged(losses={4: 1.45, 16: 1.45, 64: 1.60}, noise=0.0005)
    assert found.passes
    assert found.best in (4, 16)
    assert "batch sizes 4 and 16 have the lowest final loss, no different from" in headline(found)


def test_a_fixed_rate_makes_no_claim_however_clear_the_differences(judged):
    found = judged(lr="1e-3")
    assert verdicts(found)[1] == INCONCLUSIVE and headline(found) == ""
    assert "--lr tuned" in found.gates[0].settle
    assert {number for number, verdict in verdicts(found).items() if verdict != PASS} == {1}


def test_one_seed_makes_no_claim_and_no_test(judged):
    found = judged(seeds=1)
    assert verdicts(found)[2] == INCONCLUSIVE and verdicts(found)[3] == NOT_APPLICABLE
    assert headline(found) == "" and "--seeds 3" in found.gates[1].settle


def test_two_seeds_are_compared_and_make_no_claim(judged):
    found = judged(seeds=2)
    assert found.comparison.pairs and verdicts(found)[2] == INCONCLUSIVE
    assert headline(found) == ""


def test_differences_that_drown_in_noise_are_inconclusive_with_the_seeds_that_would_tell(judged):
    found = judged(losses={4: 1.450, 16: 1.455, 64: 1.46}, noise=0.03)
    assert verdicts(found)[3] == INCONCLUSIVE and headline(found) == ""
    assert "--seeds" in found.gates[2].settle and "undecided" in found.gates[2].evidence
    assert "0.01 nats would need" in found.gates[1].evidence


def test_a_best_rate_at_the_edge_names_the_rate_to_try(judged):
    def outcome(row):
        is_high = row.stage == "tune" and row.batch_size == 64 and row.learning_rate > 1e-3
        return "WAITING" if is_high else "COMPLETE"

    found = judged(outcome=outcome)
    assert verdicts(found)[1] == INCONCLUSIVE and headline(found) == ""
    assert "AT THE EDGE" in found.gates[0].evidence
    assert "another --out with [tuning] centre" in found.gates[0].settle


def test_a_diverged_neighbour_bounds_the_grid(judged):
    def outcome(row):
        return "diverged" if row.stage == "tune" and row.learning_rate > 1.2e-3 else "COMPLETE"

    found = judged(outcome=outcome)
    assert verdicts(found)[1] == PASS


def test_a_diverged_report_is_counted_and_stops_the_claim(judged):
    def outcome(row):
        is_it = (row.stage, row.batch_size, row.seed) == ("report", 64, 1)
        return "diverged" if is_it else "COMPLETE"

    found = judged(outcome=outcome)
    assert "1 of 9 trials diverged" in found.gates[5].evidence
    assert verdicts(found)[6] == INCONCLUSIVE and verdicts(found)[3] == NOT_APPLICABLE
    assert headline(found) == ""
    assert all("warmup" in found.gates[place].settle for place in (1, 2, 5))


def test_a_lost_report_asks_for_the_same_command_and_is_no_divergence(judged):
    found = judged(outcome=lambda r: "lost" if (r.batch_size, r.seed) == (64, 1) else "COMPLETE")
    assert "0 of 9 trials diverged, 1 failed" in found.gates[5].evidence
    assert all(found.gates[place].settle == "the same command again" for place in (1, 5))
    assert "finite" not in found.gates[2].evidence


def test_rates_tuned_at_fewer_tokens_pass_only_when_confirmed(judged):
    found = judged(tuning={"budget": 98304})
    assert verdicts(found)[1] == INCONCLUSIVE
    assert "confirm batch size 4 at the full budget" in found.gates[0].settle


def test_tokens_that_differ_stop_the_claim(judged, tmp_path):
    found = judged(losses={7: 1.5, 16: 1.45, 60: 1.6})
    assert verdicts(found)[5] == INCONCLUSIVE and headline(found) == ""
    assert "### At nearly equal tokens, " in write_report(tmp_path / "s").read_text()


def test_two_policies_are_judged_apart(tmp_path):
    FAKE["write_fake_sweep"](tmp_path / "s", lrs=("1e-3", "tuned"), seeds=3, batches="4,16")
    sweep = load_sweep(tmp_path / "s")
    first, second = judge(sweep, compare_batch_sizes(sweep.trials))
    assert first.label == "fixed 1e-3" and second.label == "tuned"
    assert not first.rates and len(second.rates) == 2
    assert first.gates[0].verdict == INCONCLUSIVE
