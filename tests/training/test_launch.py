"""Why an attempt in several processes ended, by what they left behind."""

import json
import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sweep.plan.retry import Outcome
from sweep.training.launch import GRACE_SECONDS, judged

BROKEN = Outcome("error", "RuntimeError: connection closed by peer")
OWN = Outcome("error", "ValueError: a shape does not fit")
FULL = Outcome("out_of_memory", "OutOfMemoryError: 2 GiB")


@pytest.mark.parametrize(
    ("said", "deaths", "kind", "message"),
    [
        ({0: (10.02, BROKEN)}, {0: 10.1, 1: 10.2}, "lost", "process 1 of the trial"),
        ({}, {1: 10.0, 0: 10.0 + GRACE_SECONDS}, "lost", "process 1 of the trial"),
        # The first raised, the other waited for it and was ended.
        ({0: (10.0, OWN)}, {0: 10.1, 1: 10.1 + GRACE_SECONDS}, "error", "a shape does not fit"),
        ({0: (10.0, OWN), 1: (10.2, BROKEN)}, {0: 10.1, 1: 10.3}, "error", "a shape"),
        ({0: (10.0, BROKEN), 1: (10.1, FULL)}, {0: 10.1, 1: 10.2}, "out_of_memory", "2 GiB"),
    ],
)
def test_the_first_cause_is_told_from_what_followed(tmp_path, said, deaths, kind, message):
    for number, (when, outcome) in said.items():
        text = json.dumps({"time": when, **vars(outcome)})
        (tmp_path / f"end-{number}").write_text(text)
    failure = ProcessFailure(0, 1, 1, "none") if said else ProcessFailure(1, 1, -9, "none")
    error = ChildFailedError("ranks", {failure.local_rank: failure})
    found = judged(error, deaths, tmp_path, memory_ran_out=False)
    assert found.kind == kind and message in found.message


def test_a_process_that_the_kernel_killed_for_memory_ran_out_of_it(tmp_path):
    failure = ProcessFailure(1, 1, -signal.SIGKILL, "none")
    error = ChildFailedError("ranks", {1: failure})
    assert judged(error, {1: 10.0}, tmp_path, memory_ran_out=True).kind == "out_of_memory"
