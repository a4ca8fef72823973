"""Calls of the Python API as users write them. `make types` checks them, and nothing runs them."""

from typing import Any, assert_type

import sweep


def calls() -> None:
    run = sweep.run_sweep("quick", budget="64k", batches=[4, 8], lr=3e-4, out="s")
    answer = run.answer()
    if answer:
        assert_type(answer.recommended, int)
    sweep.plot_loss(sweep.load_sweep("s"))
    sweep.plan_sweep(workload=sweep.Workload, model=lambda vocabulary, context: None)
    of_my_executor = dict[str, Any](option_of_my_executor=1)
    sweep.plan_sweep(workload="mine:Workload", model={"kind": "transformer"}, **of_my_executor)

    # mypy reports an ignored error that is none.
    sweep.run_sweep(bugdet=1)  # type: ignore[call-arg]
    sweep.plan_sweep(batches=4.5)  # type: ignore[arg-type]
