"""Models and workloads of the user's: what is planned, refused and reported is what was built."""

import importlib
import json
import sys

import pandas as pd
import pytest

from sweep import SweepError, plan_sweep
from sweep.analysis.results import load_sweep
from sweep.report.charts import plot_loss
from sweep.report.vega import BOTTOM
from sweep.workloads.workload import FinalEvaluation

WORKLOAD = """
import torch
import torch.nn.functional as F
from sweep import Workload
from sweep.workloads.workload import FinalEvaluation

class Lines(Workload):
    objective, direction, tolerance = "accuracy", "maximize", 0.02

    def __init__(self, config, device):
        super().__init__(config, device)
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(400, 5, generator=generator, device=device)
        self.y = (self.x.sum(1) > 0).long()
        self.train_sequences = 300

    def build_model(self):
        return torch.nn.Linear(5, 2)

    def build_batch(self, first, count):
        chosen = self.stream.indices(first, count)
        return self.x[chosen], self.y[chosen]

    def loss_sum(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def evaluate(self, model):
        logits = model(self.x[300:])
        hits = logits.argmax(1) == self.y[300:]
        return {"accuracy": hits.float().mean(), "loss": F.cross_entropy(logits, self.y[300:])}

    def evaluate_finally(self, model):
        return FinalEvaluation(self.evaluate_metrics(model), train_loss=0.125)
"""
RUN = ("--budget", "1200", "--batches", "4,8,12", "--seeds", "3", "--lr", "0.05", "--device", "cpu")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the current folder, and return its name."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    monkeypatch.chdir(tmp_path)
    return write


def test_a_workload_needs_no_experiment_and_is_reported_as_what_it_built(call, module, tmp_path):
    module("lines", WORKLOAD)
    code, text = call("plan", "--workload", "lines:Lines", *RUN)
    assert code == 0 and "lines:Lines, 12 parameters" in text and "examples" in text
    assert not {"tinystories", "tokens", "fp32"} & {*text.replace(",", " ").split()}
    assert call("run", "--workload", "lines:Lines", *RUN, "--quiet")[0] == 0
    folder = tmp_path / "results/lines"
    answer = json.loads((folder / "answer.json").read_text())
    assert (answer["metric"], answer["direction"]) == ("final_valid_accuracy", "maximize")
    assert answer["tolerance"] == 0.02
    table = pd.read_csv(folder / "trials.csv")
    assert table["final_valid_accuracy"].between(0.5, 1).all()
    best = table.groupby("batch_size")["final_valid_accuracy"].mean()
    assert {row["batch_size"]: row["mean"] for row in answer["batch_sizes"]} == pytest.approx(
        best.to_dict()
    )
    assert table["epochs"].eq(4).all()
    report = (folder / "report.md").read_text()
    lines = [line for line in report.splitlines() if "token" in line]
    assert all("_tokens" in line or "tokens_" in line for line in lines), lines  # names of checks
    for absent in ("tinystories", "vocabulary", "bits/byte", "nats", "tokenizer", "final train"):
        assert absent not in report
    assert "lines.py, sha256" in report and "validation loss" in report
    status = json.loads(call("status", folder, "--json")[1])
    assert (status["metric"], status["unit"]) == ("final_valid_accuracy", "examples")
    assert all(0.5 <= row["value"] <= 1 for row in status["trials"])
    sweep = load_sweep(folder)
    sweep.trials.loc[0, ["state", "cause"]] = ["FAILED", "diverged"]
    layers = plot_loss(sweep).panels[0]["layer"]
    drawn = {la["mark"].get("shape"): la for la in layers if la["mark"]["type"] == "point"}
    means = {
        row["batch size"]: row["final validation accuracy"] for row in drawn[None]["data"]["values"]
    }
    assert means == pytest.approx({size: mean for size, mean in best.items() if size > 4}, rel=1e-5)
    assert drawn["cross"]["encoding"]["y"] == BOTTOM  # more is better


def test_the_mlflow_runs_of_a_workload_without_tokens_speak_of_examples(call, module, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    module("lines", WORKLOAD)
    run = ("--budget", "96", "--batches", "4", "--device", "cpu", "--quiet")
    assert call("run", "--workload", "lines:Lines", *run)[0] == 0
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/results/lines/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "lines"]
    runs = client.search_runs([experiment.experiment_id], "tags.`sweep.trial_id` != ''")
    names = {*runs[0].data.metrics, *runs[0].data.params}
    assert {"valid/accuracy", "final/valid_accuracy", "examples"} <= names
    assert "system/perf/examples_per_second" in names
    assert not any("tokens" in name for name in names)


