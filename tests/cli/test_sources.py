"""`sweep answer` from studies of Optuna, experiments of MLflow, and tables of several models."""

import json
import math
import random

import optuna
import pandas as pd
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import sweep
from sweep.analysis.table_answer import answer_of
from sweep.errors import SweepError
from sweep.tracking.store import connect

TABLE = """model,batch_size,lr,seed,val_loss
small,8,1e-3,0,2.51
small,8,1e-3,1,2.52
small,32,1e-3,0,2.61
small,32,1e-3,1,2.60
large,8,1e-3,0,2.31
large,8,1e-3,1,2.32
large,32,1e-3,0,2.21
large,32,1e-3,1,2.20
"""


def write_study(storage, direction="maximize"):
    """Write a study in which accuracy is best at batch size 32, with a trial that was pruned."""
    study = optuna.create_study(study_name="mine", storage=storage, direction=direction)
    spaces = {
        "batch_size": optuna.distributions.CategoricalDistribution([8, 32]),
        "lr": optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True),
        "seed": optuna.distributions.IntDistribution(0, 9),
    }
    for size in (8, 32):
        for seed in range(3):
            params = {"batch_size": size, "lr": 1e-3, "seed": seed}
            value = 0.8 + size / 1000 + seed / 10_000
            study.add_trial(optuna.create_trial(params=params, distributions=spaces, value=value))
    study.add_trial(
        optuna.create_trial(
            params={"batch_size": 32, "lr": 1e-3, "seed": 3},
            distributions=spaces,
            state=optuna.trial.TrialState.PRUNED,
            intermediate_values={0: 0.99},
        )
    )


@pytest.fixture
def study(tmp_path):
    address = f"sqlite:///{tmp_path}/study.db"
    write_study(address)
    return address


def test_a_study_is_answered_by_its_objective_and_its_direction(call, study):
    code, text = call("answer", f"optuna:{study}/mine", "--json")
    answer = json.loads(text)
    assert code == 0 and (answer["recommended"], answer["direction"]) == (32, "maximize")
    means = {row["batch_size"]: row["mean"] for row in answer["batch_sizes"]}
    assert means == {8: pytest.approx(0.8081), 32: pytest.approx(0.8321)}
    assert answer["provisional"]  # one rate


def test_a_study_in_a_journal_is_read(call, tmp_path):
    path = tmp_path / "journal.log"
    write_study(JournalStorage(JournalFileBackend(str(path))))
    code, text = call("answer", f"optuna:{path}/mine", "--json")
    assert code == 0 and json.loads(text)["recommended"] == 32


@pytest.mark.parametrize("form", ["sqlite:///{}", "{}", "{}/mine"])
def test_the_only_study_of_a_file_needs_no_name_and_its_file_no_scheme(call, study, form):
    path = study.removeprefix("sqlite:///")
    code, text = call("answer", f"optuna:{form.format(path)}", "--json")
    assert code == 0 and json.loads(text)["recommended"] == 32


def test_a_study_that_is_not_there_is_refused_with_those_that_are(refuse, study):
    optuna.create_study(study_name="other", storage=study)
    assert "its studies: mine, other" in refuse("answer", f"optuna:{study}/none")
    assert "its studies: mine, other" in refuse("answer", f"optuna:{study}")


def grid_of_seeds(seeds=4):
    rows = []
    for size in (8, 16, 32, 64):
        for rate in (1e-3, 2e-3, 4e-3, 8e-3):
            for seed in range(seeds):
                x = math.log(rate / (2.5e-3 * math.sqrt(size / 16)))
                draw = random.Random(f"{size} {rate} {seed}").gauss(0, 0.002)
                loss = 2 + 0.02 * abs(math.log2(size / 16)) + 0.1 * x**2 + draw
                rows.append((size, rate, seed, loss))
    return pd.DataFrame(rows, columns=["batch_size", "learning_rate", "seed", "val_loss"])


