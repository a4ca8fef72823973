"""Workloads that fail in known ways; named in experiments as `faulty:Name`."""

import os
import signal
import time
from pathlib import Path

import torch

from sweep.trial.folder import TrialFolder
from sweep.workloads.quadratic import NoisyQuadratic


class OutOfMemoryAboveTwo(NoisyQuadratic):
    """Has memory for two sequences at once."""

    def loss_sum(self, model, batch):
        if batch[0].shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
        return super().loss_sum(model, batch)


class OutOfMemoryAlways(NoisyQuadratic):
    """Not even one sequence fits."""

    def loss_sum(self, model, batch):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate …")


class BatchEightRaises(NoisyQuadratic):
    """Raises an error at batch size 8 only."""

    def build_batch(self, first, count):
        if count == 8:
            raise ValueError("a mistake in the user's code")
        return super().build_batch(first, count)


class Dies(NoisyQuadratic):
    """Kills its process at step 20: once, of which a file is the record, or every time."""

    how, is_stubborn = signal.SIGKILL, False

    def build_batch(self, first, count):
        marker = Path(os.environ["FAULTY_FOLDER"]) / f"died-{count}"
        if first == 20 * count and (self.is_stubborn or not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), self.how)
            time.sleep(10)
        return super().build_batch(first, count)


class DiesOfSegfault(Dies):
    how = signal.SIGSEGV


class DiesAlways(Dies):
    is_stubborn = True


class IsPreempted(NoisyQuadratic):
    """Receives SIGTERM once, as from a cluster that takes the device away with notice."""

    def build_batch(self, first, count):
        marker = Path(os.environ["FAULTY_FOLDER"]) / f"died-{count}"
        if first == 20 * count and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().build_batch(first, count)


class RaisesOnceAtTheBestRate(NoisyQuadratic):
    """Raises an error at one rate, once."""

    def build_batch(self, first, count):
        marker = Path(os.environ["FAULTY_FOLDER"]) / "raised"
        rate = self.config.science.learning_rate
        if rate == float(os.environ["FAULTY_RATE"]) and not marker.exists():
            marker.touch()
            raise ValueError("an error that does not depend on the rate")
        return super().build_batch(first, count)


class Slow(NoisyQuadratic):
    """Is slow enough for a test to interrupt it."""

    def build_batch(self, first, count):
        time.sleep(0.02)
        return super().build_batch(first, count)


class WaitsForGo(NoisyQuadratic):
    """Waits after step 50 for the file `go`, so that a test can disturb it."""

    def build_batch(self, first, count):
        while first == 50 * count and not (Path(os.environ["FAULTY_FOLDER"]) / "go").exists():
            time.sleep(0.05)
        return super().build_batch(first, count)


class NotesItsDevices(WaitsForGo):
    """Writes its process id and its visible GPUs to a file at the first step."""

    def build_batch(self, first, count):
        note = Path(os.environ["FAULTY_FOLDER"]) / f"devices-{self.config.id}"
        if not note.exists():
            note.write_text(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
        return super().build_batch(first, count)


class EndsInNan(NoisyQuadratic):
    """Has a loss that is not a number in the final evaluation only."""

    def evaluate_finally(self, model):
        final = super().evaluate_finally(model)
        final.valid_losses[0, 0] = float("nan")
        return final


class LeavesHalfACheckpoint(Dies):
    """Dies once while it writes a checkpoint."""

    def build_batch(self, first, count):
        (trial,) = Path(os.environ["FAULTY_FOLDER"]).glob("sweep/trials/*")
        if not (Path(os.environ["FAULTY_FOLDER"]) / f"died-{count}").exists():
            (trial / ".checkpoint-0000000001-0000000001.1.part").write_bytes(b"half")
        return super().build_batch(first, count)


class IsSuperseded(NoisyQuadratic):
    """Another machine takes over the trial once, while this worker continues."""

    def build_batch(self, first, count):
        marker = Path(os.environ["FAULTY_FOLDER"]) / f"superseded-{count}"
        if first == 20 * count and not marker.exists():
            marker.touch()
            (path,) = Path(os.environ["FAULTY_FOLDER"]).glob("sweep/trials/*")
            status = TrialFolder(path).read_status()
            TrialFolder(path).write_status(status.changed(fencing=status.fencing + 1))
        return super().build_batch(first, count)


class TakesTheMachinesMemory(NoisyQuadratic):
    """Allocates 6 GiB and keeps them, with more than two sequences at once."""

    def build_batch(self, first, count):
        if first == 20 * count and self.config.microbatch_size > 2:
            taken = [bytearray(os.urandom(1) * 2**28) for _ in range(24)]
            time.sleep(60)
            del taken
        return super().build_batch(first, count)


class EvaluatesTwoAtATime(NoisyQuadratic):
    """Runs out of memory if more than two sequences are evaluated at once."""

    def evaluate(self, model):
        if self.config.execution.evaluation_batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().evaluate(model)


class NeverFinite(NoisyQuadratic):
    """Its loss is infinite at every rate."""

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * float("inf")