def test_changed_code_is_refused_by_name_in_a_folder_with_results(call, module, tmp_path):
    module("lines", WORKLOAD)
    run = ("run", "--workload", "lines:Lines", "--budget", "96", "--batches", "4", "--quiet")
    assert call(*run)[0] == 0
    module("lines", WORKLOAD.replace("torch.randn", "2 * torch.randn"))
    assert call(*run)[0] == 2 and "lines.py has changed" in call.stderr


def test_a_module_that_changes_during_a_sweep_fails_the_next_trial(
    call, module, tmp_path, monkeypatch
):
    (tmp_path / "lib").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.syspath_prepend(tmp_path / "lib")
    (tmp_path / "lib/helper.py").write_text(
        "import pathlib\nsave = pathlib.Path(__file__).write_text\n"
    )
    text = WORKLOAD.replace("import torch\n", "import torch, helper\n", 1)
    module("lines", text.replace("logits =", "helper.save('#')\n        logits ="))
    run = ("--budget", "96", "--batches", "4,8", "--quiet", "--device", "cpu", "--out", "out")
    assert call("run", "--workload", "lines:Lines", *run)[0] == 1
    status = json.loads(call("status", "out", "--json")[1])
    assert [row["state"] for row in status["trials"]] == ["COMPLETE", "FAILED"]
    assert "helper.py has changed since the sweep was planned" in call("status", "out")[1]


MISTAKES = {
    "build_model": ("return torch.nn.Linear(5, 2)", "return torch.nn.Linear(5, width)", 18),
    "build_batch": ("return self.x[chosen], self", "return self.missing, self", 22),
    "loss_sum": ('reduction="sum"', 'weight="none"', 25),
}


@pytest.mark.parametrize("method", MISTAKES)
def test_a_mistake_in_a_workload_is_refused_with_its_line_before_anything_runs(
    refuse, module, tmp_path, monkeypatch, method
):
    right, wrong, line = MISTAKES[method]
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work/wrong.py").parent.mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wrong.py").write_text(WORKLOAD.replace(right, wrong))
    monkeypatch.setattr("sweep.orchestration.request.LOG.warning", lambda *_: None)
    message = refuse("plan", "--workload", "wrong:Lines", "--budget", "96", "--batches", "4")
    assert f"(wrong.py, line {line})" in message
    log = (tmp_path / "cache/user-code.log").read_text()
    assert "Traceback" in log and f"in {method}" in log


def test_the_largest_loss_wins_if_more_is_better(call, module, tmp_path):
    text = WORKLOAD.replace('"accuracy", "max', '"loss", "max').replace(
        '"accuracy": hits', '"loss": hits'
    )
    module("more", text.replace(', "loss": F.cross_entropy(logits, self.y[300:])', ""))
    assert call("run", "--workload", "more:Lines", *RUN, "--out", "out", "--yes")[0] == 0
    rows = pd.read_csv(tmp_path / "out" / "trials.csv")
    means = rows.groupby("batch_size")["final_valid_loss"].mean()
    answer = json.loads((tmp_path / "out" / "answer.json").read_text())
    assert {row["batch_size"]: row["mean"] for row in answer["batch_sizes"]} == pytest.approx(
        means.to_dict()
    )
    assert means.idxmax() in answer["candidates"] and means.nunique() > 1


def test_the_other_metrics_of_a_loss_have_columns_in_the_report(call, module, tmp_path):
    text = WORKLOAD.replace('"accuracy", "maximize"', '"loss", "minimize"')
    for name in ("lines", "final"):
        module(name, text if name == "final" else text.replace("evaluate_finally", "unused"))
        run = ("--budget", "96", "--batches", "4", "--quiet", "--out", name)
        assert call("run", "--workload", f"{name}:Lines", *run)[0] == 0
        report = (tmp_path / name / "report.md").read_text()
        head = next(
            line for line in report.splitlines() if line.startswith("| batch size | policy")
        )
        assert "| validation accuracy |" in head and ("final train" in head) == (name == "final")


def test_a_metric_that_mlflow_cannot_record_fails_its_trial(call, module):
    module("lines", WORKLOAD.replace('{"accuracy"', '{"acc@1": 1.0, "accuracy"'))
    run = ("run", "--workload", "lines:Lines", "--budget", "96", "--batches", "4", "--out", "out")
    assert call(*run, "--quiet")[0] == 1
    assert "names of letters, digits and _ . -" in call("status", "out")[1]


