"""Signal handlers that respect how a command was started."""

import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None


def handle_unless_ignored(number: signal.Signals, handler: Handler) -> Handler:
    """Set the handler of a signal, unless the process ignores it; return the earlier handler.

    `nohup`, and a shell script that starts a command in the background, make it ignore signals.
    """
    earlier = signal.getsignal(number)
    if earlier is not signal.SIG_IGN:
        signal.signal(number, handler)
    return earlier
