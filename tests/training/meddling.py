"""Workloads that do something to the second of two processes; named as `meddling:Name`."""

import os
import signal
from pathlib import Path

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader

from sweep.training import checkpoint
from sweep.workloads import ranks
from sweep.workloads.pretrain import Pretrain


def is_first_time() -> bool:
    """Tell whether this was not asked before, in any process."""
    marker = Path(os.environ["MEDDLING_FOLDER"]) / "meddled"
    if marker.exists():
        return False
    marker.touch()
    return True


class Meddling(Pretrain):
    """Meddles with the first microbatch of step 21."""

    is_time = False

    def build_batch(self, first, count):
        self.is_time = first == (20 * 2 + 1) * count
        return super().build_batch(first, count)

    def loss_sum(self, model, batch):
        if self.is_time:
            self.is_time = False
            self.meddle(batch[0].shape[0])
        return super().loss_sum(model, batch)


class Killed(Meddling):
    def meddle(self, sequences):
        if is_first_time():
            os.kill(os.getpid(), signal.SIGKILL)


class OutOfMemory(Meddling):
    def meddle(self, sequences):
        if sequences > 1:
            raise torch.OutOfMemoryError("out of memory: all of it was asked for")


class Raising(Meddling):
    def meddle(self, sequences):
        raise RuntimeError("one of two has had enough")


def fail(*_):
    raise OSError(5, "an I/O error")


class CannotReadTensors(Pretrain):
    """The file system does not give the second process what a checkpoint holds."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if ranks.rank() == 1:
            HuggingFaceStorageReader.read_metadata = fail


class CannotReadNotes(Pretrain):
    """The file system does not give the second process what stands beside the tensors."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        if ranks.rank() == 1:
            checkpoint.read_notes = fail


class OutOfMemoryAtTheEnd(Pretrain):
    def evaluate_finally(self, model):
        if ranks.rank() == 1 and is_first_time():
            raise torch.OutOfMemoryError("out of memory: all of it was asked for")
        return super().evaluate_finally(model)
