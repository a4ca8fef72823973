"""Report from a training script that `sweep run --command` starts: `sweep.log(...)`.

This file needs only the standard library, so a project may also copy it.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def log(metrics: Mapping[str, Any] | None = None, /, *, step: int, **values: Any) -> None:
    """Report metrics by name after a step: `sweep.log({"train/loss": 2.5}, step=10)`.

    Does nothing unless `sweep` started the script, and in other processes than the first of a
    distributed training. Values may be tensors or arrays of one number. `tokens` or `examples`,
    if given, must be those trained on so far.
    """
    path = os.environ.get("SWEEP_LOG")
    if path and os.environ.get("RANK", "0") == "0":
        line = {"time": time.time(), "step": int(step), **(metrics or {}), **values}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=float) + "\n")
