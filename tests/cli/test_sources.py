"""`sweep answer` from studies of Optuna, experiments of MLflow, and tables of several models."""

import json
import math
import random

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

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
    return {
        rate: level + 0.05 * math.log(rate / best) ** 2 + rng.gauss(0, noise) for rate in rates
    }


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
    assert "degrees of freedom); what another seed would change" in " ".join(answer["reasons"])
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
    assert "Rows that are compared differ in params_dropout too." in answer["reasons"]


def test_a_grid_whose_curves_leave_no_residuals_decides_nothing(call, tmp_path):
    path = tmp_path / "t.csv"
    rows = [row for row in grid_rows() if RATES[1] < row[1] < RATES[5]]
    path.write_text("\n".join(["batch_size,lr,val_loss", *(f"{b},{r},{y}" for b, r, y in rows)]))
    code, text = call("answer", path, "--json")
    answer = json.loads(text)
    assert code == 0 and answer["candidates"] == [8, 32, 128]
    assert "so the noise is not known" in " ".join(answer["reasons"])


def test_a_grid_with_several_seeds_must_mark_its_search(refuse, tmp_path):
    path = tmp_path.parent / "t.csv"
    rows = [f"{b},{r},{seed},{y + seed / 1000}" for b, r, y in grid_rows() for seed in range(3)]
    path.write_text("\n".join(["batch_size,lr,seed,val_loss", *rows]))
    assert "stage tune marks a search" in refuse("answer", path)
