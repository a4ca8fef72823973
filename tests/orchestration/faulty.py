"""Workloads that fail in known ways; named in experiments as `faulty:Name`."""

import os
import signal
import time
from pathlib import Path

import torch

from sweep.trial.folder import TrialFolder
from sweep.workloads.quadratic import NoisyQuadratic
from sweep.workloads.workload import FinalEvaluation


def file(name):
    return Path(os.environ["FAULTY_FOLDER"]) / name


class OutOfMemoryAboveTwo(NoisyQuadratic):
    def loss_sum(self, model, batch):
        if batch[0].shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
        return super().loss_sum(model, batch)


class OutOfMemoryAlways(NoisyQuadratic):
    def loss_sum(self, model, batch):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate …")


class EvaluatesTwoAtATime(NoisyQuadratic):
    def evaluate(self, model):
        if self.config.execution.evaluation_batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().evaluate(model)


class TakesTheMachinesMemory(NoisyQuadratic):
    """Allocates 6 GiB and keeps them, with more than two sequences at once."""

    def build_batch(self, first, count):
        if first == 20 * count and self.config.microbatch_size > 2:
            taken = [bytearray(os.urandom(1) * 2**28) for _ in range(24)]
            time.sleep(60)
            del taken
        return super().build_batch(first, count)


class BatchEightRaises(NoisyQuadratic):
    def build_batch(self, first, count):
        if self.config.science.batch_size == 8 and first:  # not while it is planned
            raise ValueError("a mistake in the user's code")
        return super().build_batch(first, count)


class RaisesOnceAtTheBestRate(NoisyQuadratic):
    def build_batch(self, first, count):
        rate, record = self.config.science.learning_rate, file("raised")
        if rate == float(os.environ["FAULTY_RATE"]) and not record.exists():
            record.touch()
            raise ValueError("an error that does not depend on the rate")
        return super().build_batch(first, count)


class EndsInNan(NoisyQuadratic):
    def evaluate_finally(self, model):
        final = super().evaluate_finally(model)
        losses = final.valid_losses.copy()
        losses[0, 0] = float("nan")
        return FinalEvaluation({}, losses)


class NeverFinite(NoisyQuadratic):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * float("inf")


class Dies(NoisyQuadratic):
    """Receives a signal at step 20: once, of which a file is the record, or in every attempt."""

    number, is_stubborn = signal.SIGKILL, False

    def build_batch(self, first, count):
        record = file(f"died-{count}")
        if first == 20 * count and (self.is_stubborn or not record.exists()):
            record.touch()
            self.leave(TrialFolder(file(f"sweep/trials/{self.config.id}")))
            os.kill(os.getpid(), self.number)
        return super().build_batch(first, count)

    def leave(self, trial):
        """Change the trial's folder before the end."""


class DiesAlways(Dies):
    is_stubborn = True


class LeavesHalfACheckpoint(Dies):
    number = signal.SIGSEGV

    def leave(self, trial):
        (trial.path / ".checkpoint-0000000001-0000000001.1.part").write_bytes(b"half")


class IsPreempted(Dies):
    number = signal.SIGTERM


class IsSuperseded(Dies):
    number = 0  # no signal

    def leave(self, trial):
        status = trial.read_status()
        trial.write_status(status.changed(fencing=status.fencing + 1))


class Hangs(NoisyQuadratic):
    def build_batch(self, first, count):
        while first == 20 * count:
            time.sleep(1)
        return super().build_batch(first, count)


class Slow(NoisyQuadratic):
    def build_batch(self, first, count):
        time.sleep(0.02)
        return super().build_batch(first, count)


class WaitsForGo(NoisyQuadratic):
    """Waits after step 50 for the file `go`, so that a test can disturb it; touches `waits`."""

    def build_batch(self, first, count):
        while first == 50 * count and not file("go").exists():
            file("waits").touch()
            time.sleep(0.05)
        return super().build_batch(first, count)


class SlowUntilGo(NoisyQuadratic):
    """Takes a second for each step after step 50 until the file `go` exists."""

    def build_batch(self, first, count):
        if first >= 50 * count and not file("go").exists():
            time.sleep(1.0)
        return super().build_batch(first, count)


class NotesItsDevices(WaitsForGo):
    def build_batch(self, first, count):
        note = file(f"devices-{self.config.id}")
        if not note.exists():
            note.write_text(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}")
        return super().build_batch(first, count)


class NotesItsSteps(NoisyQuadratic):
    """Appends the size of each batch, and of each microbatch that is not compiled, to files."""

    def build_batch(self, first, count):
        with file("batches").open("a") as notes:
            notes.write(f"{count}\n")
        return super().build_batch(first, count)

    def loss_sum(self, model, batch):
        if not torch.compiler.is_compiling():
            with file("microbatches").open("a") as notes:
                notes.write(f"{len(batch[0])}\n")
        return super().loss_sum(model, batch)


class RaisesIfTold(NoisyQuadratic):
    def build_batch(self, first, count):
        if file("raise").exists():
            raise ValueError("a mistake in the user's code")
        return super().build_batch(first, count)
