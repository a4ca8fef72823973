"""Prototype: the whole training step as one CUDA graph, against the same step without a graph.

    python tests/benchmarks/cuda_graph.py MODEL BATCH [DEVICE PRECISION]

A graph replays the kernels of forward, backward, clipping and update with one launch, so the CPU
no longer limits small batches. The batch and the learning rate lie in tensors that every replay
reads. On a CPU, which has no graphs, the function is called instead: a rehearsal.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from contenders import benchmarked, windows
from torch import Tensor, nn

from sweep.config.trial import TrialConfig
from sweep.models.build import autocast, build_model

WARM_UP = 4  # steps before the capture
COMPARED = 20  # steps whose losses must agree with those without a graph
LEARNING_RATE = 1e-3


class WholeStep:
    """A training step of the plain loop, whose inputs are tensors that stay in place."""

    def __init__(self, config: TrialConfig, is_compiled: bool) -> None:
        science = config.science
        self.device = torch.device(config.execution.device)
        self.batches = windows(config)
        self.batch = self.batches[0].clone()
        self.rate = torch.tensor(LEARNING_RATE, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        model = build_model(science.model, science.seed, False).to(self.device)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            parameters, lr=self.rate, fused=True, capturable=self.device.type == "cuda"
        )

        def loss_of(batch: Tensor) -> Tensor:
            with autocast(self.device, science.precision):
                logits = model(batch[:, :-1])
            return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

        function = torch.compile(loss_of) if is_compiled else loss_of

        def run() -> None:
            optimizer.zero_grad(set_to_none=False)  # the graph keeps the addresses of gradients
            loss = function(self.batch)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            self.loss.copy_(loss.detach())

        self._run: Callable[[], None] = run
        self._taken = 0

    def take(self, count: int) -> list[Tensor]:
        """Take steps; return their losses, on the device."""
        losses: list[Tensor] = []
        for _ in range(count):
            self.batch.copy_(self.batches[self._taken % len(self.batches)])
            self._run()
            self._taken += 1
            losses.append(self.loss.clone())
        return losses

    def capture(self) -> None:
        """Replace the function by a graph of it, after the steps that allocate."""
        if self.device.type != "cuda":
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self._run = graph.replay

    def seconds_per_step(self, seconds: float) -> float:
        steps = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            self.take(20)
            steps += 20
            float(self.loss)  # waits for the device
        return (time.perf_counter() - start) / steps


def measure(config: TrialConfig, is_compiled: bool, is_graph: bool, seconds: float) -> Any:
    """Return seconds per step, and the losses of the first steps."""
    step = WholeStep(config, is_compiled)
    if step.device.type == "cuda":  # as torch's notes on CUDA graphs say: warm up in a side stream
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = step.take(WARM_UP)
        torch.cuda.current_stream().wait_stream(side)
    else:
        losses = step.take(WARM_UP)
    if is_graph:
        step.capture()
    losses += step.take(COMPARED)
    return step.seconds_per_step(seconds), torch.stack(losses).tolist()


def compare(
    model: str, batch: int, device: str, precision: str, seconds: float
) -> list[dict[str, Any]]:
    """Measure eager and compiled steps, each without and with a graph."""
    config = benchmarked(model, batch, device, precision, False)
    rows: list[dict[str, Any]] = []
    for mode in ("eager", "compiled"):
        torch.compiler.reset()
        row: dict[str, Any] = {"mode": mode, "batch_size": batch}
        plain, expected = measure(config, mode == "compiled", False, seconds)
        row["seconds_per_step"] = plain
        try:
            graphed, losses = measure(config, mode == "compiled", True, seconds)
        except RuntimeError as error:
            row["error"] = str(error).splitlines()[0][:200]
        else:
            row["seconds_per_step_of_graph"] = graphed
            row["speedup"] = plain / graphed
            differences = [abs(a - b) for a, b in zip(expected, losses, strict=True)]
            row["largest_loss_difference"] = max(differences)
        rows.append(row)
    return rows


def main() -> None:
    model, batch, *more = sys.argv[1:]
    device, precision = more or ("cuda", "bf16")
    for row in compare(model, int(batch), device, precision, 2.0):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
