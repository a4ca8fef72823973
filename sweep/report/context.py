"""The variables of the report's templates, computed from the results of `sweep.analysis`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.comparison import find_gains, recommend, report_trials
from sweep.analysis.critical_batch_size import noise_scale
from sweep.analysis.frames import Sweep
from sweep.analysis.policies import PolicyResult
from sweep.analysis.target import StepsCurve, losses_at
from sweep.config.experiment import FINAL_PROMPTS
from sweep.version import __version__

LEAST_NOISE_RECORDS = 4  # with fewer, no noise scale is reported
NOISE_COLUMNS = {"noise/trace": "trace", "noise/square": "square"}


def build_context(
    sweep: Sweep, cells: pd.DataFrame, policies: Sequence[PolicyResult]
) -> dict[str, Any]:
    """Return the variables that all templates share."""
    plan, settings = sweep.plan, sweep.plan.settings
    trials = report_trials(sweep.trials).fillna({"state": "unknown"})
    curves = {policy.label: policy.curve for policy in policies if policy.curve}
    return {
        "version": __version__,
        "sweep": sweep,
        "plan": plan,
        "settings": settings,
        "policies": policies,
        "warmup_fractions": [row.warmup_steps / row.steps for row in plan.known_trials],
        "cells": cells.to_dict("records"),
        "all_trials": sweep.trials.to_dict("records"),
        "trials": trials.sort_values(["label", "batch_size", "seed"]).to_dict("records"),
        "recommendations": recommend(cells),
        "gains": find_gains(sweep) if settings.traits.samples else (),
        "final_prompts": FINAL_PROMPTS,
        "noise": list(_noise_scales(sweep)),
        "steps": [row for curve in curves.values() for row in _steps(curve)],
        "equal_losses": [
            (measure, label, *losses_at(sweep, curve.trials, measure))
            for measure in ("tokens", "steps", "seconds")
            for label, curve in curves.items()
        ],
    }


def noise_records(sweep: Sweep) -> pd.DataFrame:
    """Return the reporting trials' noise: label, batch_size, seed, tokens, trace, square."""
    trials = report_trials(sweep.trials)[["id", "label", "batch_size", "seed"]]
    if not set(NOISE_COLUMNS) <= set(sweep.curves):
        return trials.iloc[:0]
    lines = sweep.curves.dropna(subset=list(NOISE_COLUMNS)).rename(columns=NOISE_COLUMNS)
    lines = lines[["id", "tokens", "trace", "square"]].astype({"id": object})
    return lines.merge(trials, on="id")


def _noise_scales(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield the noise scale of each cell over the later half of training, all seeds together."""
    groups = noise_records(sweep).groupby(["label", "batch_size"], sort=False)
    for (label, batch_size), lines in groups:
        late = lines[lines["tokens"] >= lines["tokens"].max() / 2].sort_values(["seed", "tokens"])
        if len(late) >= LEAST_NOISE_RECORDS:
            scale = noise_scale(late["trace"].to_list(), late["square"].to_list())
            yield {"label": label, "batch_size": batch_size, "scale": scale}


def _steps(curve: StepsCurve) -> list[dict[Any, Any]]:
    """Return the steps to the target of each batch size: means over the seeds that reached it."""
    batches = curve.trials.groupby("batch_size")
    reached = curve.trials[~curve.trials["is_censored"]].groupby("batch_size")
    table = batches[["label", "learning_rate"]].first()
    table["seeds"], table["bound"] = batches.size(), batches["steps"].min()
    table["reached"] = reached.size().reindex(table.index, fill_value=0)
    table[["tokens", "steps", "seconds"]] = reached[["tokens", "steps", "seconds"]].mean()
    table["steps_sd"] = reached["steps"].std()
    table["is_whole"] = table["reached"] == table["seeds"]
    sizes, fit = list(curve.batch_sizes), curve.fit
    table["slope"] = pd.Series(fit.slopes, sizes[1:]) if fit else np.nan
    table["residual"] = pd.Series(fit.residuals.mean(0), sizes) if fit else np.nan
    return table.reset_index().to_dict("records")
