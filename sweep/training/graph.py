"""The update of a step as a CUDA graph: one launch instead of one for each of its kernels.

At every replay the kernels of a graph use the addresses and the numbers of its capture. Weights and
states are updated in place. The batch and scalars such as the rate are copied into tensors that the
graph reads. Its other memory belongs to the graph alone, so nothing between two steps disturbs it.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from sweep.errors import describe_error
from sweep.training.device import is_out_of_memory
from sweep.workloads.workload import Batch

WARM_UP = 3  # updates before the capture, which allocate states and load kernels

has_failed_capture = False  # in this process, whose allocator then frees no unused memory

# Updates weights in place, from a batch and scalars; returns metrics in one tensor.
Update = Callable[..., Tensor]
Work = Callable[[], None]


class Recorder(Protocol):
    """Runs work, or records it without an effect."""

    def run(self, work: Work) -> None: ...

    def capture(self, work: Work) -> Work:
        """Return a function that repeats the work.

        Raises:
            RuntimeError: it cannot be captured, because it waits for the device, for example.
        """


class CudaRecorder:
    """Runs and captures work in a side stream, as torch's notes on CUDA graphs advise."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _side_stream(device)

    def run(self, work: Work) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.stream(torch.cuda.current_stream())  # restored even after an error
        with current, torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream of this process: only its own stream uses freed memory again."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class GraphedUpdate:
    """Calls an update on batches of one size: the first times as it is, then as a graph."""

    def __init__(self, update: Update, batch: Batch, recorder: Recorder) -> None:
        self._update = update
        self._batch = tuple(torch.empty_like(part) for part in batch)
        self._scalars: list[Tensor] = []
        self._recorder = recorder
        self._metrics: Tensor
        self._calls = 0
        self._replay: Work | None = None

    def __call__(self, batch: Batch, *scalars: float) -> Tensor:
        """Update with a batch and scalars; the next call overwrites the metrics."""
        if not self._scalars:
            device = batch[0].device
            self._scalars = [torch.zeros((), device=device) for _ in scalars]
        for part, values in zip(self._batch, batch, strict=True):
            part.copy_(values)
        for scalar, value in zip(self._scalars, scalars, strict=True):
            scalar.fill_(value)

        self._calls += 1
        if self._calls <= WARM_UP:
            self._recorder.run(self._run)
            return self._metrics
        if self._replay is None:
            self._replay = self._capture()
        self._replay()
        return self._metrics

    def _run(self) -> None:
        self._metrics = self._update(self._batch, *self._scalars)

    def _capture(self) -> Work:
        global has_failed_capture
        try:
            return self._recorder.capture(self._run)
        except RuntimeError as error:
            has_failed_capture = True
            if is_out_of_memory(error):
                raise
            cause = error.__context__ or error  # the end of a failed capture raises too
            if is_out_of_memory(cause):
                raise cause from None
            text = describe_error(cause)
            print(f"steps are not CUDA graphs, but launch each kernel: {text}", flush=True)
            return self._run