def test_a_grid_of_rates_and_seeds_has_the_answer_of_one_seed_that_searches(tmp_path):
    table = grid_of_seeds()
    search = table[table["seed"] == 0]
    best = search.loc[search.groupby("batch_size")["val_loss"].idxmin()]
    keys = ["batch_size", "learning_rate"]
    others = table[table["seed"] != 0].merge(best[keys], on=keys)
    marked = pd.concat([search.assign(stage="tune"), others.assign(stage="final")])
    answer, same = sweep.answer(table), sweep.answer(marked.assign(policy="tuned"))
    assert answer.recommended == 16
    for row, expected in zip(answer.batch_sizes, same.batch_sizes, strict=True):
        assert (row.mean, row.seeds, row.gap_to_best) == (
            expected.mean,
            3,
            expected.gap_to_best,
        )
    assert "seed 0 are a search" in answer.scope and "36 rows at other rates" in answer.scope


@pytest.mark.parametrize("seed", [0, 2])
def test_the_order_of_the_rows_does_not_choose_the_search(seed):
    table = grid_of_seeds()
    first = table[table["seed"] == seed]
    turned = pd.concat([first, table[table["seed"] != seed]], ignore_index=True)
    assert sweep.answer(turned).as_json() == sweep.answer(table).as_json()


def test_a_batch_size_that_only_the_search_has_keeps_its_place():
    table = grid_of_seeds()
    only = table[(table["batch_size"] != 16) | (table["seed"] == 0)]
    answer = sweep.answer(only)
    assert answer.recommended == 16 and answer.provisional
    assert "those of other seeds do not count (36 rows)" in answer.scope


def test_two_seeds_have_no_weaker_answer_than_one():
    two, one = (grid_of_seeds(count) for count in (2, 1))
    answers = [sweep.answer(table) for table in (two, one)]
    assert answers[0].candidates == answers[1].candidates
    assert [row.gap_to_best for row in answers[0].batch_sizes] == [
        row.gap_to_best for row in answers[1].batch_sizes
    ]


def test_weight_decays_at_equal_rates_and_seeds_are_answered_apart():
    table = grid_of_seeds()
    both = pd.concat([table.assign(weight_decay=decay) for decay in (0.0, 0.1)])
    with pytest.raises(SweepError, match="differ in weight_decay: answer each by itself"):
        sweep.answer(both.reset_index(drop=True))


ROWS = [(b, 1e-3, s, 2.5 + b / 1000 + s / 1000) for b in (8, 32) for s in range(3)]
SEEDS = pd.DataFrame(ROWS, columns=["batch_size", "lr", "seed", "val_loss"])


@pytest.mark.parametrize(
    "title", ["model_name_or_path", "_name_or_path", "base_model", "dataset_id", "train_file"]
)
def test_models_and_data_of_any_header_are_never_pooled(title):
    names = ["a" if seed == 0 else "b" for seed in SEEDS["seed"]]
    with pytest.raises(SweepError, match=f"{title} must be the same in all rows"):
        sweep.answer(SEEDS.assign(**{title: names}))


def test_a_setting_that_differs_by_seed_makes_the_answer_provisional():
    answer = sweep.answer(SEEDS.assign(dropout=SEEDS["seed"] / 10))
    assert any("differ in dropout" in reason for reason in answer.reasons)


@pytest.mark.parametrize("title", ["epoch", "train/epoch", "training_iteration"])
def test_trainings_that_ended_early_are_said(title):
    answer = sweep.answer(SEEDS.assign(**{title: [4, 100, 100, 100, 100, 100]}))
    assert any("ranges from 4 to 100" in reason for reason in answer.reasons)
    answer = sweep.answer(SEEDS.assign(**{title: [1.0, 1.0, 1.0, 0.99, 0.99, 0.99]}))
    assert not any("ranges from" in reason for reason in answer.reasons)


def test_a_mean_is_no_seed():
    with pytest.raises(SweepError, match="seed must be that of one training, got mean"):
        sweep.answer(SEEDS.assign(seed=["0", "1", "mean"] * 2))


def test_the_batch_size_of_transformers_is_a_product():
    parts = {
        "per_device_train_batch_size": SEEDS["batch_size"],
        "gradient_accumulation_steps": 2,
        "train_batch_size": 4 * SEEDS["batch_size"],  # of a device times the devices
    }
    table = SEEDS.drop(columns="batch_size").assign(**parts)
    answer = sweep.answer(table.assign(world_size=4))
    assert [row.batch_size for row in answer.batch_sizes] == [64, 256]
    assert not any("train_batch_size" in reason for reason in answer.reasons)
    with pytest.raises(SweepError, match="Add the column devices"):
        sweep.answer(table.drop(columns="train_batch_size"))


