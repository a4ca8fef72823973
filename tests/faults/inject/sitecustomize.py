"""Python imports this at start: the process fails where the variable FAULT says.

FAULT is JSON: `process` (command or worker), `event` (an audit event of Python, such as open or
os.rename), `path` (a pattern of one of its arguments, or of the file that is open by its number),
`action` (kill, or the name of an errno),
`hits` (a file with a byte for every matching event of all processes), `number` (the event that
fails, counted from 1), `lasts` (true if all later events fail too).
If the variable CLOCK is set, to a seed, every reading of the clock jumps.
"""

import errno
import json
import os
import random
import re
import signal
import sys
import time
from typing import Any

FAULT = json.loads(os.environ.get("FAULT", "null"))


def is_due(fault: dict[str, Any]) -> bool:
    """Count a matching event in all processes; return True if it fails."""
    file = os.open(fault["hits"], os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(file, b".")
    count = os.lseek(file, 0, os.SEEK_CUR)
    os.close(file)
    return count >= fault["number"] if fault["lasts"] else count == fault["number"]


def fail(action: str, path: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    number = getattr(errno, action)
    raise OSError(number, os.strerror(number), path)


if FAULT and ("run" in sys.orig_argv) == (FAULT["process"] == "command"):

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event == FAULT["event"] and "FAULT" in os.environ:
            if event == "fcntl.flock":
                arguments = (os.readlink(f"/proc/self/fd/{arguments[0]}"),)
            for argument in arguments:
                if isinstance(argument, str | bytes | os.PathLike):
                    path = os.fsdecode(argument)
                    if re.search(FAULT["path"], path):
                        if is_due(FAULT):
                            fail(FAULT["action"], path)
                        return

    sys.addaudithook(audit)

if "CLOCK" in os.environ:
    rng, real = random.Random(os.environ["CLOCK"]), time.time
    time.time = lambda: real() + rng.uniform(-1e6, 1e6)  # days
