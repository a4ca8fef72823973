"""The answer from tables of trials whose truth is known, through the public function."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import sweep
from experiments.studies.answer.error_rates import SPREAD, Case, tune
from sweep.analysis.judge import judge_trials
from sweep.analysis.rate_rules import describe_costs, rate_exponent, rule_costs
from sweep.analysis.sentences import describe
from sweep.analysis.table_answer import answer_of
from sweep.analysis.tables import TRIAL_COLUMNS, write_trials_csv
from sweep.config.objective import Objective
from sweep.decision.rates import rate_points
from sweep.errors import SweepError
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.analysis.noisy_quadratic import quadratic_loss

DEFAULTS = ("final_valid_loss", "minimize")
RATES = {2: 1e-3, 4: 1.4e-3, 8: 2e-3}


def table(losses, noise=0.001, seeds=5, seconds=None, **changes):
    """Trials of a tuned sweep with the given losses at the best rates, which are RATES."""
    rng = np.random.default_rng(0)
    rows = []
    for size, loss in losses.items():
        best = RATES.get(size, 1e-3)
        for place in range(-2, 3):
            row = {"stage": "tune", "seed": 1000, "learning_rate": best * 2.0 ** (place / 2)}
            value = loss + 0.1 * (place / 2 * math.log(2)) ** 2 + noise * rng.normal()
            rows.append({**row, "batch_size": size, "final_valid_loss": value})
        for seed in range(seeds):
            row = {"stage": "final", "seed": seed, "learning_rate": best, "batch_size": size}
            row["seconds_training"] = (seconds or {}).get(size, 10.0) * (1 + 0.01 * seed)
            rows.append({**row, "final_valid_loss": loss + noise * rng.normal()})
    return pd.DataFrame(rows).assign(policy="tuned", state="COMPLETE", **changes)


CLOSE = {2: 1.0, 4: 1.001, 8: 1.5}


def test_the_fastest_within_the_tolerance_is_recommended():
    answer = sweep.answer(table(CLOSE, noise=1e-4, seconds={2: 30.0, 4: 20.0, 8: 10.0}))
    assert answer.recommended == 4 and not answer.provisional and answer.decided
    verdicts = {row.batch_size: row.tolerance_verdict for row in answer.batch_sizes}
    assert verdicts == {2: "within", 4: "within", 8: "outside"}
    assert answer[2].seconds == pytest.approx(30.6)  # the median
    text = " ".join(describe(answer))
    basis = "the fastest of those within 0.01 of the best"
    assert text.startswith(f"Use batch size 4: {basis}, as far as their times are known.")
    seconds = {2: 30.0, 4: 20.0, 8: 10.0}
    timed = table(CLOSE, seeds=8, noise=1e-4, seconds=seconds, device="cpu: one")
    assert sweep.answer(timed).headline == f"Use batch size 4: {basis}."
    assert "Batch size 8 is worse than the best by at least 0.4" in text


def test_without_times_the_largest_within_the_tolerance_is_recommended():
    trials = table(CLOSE, noise=1e-4, seconds={2: 1.0, 4: 20.0})
    is_it = (trials["batch_size"] == 2) & (trials["stage"] == "final")
    trials.loc[is_it, "seconds_training"] = np.nan
    answer = sweep.answer(trials)
    assert answer.recommended == 4 and "the time at batch size 2 is not known" in answer.basis


def test_while_none_is_within_the_least_worst_case_is_recommended_provisionally():
    answer = sweep.answer(table({2: 1.0, 4: 1.004, 8: 1.5}, noise=0.02, seeds=3))
    worst = {row.batch_size: row.gap_to_best[1] for row in answer.batch_sizes}
    assert answer.provisional and not answer.decided
    assert answer.recommended == min(worst, key=worst.__getitem__)
    assert answer[8].tolerance_verdict == "outside" and answer.candidates == [2, 4]


def test_the_best_at_an_end_is_the_best_of_those_tried():
    text = " ".join(describe(sweep.answer(table({2: 1.0, 4: 1.2, 8: 1.5}))))
    assert "the best of those tried" in text and "Smaller batch sizes were not tried." in text
    text = " ".join(describe(sweep.answer(table({2: 1.2, 4: 1.0, 8: 1.5}))))
    assert "not tried" not in text


def test_a_rate_that_gives_up_loss_is_corrected_and_named():
    trials = table({2: 1.0, 4: 1.001, 8: 1.5}, noise=1e-4)
    is_it = (trials["batch_size"] == 2) & (trials["stage"] == "final")
    trials.loc[is_it, "learning_rate"] *= 2  # gives up 0.1·ln²2 = 0.048
    trials.loc[is_it, "final_valid_loss"] += 0.1 * math.log(2) ** 2
    answer = sweep.answer(trials)
    assert answer[2].estimated_regret == pytest.approx(0.048, abs=2e-3)
    assert 2 in answer.candidates and answer[2].gap == pytest.approx(-0.001, abs=2e-3)
    low, high = answer[2].learning_rate_interval
    assert low < 1e-3 * 1.05 and high > 1e-3 * 0.95 and answer[2].learning_rate > high


def test_larger_is_better_if_asked():
    trials = table({2: 1.0, 4: 1.2, 8: 1.5}).assign(accuracy=lambda t: 5 - t["final_valid_loss"])
    trials = trials.drop(columns="final_valid_loss")
    answer = sweep.answer(trials, "accuracy", "maximize", tolerance=0.05)
    assert answer.recommended == 2 and answer[2].mean == pytest.approx(4.0, abs=0.01)
    assert answer[8].gap_to_best[0] > 0.4
    assert (answer.metric, answer.direction) == ("accuracy", "maximize")


def test_the_unit_is_that_of_the_table():
    assert sweep.answer(table(CLOSE, loss_unit="nats")).unit == "nats"
    assert "0.01 nats" in describe(sweep.answer(table(CLOSE, loss_unit="nats")))[0]
    assert sweep.answer(table(CLOSE)).unit == ""


@pytest.mark.parametrize(
    ("metric", "gap", "written"),
    [
        (Objective(unit="nats"), 0.166912, ("0.1669 nats", "0.1669 nats", "0.167 nats")),
        (Objective(unit="", tolerance=1e-5), -2.53e-6, ("-2.5e-06", "-2.6e-06", "-2.5e-06")),
        (
            Objective("tokens_to_target", unit="ratio", tolerance=0.05),
            0.09434,
            ("9.43 %", "9.43 %", "9.44 %"),
        ),
    ],
)
def test_a_gap_is_written_as_finely_as_the_tolerance_needs(metric, gap, written):
    assert tuple(metric.write(gap, rounded) for rounded in (np.round, np.floor, np.ceil)) == written


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.drop(columns="seed"), "column seed"),
        (lambda t: t.drop(columns="final_valid_loss"), "column final_valid_loss"),
        (
            lambda t: t.assign(stage="train"),
            "got stage .its cells are neither final nor tune, such as train",
        ),
        (lambda t: t.assign(stage=t["stage"].replace("final", "train")), "row 5 .its stage is"),
        (lambda t: t.assign(policy=None), "policy must be a name"),
        (
            lambda t: t.assign(batch_size=t["batch_size"] / 4),
            "got 0.5 .batch_size, row 0",
        ),
        (lambda t: t.assign(learning_rate=0.0), "got 0.0 .learning_rate, row 0"),
        (
            lambda t: t.assign(final_valid_loss="low"),
            "empty or readable, got low .final_valid_loss, row 0",
        ),
        (lambda t: pd.concat([t, t]), "row 30 .it repeats another row"),
        (
            lambda t: pd.concat([t, t.assign(final_valid_loss=t["final_valid_loss"] + 1)]),
            "row 0 .it has the settings and the seed of row 30",
        ),
        (
            lambda t: t.assign(learning_rate=[*np.linspace(1, 2, len(t))]),
            "learning_rate must be equal",
        ),
    ],
)
def test_a_table_that_cannot_be_read_as_a_whole_is_refused(change, says):
    with pytest.raises(SweepError, match=says):
        sweep.answer(change(table(CLOSE)))
    with pytest.raises(SweepError, match="minimize or maximize"):
        sweep.answer(table(CLOSE), direction="down")


def test_seeds_that_differ_by_rounding_only_say_nothing_about_the_error():
    trials = table(CLOSE)
    is_it = trials["stage"] == "final"
    first = trials[is_it].groupby("batch_size")["final_valid_loss"].transform("first")
    trials.loc[is_it, "final_valid_loss"] = first
    answer = sweep.answer(trials)
    assert all(row.gap_to_best == (None, None) for row in answer.batch_sizes)
    assert answer.provisional and answer.candidates == [2, 4, 8]


def test_one_batch_size_has_no_answer():
    assert sweep.answer(table({2: 1.0})) is None


def test_seeds_that_differ_between_batch_sizes_do_not_count_as_looks():
    even = sweep.answer(table(CLOSE, seeds=5))
    trials = table(CLOSE, seeds=5)
    is_late = (trials["stage"] == "final") & (trials["seed"] > 2)
    uneven = sweep.answer(trials[~(is_late & (trials["batch_size"] == 8))])
    with_looks = sweep.answer(trials.assign(has_looks=True))

    def widths(answer, with_eight):
        pairs = [pair for pair in answer.pairs if (8 in pair.batch_sizes) == with_eight]
        return [pair.difference.high - pair.difference.low for pair in pairs]

    for width, of_even, of_looks in zip(
        *(widths(answer, False) for answer in (uneven, even, with_looks)), strict=True
    ):
        assert width == pytest.approx(of_even, rel=0.1) and width < of_looks / 1.2
    assert max(widths(uneven, True)) > 1.2 * max(widths(even, True))


def test_a_batch_size_without_common_seeds_makes_the_answer_provisional():
    trials = table(CLOSE)
    trials.loc[(trials["batch_size"] == 8) & (trials["stage"] == "final"), "seed"] += 100
    answer = sweep.answer(trials)
    assert answer.provisional and not answer.decided
    assert "Fewer than 3 seeds are common" in " ".join(describe(answer))


def test_why_an_answer_is_provisional_is_said_in_full():
    trials = table(CLOSE, seeds=2)
    trials = trials[trials["stage"] == "final"].assign(policy="fixed", learning_rate=1e-3)
    answer = sweep.answer(trials)
    assert len(answer.reasons) == 2
    assert [line for line in describe(answer) if any(r in line for r in answer.reasons)] == [
        f"This is provisional: {answer.reasons[0]}",
        f"Also: {answer.reasons[1]}",
    ]


def test_an_untuned_batch_size_may_be_far_better_and_is_not_recommended():
    trials = table({2: 1.0, 4: 1.001, 8: 1.2})
    is_it = (trials["batch_size"] == 8) & (trials["stage"] == "tune")
    answer = sweep.answer(trials[~is_it])
    assert answer.recommended in (2, 4) and answer.provisional
    assert answer[2].gap_to_best[1] is None and answer[8].gap_to_best[0] is None
    assert "At 8 the best learning rate is not known" in " ".join(describe(answer))


@pytest.mark.parametrize("loss", [math.inf, -math.inf])
def test_an_infinite_loss_counts_as_diverged(loss):
    trials = table(CLOSE)
    trials.loc[(trials["batch_size"] == 8) & (trials["seed"] == 4), "final_valid_loss"] = loss
    answer = sweep.answer(trials)
    assert answer.provisional and answer[8].mean is None and answer[2].mean is not None


def test_untuned_rates_open_with_the_losses_and_limit_the_differences_to_them():
    trials = table({2: 1.0, 4: 1.2, 8: 1.5}).query("stage == 'final'")
    answer = sweep.answer(trials.assign(policy="fixed", learning_rate=1e-3))
    first, second, *rest = describe(answer)
    assert all(f"{loss} at batch size" in first for loss in ("1", "1.2", "1.5"))
    assert second.startswith("Provisionally, use batch size 2")
    assert any(line.startswith("At these rates, batch size 4 is worse") for line in rest)


def test_tokens_to_a_target_are_positive():
    trials = table({2: 13.0, 4: 13.1}, target=3.0).assign(tokens_to_target=0)
    with pytest.raises(SweepError, match="tokens_to_target must be positive or empty, got 0"):
        sweep.answer(trials)


def test_a_batch_size_that_missed_the_target_is_not_compared():
    trials = table({2: 13.0, 4: 13.001, 8: 13.1}, target=3.0)
    trials["tokens_to_target"] = np.exp(trials["final_valid_loss"])
    missed = (trials["batch_size"] == 8) & (trials["seed"] == 4)
    trials.loc[missed, "tokens_to_target"] = np.nan
    answer = sweep.answer(trials)
    assert (answer.metric, answer.unit, answer.tolerance) == ("tokens_to_target", "ratio", 0.05)
    assert answer[2].mean == pytest.approx(math.exp(13), rel=0.01)
    assert answer.candidates == [2] or answer.candidates == [2, 4]
    assert answer[8].mean is None
    assert "8 is not compared: 1 of its 5 seeds missed the target" in " ".join(describe(answer))
    by_loss = sweep.answer(trials.assign(loss=trials["final_valid_loss"]), "loss")
    assert by_loss.metric == "loss" and by_loss[2].mean == pytest.approx(13.0, abs=0.01)


def test_the_time_of_a_training_to_a_target_ends_at_the_target():
    trials = table({2: 13.0, 4: 13.001}, noise=1e-4, target=3.0)
    trials["tokens_to_target"] = np.exp(trials["final_valid_loss"])
    assert sweep.answer(trials)[2].seconds == pytest.approx(10.2)
    trained = trials["tokens_to_target"] * np.where(trials["batch_size"] == 2, 1.25, 2.0)
    answer = sweep.answer(trials.assign(tokens=trained))
    assert answer[2].seconds == pytest.approx(10.2 / 1.25)
    assert answer[4].seconds == pytest.approx(10.2 / 2) and answer.recommended == 4


def test_a_time_is_the_median_of_equal_trials_with_its_range_or_interval():
    trials = table(CLOSE, seconds={2: 10.0, 4: 10.0, 8: 10.0})
    trials.loc[(trials["batch_size"] == 8) & (trials["seed"] == 1), "seconds_training"] = 20.0
    answer = sweep.answer(trials)
    assert answer[8].seconds == pytest.approx(10.3) and answer[8].seconds_interval is None
    assert answer[8].seconds_range == pytest.approx((10.0, 20.0))

    many = sweep.answer(table(CLOSE, seeds=8, seconds={2: 10.0, 4: 10.0, 8: 10.0}))
    assert many[8].seconds_interval == pytest.approx((10.0, 10.7))
    assert many[8].seconds_range is None


def test_trials_on_several_devices_have_no_time():
    trials = table(CLOSE)
    trials["device"] = np.where(trials["seed"] == 1, "one", "another")
    answer = sweep.answer(trials)
    assert answer[2].seconds is None and answer.fewest_tokens.batch_size == answer.recommended


def timed_to_target(seconds, seeds=5, **changes):
    """A sweep to a target that batch size 2 reaches with the fewest tokens."""
    trials = table({2: 13.0, 4: 13.1, 8: 13.6}, seeds=seeds, seconds=seconds, target=3.3, **changes)
    trials["tokens_to_target"] = np.exp(trials["final_valid_loss"])
    return trials.assign(token_budget=trials["tokens_to_target"], device="cpu: one")


def test_with_a_target_the_soonest_is_recommended_and_the_fewest_tokens_are_named():
    answer = sweep.answer(timed_to_target({2: 40.0, 4: 20.0, 8: 30.0}, seeds=12))
    assert (answer.pursues, answer.recommended) == ("time", 4)
    assert answer.soonest.candidates == [4] and answer.soonest.value == pytest.approx(
        21.1, rel=0.01
    )
    low, high = answer.soonest.interval
    assert low < answer.soonest.value < high
    assert answer.fewest_tokens.batch_size == 2 and answer.fewest_steps.batch_size == 2
    assert "soonest to a loss of 3.3" in answer.headline
    assert answer.headline.endswith("2 takes 2 times as long). With the fewest tokens: 2.")
    assert answer.provisional and all(row.dominated is None for row in answer.batch_sizes)
    assert answer.as_json()["for"] == "time"


@pytest.mark.parametrize(("pursues", "size"), [("tokens", 2), ("time", 4), ("steps", 2)])
def test_another_side_can_be_asked_for(pursues, size):
    trials = timed_to_target({2: 40.0, 4: 20.0, 8: 30.0}, seeds=12)
    answer = sweep.answer(trials, pursues=pursues)
    assert (answer.pursues, answer.recommended) == (pursues, size)


def test_times_of_few_trials_make_the_soonest_provisional():
    answer = sweep.answer(timed_to_target({2: 40.0, 4: 20.0, 8: 30.0}, seeds=5))
    assert answer.pursues == "time" and answer.provisional
    assert "range" in answer.reasons[-1] and answer.soonest.reason == answer.reasons[-1]
    assert not any(row.dominated for row in answer.batch_sizes)


def test_a_table_without_the_tokens_of_its_trials_has_no_time_to_a_target():
    trials = timed_to_target({2: 40.0, 4: 20.0, 8: 30.0}, seeds=12).drop(columns="token_budget")
    answer = sweep.answer(trials)
    assert answer.soonest.batch_size is None and answer.pursues == "tokens"
    assert "not known at batch size 2, 4 and 8" in answer.soonest.reason


def test_at_equal_tokens_it_is_not_known_which_is_the_soonest():
    answer = sweep.answer(table(CLOSE))
    assert answer.soonest.batch_size is None and "to one loss" in answer.soonest.reason
    assert answer.pursues == "tokens" and not answer.provisional

    asked = sweep.answer(table(CLOSE), pursues="time")
    assert asked.recommended == answer.recommended and asked.provisional
    with pytest.raises(SweepError, match="pursues must be"):
        sweep.answer(table(CLOSE), pursues="money")


def test_the_fewest_steps_are_those_of_the_largest_within_the_tolerance():
    trials = table(CLOSE, noise=1e-4).assign(steps=lambda rows: 800 // rows["batch_size"])
    answer = sweep.answer(trials)
    assert (answer.fewest_steps.batch_size, answer.fewest_steps.value) == (4, 200)
    none_within = sweep.answer(table({2: 1.0, 4: 1.004, 8: 1.5}, noise=0.02, seeds=3))
    assert none_within.fewest_steps.batch_size is None and none_within.fewest_steps.reason


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan, math.inf])
def test_a_tolerance_is_a_finite_positive_number(tolerance):
    with pytest.raises(SweepError, match="tolerance must be"):
        sweep.answer(table(CLOSE), tolerance=tolerance)


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({2: 1.0, 4: 0.5, 8: 0.01}, "2 and 1 % at 8, as if these had different optimizers."),
        (
            {2: 0.02, 4: 0.0, 8: 0.0},
            "The clip shortens 2 % of the steps at batch size 2 and 0 %",
        ),
        ({2: 0.9, 4: 0.5, 8: 0.1}, ""),
        ({2: 0.009, 4: 0.0, 8: 0.0}, ""),
    ],
)
def test_shares_of_clipped_steps_that_differ_by_an_order_of_magnitude_are_named(shares, says):
    trials = table(CLOSE, noise=1e-4)
    trials["clipped_step_fraction"] = trials["batch_size"].map(shares)
    sentences = " ".join(describe(sweep.answer(trials)))
    assert says in sentences and ("shortens" in sentences) == bool(says)


def test_a_price_has_the_interval_or_the_range_of_its_time():
    seconds = {2: 30.0, 4: 20.0, 8: 10.0}
    few = table(CLOSE, noise=1e-4, seconds=seconds, device="cpu: one", devices=1)
    answer = sweep.answer(few, price=3.6)  # 0.001 per device and second
    assert answer.price_per_device_hour == 3.6
    for row in answer.batch_sizes:
        assert row.price == pytest.approx(row.seconds / 1000)
        assert row.price_interval is None
        assert row.price_range == pytest.approx([s / 1000 for s in row.seconds_range])
    assert "0.03 to 0.0312 (a range) at batch size 2" in " ".join(describe(answer))

    many = table(CLOSE, seeds=8, noise=1e-4, seconds=seconds, device="cpu: one", devices=1)
    row = sweep.answer(many, price=3.6)[2]
    assert row.price_range is None
    assert row.price_interval == pytest.approx([s / 1000 for s in row.seconds_interval])
    without = sweep.answer(many)
    assert without[2].price is None and "per device" not in " ".join(describe(without))
    one_seed = few[few["seed"] == 0]
    assert "0.03 (one training) at batch size 2" in " ".join(
        describe(sweep.answer(one_seed, price=3.6))
    )
    unknown = sweep.answer(table(CLOSE, seconds=seconds, device="cpu: one"), price=3.6)
    assert unknown[2].price is None  # the number of devices is not known


@pytest.fixture
def looked(tmp_path):
    """A folder in which seeds were added after a look, and its trials.csv."""
    write_fake_sweep(tmp_path / "s", lrs=("tuned",), seeds="auto", batches="4,8,16", answer="order")
    folder = sweep.load_sweep(tmp_path / "s")
    write_trials_csv(folder, tmp_path / "trials.csv")
    return tmp_path / "s", tmp_path / "trials.csv"


def test_a_folder_and_its_table_have_the_same_answer(looked):
    (whole, *_), (read, sentences, *_) = (answer_of(path, *DEFAULTS, None) for path in looked)
    assert whole.batch_sizes == read.batch_sizes and whole.pairs == read.pairs
    assert read.scope and " ".join(sentences).startswith(describe(whole)[0])


def test_the_options_count_for_a_folder_too(looked):
    wide = answer_of(looked[0], *DEFAULTS, 5.0).answer
    assert wide.decided and wide.tolerance == 5.0
    assert (wide.question, wide.pursues) == ("order", "tokens")  # as in the folder
    steps = answer_of(looked[0], *DEFAULTS, 5.0, pursues="steps", question="which").answer
    assert (steps.question, steps.pursues) == ("which", "steps")
    with pytest.raises(SweepError, match="column nonsense"):
        answer_of(looked[0], "nonsense", "minimize", None)


@pytest.mark.parametrize(
    ("column", "value"),
    [("seconds_training", "12 s"), ("tokens", "many"), ("execution", "{"), ("has_looks", "yes")],
)
def test_an_optional_column_that_cannot_be_read_is_refused(column, value):
    with pytest.raises(SweepError, match=f"must be .*, got {value} (.{column}, |in )row 0"):
        sweep.answer(table(CLOSE, **{column: value}))


def test_simulated_sweeps_are_answered_as_the_truth_has_it():
    """A few sweeps of the study, through the table."""
    case, rng = Case(8, best=SPREAD, sigma=0.002), np.random.default_rng(0)
    for _ in range(3):
        search = tune(case, np.zeros(len(SPREAD)), rng)
        rows = []
        for index, tried in enumerate(search):
            tuned = [(rate, loss) for rate, losses in tried.items() for loss in losses.values()]
            used = min(tuned, key=lambda pair: pair[1])[0]
            expected = case.expected(np.full((5, 1), math.log(used)))[index, 0]
            finals = (expected + 0.002 * rng.normal(size=8)).tolist()
            kind = [("tune", 1000, *pair) for pair in tuned]
            kind += [("final", seed, used, loss) for seed, loss in enumerate(finals)]
            names = ("stage", "seed", "learning_rate", "final_valid_loss")
            rows += [{**dict(zip(names, k, strict=True)), "batch_size": 2**index} for k in kind]
        answer = sweep.answer(pd.DataFrame(rows).assign(policy="tuned", state="COMPLETE"))
        assert 1 in answer.candidates
        for index, best in enumerate(SPREAD):
            gap = best - min(SPREAD[:index] + SPREAD[index + 1 :])
            low, high = answer[2**index].gap_to_best
            assert low <= gap <= high


def test_the_exponent_of_the_best_rate_is_found():
    write_rates = table({2: 1.0, 4: 1.0, 8: 1.0}, noise=0.0)
    (result,) = sweep_of(write_rates)
    exponent = rate_exponent(result.rates)
    assert exponent.value == pytest.approx(0.5, abs=0.02) and exponent.low < 0.5 < exponent.high
    assert rate_exponent(result.rates[:2]) is None


def sweep_of(trials):
    return judge_trials(trials.reindex(columns=list(TRIAL_COLUMNS)))


def test_the_cost_of_rules_is_that_of_the_closed_form(tmp_path):
    """On the noisy quadratic model the loss of any rate is known."""
    plan = write_fake_sweep(tmp_path / "s", experiment="quadratic", lrs=("0.1",))
    tokens, grid = 4096, np.geomspace(0.02, 1.6, 40)
    rows = [
        {"stage": "tune", "batch_size": size, "seed": 1000, "learning_rate": rate}
        | {"final_valid_loss": float(quadratic_loss([tokens / size], size, [rate], 100)[0])}
        for size in (8, 16, 32)
        for rate in grid
    ]
    trials = pd.DataFrame(rows).assign(policy="tuned", state="COMPLETE")
    (result,) = sweep_of(trials)
    costs = rule_costs(plan, result.rates, dict.fromkeys((8, 16, 32), 1e-9))
    assert {cost.rule for cost in costs} == {"same", "sqrt", "linear"}
    best = {rate.batch_size: rate.optimum for rate in result.rates}
    for cost in costs:
        exponent = {"same": 0.0, "sqrt": 0.5, "linear": 1.0}[cost.rule]
        for size, chosen in cost.rates.items():
            assert chosen == pytest.approx(best[cost.anchor] * (size / cost.anchor) ** exponent)
            if not grid[0] <= chosen <= grid[-1]:
                assert cost.costs[size] is None
                continue
            least = min(r["final_valid_loss"] for r in rows if r["batch_size"] == size)
            truth = quadratic_loss([tokens / size], size, [chosen], 100)[0] - least
            assert cost.costs[size].value == pytest.approx(truth, abs=0.02 * abs(truth) + 1e-3)
    assert not any(None in cost.costs.values() for cost in costs)
    assert describe_costs(costs, 1e-6).startswith("No")
    assert rule_costs(plan, result.rates[:1], {}) == []  # nothing could follow a rule
    unknown = replace(result.rates[0], points=rate_points({}))
    assert rule_costs(plan, [unknown, *result.rates[1:]], {}) == []
    assert describe_costs(costs, 1e9).startswith("Yes")
    for cost in rule_costs(plan, result.rates, dict.fromkeys((8, 16, 32), 10.0)):
        others = [own for size, own in cost.costs.items() if size != cost.anchor]
        assert all(own.high - own.low > 1 for own in others)
        assert cost.costs[cost.anchor].low == cost.costs[cost.anchor].high == 0  # by definition
        assert cost.is_within(1e9) and not cost.is_within(0.1)
        assert not replace(cost, costs={**cost.costs, 8: None}).is_within(1e9)  # not measured


def timed_table(seconds, slope=0.4, **changes):
    """Trials with a budget of ten minutes, which took so many seconds."""
    trials = table(CLOSE, noise=1e-4, seeds=8, seconds=seconds, device="cpu: one", devices=1)
    sizes = trials["batch_size"]
    trials["seconds_training"] = sizes.map(seconds) * (1 + 0.001 * (trials["seed"] % 1000))
    fields = {"token_budget": 1000 * sizes, "time_budget_seconds": 600.0, "valid_slope": slope}
    trials = trials.assign(**{**fields, **changes})
    return trials.rename(columns={"token_budget": "tokens"})


def test_losses_at_equal_time_are_answered_with_the_errors_of_the_times():
    seconds = {2: 590.0, 4: 588.0, 8: 592.0}
    exact = sweep.answer(timed_table(seconds, slope=1e-9))
    answer = sweep.answer(timed_table(seconds))
    assert answer.time_budget_seconds == 600 and answer.pursues == "time"
    assert answer.recommended == 2 and not answer.reasons
    for row in answer.batch_sizes:
        low, high = row.gap_to_best
        low_of_losses, high_of_losses = exact[row.batch_size].gap_to_best
        assert low < low_of_losses and high > high_of_losses
    pairs = {pair.batch_sizes: pair for pair in answer.pairs}
    for pair in exact.pairs:
        widened = pairs[pair.batch_sizes].difference
        assert widened.low < pair.difference.low and widened.high > pair.difference.high
        assert widened.value == pair.difference.value


def test_trainings_that_took_another_time_than_they_were_to_make_the_answer_provisional():
    longer = sweep.answer(timed_table({2: 1200.0, 4: 1210.0, 8: 1190.0}))
    assert longer.provisional
    assert "to take 10 min, but took 20.1 min at batch size 2" in " ".join(longer.reasons)
    unequal = sweep.answer(timed_table({2: 590.0, 4: 570.0, 8: 640.0}))
    assert "at batch size 4 and batch size 8 took equally long" in " ".join(unequal.reasons)
    without_slopes = sweep.answer(timed_table({2: 590.0, 4: 588.0, 8: 592.0}, slope=math.nan))
    assert "do not tell what a difference in time would change" in " ".join(without_slopes.reasons)
    assert not without_slopes.decided


def test_what_times_leave_open_is_said_whatever_counts():
    few = timed_table({2: 590.0, 4: 588.0, 8: 592.0}).query("stage == 'tune' or seed < 5")
    for pursues in ("time", "steps"):
        answer = sweep.answer(few, pursues=pursues)
        assert "only the range of each ratio; 8 give an interval" in " ".join(answer.reasons)


def test_trials_with_different_budgets_of_time_are_not_compared_at_equal_time():
    trials = timed_table({2: 590.0, 4: 588.0, 8: 592.0})
    trials.loc[trials["batch_size"] == 8, "time_budget_seconds"] = 1200.0
    answer = sweep.answer(trials)
    assert answer.time_budget_seconds is None and answer.provisional
    assert "Training tokens" in " ".join(answer.reasons)


@pytest.mark.parametrize("seconds", [0.0, -5.0, math.inf, 1e-320])
def test_a_time_that_none_can_be_is_refused_with_its_row(seconds):
    with pytest.raises(SweepError, match="seconds_training, row 13"):
        sweep.answer(timed_table({2: 590.0, 4: seconds, 8: 592.0}))


def test_a_batch_size_without_times_is_not_known_to_have_had_equal_time():
    answer = sweep.answer(timed_table({2: 590.0, 4: math.nan, 8: 592.0}))
    assert answer[4].seconds is None and not answer.decided
    assert "took equally long is not known" in " ".join(answer.reasons)


def test_a_batch_size_without_any_result_is_named_and_leaves_the_answer_open():
    trials = table(CLOSE, noise=1e-4, seconds={2: 30.0, 4: 20.0, 8: 10.0})
    has_failed = (trials["batch_size"] == 8) & (trials["stage"] == "final")
    trials.loc[has_failed, "final_valid_loss"] = np.nan
    trials.loc[has_failed, "state"] = "FAILED"
    trials.loc[has_failed, "cause"] = "out_of_memory"
    answer = sweep.answer(trials)
    assert answer[8].mean is None and not answer.decided
    text = " ".join(describe(answer))
    assert "Batch size 8 is not compared: it has no result." in text
    assert "of those tried" not in text and "Larger batch sizes" not in text
    assert answer.fewest_steps.candidates == [4]


def test_a_batch_size_that_may_be_as_fast_is_named():
    seconds = {2: 20.0, 4: 20.0, 8: 10.0}
    trials = table(CLOSE, seeds=8, noise=1e-4, seconds=seconds, device="cpu: one")
    assert "may be as fast)" in sweep.answer(trials).headline


def test_the_choice_of_the_fewest_tokens_is_one_of_its_candidates():
    losses = {2: 1.0, 4: 1.005, 8: 1.5}
    answer = sweep.answer(table(losses, noise=1e-4, seconds={2: 30.0, 4: 20.0, 8: 10.0}))
    assert answer.candidates == [2]
    assert (answer.fewest_tokens.batch_size, answer.fewest_tokens.candidates) == (4, [2, 4])
    asked = sweep.answer(timed_to_target({2: 40.0, 4: 20.0, 8: 30.0}, seeds=12), tolerance=0.2)
    assert asked.fewest_tokens.batch_size == asked.recommended == 4
    assert asked.headline.endswith("With the fewest tokens: 2.")


def test_one_seed_gives_a_best_rate_without_an_interval():
    answer = sweep.answer(table(CLOSE, seeds=1))
    for row in answer.batch_sizes:
        assert row.best_learning_rate == pytest.approx(RATES.get(row.batch_size, 1e-3), rel=0.2)
        assert row.learning_rate_interval is None and row.regret_interval is None


def test_the_soonest_is_named_if_batch_sizes_that_share_no_seed_contradict_each_other():
    trials = timed_to_target({2: 20.0, 4: 20.0, 8: 20.0}, seeds=24)
    better = {(0, 2): 0, (0, 4): 1, (1, 4): 0, (1, 8): 1, (2, 8): 0, (2, 2): 1}
    finals = trials["stage"] == "final"
    for index, row in trials[finals].iterrows():
        rank = better.get((row["seed"] // 8, row["batch_size"]))
        if rank is None:
            trials = trials.drop(index)
        else:
            trials.loc[index, "tokens_to_target"] = math.exp(13 + rank + 1e-3 * (row["seed"] % 8))
    answer = sweep.answer(trials)
    assert answer.soonest.batch_size in answer.soonest.candidates


def test_a_soonest_that_was_trained_off_its_best_rate_is_timed_at_it():
    trials = timed_to_target({2: 30.0, 4: 40.0, 8: 60.0}, seeds=12)
    is_off = (trials["batch_size"] == 2) & (trials["stage"] == "final")
    trials.loc[is_off, "learning_rate"] *= 2.0
    trials.loc[is_off, "tokens_to_target"] *= math.exp(0.1 * math.log(2) ** 2)
    answer = sweep.answer(trials)
    assert answer.soonest.batch_size == 2 and "at its best rate" in answer.soonest.basis
    assert answer.soonest.value < answer[2].seconds


def test_trials_with_different_budgets_of_time_are_answered_provisionally():
    trials = timed_table({2: 590.0, 4: 588.0, 8: 592.0})
    trials.loc[trials["batch_size"] == 4, "time_budget_seconds"] = 500.0
    answer = sweep.answer(trials)
    assert answer.provisional and "different budgets of time" in " ".join(answer.reasons)