@pytest.mark.parametrize(
    "name", ["train/lr", "train/loss", "perf/tokens_per_second", "tokens", "train/loss/x"]
)
def test_a_metric_that_would_replace_one_of_the_loop_fails_its_trial(call, module, name):
    head = "def loss_sum(self, model, batch):"
    add = f"{head}\n        self.meter.add({name!r}, 1.0, 1)"
    module("lines", WORKLOAD.replace(head, add))
    run = ("run", "--workload", "lines:Lines", "--budget", "96", "--batches", "4", "--out", "out")
    assert call(*run, "--quiet", "--yes")[0] == 1
    assert name in call("status", "out")[1]


@pytest.mark.parametrize("name", ["acc@1", "a//b", "acc/", ".a", ""])
def test_names_of_metrics_that_mlflow_refuses_are_refused(name):
    FinalEvaluation({"top-1/acc.5": 1.0})
    with pytest.raises(SweepError, match="Rename it"):
        FinalEvaluation({name: 1.0})


def test_what_a_module_draws_when_it_is_imported_is_the_same_in_every_sweep(call, module, tmp_path):
    drawn = WORKLOAD.replace(
        "class Lines", "import numpy\nOFFSET = numpy.random.rand()\nclass Lines"
    )
    module("drawn", drawn.replace("device=device)\n", "device=device) + OFFSET\n", 1))
    losses = set()
    for out in ("one", "two"):
        run = ("--budget", "96", "--batches", "4", "--quiet", "--device", "cpu", "--out", out)
        assert call("run", "--workload", "drawn:Lines", *run)[0] == 0
        losses |= {*pd.read_csv(tmp_path / out / "trials.csv")["final_valid_loss"]}
    assert len(losses) == 1


def test_an_evaluation_without_the_objective_fails_its_trial(call, module):
    module("auc", WORKLOAD.replace('"accuracy", "max', '"auc", "max'))
    run = ("run", "--workload", "auc:Lines", *RUN, "--out", "out", "--yes")
    assert call(*run, "--batches", "4", "--seeds", "1")[0] == 1
    assert "must return its objective 'auc', got accuracy, loss" in call("status", "out")[1]


def test_an_experiment_with_a_model_and_a_text_does_not_fit_a_workload_that_has_its_own(module):
    module("lines", WORKLOAD)
    with pytest.raises(SweepError, match="builds its own model and batches"):
        plan_sweep("quick", workload="lines:Lines")
    module("text", "from sweep.workloads.pretrain import Pretrain\nclass Text(Pretrain): pass\n")
    with pytest.raises(SweepError, match="reads a model and a text"):
        plan_sweep(workload="text:Text", budget=4096, batches=[4])
    assert plan_sweep("quick", workload="text:Text").model.name == "quick"


MODEL = """
from torch import nn

def build(vocabulary, context, width=8, depth=1):
    layers = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(vocabulary, width), *layers, nn.Linear(width, vocabulary))
"""


def test_a_model_keeps_the_sizes_of_its_experiment_and_its_flops_are_counted(
    module, monkeypatch, tmp_path
):
    module("mine", MODEL)
    options = {"width": 16, "depth": 2}
    plan = plan_sweep("quick", model="mine:build", model_option="width=16,depth=2", device="cpu")
    assert plan.tokens_per_sequence == 64 and plan.settings.model.vocabulary == 512
    assert plan.settings.model.options == options
    linear = [16 * 16, 16 * 16, 16 * 512]
    assert plan.model.parameters == 512 * 16 + sum(linear) + 16 + 16 + 512
    assert plan.model.flops_per_token == 6 * sum(linear)
    monkeypatch.syspath_prepend(str(tmp_path))
    build = importlib.import_module("mine").build
    same = plan_sweep("quick", model=build, model_option=options, device="cpu")
    assert [row.id for row in same.trials] == [row.id for row in plan.trials]


def test_a_function_that_workers_cannot_import_is_refused(module):
    module("mine", MODEL)
    with pytest.raises(SweepError, match="importable by name"):
        plan_sweep("quick", model=lambda vocabulary, context: None)


def test_a_workload_without_a_method_is_refused_when_it_is_planned(module):
    module("lines", WORKLOAD.replace("def evaluate(", "def evaluated("))
    with pytest.raises(SweepError, match="evaluate"):
        plan_sweep(workload="lines:Lines", budget=96, batches=[4])
