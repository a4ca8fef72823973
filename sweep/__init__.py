"""sweep: which batch size should I use? Answered by a measurement.

    sweep run --budget 327M --batches 1,8,32,64,128,256

The names below load on first use, so that `import sweep` costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "SweepError": "sweep.errors",
    "forecast_memory": "sweep.orchestration.memory",
    "load_sweep": "sweep.analysis.frames",
    "probe_memory": "sweep.orchestration.memory",
    "plan_sweep": "sweep.orchestration.planning",
    "run_sweep": "sweep.orchestration.runner",
    "write_report": "sweep.report.report",
}

__all__ = [
    "SweepError",
    "forecast_memory",
    "load_sweep",
    "plan_sweep",
    "probe_memory",
    "run_sweep",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sweep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
