"""What the fork server imports for all the processes that it forks; imported by nobody else."""

import signal

import torch._dynamo  # noqa: F401 - building an optimizer imports it

import sweep.training.worker  # noqa: F401


def _import_inductor(*_: object) -> None:
    import torch._inductor.compile_fx  # noqa: F401


signal.signal(signal.SIGUSR1, _import_inductor)
