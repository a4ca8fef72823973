"""On synthetic stories the loss of a model approaches the entropy of the grammar from above."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sweep.config.execution import Execution
from sweep.config.load import load_experiment
from sweep.data.synthetic_stories import synthetic_documents
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import Request
from sweep.orchestration.runner import run_plan
from sweep.trial.files import read_metrics
from sweep.trial.folder import SweepFolder
from tests.fakes.executors import InlineExecutor

PARSER = runpy.run_path(str(Path(__file__).parents[1] / "data" / "grammar_parser.py"))


# Measured at the end: 0.122 and 0.021 of the excess before training.
@pytest.mark.slow
@pytest.mark.parametrize(("budget", "share"), [(100_000, 0.2), (2_000_000, 0.03)])
def test_a_trained_model_approaches_the_bound_from_above(tmp_path, budget, share):
    folder = SweepFolder(tmp_path)
    evaluation = {"points": 4, "sequences": 1000}  # at most: all windows of the validation split
    settings = {"batches": "16", "budget": budget, "lr": "1e-2", "evaluation": evaluation}
    planned = make_plan(
        Request(load_experiment("quick", settings), Execution(device="cpu"), folder)
    )
    # In this process, whose warnings are errors, the compiler cannot be imported.
    planned = replace(planned, plan=planned.plan.with_execution(compile=False))
    assert run_plan(planned, folder, executor=InlineExecutor()).exit_code == 0
    documents = synthetic_documents(planned.plan.data, "valid")
    true_nats = np.array([-PARSER["log_probability"](text) for text in documents])
    trial = folder.trials()[0]
    summed, tokens = np.load(trial.losses_path).T
    per_document = (summed - true_nats) / tokens.mean()  # nats per token; its mean is the excess
    noise = 3 * per_document.std(ddof=1) / np.sqrt(len(per_document))
    bound = true_nats.sum() / tokens.sum()
    result = trial.read_result()
    metrics = read_metrics(trial.metrics_path)
    lines = [line["valid/loss"] for line in metrics if "valid/loss" in line]
    excess = np.array([result.initial_train_loss, *lines, result.final_valid_loss]) - bound
    assert len(lines) == 4
    assert excess[-1] == pytest.approx(per_document.mean())
    assert all(excess[k] < excess[:k].mean() for k in range(1, len(excess)))
    assert excess.min() > -noise
    assert excess[-1] < share * excess[0]
