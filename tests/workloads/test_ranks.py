"""Communication between the processes of a trial, over gloo."""

import torch
import torch.distributed as dist

from sweep.training.process import FreshProcess
from sweep.workloads import ranks

NAME = "checkpoint-" + "9" * 200  # longer than any fixed buffer
WORLD = 3


def exchange(rank, store, should_stop):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    try:
        assert (ranks.are_many(), ranks.rank(), ranks.count()) == (True, rank, WORLD)
        for value in (NAME, "ünïcode", "", None, 0.1, -3):
            assert ranks.agreed(value if rank == 0 else "another") == value
        assert ranks.gathered(rank * 7) == [0, 7, 14]
        assert ranks.summed(torch.tensor([1.0, rank])).tolist() == [WORLD, 3.0]
        calls = []
        squares = ranks.share_out([1, 2, 3, 4], lambda n: calls.append(n) or torch.full((n,), n**2))
        assert [part.tolist() for part in squares] == [[n**2] * n for n in (1, 2, 3, 4)]
        return len(calls)
    finally:
        dist.destroy_process_group()


def test_processes_agree_on_the_value_of_the_first_and_share_work(tmp_path):
    """All of them compute equally often."""
    processes = [FreshProcess(exchange, rank, tmp_path / "store") for rank in range(WORLD)]
    assert [process.result() for process in processes] == [2] * WORLD


def test_one_process_sends_nothing():
    assert (ranks.are_many(), ranks.rank(), ranks.count()) == (False, 0, 1)
    assert ranks.agreed(NAME) == NAME and ranks.agreed(None) is None
    assert ranks.gathered(3) == [3] and ranks.summed(torch.ones(1)).item() == 1
    assert ranks.share_out([1, 2], lambda n: torch.tensor([n])) == [1, 2]
