"""sweep: measure which batch size to use.

    sweep run --budget 327M --batches 1,8,32,64,128,256

The names in `__all__` are imported on first use, so that `import sweep` is fast.
"""

from typing import Any

from sweep.errors import SweepError
from sweep.script import log
from sweep.version import __version__ as __version__

__all__ = [
    "SweepError",
    "Workload",
    "answer",
    "forecast_memory",
    "load_sweep",
    "log",
    "plan_sweep",
    "probe_memory",
    "run_sweep",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in ("answer", "load_sweep", "write_report"):  # these do not import torch
        from sweep.analysis.results import answer, load_sweep
        from sweep.report.report import write_report

        return {"answer": answer, "load_sweep": load_sweep, "write_report": write_report}[name]
    if name == "Workload":
        from sweep.workloads.workload import Workload

        return Workload
    if name in __all__:
        from sweep.orchestration.costs import plan_sweep
        from sweep.orchestration.memory import forecast_memory, probe_memory
        from sweep.orchestration.runner import run_sweep

        functions = (forecast_memory, plan_sweep, probe_memory, run_sweep)
        return {function.__name__: function for function in functions}[name]
    raise AttributeError(f"module 'sweep' has no attribute {name!r}")