def test_rows_with_neither_a_batch_size_nor_a_result_do_not_count(call, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(SEEDS.assign(status="FINISHED").to_csv(index=False) + ",,,,FINISHED\n")
    code, _ = call("answer", path)
    assert code == 0 and "a result do not count: 1." in call.stderr


def test_seeds_without_a_common_search_are_refused():
    table = grid_of_seeds()
    is_odd = (table["seed"] == 0) != (table["batch_size"] == 8)  # no seed has all batch sizes
    with pytest.raises(SweepError, match="some seed must have several rates"):
        sweep.answer(table[is_odd | ((table["seed"] > 1) & (table["learning_rate"] == 1e-3))])


def test_parts_of_a_table_count_their_rows_each(call, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    call("answer", path, "--by", "model")
    assert "Each part: Rows: 4 with a result" in call.stderr


def test_a_file_that_does_not_exist_is_named_so(refuse, tmp_path):
    assert "none.csv must exist" in refuse("answer", tmp_path / "none.csv")


def test_runs_of_mlflow_are_answered(call, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = connect(uri)
    experiment = client.create_experiment("mine")
    for size in (8, 32):
        for seed in range(3):
            run = client.create_run(experiment).info.run_id
            for name, value in (("batch_size", size), ("lr", 1e-3), ("seed", seed)):
                client.log_param(run, name, value)
            client.log_metric(run, "val_loss", 2.0 + size / 100 + seed / 1000)
            client.set_terminated(run)
    broken = client.create_run(experiment).info.run_id
    for name, value in (("batch_size", 32), ("lr", 1e-3), ("seed", 9)):
        client.log_param(broken, name, value)
    client.set_terminated(broken, "FAILED")
    code, text = call("answer", f"mlflow:{uri}/mine", "--json")
    answer = json.loads(text)
    assert code == 0 and answer["recommended"] == 8
    assert [row["seeds"] for row in answer["batch_sizes"]] == [3, 3]
    assert [row["missed_seeds"] for row in answer["batch_sizes"]] == [0, 0]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("optuna:study.db", "must be named by storage and name"),
        ("optuna:sqlite:///none.db/mine", "none.db must exist"),
        ("optuna:none.log/mine", "none.log must exist"),
        ("mlflow:mine", "must be named by tracking URI and name"),
        ("mlflow:sqlite:///none.db/mine", "none.db must exist"),
    ],
)
def test_a_source_that_does_not_exist_is_refused_and_not_made(refuse, source, problem):
    assert problem in refuse("answer", source)


def test_an_unknown_study_is_refused(refuse, study):
    assert "must hold the study 'other'" in refuse("answer", f"optuna:{study}/other")


def test_a_table_of_two_models_is_answered_by_model_and_never_pooled(call, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    code, text = call("answer", path, "--by", "model", "--json")
    answers = json.loads(text)
    assert code == 0
    assert {label: answer["recommended"] for label, answer in answers.items()} == {
        "small": 8,
        "large": 32,
    }
    assert call("answer", path, "--by", "model")[1].startswith("model small:\n")


def test_a_table_of_two_models_is_refused_as_one(refuse, tmp_path):
    path = tmp_path.parent / "t.csv"
    path.write_text(TABLE)
    assert "Answer each by itself: --by model" in refuse("answer", path)
    assert "--by must be a column of" in refuse("answer", path, "--by", "seed")


@pytest.mark.parametrize(
    ("header", "best"),
    [("Valid Acc (Best)", 64), ("val_f1", 64), ("eval/perplexity", 16), ("metrics.val_mae", 16)],
)
def test_a_metric_that_is_named_has_its_direction(call, tmp_path, header, best):
    path = tmp_path / "t.csv"
    path.write_text(f"batch_size,lr,{header},Test Acc\n16,1e-3,0.80,0.9\n64,1e-3,0.90,0.8\n")
    code, text = call("answer", path, "--json")
    assert code == 0 and json.loads(text)["recommended"] == best


def test_two_metrics_need_a_choice(refuse, tmp_path):
    path = tmp_path.parent / "two.csv"
    path.write_text("batch_size,lr,val_acc,val_f1\n16,1e-3,0.80,0.9\n64,1e-3,0.90,0.8\n")
    assert "got val_acc and val_f1. Choose by --metric." in refuse("answer", path)


def bowl(best, level, rates, noise):
    """Return losses by rate about a parabola in the log rate."""
    rng = random.Random(0)
    return {rate: level + 0.05 * math.log(rate / best) ** 2 + rng.gauss(0, noise) for rate in rates}


RATES = [1e-4 * 2**k for k in range(8)]


def grid_rows(noise=0.001):
    """Return batch size, rate and loss of a grid without seeds; 32 is the best by 0.1."""
    return [
        (size, rate, loss)
        for size, best, level in ((8, 5e-4, 2.1), (32, 1e-3, 2.0), (128, 2e-3, 2.3))
        for rate, loss in bowl(best, level, RATES, noise).items()
    ]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_grid_of_rates_without_seeds_is_answered_by_the_noise_about_its_curves(
    call, tmp_path, direction
):
    path = tmp_path / "t.csv"
    metric, sign = ("val_loss", 1) if direction == "minimize" else ("val_acc", -0.1)
    lines = [f"{size},{rate},{sign * loss}" for size, rate, loss in grid_rows()]
    path.write_text("\n".join([f"batch_size,lr,{metric}", *lines]))
    code, text = call("answer", path, "--json")
    answer = json.loads(text)
    assert code == 0 and answer["candidates"] == [32] and answer["provisional"]
    assert "what a seed changes at all rates" in " ".join(answer["reasons"])
    assert "a search of its rate" in answer["scope"] and "one seed" in answer["scope"]
    row = answer["batch_sizes"][1]
    assert row["best_learning_rate"] == pytest.approx(1e-3, rel=0.1) and row["seeds"] == 1


def test_a_study_that_searched_rates_is_answered_and_names_what_else_differed(call, tmp_path):
    address = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(study_name="mine", storage=address)
    spaces = {
        "batch_size": optuna.distributions.CategoricalDistribution([8, 32, 128]),
        "lr": optuna.distributions.FloatDistribution(1e-5, 1, log=True),
        "dropout": optuna.distributions.FloatDistribution(0, 1),
    }
    for place, (size, rate, loss) in enumerate(grid_rows()):
        params = {"batch_size": size, "lr": rate, "dropout": place / 100}
        study.add_trial(optuna.create_trial(params=params, distributions=spaces, value=loss))
    code, text = call("answer", f"optuna:{address}/mine", "--json")
    answer = json.loads(text)
    assert code == 0 and answer["candidates"] == [32]
    text = "Rows that are compared differ in params_dropout too, which is taken for"
    assert text in " ".join(answer["reasons"])


def test_a_grid_whose_curves_leave_no_residuals_decides_nothing(call, tmp_path):
    path = tmp_path / "t.csv"
    rows = [row for row in grid_rows() if RATES[1] < row[1] < RATES[5]]
    path.write_text("\n".join(["batch_size,lr,val_loss", *(f"{b},{r},{y}" for b, r, y in rows)]))
    code, text = call("answer", path, "--json")
    answer = json.loads(text)
    assert code == 0 and answer["candidates"] == [8, 32, 128]
    assert "so the noise is not known" in " ".join(answer["reasons"])


def test_a_grid_whose_rows_repeat_is_refused(refuse, tmp_path):
    path = tmp_path.parent / "t.csv"
    rows = [f"{b},{r},0,{y + again / 1000}" for b, r, y in grid_rows() for again in range(3)]
    path.write_text("\n".join(["batch_size,lr,seed,val_loss", *rows]))
    assert "each row must be a trial" in refuse("answer", path)


def test_the_columns_of_step_law_are_answered_by_model_and_budget(call, tmp_path):
    path = tmp_path / "t.csv"
    lines = ["h,lr,bs,loss,smooth loss,exp_name,D,N,D/N"]
    for model, tokens, shift in ((214663680, 4e9, 0.0), (214663680, 1e11, -0.4)):
        for size, rate, loss in grid_rows():
            cells = (960, rate, size, loss + 1, loss + shift, "x", tokens, model, tokens / model)
            lines.append(",".join(map(str, cells)))
    path.write_text("\n".join(lines))
    code, _ = call("answer", path)
    assert code == 2

    code, text = call("answer", path, "--by", "N", "--by", "D", "--json")
    answers = json.loads(text)
    assert code == 0 and [*answers] == ["214663680, 4000000000.0", "214663680, 100000000000.0"]
    assert [answer["candidates"] for answer in answers.values()] == [[32], [32]]
    means = [answer["batch_sizes"][1]["mean"] for answer in answers.values()]
    assert means == [pytest.approx(2.0, abs=0.01), pytest.approx(1.6, abs=0.01)]


@pytest.mark.parametrize("header", ["n", "N"])
def test_a_letter_alone_is_not_taken_for_a_scale(call, tmp_path, header):
    """An n may count seeds or trainings; N is a model size next to D only."""
    path = tmp_path / "t.csv"
    path.write_text(f"bs,lr,{header},val_loss\n8,1e-3,3,2.4\n32,1e-3,5,2.5\n")
    code, text = call("answer", path, "--json")
    assert code == 0 and json.loads(text)["recommended"] == 8


def test_any_column_of_settings_may_tell_parts_apart(call, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("trainset,bs,lr,val_loss\na,8,1e-3,2.4\na,32,1e-3,2.5\nb,8,1e-3,1.9\n")
    code, text = call("answer", path, "--by", "trainset")
    assert code == 0 and "trainset a:\n" in text and "trainset b:\n" in text


# Zhang et al. 2025; the expected numbers are those of SCIENCE.md, section 4.
STEPS = """model,batch_size,steps_to_target
85M,64,46000
85M,128,23000
85M,256,13282
85M,512,"7,000"
85M,1024,3840
85M,2048,2528
85M,4096,1917
85M,8192,1600
85M,16384,1600
"""


def test_steps_to_one_loss_give_a_critical_batch_size(call, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(STEPS)
    code, text = call("answer", path, "--json")
    answer = json.loads(text)
    assert code == 0
    assert answer["s_min"]["value"] == pytest.approx(1293.83, rel=1e-4)
    assert answer["e_min"]["value"] == pytest.approx(2834258, rel=1e-4)
    assert answer["critical_batch_size"] == {
        "value": pytest.approx(2834258 / 1293.83, rel=1e-4),
        "low": None,
        "high": None,
    }
    assert answer["provisional"] and "one seed at 9 batch sizes" in answer["reasons"][0]
    fit = sweep.fit_steps([64, 128, 256], [46000, 23000, 13282])
    assert fit.b_crit.value > 64


def test_seeds_give_a_critical_batch_size_its_interval(call, tmp_path):
    path = tmp_path / "t.csv"
    rng = random.Random(0)
    lines = ["bs,Steps to 75% accuracy,seed"]
    for size in (8, 16, 32, 64, 128):
        for seed in range(5):
            lines.append(f"{size},{(200 + 6400 / size) * rng.uniform(0.99, 1.01)},{seed}")
    path.write_text("\n".join(lines))
    code, text = call("answer", path, "--json")
    answer = json.loads(text)
    critical = answer["critical_batch_size"]
    assert code == 0 and not answer["provisional"]
    assert critical["low"] < 32 < critical["high"] and critical["high"] < 1.2 * critical["low"]
    assert "The critical batch size is 3" in call("answer", path)[1]


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        ("bs,steps\n8,100\n16,60\n32,40\n", (), "name the result by --metric, one of steps"),
        (STEPS + "151M,64,96000\n", (), "Answer each by itself: --by model"),
        ("bs,lr,N,D,loss\n8,1,1,1,2\n8,1,1,9,2\n", (), "itself: --by D, or a table of its own"),
        ("bs,steps to loss\n8,100\n16,60\n", (), "A fit must have 3 batch sizes"),
        ("bs,steps\n8,99\n8,98\n16,60\n32,9\n", ("--metric", "steps"), "seed must differ"),
        ("bs,steps to loss\n8,100\n16,many\n32,40\n", (), "many"),
    ],
)
def test_steps_that_say_too_little_are_refused(refuse, tmp_path, text, flags, problem):
    path = tmp_path.parent / "t.csv"
    path.write_text(text)
    assert problem in refuse("answer", path, *flags)


def test_scores_of_people_are_read_in_percent(call, tmp_path):
    path = tmp_path / "t.md"
    rows = ["| 32 | 0.01 | ≈ 38 % |", "| 32 | 0.001 | **51.46 %** |", "| 128 | 0.1 | 9.64 % |"]
    header = ["| Batch size | Learning rate | Validation Accuracy |", "| --: | --: | --: |"]
    path.write_text("\n".join(header + rows))
    answer = json.loads(call("answer", path, "--json")[1])
    assert {row["batch_size"]: row["mean"] for row in answer["batch_sizes"]} == {
        32: 51.46,
        128: 9.64,
    }


def test_percent_signs_in_some_cells_are_ambiguous(refuse, tmp_path):
    path = tmp_path.parent / "t.csv"
    path.write_text("bs,lr,val_acc\n8,1e-3,0.9\n32,1e-3,85 %\n")
    assert "got 85 % (val_acc, line 3)" in refuse("answer", path)


def test_the_best_of_several_evaluations_is_said_to_be_it(call, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("bs,lrate,best_val_loss\n8,1e-3,2.4\n32,2e-3,2.5\n")
    answer = json.loads(call("answer", path, "--metric", "best_val_loss", "--json")[1])
    text = "best_val_loss is the best of several evaluations, which favours noisy trials."
    assert text in answer["reasons"]


def test_settings_that_differ_within_a_batch_size_are_named(call, tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"{b},{r},{0.1 * k},{y}" for k, (b, r, y) in enumerate(grid_rows())]
    path.write_text("\n".join(["bs,lr,wdecay,val_loss", *rows]))
    answer = json.loads(call("answer", path, "--json")[1])
    assert answer["candidates"] == [32]
    text = "Rows that are compared differ in wdecay too, which is taken for noise."
    assert text in answer["reasons"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("epochs,bs,lr,val_loss\n3,8,1,2\n5,8,1,2\n", "Answer each by itself: --by epochs"),
        ("bs,lr,best_val_loss\n8,1,2\n9,1,2\n", "by --metric, one of best_val_loss"),
        (
            "number,value,params_bs,params_lr\n0,1,8,1\n1,2,9,1\n",
            "by --metric, one of number, value",
        ),
        ("bs,lr,trainset,val_loss\n8,1,a,2\n8,1,b,3\n", "an ignored column tells apart (--by)"),
        ("bs,lr,model,val_loss\n8,1,,2\n9,1,b,3\n", "must be the same in all rows"),
    ],
)
def test_a_table_that_lacks_something_gets_a_sentence_with_a_way_on(
    refuse, tmp_path, text, problem
):
    path = tmp_path.parent / "t.csv"
    path.write_text(text)
    assert problem in refuse("answer", path)


def test_parts_need_a_cell_in_each_row(refuse, tmp_path):
    path = tmp_path.parent / "t.csv"
    path.write_text("bs,lr,model,val_loss\n8,1,,2\n9,1,b,3\n")
    assert "got an empty cell in line 2" in refuse("answer", path, "--by", "model")


def seeded(settings, header):
    """Return a table with three seeds at each of three batch sizes, of which 16 is the best."""
    rng = random.Random(0)
    lines = [f"batch_size,lr,seed,{header}"]
    for size, level, cells in zip((16, 32, 64), (3.0, 3.1, 3.2), settings, strict=True):
        rate = 1e-3 * size
        for tried in (rate / 4, rate / 2, rate, 2 * rate, 4 * rate):
            loss = level + 0.05 * math.log(tried / rate) ** 2 + 0.0005 * (tried > rate)
            lines.append(f"{size},{tried},1000,{cells},tune,{loss}")
        for seed in range(3):
            loss = level + rng.gauss(0, 0.0003)
            lines.append(f"{size},{rate},{seed},{cells},final,{loss}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("header", "cells", "named"),
    [
        ("precision", ("bf16", "fp32", "fp32"), "precision"),
        ("params_dropout", ("0", "0.3", "0.5"), "params_dropout"),
        ("dropout", ("0", "0.3", "0.5"), "dropout"),
        ("weight_decay", ("0", "0.1", "0.1"), "weight_decay"),
        ("warmup", ("100", "100", "100"), "warmup"),
        ("context", ("128", "256", "256"), None),  # refused: sequences of other lengths
        ("warmup", ("400", "200", "100"), ""),  # the same share of equal tokens
        ("run_name", ("bs16", "bs32", "bs64"), ""),
        ("peak_memory_gb", ("2", "3", "5"), ""),
        ("final_train_loss", ("2.9", "3.0", "3.2"), ""),
    ],
)
def test_what_differs_with_the_batch_size_makes_an_answer_provisional(
    call, tmp_path, header, cells, named
):
    path = tmp_path / "t.csv"
    path.write_text(seeded(cells, f"{header},stage,val_loss"))
    code, text = call("answer", path, "--json")
    if named is None:
        assert code == 2
        return
    answer = json.loads(text)
    assert code == 0 and answer["recommended"] == 16
    reasons = " ".join(answer["reasons"])
    assert (f"Rows that are compared differ in {named} too." in reasons) is bool(named)
    assert answer["provisional"] is bool(named)


@pytest.mark.parametrize(
    ("header", "direction"),
    [
        ("exact_match", "maximize"),
        ("eval_f1_macro", "maximize"),
        ("eval_rougeLsum", "maximize"),
        ("ndcg@10", "maximize"),
        ("mAP50", "maximize"),
        ("pass@1", "maximize"),
        ("val_balanced_accuracy", "maximize"),
        ("ep_rew_mean", "maximize"),
        ("val_mcc", "maximize"),
        ("score ↑", "maximize"),
        ("distance ↓", "minimize"),
        ("my_loss", "minimize"),
        ("smape", "minimize"),
    ],
)
def test_the_better_direction_of_a_metric_is_that_of_its_name(call, tmp_path, header, direction):
    path = tmp_path / "t.csv"
    path.write_text(f"bs,lr,{header}\n8,1e-3,0.4\n32,1e-3,0.6\n")
    answer = json.loads(call("answer", path, "--metric", header, "--json")[1])
    assert answer["direction"] == direction
    assert answer["recommended"] == (32 if direction == "maximize" else 8)


@pytest.mark.parametrize("header", ["score_x", "accuracy ↓", "gap"])
def test_a_metric_without_a_known_direction_needs_one(refuse, tmp_path, header):
    path = tmp_path.parent / "t.csv"
    path.write_text(f"bs,lr,{header}\n8,1e-3,0.4\n32,1e-3,0.6\n")
    assert "Add --direction minimize or maximize" in refuse("answer", path, "--metric", header)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("policy,bs,lr,val_loss\nwarm,8,1,2\ncold,8,1,3\n", "--by policy"),
        (
            "bs,lr,seed,target,tokens_to_target,val_loss\n8,1,0,3.5,9,3\n32,1,0,3.3,9,3\n",
            "target must be the same in all rows",
        ),
        ("bs,optimizer,steps to loss\n8,sgd,9\n16,adam,8\n32,adam,7\n", "--by optimizer"),
        ("bs,lr,steps to loss\n8,1,9\n8,2,8\n16,1,7\n32,1,6\n", "learning_rate must be equal"),
    ],
)
def test_what_must_not_be_pooled_is_refused(refuse, tmp_path, text, problem):
    path = tmp_path.parent / "t.csv"
    path.write_text(text)
    assert problem in refuse("answer", path)


