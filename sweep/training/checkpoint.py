"""The progress of a trial, and its checkpoints: safetensors files, and progress.json for the rest.

On several devices each process writes its part; any number of processes can continue from them.
"""

import contextlib
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sweep.errors import CorruptFile, UnusableCheckpoint, describe_error
from sweep.plan.target import CONFIRMED, smoothed
from sweep.training.device import is_out_of_memory
from sweep.training.parallel import whole
from sweep.training.step import TrainingStep
from sweep.trial.files import MetricsLog, remove, replacing, sync
from sweep.trial.folder import TrialFolder
from sweep.workloads import ranks

NOTES = "progress.json"
WHOLE = "state.safetensors"  # all tensors of a trial on one device
DIVERGED_POINTS = 5  # log points in a row: 5 % of the tokens with 100 points


@dataclass
class Progress:
    """Counters, sums, seconds, and what may change the last bits: plain values only."""

    step: int = 0
    start_loss: float = math.nan  # loss of the milestone set before any update
    start_reward: float = math.nan  # mean reward of the milestone prompts then
    first_loss: float | None = None  # loss of the first batch before any update
    best_valid_loss: float | None = None  # least of the milestone evaluations
    clipped_steps: float = 0.0
    log_step: int = 0
    logged_at: float = 0.0  # time of the last line of metrics.jsonl
    # Sum and count of each metric since the last log point.
    watched: dict[str, list[float]] = field(default_factory=dict)
    points_above_start: int = 0
    recent_losses: list[float] = field(default_factory=list)  # recent evaluations, for a target
    noise_squares: list[float] = field(default_factory=list)  # Ĝ² of the noise measurements
    seconds_compile: float = 0.0
    seconds_training: float = 0.0
    seconds_evaluation: float = 0.0
    seconds_checkpoint: float = 0.0
    seconds_noise: float = 0.0
    seconds_total: float = 0.0
    log_seconds: float = 0.0  # training seconds at the last log point
    charged_at: float = field(default_factory=time.perf_counter)  # valid in one process only
    peak_memory_bytes: int = 0  # over all attempts
    instruction_sets: list[str] = field(default_factory=list)  # different ones of all attempts

    def charge(self, account: str) -> None:
        """Add the time since the last charge to the total and `seconds_ACCOUNT`, except `other`."""
        now = time.perf_counter()
        elapsed = now - self.charged_at
        self.charged_at = now
        self.seconds_total += elapsed
        if account != "other":
            vars(self)[f"seconds_{account}"] += elapsed

    def record_instructions(self, instructions: str) -> None:
        """Record the instruction set of an attempt."""
        if instructions not in self.instruction_sets:
            self.instruction_sets.append(instructions)

    def record_evaluation(
        self, metrics: Mapping[str, float], target: float | None, window: int
    ) -> str | None:
        """Record an evaluation; return `diverged` or `trained` if it ends the training."""
        if not all(map(math.isfinite, metrics.values())):
            return "diverged"
        loss = metrics.get("loss")
        if loss is None:
            return None
        if self.best_valid_loss is None or loss < self.best_valid_loss:
            self.best_valid_loss = loss

        if target is None:
            return None
        self.recent_losses = [*self.recent_losses, loss][1 - window - CONFIRMED :]
        _, means = smoothed(range(1, 1 + len(self.recent_losses)), self.recent_losses, window)
        if len(means) == CONFIRMED and max(means) <= target:
            return "trained"
        return None

    def is_diverging(self, loss: float, margin: float = math.inf) -> bool:
        """Return True if this loss, or a run of them `margin` above the start, is divergence."""
        if not math.isfinite(loss):
            return True
        is_above = loss > self.start_loss + margin
        self.points_above_start = self.points_above_start + 1 if is_above else 0
        return self.points_above_start >= DIVERGED_POINTS


