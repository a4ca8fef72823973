"""Compare finders of the largest batch size that fits: same model, same limit, on a CPU.

`sweep probe`, Accelerate's `find_executable_batch_size` and Lightning's `scale_batch_size` search
with the same training step and memory limit (`LiveStorages`). The true maximum comes from trying
every size. Needs `pip install accelerate lightning`.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import trial_config

from sweep.config.trial import TrialConfig
from sweep.memory.probe import measure
from sweep.orchestration.memory import probe_memory
from sweep.training.step import TrainingStep
from sweep.training.storages import LiveStorages

LIMIT = 64 << 20
START = 128  # a usual first guess for Accelerate


def quick(size: int) -> TrialConfig:
    """Return the config of the model `quick` for one microbatch of this size."""
    return trial_config("quick", size, "fp32", "cpu", is_compiled=False)


class Training:
    """Whole optimizer steps of one size within the limit; raises when it is exceeded."""

    def __init__(self, size: int) -> None:
        self.size, self._storages = size, LiveStorages(LIMIT)
        with self._storages:
            self._step = TrainingStep(quick(size), torch.device("cpu"))

    def take_step(self) -> None:
        """Take one step."""
        try:
            with self._storages:
                self._step(self._step.workload.random_batch(self.size), 1e-6)
        except torch.OutOfMemoryError as error:  # the other tools recognise this message
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more.") from error


def by_accelerate(tried: list[int]) -> int:
    """Search with Accelerate, which shrinks the batch size until the steps run."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=START)  # type: ignore[untyped-decorator]
    def run(batch_size: int) -> int:
        tried.append(batch_size)
        training = Training(batch_size)
        for _ in range(3):
            training.take_step()
        return batch_size

    return int(run())


def by_lightning(tried: list[int]) -> int:
    """Search with Lightning's tuner: powers of two, then bisection."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.automatic_optimization = False
            self.unused = torch.nn.Linear(1, 1)
            self.training_of: Training | None = None

        def training_step(self, batch: Any, _: int) -> None:
            if self.training_of is None or self.training_of.size != self.batch_size:
                tried.append(self.batch_size)
                self.training_of = Training(self.batch_size)
            self.training_of.take_step()
            self.optimizers().step()  # Lightning counts the steps of a trial by it

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.zeros(100_000, 1))
            return torch.utils.data.DataLoader(data, self.batch_size)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=1,
    )  # fmt: skip
    largest = Tuner(trainer).scale_batch_size(Module(), mode="binsearch", steps_per_trial=3)
    return int(largest or 0)


def by_sweep(tried: list[int]) -> int:
    """Search with `sweep probe`."""
    document = probe_memory(
        "quick",
        device="cpu",
        device_memory=LIMIT,
        loss_chunk_rows=0,
        batches=[8],
        on_point=lambda point: tried.append(point.microbatch_size),
    )
    return int(document["largest_microbatch_size"])


def main() -> None:
    """Compare the finders and write the file named on the command line."""
    truth = 1
    while measure(quick(truth + 1), LIMIT, 3, lambda: None).status == "OK":
        truth += 1
    rows = []
    finders: dict[str, Callable[[list[int]], int]] = {
        "sweep probe": by_sweep,
        "accelerate find_executable_batch_size": by_accelerate,
        "lightning scale_batch_size (binsearch, cuts 5 % off)": by_lightning,
    }
    for name, find in finders.items():
        tried: list[int] = []
        start = time.perf_counter()
        answer = find(tried)
        rows.append(
            {
                "finder": name,
                "answer": answer,
                "is_true_maximum": answer == truth,
                "sizes_tried": list(dict.fromkeys(tried)),
                "seconds": time.perf_counter() - start,
            }
        )
        print(json.dumps(rows[-1]))
    document = {"limit_bytes": LIMIT, "true_maximum": truth, "finders": rows}
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
