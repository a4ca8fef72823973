"""Python imports this at start: the process fails where the variable FAULT says.

FAULT is JSON: `event` (an audit event of Python, such as open or os.rename), `path` (a pattern of
one of its arguments), `process` (command or worker), `number` (of matching events until it
happens), `action` (kill, or the name of an errno), `once` (a file that records that it happened).
Where the variable CLOCK is set, to a seed, the clock jumps at every look at it.
"""

import contextlib
import errno
import json
import os
import random
import re
import signal
import sys
import time

FAULT = json.loads(os.environ.get("FAULT", "null"))


def fail(fault: dict[str, str], path: str) -> None:
    if once := fault.get("once"):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(once, os.O_CREAT | os.O_EXCL))
            once = None
        if once:
            return
    if fault["action"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    number = getattr(errno, fault["action"])
    raise OSError(number, os.strerror(number), path)


if FAULT and ("run" in sys.orig_argv) == (FAULT["process"] == "command"):
    left = [FAULT.get("number", 1)]

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event == FAULT["event"]:
            for argument in arguments:
                if isinstance(argument, str | bytes | os.PathLike):
                    path = os.fsdecode(argument)
                    if re.search(FAULT["path"], path) and "FAULT" in os.environ:
                        left[0] -= 1
                        if left[0] == 0 or (left[0] < 0 and "once" not in FAULT):
                            fail(FAULT, path)
                        return

    sys.addaudithook(audit)

if "CLOCK" in os.environ:
    rng, real = random.Random(os.environ["CLOCK"]), time.time
    time.time = lambda: real() + rng.uniform(-1e6, 1e6)  # days