class CheckpointStore:
    """Reads and writes a trial's checkpoints; a superseded attempt's writes raise Superseded."""

    def __init__(self, folder: TrialFolder, fencing: int) -> None:
        self.folder = folder
        self.fence = partial(folder.fence, fencing)  # raises if a newer attempt has begun
        self._fencing = fencing
        self._step: int | None = None  # step of the newest checkpoint that was read or written

    def load(self, step: TrainingStep, progress: Progress) -> int:
        """Restore the newest intact checkpoint; return its length of metrics.jsonl, or 0.

        Raises:
            UnusableCheckpoint: if an intact one cannot be restored; it is removed, and the weights
                may have changed.
        """
        for checkpoint in self.folder.checkpoints():
            path = checkpoint.path
            problem = ""
            try:
                self.folder.verify_checkpoint(checkpoint)
            except (CorruptFile, OSError) as error:
                problem = str(error)
            if any(ranks.all_gather(bool(problem))):  # no process may use it
                why = problem or "another process cannot read it"
                print(f"{path.name} is not used ({why}); trying an older one", flush=True)
                continue

            try:
                notes = json.loads((path / NOTES).read_text())
                _restore(step, path, notes)
                vars(progress).update(notes["progress"])
            except Exception as error:  # written by another version, for example
                if is_out_of_memory(error) or isinstance(error, OSError):  # not the checkpoint's
                    raise
                problem = describe_error(error)
            if any(ranks.all_gather(bool(problem))):
                self.fence()
                if not ranks.rank():
                    remove(path)
                raise UnusableCheckpoint(f"{path.name} cannot be restored ({problem}); removed")

            self._step = progress.step
            return checkpoint.metrics_length
        return 0

    def save(self, step: TrainingStep, progress: Progress, log: MetricsLog | None) -> None:
        """Write a checkpoint durably, unless this step has one; every process must call this."""
        if progress.step == self._step:
            return
        self._step = progress.step
        length = ranks.broadcast(log.length if log else 0)
        name = f"checkpoint-{progress.step:010d}-{length:010d}"
        path = self.folder.path / name
        part = self.folder.path / f".{name}.{self._fencing}.part"
        try:
            if ranks.is_distributed():
                from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
                from torch.distributed.checkpoint.state_dict_saver import save  # takes a second

                writer = HuggingFaceStorageWriter(str(part), save_distributed=True)
                with _as_os_error():
                    save(_tensors(step), storage_writer=writer)
            else:
                part.mkdir()
                tensors = {name: value.contiguous() for name, value in _tensors(step).items()}
                save_file(tensors, part / WHOLE)

            rng_states = ranks.all_gather((random.getstate(), np.random.get_state()))
            if log is None:  # in all processes but the first
                return

            log.flush()
            notes = {
                "progress": asdict(progress),
                "processes": ranks.count(),
                "average_steps": step.average.steps if step.average else 0,
                "optimizer": [_numbers_of(part) for part in step.parallel.numbers()],
                "rng_python": [python for python, _ in rng_states],  # by rank
                "rng_numpy": [numpy for _, numpy in rng_states],
            }
            (part / NOTES).write_text(json.dumps(notes, default=np.ndarray.tolist))

            self.folder.seal_checkpoint(part, progress.step, log.length, log.sha256)
            for file_path in part.iterdir():
                sync(file_path)
            self.fence()
            remove(path)  # a damaged one: only an empty folder can be replaced
            part.replace(path)
        finally:
            if log:
                remove(part)

        sync(self.folder.path)
        for other in self.folder.checkpoints():
            if other.step >= progress.step and other.path != path:  # damaged, as they were not used
                remove(other.path)
        self.folder.remove_checkpoints(2)  # the newest may be lost with the machine

    def save_weights(self, step: TrainingStep) -> None:
        """Write the weights of a complete trial; every process must call this."""
        with step.averaged():
            tensors = step.parallel.weights().items()
            weights = {name: whole(value).cpu().contiguous() for name, value in tensors}
            if ranks.rank() == 0:
                with replacing(self.folder.weights_path, self.fence) as part:
                    save_file(weights, str(part))


def _numbers_of(part: Mapping[str, Any]) -> dict[str, float | int]:
    """Return the numbers of a group of parameters, such as its rate."""
    return {key: value for key, value in part.items() if isinstance(value, float | int)}


def _restore(step: TrainingStep, folder: Path, notes: dict[str, Any]) -> None:
    step.parallel.make_states()
    tensors = _tensors(step)
    rank = ranks.rank()
    has_random_state = rank < notes["processes"]
    if not has_random_state:  # this process keeps its own
        tensors = {name: value for name, value in tensors.items() if not name.startswith("rng.")}

    if ranks.is_distributed() or not (folder / WHOLE).exists():
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load  # takes a second

        with _as_os_error():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    else:
        stored = load_file(folder / WHOLE)
        for name in stored:
            if name.startswith("optimizer.") and name not in tensors:
                raise ValueError(f"the first step of the optimizer does not create {name}")
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])

    for part, numbers in zip(step.parallel.numbers(), notes["optimizer"], strict=True):
        part.update(numbers)

    if has_random_state:
        torch.set_rng_state(tensors[f"rng.cpu.{rank}"])
        if step.device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"rng.cuda.{rank}"], step.device)
        version, internal, gauss = notes["rng_python"][rank]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(notes["rng_numpy"][rank])
    if step.average is not None:
        step.average.steps = notes["average_steps"]


def _tensors(step: TrainingStep) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in step.parallel.weights().items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in step.parallel.states().items()}

    if step.average is not None:
        names = [name for name, p in step.model.named_parameters() if p.requires_grad]
        for name, value in zip(names, step.average.values, strict=True):
            tensors[f"average.{name}"] = value

    rank = ranks.rank()
    tensors[f"rng.cpu.{rank}"] = torch.get_rng_state()
    if step.device.type == "cuda":
        tensors[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state(step.device)
    return tensors


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise torch's CheckpointException, which is no Exception, as an OSError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        causes = {str(failure[0]) for failure in error.failures.values()}
        raise OSError("; ".join(sorted(causes))) from None
