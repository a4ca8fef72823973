"""sweep: measure which batch size to use.

    sweep run --budget 327M --batches 1,8,32,64,128,256

The names in `__all__` are imported on first use, so that `import sweep` is fast.
"""

from typing import Any

__version__ = "0.1.0"

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
            from sweep.errors import SweepError as value
        case "forecast_memory":
            from sweep.orchestration.memory import forecast_memory as value
        case "load_sweep":
            from sweep.analysis.frames import load_sweep as value
        case "plan_sweep":
            from sweep.orchestration.planning import plan_sweep as value
        case "probe_memory":
            from sweep.orchestration.memory import probe_memory as value
        case "run_sweep":
            from sweep.orchestration.runner import run_sweep as value
        case "write_report":
            from sweep.report.report import write_report as value
        case _:
            raise AttributeError(f"module 'sweep' has no attribute {name!r}")
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
