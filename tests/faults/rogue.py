"""Workloads that misbehave at their step 20, as `rogue:Name`; each is a mistake of a user."""

import atexit
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings

import torch

from sweep.workloads.quadratic import NoisyQuadratic


class Rogue(NoisyQuadratic):
    def build_batch(self, first, count):
        if first == 20 * count:
            self.misbehave()
        return super().build_batch(first, count)

    def misbehave(self):
        pass


class Raises(Rogue):
    def misbehave(self):
        raise ValueError("a mistake\nin two lines \x1b[2J")


class RaisesMuch(Rogue):
    def misbehave(self):
        raise ValueError("x" * 10**7)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class RaisesUnprintable(Rogue):
    def misbehave(self):
        raise Unprintable


class RaisesChained(Rogue):
    def misbehave(self):
        try:
            raise OSError("inner")
        except OSError as error:
            raise KeyError("outer") from error


class RaisesGroup(Rogue):
    def misbehave(self):
        raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])


class RaisesKeyboardInterrupt(Rogue):
    def misbehave(self):
        raise KeyboardInterrupt


class Exits(Rogue):
    def misbehave(self):
        sys.exit(0)


class ExitsAtOnce(Rogue):
    def misbehave(self):
        os._exit(0)


class Aborts(Rogue):
    def misbehave(self):
        os.abort()


class Crashes(Rogue):
    def misbehave(self):
        ctypes.string_at(0)


class RunsOutOfMemory(Rogue):
    def misbehave(self):
        raise MemoryError


class Recurses(Rogue):
    def misbehave(self):
        self.misbehave()


class Loops(Rogue):
    def misbehave(self):
        while True:
            pass


class HangsInNativeCode(Rogue):
    def misbehave(self):
        ctypes.PyDLL(None).sleep(600)  # keeps Python's lock


class LeavesAThread(Rogue):
    def misbehave(self):
        threading.Thread(target=time.sleep, args=(600,)).start()


class LeavesAChild(Rogue):
    def misbehave(self):
        subprocess.Popen(["sleep", "612"])


class LeavesAPythonChild(Rogue):
    def misbehave(self):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()


class HangsAtExit(Rogue):
    def misbehave(self):
        atexit.register(time.sleep, 600)


class Prints(Rogue):
    def misbehave(self):
        for _ in range(200):
            os.write(1, b"x" * 2**20)
        time.sleep(2.5)


class ClosesItsOutput(Rogue):
    def misbehave(self):
        os.close(1)
        sys.stdout.close()


class ChangesFolder(Rogue):
    def misbehave(self):
        os.chdir("/")


class ClearsTheEnvironment(Rogue):
    def misbehave(self):
        os.environ.clear()


class BreaksSearchPath(Rogue):
    def misbehave(self):
        sys.path.clear()


class Seeds(Rogue):
    def misbehave(self):
        random.seed(1)
        torch.manual_seed(1)


class IgnoresSignals(Rogue):
    def misbehave(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Warns(Rogue):
    def misbehave(self):
        for number in range(10_000):
            warnings.warn(f"warning {number}", stacklevel=1)


class UsesManyThreads(Rogue):
    def misbehave(self):
        torch.set_num_threads(64)


class TakesAllDescriptors(Rogue):
    kept: list[int]

    def misbehave(self):
        self.kept = []
        while True:
            self.kept.append(os.open("/dev/null", os.O_RDONLY))


class DeletesItsFolder(Rogue):
    def misbehave(self):
        trials = os.path.join(os.environ["ROGUE_SWEEP"], "trials")
        shutil.rmtree(os.path.join(trials, self.config.id))


class LeavesFiles(Rogue):
    def misbehave(self):
        folder = os.path.join(os.environ["ROGUE_SWEEP"], "trials", self.config.id)
        for name in ("mine.txt", "checkpoint-mine", "checkpoint-9-9"):
            with open(os.path.join(folder, name), "w") as file:
                json.dump({}, file)


class ReturnsAFloat(Rogue):
    def loss_sum(self, model, batch):
        loss = super().loss_sum(model, batch)
        return float(loss) if batch[0][0] > 0 else loss  # not while it is planned


class ReturnsNaN(Rogue):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * float("nan")


class ReturnsText(Rogue):
    def evaluate(self, model):
        return "low"


class ReturnsNothing(Rogue):
    def evaluate_finally(self, model):
        return None
