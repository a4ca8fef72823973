"""sweep: measure which batch size to use.

    sweep run --budget 327M --batches 1,8,32,64,128,256

The names in `__all__` are imported on first use, so that `import sweep` is fast.
"""

from typing import TYPE_CHECKING, Any

from sweep.errors import SweepError
from sweep.script import log, settings, training_arguments
from sweep.version import __version__ as __version__

if TYPE_CHECKING:
    from sweep.analysis.critical_batch_size import fit_steps
    from sweep.analysis.recommend import recommend, suggest
    from sweep.analysis.results import load_sweep
    from sweep.analysis.table_answer import answer
    from sweep.api import plan_sweep, run_sweep
    from sweep.decision.decision import decide
    from sweep.orchestration.memory import forecast_memory, probe_memory
    from sweep.report.charts import (
        plot_answer,
        plot_budgets,
        plot_curves,
        plot_frontier,
        plot_loss,
        plot_rates,
        plot_steps,
        plot_throughput,
    )
    from sweep.report.report import write_report
    from sweep.workloads.workload import Workload

__all__ = [
    "LightningCallback",
    "SweepError",
    "TrainerCallback",
    "Workload",
    "answer",
    "decide",
    "fit_steps",
    "forecast_memory",
    "load_sweep",
    "log",
    "plan_sweep",
    "plot_answer",
    "plot_budgets",
    "plot_curves",
    "plot_frontier",
    "plot_loss",
    "plot_rates",
    "plot_steps",
    "plot_throughput",
    "probe_memory",
    "recommend",
    "run_sweep",
    "settings",
    "suggest",
    "training_arguments",
    "write_report",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in ("answer", "load_sweep", "write_report"):  # these do not import torch
        from sweep.analysis.results import load_sweep
        from sweep.analysis.table_answer import answer
        from sweep.report.report import write_report

        return {"answer": answer, "load_sweep": load_sweep, "write_report": write_report}[name]
    if name in ("decide", "fit_steps"):  # nor do these
        from sweep.analysis.critical_batch_size import fit_steps
        from sweep.decision.decision import decide

        return decide if name == "decide" else fit_steps
    if name in ("recommend", "suggest"):
        from sweep.analysis.recommend import recommend, suggest

        return recommend if name == "recommend" else suggest
    if name.startswith("plot_") and name in __all__:
        from sweep.report import charts

        return getattr(charts, name)
    if name in ("LightningCallback", "TrainerCallback"):  # which import Lightning, transformers
        from sweep import script

        return getattr(script, name)
    if name == "Workload":
        from sweep.workloads.workload import Workload

        return Workload
    if name in __all__:
        from sweep.api import plan_sweep, run_sweep
        from sweep.orchestration.memory import forecast_memory, probe_memory

        functions = (forecast_memory, plan_sweep, probe_memory, run_sweep)
        return {function.__name__: function for function in functions}[name]
    raise AttributeError(f"module 'sweep' has no attribute {name!r}")
