"""`sweep answer` from studies of Optuna, experiments of MLflow, and tables of several models."""

import json

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