def test_the_word_fixed_does_not_tell_the_rates_of_a_grid_apart(call, tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"fixed,{size},{rate},{loss}" for size, rate, loss in grid_rows()]
    path.write_text("\n".join(["policy,batch_size,lr,val_loss", *rows]))
    answer = json.loads(call("answer", path, "--json")[1])
    assert answer["candidates"] == [32]


def test_parts_whose_cells_have_commas_stay_apart(call, tmp_path):
    path = tmp_path / "t.csv"
    rows = ['"a, b",c', 'a,"b, c"']
    cells = [f"{row},{size},1e-3,{size}" for row in rows for size in (8, 32)]
    path.write_text("\n".join(["aug,crop,bs,lr,val_loss", *cells]))
    answers = json.loads(call("answer", path, "--by", "aug", "--by", "crop", "--json")[1])
    assert [*answers] == ["'a, b', 'c'", "'a', 'b, c'"]


def test_a_grid_that_lies_exactly_on_its_curves_has_no_noise_that_is_known(call, tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"{size},{rate},{loss}" for size, rate, loss in grid_rows(noise=0.0)]
    path.write_text("\n".join(["batch_size,lr,val_loss", *rows]))
    answer = json.loads(call("answer", path, "--json")[1])
    assert "so the noise is not known" in " ".join(answer["reasons"])
    assert {row["tolerance_verdict"] for row in answer["batch_sizes"]} == {"undecided"}


