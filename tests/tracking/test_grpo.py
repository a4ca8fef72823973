"""What a run of GRPO measures, as MLflow has it."""

from sweep.orchestration.runner import run_sweep
from sweep.tracking.reader import read_store
from sweep.tracking.store import default_tracking_uri
from sweep.trial.metrics import read_metrics


def test_metrics_of_grpo_are_kept_as_they_were_logged(tmp_path):
    grpo = {"prompt_tokens": 40, "new_tokens": 12, "group_size": 4, "kl": 0.1}
    fields = {"batches": "8", "budget": 8 * 52 * 4, "model": "quick", "data": "synthetic"}
    summary = run_sweep(
        "grpo-words", out=tmp_path / "sweep", device="cpu", **fields, lr="3e-3", grpo=grpo
    )
    assert summary.exit_code == 0
    (trial,) = summary.folder.trials()
    lines = read_metrics(trial.metrics_path)
    stored = read_store(default_tracking_uri(summary.folder), "grpo-words").curves[trial.id]
    named = {name for line in stored for name in line if "/" in name}
    assert {"reward/mean", "reward/words", "grpo/kl", "grpo/entropy", "grpo/ratio"} <= named
    logged = [{name: line[name] for name in sorted(named & line.keys())} for line in lines]
    kept = [{name: line[name] for name in sorted(named & line.keys())} for line in stored]
    assert kept == [{k: v for k, v in line.items() if v is not None} for line in logged]
