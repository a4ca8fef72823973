"""The critical batch size from a table of batch sizes and steps to one loss."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.answer_data import join
from sweep.analysis.any_table import Table
from sweep.analysis.cells import STEPS, is_in_tokens, match_header
from sweep.analysis.checks import FAIL, check_curve
from sweep.analysis.critical_batch_size import (
    COLUMNS,
    StepsCurve,
    StepsFit,
    describe_excess,
    fit_curve,
)
from sweep.analysis.tables import Estimate, format_range
from sweep.errors import SweepError

METRICS = (STEPS, "steps")  # those that count steps to one loss, if they are the result
ASSUMED = (
    "As the table does not tell, it is taken that all trainings ended at one loss, and that no "
    "learning rate was decayed towards an end that was known"
)


@dataclass(frozen=True, eq=False)
class StepsAnswer:
    """The critical batch size, and what it rests on; an interval is NaN with one seed."""

    curve: StepsCurve
    fit: StepsFit
    unit: str  # of batch sizes: sequences or tokens
    reasons: list[str]  # why it is provisional, sentences
    scope: str

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "unit": self.unit,
            "critical_batch_size": _write(self.fit.b_crit),
            "s_min": _write(self.fit.s_min),
            "e_min": _write(self.fit.e_min),
            "largest_misfit": self.fit.largest_misfit,
        }
        for excess, estimate in self.curve.excess.items():
            name = f"batch_size_of_{100 * excess:.0f}_percent_more"
            document[name] = None if estimate is None else _write(estimate)
        return document | {
            "batch_sizes_are_bounds": self.curve.is_excess_bound,
            "provisional": len(self.reasons) > 0,
            "reasons": self.reasons,
            "scope": self.scope,
        }

    def describe(self) -> list[str]:
        """Write the answer in a few sentences."""
        fit = self.fit
        start = "Provisionally, the" if self.reasons else "The"
        lines = [
            f"{start} critical batch size is {fit.b_crit:.4g} {self.unit}: by the curve S_min + "
            f"E_min/B, which is {100 * fit.largest_misfit:.1f} % off at most, it takes twice the "
            f"fewest steps ({fit.s_min:.4g}) and twice the fewest {self.unit} ({fit.e_min:.4g}).",
        ]
        measured = describe_excess(self.curve, self.unit)
        if measured:
            text = f"Without the curve: the {self.unit} to the loss exceed their least"
            lines.append(f"{text} {join(measured)}.")
        text = "This is provisional"
        for reason in self.reasons:
            lines.append(f"{text}: {reason}")
            text = "Also"
        return [*lines, f"This holds for {self.scope}"]


def _write(estimate: Estimate) -> dict[str, float | None]:
    """Return an estimate with its interval; None in place of NaN and of infinity."""
    values = estimate._asdict().items()
    return {name: value if np.isfinite(value) else None for name, value in values}


def answer_steps(table: Table) -> StepsAnswer:
    """Return the critical batch size of a table whose metric counts steps to one loss.

    Raises:
        SweepError: if a batch size has two rows of one seed, or fewer than three have steps.
    """
    curve = fit_curve(_trials_of(table), float("nan"))
    if curve.fit is None:
        raise SweepError(curve.no_fit)
    reasons = []
    for check in check_curve(curve):
        if check.status == FAIL:
            reasons.append(f"{check.evidence} {check.remedy}")
    failed = int(table.rows["is_failed"].sum())
    if failed:
        reasons.append(f"{failed} trainings did not reach the loss, and are left out.")
    if table.other_settings:
        reasons.append(f"Rows that are compared differ in {join(table.other_settings)} too.")
    header = match_header(table.titles["batch_size"])
    in_tokens = header is not None and is_in_tokens(header[1])
    unit = "tokens" if in_tokens and "context_length" not in table.titles else "sequences"
    sizes = format_range(pd.Series(curve.batch_sizes))
    seeds = f"{len(curve.fit.residuals)} seeds" if len(curve.fit.residuals) > 1 else "one seed"
    scope = f"batch sizes {sizes}, {seeds}. {ASSUMED}."
    return StepsAnswer(curve, curve.fit, unit, reasons, scope)


def _trials_of(table: Table) -> pd.DataFrame:
    """Return the rows with steps as trials that reached the target."""
    rows = table.rows[~table.rows["is_failed"]]
    trials = pd.DataFrame(index=rows.index, columns=list(COLUMNS))
    for name in ("batch_size", "learning_rate"):
        trials[name] = rows[name].astype(float)
    trials["seed"] = rows["seed"] if "seed" in table.titles else "0"
    trials["steps"] = rows[table.metric].astype(float)
    trials["tokens"] = trials["steps"] * trials["batch_size"]
    trials["is_known"] = True
    for name in ("is_censored", "is_early", "has_curve"):
        trials[name] = False
    is_repeated = trials.duplicated(["batch_size", "seed"])
    if is_repeated.any():
        row = f"{table.unit} {is_repeated.idxmax()}"
        raise SweepError(
            "each batch size must have one row of each seed, got another in "
            f"{row}. Keep that of the best learning rate, or add a column seed."
        )
    return trials