def steps_table(extra="", noise=0.01, seeds=3):
    rng = random.Random(0)
    lines = ["bs,Steps to target,seed,stage"]
    for size in (8, 16, 32, 64, 128):
        for seed in range(seeds):
            steps = (200 + 6400 / size) * rng.uniform(1 - noise, 1 + noise)
            lines.append(f"{size},{steps},{seed},final")
    return "\n".join(lines) + extra


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (steps_table(), None),
        (steps_table("\n64,99999,9,tune"), None),
        (steps_table(noise=0.0), "All seeds have the same steps"),
        (steps_table().rsplit("\n", 2)[0], "Only 1 of up to 3 seeds are known"),
        (steps_table("\n64,,9,final"), "1 trainings without steps are left out"),
    ],
)
def test_steps_count_as_far_as_they_are_of_one_kind(call, tmp_path, text, reason):
    path = tmp_path / "t.csv"
    path.write_text(text)
    answer = json.loads(call("answer", path, "--json")[1])
    assert answer["critical_batch_size"]["value"] == pytest.approx(32, rel=0.1)
    assert answer["provisional"] is (reason is not None)
    assert reason is None or reason in " ".join(answer["reasons"])


def test_steps_on_linear_scaling_have_no_critical_batch_size(call, tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"{size},{6400 / size},{seed}" for size in (8, 16, 32, 64) for seed in (0, 1)]
    path.write_text("\n".join(["bs,steps to loss,seed", *rows]))
    text = " ".join(call("answer", path)[1].split())
    assert "Provisionally, the critical batch size lies far above those tried" in text


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([8, 16, 32], [9, 8]),
        ([8, 16, 32], [9, 8, 0]),
        ([8, 16, 32], [9, 8, math.nan]),
        ([32, 16, 8], [9, 8, 7]),
    ],
)
def test_fit_steps_refuses_what_it_cannot_fit(sizes, steps):
    with pytest.raises(SweepError, match="must be positive"):
        sweep.fit_steps(sizes, steps)


def test_a_study_may_have_a_slash_in_its_name(call, tmp_path):
    address = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(study_name="team/mine", storage=address)
    spaces = {
        "batch_size": optuna.distributions.CategoricalDistribution([8, 32]),
        "lr": optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True),
    }
    for size in (8, 32):
        params = {"batch_size": size, "lr": 1e-3}
        study.add_trial(optuna.create_trial(params=params, distributions=spaces, value=size))
    code, text = call("answer", f"optuna:{address}/team/mine", "--json")
    assert code == 0 and json.loads(text)["recommended"] == 8


def test_a_table_of_runs_that_go_on_names_their_state(tmp_path):
    path = tmp_path / "runs.tsv"
    header = "batch_size\tlr\tseed\tState\tval_loss"
    path.write_text(f"{header}\n8\t1e-3\t0\trunning\t2.5\n32\t1e-3\t0\trunning\t2.6\n")
    (sentence,) = answer_of(path, "final_valid_loss", "minimize", None).sentences
    assert "no row is complete: State has running" in sentence
