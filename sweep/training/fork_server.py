"""What the fork server imports for all the processes that it forks; imported by nobody else."""

import contextlib
import signal

import torch._dynamo  # noqa: F401 - building an optimizer imports it

import sweep.training.worker  # noqa: F401


def _import_inductor(*_: object) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # once
    with contextlib.suppress(Exception):  # whoever compiles says what is wrong
        import torch._inductor.compile_fx  # noqa: F401


signal.signal(signal.SIGUSR1, _import_inductor)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # blocked until here by our parent
