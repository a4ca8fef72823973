"""Plan, run and report of a pretrained model, from the command line to the report."""

import json

import pytest

from tests.hugging_face import STORIES, save_model

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def command(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    rows = [json.dumps({"story": story, "id": i}) for i, story in enumerate(STORIES * 40)]
    (tmp_path / "stories.jsonl").write_text("\n".join(rows))
    data = ("--data", "stories.jsonl", "--text-column", "story", "--device", "cpu")
    return ("quick", "--init", tiny, *data, "--batches", "4,8", "--budget", "4096", "--out", "out")


def test_lora_is_planned_run_and_reported(call, command, tiny, tmp_path):
    code, _ = call("run", *command, "--lora", "2", "--yes", "--verbose")
    assert code == 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    model = plan["model"]
    assert model["name"] == "llama"
    assert 0 < model["trained_parameters"] < model["parameters"] / 10
    assert (plan["data"]["column"], plan["settings"]["model"]["context"]) == ("story", 64)
    assert plan["settings"]["model"]["lora"] == 2
    for part in (f"{model['parameters']:,} parameters", f"{model['trained_parameters']:,} trained",
                 "64 tokens per sequence", str(tiny), "the tokenizer is pretrained"):  # fmt: skip
        assert part in call.stderr
    trials = list((tmp_path / "out" / "trials").iterdir())
    assert len(trials) == 2
    for trial in trials:
        result = json.loads((trial / "result.json").read_text())
        assert result["state"] == "COMPLETE" and result["parameters"] == model["parameters"]
        assert (trial / "weights.safetensors").stat().st_size < 4 * model["parameters"]
    report = (tmp_path / "out" / "report.md").read_text()
    for part in (f"{model['parameters']:,} parameters", f"{model['trained_parameters']:,} of them",
                 "lora 2", plan["start"]["weights"]):  # fmt: skip
        assert part in report
    assert "ln V" not in report  # the loss of random weights
    code, _ = call("run", *command, "--yes", "--quiet")  # all weights: another experiment
    assert code == 2 and "lora" in call.stderr


def test_a_missing_column_is_refused_before_anything_is_written(refuse, tiny, tmp_path):
    path = tmp_path / "stories.csv"
    path.write_text("id,story\n1,a cat\n2,a dog\n")
    error = refuse("run", "quick", "--init", tiny, "--data", path, "--batches", "4", "--quiet")
    assert "must have the column 'text', got id, story" in error and "--text-column" in error
