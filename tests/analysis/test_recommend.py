"""Recommendations for larger trainings, from sweeps whose losses are known."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import brentq

from sweep.analysis.budget_laws import describe_best, describe_growth, growth_of
from sweep.analysis.budgets import find_best_batch_size, with_worth
from sweep.analysis.recommend import recommend, suggest
from sweep.analysis.recommendation import describe_recommendation, describe_suggestion
from sweep.analysis.results import load_sweep
from sweep.decision.decision import decide
from sweep.errors import SweepError
from sweep.plan.plan import parse_plan
from sweep.trial.files import read_json, write_json
from tests.analysis.fake_sweeps import write_fake_sweep
from tests.analysis.noisy_quadratic import best_quadratic_loss
from tests.analysis.test_law import EXPONENT, best_at, loss_at

SEQUENCE = 64  # tokens
BUDGETS = (10_000, 40_000, 160_000, 640_000)  # in sequences


def write_budget(
    path, sequences, sizes=None, noise=0.003, seeds=5, loss=loss_at, lr="tuned", **model
):
    """Write a sweep of one budget, best at the batch size of the synthetic training."""
    if sizes is None:
        centre = round(math.log2(best_at(sequences)))
        sizes = [2**exponent for exponent in range(centre - 2, centre + 3)]

    def change(row):
        # The curve of the rates is round, and lowest at 1e-3·√(B/16).
        distance = math.log(row.learning_rate / (1e-3 * math.sqrt(row.batch_size / 16)))
        draw = random.Random(f"{path.name} {row.batch_size} {row.seed} {row.learning_rate}")
        value = loss(sequences, float(row.batch_size)) + 0.1 * distance**2
        return {"final_valid_loss": value + draw.gauss(0, noise)}

    settings = {"batches": ",".join(map(str, sizes)), "budget": sequences * SEQUENCE}
    settings["vocabulary"] = 256 + model.get("parameters", 0) // 100_000  # part of a trial's id
    write_fake_sweep(path, lrs=(lr,), seeds=seeds, change=change, **settings)
    document = read_json(path / "plan.json")
    plan = parse_plan(document, "the plan")
    counts = {"parameters": 200_000, "embedding_parameters": 50_000, **model}
    plan = plan.model_copy(update={"model": plan.model.model_copy(update=counts)})
    write_json(path / "plan.json", plan.model_dump(mode="json"))
    return path


def test_a_budget_without_an_answer_is_named(tmp_path):
    path = write_budget(tmp_path / "s", 10_000)
    plan = parse_plan(read_json(path / "plan.json"), "the plan")
    later = plan.model_copy(update={"later_budgets": (2_560_000,)})
    write_json(path / "plan.json", later.model_dump(mode="json"))
    reasons = recommend([path], 10**7).reasons
    assert reasons[0].startswith("The budget of 2.56M in ") and "no answer yet" in reasons[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("budgets")
    return [write_budget(parent / f"s{sequences}", sequences) for sequences in BUDGETS]


def test_a_law_recommends_with_an_interval_and_a_range(folders):
    answer = recommend(folders, 4 * BUDGETS[-1] * SEQUENCE)
    low, high = answer.law["interval"]
    assert low < EXPONENT < high and len(answer.law["points"]) == 4
    truth = best_at(4 * BUDGETS[-1]) * SEQUENCE
    low, high = answer.batch_size_tokens["interval"]
    assert low < truth < high
    start, end = answer.batch_size_tokens["range_within_tolerance"]
    assert start < answer.batch_size_tokens["value"] < end
    rate = 1e-3 * math.sqrt(answer.batch_size_tokens["value"] / SEQUENCE / 16)
    low, high = answer.learning_rate["interval"]
    assert low < rate < high
    assert answer.weight_decay > 0 and 0.9 < answer.adam_beta2 < 1
    assert (answer.factor_beyond, answer.cap) == (4, None)
    assert "--budget 160M" in answer.settle and "--for" not in answer.settle
    assert answer.regret == {"this": None, "kept": None, "published": None}


def test_far_beyond_the_sweeps_the_answer_is_provisional_and_then_the_cap(folders):
    near, far, farther = (recommend(folders, f * BUDGETS[-1] * SEQUENCE) for f in (4, 50, 101))
    assert near.cap is far.cap is None and far.provisional
    assert far.batch_size_tokens["value"] is not None
    assert farther.cap and farther.batch_size_tokens["value"] is None
    assert farther.learning_rate["value"] is None


def test_within_the_budgets_the_regret_of_three_choices_is_known(folders, tmp_path):
    five = [*folders, write_budget(tmp_path / "five", 4 * BUDGETS[-1])]
    assert 0 <= recommend(five, 2 * BUDGETS[-1] * SEQUENCE).regret["this"] < 0.003
    answer = recommend(folders, 320_000 * SEQUENCE)
    assert answer.regret["this"] is None  # three budgets below it predict nothing
    kept = loss_at(320_000, best_at(10_000)) - loss_at(320_000, best_at(320_000))
    assert answer.regret["kept"] == pytest.approx(kept, rel=0.5)
    assert answer.regret["published"] is None  # no law holds for so small a model
    lines = describe_recommendation(answer)
    assert any(line.startswith("Given up there") and "smallest budget" in line for line in lines)


def test_a_recommendation_is_written_in_tokens_and_sequences_with_the_cost_of_the_next_budget(
    folders,
):
    answer = recommend(folders, 4 * BUDGETS[-1] * SEQUENCE)
    lines = describe_recommendation(answer)
    sequences = answer.batch_size_tokens["value"] / SEQUENCE
    assert lines[0].startswith("Provisionally, use batch size ")
    assert f"({float(f'{sequences:.3g}'):g} sequences of {SEQUENCE})" in lines[0]
    assert " sequences of 64)" in lines[1]
    assert lines[-1].startswith("Next, about ") and " of training: sweep run " in lines[-1]
    assert not any(line.startswith("Given up there") for line in lines)


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_budgets_give_no_law(folders, count):
    answer = recommend(folders[:count], 4 * BUDGETS[-1] * SEQUENCE)
    assert answer.law["exponent"] is None and answer.batch_size_tokens["value"] is None
    assert "at least 3 budgets" in answer.reasons[0] and answer.settle


def test_a_best_batch_size_at_an_edge_gives_a_range_by_its_growth(tmp_path):
    def monotone(sequences, size):
        return 2.0 + size / (10 * sequences**0.74)

    folders = [
        write_budget(tmp_path / f"s{n}", n, sizes=[1, 4, 16, 64, 256], noise=1e-4, loss=monotone)
        for n in (500, 2000, 8000, 32_000)
    ]
    answer = recommend(folders, 128_000 * SEQUENCE)
    assert answer.batch_size_tokens["value"] is None
    low, high = answer.batch_size_tokens["range_within_tolerance"]
    assert low == SEQUENCE
    truth = 0.1 * 128_000**0.74 * SEQUENCE
    assert high == pytest.approx(truth, rel=0.4)
    low, high = answer.batch_size_tokens["interval_of_largest"]
    assert low < truth < high
    assert {point["edge"] for point in answer.law["points"]} == {"smallest"}
    low, high = answer.law["largest_within_tolerance"]["interval"]
    assert low < 0.74 < high
    lines = describe_recommendation(answer)
    start = "The best batch size for 8.19M tokens is not known. By its growth, the range"
    assert lines[0].startswith(start) and "the 95 % interval of its end: " in lines[0]
    assert any("At 4 of 4 budgets the best one is batch size 1" in line for line in lines)
    assert lines[1].startswith("At 2.05M tokens `sweep answer` recommends batch size ")
    three = recommend(folders[:3], 32_000 * SEQUENCE)
    assert three.batch_size_tokens["range_within_tolerance"] is None
    assert any("on a line by luck" in reason for reason in three.reasons)


def test_the_smallest_size_tried_gives_no_range_if_smaller_ones_may_be_better(tmp_path):
    folders = [
        write_budget(tmp_path / f"s{n}", n, sizes=[16, 32, 64, 128, 256], noise=1e-4)
        for n in (1000, 4000, 16_000)
    ]
    answer = recommend(folders, 64_000 * SEQUENCE)
    assert {point["edge"] for point in answer.law["points"]} == {"smallest"}
    assert answer.batch_size_tokens["range_within_tolerance"] is None
    assert answer.law["largest_within_tolerance"]["exponent"] is None


def test_budgets_that_do_not_differ_give_no_law(tmp_path):
    folders = [
        write_budget(tmp_path / f"s{n}", 40_000, sizes=[n, 2 * n, 4 * n, 8 * n, 16 * n], noise=1e-3)
        for n in (3, 4, 5)
    ]
    answer = recommend(folders, 160_000 * SEQUENCE)
    assert answer.batch_size_tokens["value"] is None
    assert "A law needs at least 3 different budgets; there are 1." in answer.reasons


def test_models_of_nearly_one_size_are_one_in_the_law(tmp_path):
    sizes = (200_000, 202_000, 203_000)
    pairs = zip(BUDGETS[:3], sizes, strict=True)
    folders = [write_budget(tmp_path / f"s{n}", n, parameters=size) for n, size in pairs]
    answer = recommend(folders, 4 * BUDGETS[2] * SEQUENCE)
    assert answer.law["exponent"] == pytest.approx(EXPONENT, abs=0.3)


def test_models_of_unknown_size_must_be_the_same(tmp_path):
    pairs = zip(BUDGETS[:2], (0, 1), strict=True)
    folders = [write_budget(tmp_path / f"s{n}", n, parameters=m * 100_000) for n, m in pairs]
    for folder in folders:
        document = read_json(folder / "plan.json")
        plan = parse_plan(document, "the plan")
        model = plan.model.model_copy(update={"parameters": None, "embedding_parameters": None})
        write_json(
            folder / "plan.json", plan.model_copy(update={"model": model}).model_dump(mode="json")
        )
    with pytest.raises(SweepError, match="must have the same model of unknown size"):
        recommend(folders, 10**8)


def test_beta2_is_written_so_that_it_can_be_used(folders):
    answer = replace(recommend(folders, 4 * BUDGETS[-1] * SEQUENCE), adam_beta2=0.99999)
    assert any("β2 0.99999 by" in line for line in describe_recommendation(answer))


def test_noise_that_leaves_the_best_batch_size_open_is_named_as_the_reason(tmp_path):
    folders = [write_budget(tmp_path / f"s{n}", n, noise=0.03, seeds=3) for n in BUDGETS[:3]]
    answer = recommend(folders, 4 * BUDGETS[2] * SEQUENCE)
    assert answer.batch_size_tokens["value"] is None
    assert any("More seeds narrow it." in reason for reason in answer.reasons)


def test_a_growth_that_is_not_known_gives_no_range(tmp_path):
    def erratic(sequences, size):
        scale = {1000: 50, 4000: 1000, 16_000: 100}[sequences]
        return 2.0 + size / scale

    folders = [
        write_budget(tmp_path / f"s{n}", n, sizes=[1, 4, 16, 64, 256], noise=1e-4, loss=erratic)
        for n in (1000, 4000, 16_000)
    ]
    answer = recommend(folders, 64_000 * SEQUENCE)
    low, high = answer.law["largest_within_tolerance"]["interval"]
    assert high - low > 1 and answer.batch_size_tokens["range_within_tolerance"] is None
    assert any(reason.startswith("The exponent is not known") for reason in answer.reasons)


def test_on_the_noisy_quadratic_one_is_best_and_what_20_percent_more_tokens_allow_grows(tmp_path):
    def loss(sequences, size):
        return best_quadratic_loss(sequences, int(size))

    sizes = [1, *(2**exponent for exponent in range(3, 11))]
    budgets = []
    for exponent in (12, 14, 16, 18, 20):
        path = write_budget(tmp_path / f"s{exponent}", 2**exponent, sizes, 1e-6, 3, loss)
        budgets += load_sweep(path).budgets
    assert {describe_best(budget.best) for budget in budgets} == {"1, the smallest tried"}
    growth = growth_of(budgets)
    assert growth.best is None
    assert growth.excess.exponent.value == pytest.approx(0.74, abs=0.02)
    line = describe_growth(growth, budgets[-1], "tokens")[-1]
    assert line.startswith(
        "The batch size that needs 20 % more tokens than the best grows as D^0.7"
    )


def test_a_model_size_that_was_not_measured_has_no_number(folders):
    answer = recommend(folders, BUDGETS[-1] * SEQUENCE, params=350e6)
    assert answer.batch_size_tokens["value"] is None
    assert answer.reasons[0].startswith("Not measured: a model of 350M parameters")
    assert "--model small" in answer.settle and "--context 64" in answer.settle
    assert recommend(folders, BUDGETS[-1] * SEQUENCE, params=150_000).batch_size_tokens["value"]


def test_three_model_sizes_give_a_term_and_need_the_size_of_the_training(tmp_path):
    folders = []
    for parameters in (200_000, 800_000, 3_200_000):
        for sequences in BUDGETS[:3]:
            path = tmp_path / f"s{parameters}-{sequences}"
            folders.append(write_budget(path, sequences, parameters=parameters))
    tokens = 2 * BUDGETS[2] * SEQUENCE
    with pytest.raises(SweepError, match="--params"):
        recommend(folders, tokens)
    answer = recommend(folders, tokens, params=1_000_000)
    low, high = answer.batch_size_tokens["interval"]
    assert low < best_at(2 * BUDGETS[2]) * SEQUENCE < high
    assert recommend(folders, tokens, params=1_000_000_000).cap


def test_a_folder_and_its_copy_count_once(folders):
    with pytest.raises(SweepError, match="have the same trials"):
        recommend([*folders, folders[0]], 10**9)


def test_model_sizes_and_budgets_that_grow_together_give_no_law(tmp_path):
    folders = [
        write_budget(tmp_path / f"s{sequences}", sequences, parameters=50_000 + 20 * sequences)
        for sequences in BUDGETS
    ]
    answer = recommend(folders, 2 * BUDGETS[2] * SEQUENCE, params=6_000_000)
    assert answer.batch_size_tokens["value"] is None
    assert any("vary together" in reason for reason in answer.reasons)


def test_a_training_below_the_budgets_lies_as_far_outside_as_one_above(folders):
    below = recommend(folders, BUDGETS[0] * SEQUENCE // 20)
    assert below.factor_beyond == pytest.approx(20) and below.provisional
    assert below.batch_size_tokens["value"] >= SEQUENCE
    assert recommend(folders, BUDGETS[0] * SEQUENCE // 1000).cap


def test_another_model_s_budget_validates_nothing(folders, tmp_path):
    other = write_budget(tmp_path / "other", 64_000_000, parameters=3_200_000)
    tokens = 200 * BUDGETS[-1] * SEQUENCE
    assert recommend([*folders, other], tokens, params=150_000).cap


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"data": {"name": "other"}}, "the same data"),
        ({"tokens_per_sequence": 128}, "the same tokens per sequence"),
        ({"optimizer": {"weight_decay": 0.2}}, "the same optimizer"),
        ({"schedule": {"name": "constant"}}, "the same schedule"),
        ({"start": {"sha256": "0" * 64}}, "the same initial weights"),
        ({"settings": {"precision": "bf16"}}, "the same precision"),
        ({"settings": {"tokenizer": "bytes"}}, "the same tokenizer"),
    ],
)
def test_sweeps_that_no_law_may_combine_are_refused(folders, tmp_path, change, problem):
    path = write_budget(tmp_path / "other", 2_560_000)
    plan = parse_plan(read_json(path / "plan.json"), "the plan")
    of_settings = {
        name: getattr(plan.settings, name).model_copy(update=values)
        for name, values in change.items()
        if name in ("optimizer", "schedule")
    }
    of_settings |= change.get("settings", {})
    if of_settings:
        change = {"settings": plan.settings.model_copy(update=of_settings)}
    plan = plan.model_copy(update=change)
    write_json(path / "plan.json", plan.model_dump(mode="json"))
    with pytest.raises(SweepError, match=problem):
        recommend([*folders, path], 10**9)


def test_sweeps_with_different_policies_are_refused(folders, tmp_path):
    path = write_budget(tmp_path / "other", 2_560_000, lr="1e-3")
    with pytest.raises(SweepError, match="the same policy, got 'tuned'"):
        recommend([*folders, path], 10**9)


@pytest.mark.parametrize("gap", [0.002, 0.01, 0.03, 0.1])
def test_without_noise_a_gap_is_worth_what_it_is(folders, gap):
    budgets = []
    for sequences, folder in zip(BUDGETS, folders, strict=True):
        budget = load_sweep(folder).budgets[0]
        rows = [replace(row, gap_to_best=(gap, gap)) for row in budget.answer.batch_sizes]
        answer = replace(budget.answer, batch_sizes=rows)
        loss = loss_at(sequences, best_at(sequences))
        budgets.append(replace(budget, loss=loss, loss_error=0.0, answer=answer))
    for index, sequences in enumerate(BUDGETS):
        if index < 2:
            continue

        def excess(at, least=budgets[index].loss):
            return loss_at(at, best_at(at)) - least - gap

        share = 1 - brentq(excess, BUDGETS[0], sequences) / sequences
        least, most = with_worth(budgets, index).batch_sizes[0].worth_in_tokens
        assert least < share < most < least + 0.1


def test_rates_that_were_not_tuned_give_no_law(tmp_path):
    folders = [write_budget(tmp_path / f"s{n}", n, lr="1e-3") for n in BUDGETS]
    answer = recommend(folders, 4 * BUDGETS[-1] * SEQUENCE)
    assert answer.law["exponent"] is None and answer.batch_size_tokens["value"] is None
    assert answer.batch_size_tokens["range_within_tolerance"] is None
    assert any("the rates were not tuned" in reason for reason in answer.reasons)
    assert "--lr tuned" in answer.settle
    growth = growth_of([load_sweep(folder).budgets[0] for folder in folders])
    assert growth.best is None and growth.within is None and growth.excess is None


def test_tuned_values_of_the_optimizer_are_those_of_the_trials(tmp_path):
    path = write_budget(tmp_path / "s", 40_000)
    plan = parse_plan(read_json(path / "plan.json"), "the plan")
    tuning = plan.settings.tuning.model_copy(update={"dimensions": ("lr", "beta2")})
    rows = [row.model_copy(update={"beta2": 0.95}) for row in plan.trials]
    settings = plan.settings.model_copy(update={"tuning": tuning})
    plan = plan.model_copy(update={"settings": settings, "trials": tuple(rows)})
    write_json(path / "plan.json", plan.model_dump(mode="json"))
    assert recommend([path], 40_000 * SEQUENCE).adam_beta2 == 0.95


def test_a_curve_that_may_be_flat_has_no_best_batch_size_at_an_edge():
    losses = np.array([2.0003, 2.0, 2.0008, 2.0006, 2.0004])
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(5, 3))
    values = losses[:, None] + 0.01 * (noise - noise.mean(1, keepdims=True))
    decision = decide(values, None, np.zeros(5))
    best, _, _ = find_best_batch_size([4, 8, 16, 32, 64], decision, [3] * 5, 0.01)
    if best.value is None:
        assert best.edge == "" and "not known" in describe_best(best)
    assert best.interval == (None, None)
    assert best.range_within_tolerance == (4, 64) and best.is_range_open == (True, True)


def test_a_measured_budget_has_its_own_answer(folders):
    for sequences, folder in zip(BUDGETS, folders, strict=True):
        own = load_sweep(folder).answer()
        answer = recommend(folders, round(1.01 * sequences * SEQUENCE))
        assert answer.batch_size_tokens["value"] == own.recommended * SEQUENCE
        assert answer.learning_rate["value"] == own[own.recommended].best_learning_rate
        assert answer.reasons == own.reasons and answer.provisional == own.provisional
        assert "which was measured: " in describe_recommendation(answer)[0]
    assert recommend(folders, 2 * BUDGETS[1] * SEQUENCE).at_budget is None


def test_a_measured_budget_is_not_weakened_by_others(tmp_path):
    paths = [
        with_epochs(write_budget(tmp_path / "s", 10_000), 3.9),
        with_epochs(write_budget(tmp_path / "many", 40_000), 15.6),
    ]
    answer = recommend(paths, 10_000 * SEQUENCE)
    own = load_sweep(paths[0]).answer()
    assert (answer.reasons, answer.provisional) == (own.reasons, own.provisional)


def test_the_range_for_the_whole_interval_is_within_that_for_the_estimate(folders):
    near = recommend(folders, 2 * BUDGETS[-1] * SEQUENCE)
    low, high = near.batch_size_tokens["range_within_tolerance"]
    start, end = near.batch_size_tokens["range_for_whole_interval"]
    assert low < start < end < high
    far = recommend(folders, 90 * BUDGETS[-1] * SEQUENCE)
    assert far.batch_size_tokens["range_for_whole_interval"] is None
    assert any(line.startswith("No batch size is within") for line in describe_recommendation(far))


def test_without_a_further_budget_the_next_command_adds_trials(tmp_path):
    paths = [
        with_epochs(write_budget(tmp_path / f"s{n}", n, noise=0.03, seeds=3), 3.9)
        for n in BUDGETS[:3]
    ]
    answer = recommend(paths, 4 * BUDGETS[2] * SEQUENCE)
    assert any("repeat the data over 4 times" in reason for reason in answer.reasons)
    assert "--seeds auto" in answer.settle and answer.settle_seconds > 0


def with_epochs(path, epochs):
    plan = parse_plan(read_json(path / "plan.json"), "the plan").model_copy(
        update={"data": {"name": "path"}, "epochs": epochs}
    )
    write_json(path / "plan.json", plan.model_dump(mode="json"))
    return path


def test_a_budget_with_over_four_epochs_is_left_out_and_said(tmp_path):
    paths = [
        with_epochs(write_budget(tmp_path / f"s{n}", n), epochs)
        for n, epochs in zip(BUDGETS, (0.06, 0.3, 1.2, 4.7), strict=True)
    ]
    answer = recommend(paths, 4 * BUDGETS[-1] * SEQUENCE)
    assert len(answer.law["points"]) == 3
    assert answer.measured_up_to == BUDGETS[2] * SEQUENCE
    assert any("is left out: it has over 4 epochs" in reason for reason in answer.reasons)
    with pytest.raises(SweepError, match="at most 4 epochs"):
        recommend(paths[-1:], 10**9)


def test_the_next_budget_repeats_the_data_at_most_four_times(tmp_path):
    path = write_budget(tmp_path / "s", 16_000)
    tokens = 64 * 16_000 * SEQUENCE
    assert "--budget 4.1M" in recommend([with_epochs(path, 0.5)], tokens).settle
    assert "--budget 2M" in recommend([with_epochs(path, 2.0)], tokens).settle
    answer = recommend([with_epochs(path, 3.0)], tokens)
    assert answer.settle is None
    assert any("repeat the data over 4 times" in reason for reason in answer.reasons)


@pytest.mark.parametrize(
    ("params", "tokens", "inside"),
    [
        (350e6, 7e9, {"Step Law", "DeepSeek LLM", "Zhang et al."}),
        (1e6, 8e5, set()),
        (7e9, 1e12, set()),
    ],
)
def test_a_published_law_gives_a_number_only_where_it_was_fitted(params, tokens, inside):
    published = suggest(params, int(tokens)).published
    assert {law.name for law in published if law.value is not None} == inside
    assert all(law.inside == (law.value is not None) for law in published)
    assert all(law.source and law.range for law in published)


def test_published_laws_have_the_coefficients_of_their_papers():
    step, deepseek, zhang = suggest(350e6, 7_000_000_000).published
    assert step.value == pytest.approx(0.58 * 7e9**0.571)
    assert step.learning_rate == pytest.approx(1.79 * 350e6**-0.713 * 7e9**0.307)
    flops = 6 * 350e6 * 7e9
    assert deepseek.value == pytest.approx(0.2920 * flops**0.3271)
    assert deepseek.learning_rate == pytest.approx(0.3118 * flops**-0.1250)
    assert (zhang.kind, zhang.learning_rate) == ("critical", None)


def test_a_suggestion_says_where_a_search_of_the_rates_can_begin():
    lines = describe_suggestion(suggest(350e6, 7_000_000_000))
    assert any("--tune-centre 0.0014" in line for line in lines)
    assert "The best batch sizes differ by a factor of 2.2." in lines
    assert "sweep run --model small --data FOLDER --budget 1M,4M,16M,64M" in lines[-1]
    assert not any("--tune-centre" in line for line in describe_suggestion(suggest(1e6, 7_000_000)))
