"""On synthetic stories no loss can lie below the grammar's entropy: a trained model nears it."""

import numpy as np
import pytest

from sweep.config.experiment import load_experiment
from sweep.data.synthetic import log_probability, synthetic_documents
from sweep.orchestration.local import InlineExecutor
from sweep.orchestration.planning import Logistics, make_plan
from sweep.orchestration.runner import prepare, run_plan
from sweep.trial.folder import SweepFolder
from sweep.trial.metrics import read_metrics


def train(path, budget):
    """Train the quick model; return its trial and the true −log p of the validation stories."""
    folder = SweepFolder(path)
    settings = {"batches": "4", "budget": budget, "lr": "1e-2"}
    planned = make_plan(load_experiment("quick", settings), Logistics(device="cpu"), folder)
    prepare(planned, folder)
    assert run_plan(planned, folder, executor=InlineExecutor()).exit_code == 0
    documents = synthetic_documents(planned.plan.data, "valid")
    return folder.trials()[0], np.array([-log_probability(text) for text in documents])


def assert_above_the_bound(trial, true_nats):
    """The excess over −log p, per document, is positive beyond its noise, and so is every loss."""
    summed, tokens = np.load(trial.losses_path).T
    excess = summed - true_nats
    error = excess.std(ddof=1) / np.sqrt(len(excess))
    assert excess.mean() > -3 * error
    bound = true_nats.sum() / tokens.sum()
    noise = 4 * (true_nats / tokens.mean()).std() / np.sqrt(len(excess) / 4)  # milestone sets
    losses = [
        line["valid/loss"] for line in read_metrics(trial.metrics_path) if "valid/loss" in line
    ]
    assert len(losses) == 20 and min(losses) > bound - noise
    assert losses == sorted(losses, reverse=True) or losses[-1] < losses[0] / 3
    return trial.read_result()["final_valid_loss"] / bound


def test_a_trained_model_comes_from_above_towards_the_bound(tmp_path):
    trial, true_nats = train(tmp_path, 200_000)
    assert 1 < assert_above_the_bound(trial, true_nats) < 2


@pytest.mark.slow
def test_a_longer_training_comes_close_and_stays_above(tmp_path):
    trial, true_nats = train(tmp_path, 2_000_000)
    assert 1 < assert_above_the_bound(trial, true_nats) < 1.3
