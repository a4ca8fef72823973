"""The variables of the report's templates, computed from the results of `sweep.analysis`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sweep.analysis.checks import PolicyResult, headline
from sweep.analysis.comparison import (
    cell_records,
    find_gains,
    overlapping,
    recommend,
    report_trials,
)
from sweep.analysis.critical_batch_size import noise_scale
from sweep.analysis.frames import Sweep
from sweep.analysis.statistics import Pair
from sweep.analysis.target import Reached, losses_at
from sweep.analysis.target import headline as target_headline
from sweep.config.experiment import FINAL_PROMPTS
from sweep.version import __version__

LEAST_NOISE_RECORDS = 4  # with fewer, no noise scale is reported
NOISE_COLUMNS = {"noise/trace": "trace", "noise/square": "square"}
Policies = Sequence[PolicyResult] | Sequence[Reached]


def build_context(sweep: Sweep, cells: pd.DataFrame, policies: Policies) -> dict[str, Any]:
    """Return the variables that all templates share."""
    plan, settings = sweep.plan, sweep.plan.settings
    trials = report_trials(sweep.trials).fillna({"state": "unknown"})
    results = [policy for policy in policies if isinstance(policy, PolicyResult)]
    reached = [policy for policy in policies if isinstance(policy, Reached)]
    measures = ("tokens", "steps", "seconds")
    return {
        "version": __version__,
        "sweep": sweep,
        "plan": plan,
        "settings": settings,
        "policies": policies,
        "warmup_fractions": [row.warmup_steps / row.steps for row in plan.known_trials],
        "cells": cell_records(cells),
        "all_trials": sweep.trials.to_dict("records"),
        "trials": trials.sort_values(["label", "batch_size", "seed"]).to_dict("records"),
        "headlines": {p.label: headline(p) for p in results}
        | {p.label: target_headline(p) for p in reached},
        "recommendations": _recommendations(cells, policies),
        "gains": find_gains(sweep) if settings.traits.samples else (),
        "final_prompts": FINAL_PROMPTS,
        "noise": list(_noise_scales(sweep)),
        "pairs": {policy.label: reported_pairs(policy) for policy in results},
        "steps": [row for policy in reached for row in _steps(policy)],
        "equal_losses": [(m, p, *losses_at(sweep, p, m)) for m in measures for p in reached],
    }


def _recommendations(cells: pd.DataFrame, policies: Policies) -> list[dict[str, Any]]:
    """Return the cells that each rule picks, and those whose seeds overlap with them."""
    records, recommendations = cell_records(cells), []
    passes = {policy.label: policy.passes for policy in policies}
    for item in recommend(cells):
        if chosen := item["cells"]:
            measure = "loss" if item["title"] == "best quality" else "seconds"
            overlap = [k for k in overlapping(cells, chosen[0], measure) if k not in chosen]
            best, others = ([records[k] for k in indices] for indices in (chosen, overlap))
            passes_checks = passes[best[0]["label"]]
            recommendations.append(
                {**item, "cells": best, "overlap": others, "passes": passes_checks}
            )
    return recommendations


def reported_pairs(policy: PolicyResult) -> tuple[Pair, ...]:
    """Return the pairs of the best batch size with the others."""
    best = policy.comparison.least
    return () if best is None else policy.comparison.pairs_with(best)


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


def _steps(policy: Reached) -> list[dict[Any, Any]]:
    """Return the steps to the target of each batch size: means over the seeds that reached it."""
    batches = policy.trials.groupby("batch_size")
    reached = policy.trials[~policy.trials["is_censored"]].groupby("batch_size")
    table = batches[["label", "learning_rate"]].first()
    table["seeds"], table["bound"] = batches.size(), batches["steps"].min()
    table["reached"] = reached.size().reindex(table.index, fill_value=0)
    table[["tokens", "steps", "seconds"]] = reached[["tokens", "steps", "seconds"]].mean()
    table["steps_sd"] = reached["steps"].std()
    table["is_whole"] = table["reached"] == table["seeds"]
    sizes, fit = list(policy.batch_sizes), policy.fit
    table["slope"] = pd.Series(fit.slopes, sizes[1:]) if fit else np.nan
    table["residual"] = pd.Series(fit.residuals.mean(0), sizes) if fit else np.nan
    return table.reset_index().to_dict("records")
