"""The commands of experiments/examples/hugging_face, with fewer steps and synthetic stories."""

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "experiments" / "examples" / "hugging_face"


def commands():
    """Return the words of each `sweep run` of the README, by its --out."""
    text = (EXAMPLE / "README.md").read_text().replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("    sweep run")]
    return {words[words.index("--out") + 1]: words[1:] for words in lines}


@pytest.mark.slow
def test_the_example_runs_offline_with_all_weights_and_with_lora(tmp_path):
    pytest.importorskip("peft")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"SWEEP_CACHE": str(tmp_path / "cache")}

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "step 4: loss" in run(str(EXAMPLE / "make_model.py"), "model", "5")
    for out, words in commands().items():
        small = {"--data": "synthetic", "--budget": "8192", "--seeds": "1"}
        for flag, value in small.items():
            words[words.index(flag) + 1] = value
        document = json.loads(run("-m", "sweep", *words, "--yes", "--quiet", "--json"))
        assert document["state"] == "COMPLETE" and len(document["trials"]) == 3
        assert (tmp_path / out / "report.md").exists()


@pytest.mark.parametrize("name", ["full", "lora"])
def test_the_committed_reports_are_of_these_commands(name):
    words = commands()[f"results/{name}"]
    with (EXAMPLE / "report" / name / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["batch_size"] for row in rows} == {*words[words.index("--batches") + 1].split(",")}
    assert {row["tokens"] for row in rows} == {words[words.index("--budget") + 1]}
    assert {row["state"] for row in rows} == {"COMPLETE"} and len(rows) == 9
    answer = json.loads((EXAMPLE / "report" / name / "answer.json").read_text())
    assert answer["provisional"] and answer["recommended"] in answer["candidates"]
