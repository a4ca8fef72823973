"""The critical batch size from a table of batch sizes and steps to one loss."""

import math
from collections.abc import Sequence
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
from sweep.trial.status import State

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
    unit: str  # in which batch sizes count: sequences or tokens
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
        by_curve = (
            f"by the curve S_min + E_min/B, which is {100 * fit.largest_misfit:.1f} % off at most"
        )
        if math.isfinite(fit.b_crit.value) and fit.b_crit.value > 0:
            text = (
                f"{start} critical batch size is {fit.b_crit:.4g} {self.unit}: {by_curve}, it "
                f"takes twice the fewest steps ({fit.s_min:.4g}) and twice the fewest {self.unit} "
                f"({fit.e_min:.4g})."
            )
        else:
            side = "above" if fit.b_crit.value > 0 else "below"
            text = (
                f"{start} critical batch size lies far {side} those tried, {by_curve}; or the "
                "steps do not lead to one loss."
            )
        lines = [text]
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


def answer_steps(table: Table, trials: pd.DataFrame, reasons: Sequence[str]) -> StepsAnswer:
    """Return the critical batch size of a table whose metric counts steps to one loss.

    Args:
        table: what was read.
        trials: its rows, as in trials.csv.
        reasons: why the answer is provisional, as far as the table tells.

    Raises:
        SweepError: if fewer than three batch sizes have steps.
    """
    finals = trials[trials["stage"] == "final"]
    is_known = (finals["state"] == State.COMPLETE) & finals[table.metric].notna()
    known = finals[is_known]
    curve = fit_curve(_reached(known, table.metric), math.nan)
    if curve.fit is None:
        raise SweepError(curve.no_fit)

    all_reasons = []
    for check in check_curve(curve):
        if check.status == FAIL:
            all_reasons.append(f"{check.evidence} {check.remedy}")
    without = finals[~is_known]
    if len(without):
        ends = without["state"].fillna("no state") + " " + without["cause"].fillna("")
        counts = ends.str.strip().value_counts()
        ends_of = {
            end: "without a number" if end == State.COMPLETE else end for end in counts.index
        }
        listed = join([f"{count} {ends_of[end]}" for end, count in counts.items()])
        all_reasons.append(f"{len(without)} trainings without steps are left out: {listed}.")
    seeds = known.groupby("batch_size")["seed"].nunique()
    if seeds.max() > len(curve.fit.residuals):
        all_reasons.append(
            f"Only {len(curve.fit.residuals)} of up to {seeds.max()} seeds are known at every "
            "batch size, and count."
        )
    of_sizes = known.groupby("batch_size")[table.metric]
    if len(curve.fit.residuals) > 1 and of_sizes.nunique().max() == 1:
        all_reasons.append("All seeds have the same steps, so their noise is not known.")
    header = match_header(table.titles["batch_size"])
    in_tokens = header is not None and is_in_tokens(header[1])
    unit = "tokens" if in_tokens and "context_length" not in table.titles else "sequences"
    sizes = format_range(pd.Series(curve.batch_sizes))
    of_seeds = f"{len(curve.fit.residuals)} seeds" if len(curve.fit.residuals) > 1 else "one seed"
    scope = f"batch sizes {sizes}, {of_seeds}. {ASSUMED}."
    return StepsAnswer(curve, curve.fit, unit, [*all_reasons, *reasons], scope)


def _reached(known: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the trials with steps as `steps_to_target` does, which all reached the target."""
    steps = known[metric].astype(float)
    sizes = known["batch_size"].astype(float)
    crossings = pd.DataFrame(index=known.index, columns=list(COLUMNS))
    crossings = crossings.assign(
        batch_size=sizes, seed=known["seed"], steps=steps, tokens=steps * sizes, is_known=True
    )
    return crossings.assign(is_censored=False, is_early=False, has_curve=False)
