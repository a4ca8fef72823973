"""sweep: measure which batch size to use.

    sweep run --budget 327M --batches 1,8,32,64,128,256

The names in `__all__` are imported on first use, so that `import sweep` is fast.
"""

from typing import Any

from sweep.version import __version__ as __version__

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
    match name:
        case "SweepError":
            from sweep.errors import SweepError

            return SweepError
        case "forecast_memory":
            from sweep.orchestration.memory import forecast_memory

            return forecast_memory
        case "load_sweep":
            from sweep.analysis.frames import load_sweep

            return load_sweep
        case "plan_sweep":
            from sweep.orchestration.costs import plan_sweep

            return plan_sweep
        case "probe_memory":
            from sweep.orchestration.memory import probe_memory

            return probe_memory
        case "run_sweep":
            from sweep.orchestration.runner import run_sweep

            return run_sweep
        case "write_report":
            from sweep.report.report import write_report

            return write_report
        case _:
            raise AttributeError(f"module 'sweep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
