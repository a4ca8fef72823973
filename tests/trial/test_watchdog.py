"""The watchdog of attempts: what counts as progress, and which deaths are its work."""

import torch

from sweep.config.load import load_experiment
from sweep.data import tokens
from sweep.orchestration.planning import make_plan
from sweep.orchestration.request import Request
from sweep.trial.folder import SweepFolder
from sweep.trial.watchdog import Watchdog, has_stalled
from sweep.workloads.build import build_workload
from tests.orchestration.clusters import ON_CPU


class CountingWatchdog(Watchdog):
    count = 0

    def progress(self):
        super().progress()
        self.count += 1


def test_each_batch_of_an_evaluation_and_of_tokenized_text_is_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 1 << 14)
    experiment = load_experiment("quick", {"batches": [8], "budget": 100_000})
    plan = make_plan(Request(experiment, ON_CPU, SweepFolder(tmp_path / "sweep"))).plan
    config = plan.trial_config(plan.trials[0])
    with CountingWatchdog(30) as watchdog:
        tokens.prepare_data(config.science.data, None, config.science.tokenizer)
        tokenizing = watchdog.count
        workload = build_workload(config, torch.device("cpu"))
        with torch.no_grad():
            workload.evaluate_finally(workload.build_model())
    windows = (len(workload.text.valid) - 1) // config.tokens_per_sequence
    assert tokenizing > 1
    assert watchdog.count - tokenizing >= windows // config.execution.evaluation_batch_size > 1


def test_only_a_timeout_of_the_newest_attempt_is_a_stall(tmp_path):
    log = tmp_path / "log.txt"
    assert not has_stalled(1, log)
    log.write_text("attempt 1: batch size 8\nTimeout (0:30:00)!\nThread 0x1\n")
    assert has_stalled(1, log) and not has_stalled(-9, log)
    log.write_text(log.read_text() + "attempt 2: batch size 8\nthe user's code ends\n")
    assert not has_stalled(1, log)
