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
    """A mistake that shows at one batch size only."""

    def build_batch(self, first, count):
        if count == 8:
            raise ValueError("a mistake in the user's code")
        return super().build_batch(first, count)


class Dies(NoisyQuadratic):
    """Ends its process at step 20: the first time, or every time; the second is told by a file."""

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


class IsPreempted(Dies):
    """The cluster takes the device away once, with notice."""

    how = signal.SIGTERM

    def build_batch(self, first, count):
        marker = Path(os.environ["FAULTY_FOLDER"]) / f"died-{count}"
        if first == 20 * count and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return NoisyQuadratic.build_batch(self, first, count)


class RaisesOnceAtTheBestRate(NoisyQuadratic):
    """A mistake of the machine's, at one rate, the first time."""

    def build_batch(self, first, count):
        marker = Path(os.environ["FAULTY_FOLDER"]) / "raised"
        rate = self.config.science.learning_rate
        if rate == float(os.environ["FAULTY_RATE"]) and not marker.exists():
            marker.touch()
            raise ValueError("nothing that the rate can help")
        return super().build_batch(first, count)


class Slow(NoisyQuadratic):
    """Takes its time, so that a test can interrupt it."""

    def build_batch(self, first, count):
        time.sleep(0.02)
        return super().build_batch(first, count)


class WaitsForGo(NoisyQuadratic):
    """Stands still behind step 50 until a file says go, so that a test can disturb it."""

    def build_batch(self, first, count):
        while first == 50 * count and not (Path(os.environ["FAULTY_FOLDER"]) / "go").exists():
            time.sleep(0.05)
        return super().build_batch(first, count)


class NotesItsDevices(WaitsForGo):
    """Writes down its process and which GPUs it may see, as soon as it begins."""

    def build_batch(self, first, count):
        place = Path(os.environ["FAULTY_FOLDER"]) / f"devices-{self.config.id}"
        if not place.exists():
            place.write_text(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
        return super().build_batch(first, count)


class EndsInNan(NoisyQuadratic):
    """Is measured as not a number at the very end only."""

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
    """Another machine takes the trial over once, while this worker lives and goes on."""

    def build_batch(self, first, count):
        marker = Path(os.environ["FAULTY_FOLDER"]) / f"superseded-{count}"
        if first == 20 * count and not marker.exists():
            marker.touch()
            (path,) = Path(os.environ["FAULTY_FOLDER"]).glob("sweep/trials/*")
            status = TrialFolder(path).read_status()
            TrialFolder(path).write_status(status.changed(fencing=status.fencing + 1))
        return super().build_batch(first, count)


class TakesTheMachinesMemory(NoisyQuadratic):
    """Takes 6 GiB for more than two sequences at once, and does not give them back."""

    def build_batch(self, first, count):
        if first == 20 * count and self.config.microbatch_size > 2:
            taken = [bytearray(os.urandom(1) * 2**28) for _ in range(24)]
            time.sleep(60)
            del taken
        return super().build_batch(first, count)


class EvaluatesTwoAtATime(NoisyQuadratic):
    """Memory runs out where more than two sequences are evaluated at once."""

    def evaluate(self, model):
        if self.config.execution.evaluation_batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().evaluate(model)


class NeverFinite(NoisyQuadratic):
    """Its loss is infinite at every rate."""

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * float("inf")
