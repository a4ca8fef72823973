"""The variables of the report's templates, computed from the results of `sweep.analysis`."""

from collections.abc import Iterator, Sequence
from typing import Any

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
from sweep.config.workload import FINAL_PROMPTS
from sweep.version import __version__

MOST_PAIRS = 15  # with more, only the pairs of the best batch size are reported
LEAST_NOISE_RECORDS = 4  # with fewer, no noise scale is reported
NOISE_SOURCES = {
    "probes": {"noise/trace": "trace", "noise/square": "square"},
    "own microbatches": {"noise/train_trace": "trace", "noise/train_square": "square"},
}
Policies = Sequence[PolicyResult | Reached]


def build_context(sweep: Sweep, cells: pd.DataFrame, policies: Policies) -> dict[str, Any]:
    """Return the variables that all templates share."""
    plan, settings = sweep.plan, sweep.plan.settings
    trials = report_trials(sweep.trials).fillna({"state": "unknown"})
    trials["order"] = pd.factorize(trials["label"])[0]
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
        "trials": trials.sort_values(["order", "batch_size", "seed"]).to_dict("records"),
        "headlines": {policy.label: headline(policy) for policy in results}
        | {policy.label: target_headline(policy) for policy in reached},
        "recommendations": list(_recommendations(cells, policies)),
        "gains": find_gains(sweep) if settings.traits.samples else (),
        "final_prompts": FINAL_PROMPTS,
        "noise": list(_noise_scales(sweep)),
        "pairs": {policy.label: reported_pairs(policy) for policy in results},
        "steps": [row for policy in reached for row in _steps(policy)],
        "equal_losses": [(m, p, *losses_at(sweep, p, m)) for m in measures for p in reached],
    }


def _recommendations(cells: pd.DataFrame, policies: Policies) -> Iterator[dict[str, Any]]:
    """Yield the cells that each rule picks, and what weakens the choice."""
    records = cell_records(cells)
    by_label = {policy.label: policy for policy in policies}
    for item in recommend(cells):
        if not item["cells"]:
            continue
        needs_loss, needs_time = item["title"] != "fastest", item["title"] != "best quality"
        first, measure = item["cells"][0], "seconds" if needs_time else "loss"
        policy = by_label[records[first]["label"]]
        overlap = [k for k in overlapping(cells, first, measure) if k not in item["cells"]]
        failed = [
            check
            for check in policy.failed
            if (needs_loss and check.blocks_claims) or (needs_time and check.weakens_times)
        ]
        yield {
            "title": item["title"],
            "rule": item["rule"],
            "cells": [records[k] for k in item["cells"]],
            "overlap": [records[k] for k in overlap],
            "failed": failed,
            "passes": policy.passes,
        }


def reported_pairs(policy: PolicyResult) -> tuple[Pair, ...]:
    """Return all pairs, or if there are many, those of the batch size with the least mean loss."""
    comparison = policy.comparison
    if comparison.least is None or len(comparison.pairs) <= MOST_PAIRS:
        return comparison.pairs
    return comparison.pairs_with(comparison.least)


def noise_records(sweep: Sweep, source: str = "probes") -> pd.DataFrame:
    """Return the reporting trials' noise: label, batch_size, seed, tokens, trace, square."""
    columns = NOISE_SOURCES[source]
    trials = report_trials(sweep.trials)[["id", "label", "batch_size", "seed"]]
    if not set(columns) <= set(sweep.curves):
        return trials.iloc[:0]
    lines = sweep.curves.dropna(subset=list(columns)).rename(columns=columns)
    lines = lines[["id", "tokens", "trace", "square"]].astype({"id": object})
    return lines.merge(trials, on="id")


def _noise_scales(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield the noise scale of each cell over the later half of training, all seeds together."""
    for source in NOISE_SOURCES:
        groups = noise_records(sweep, source).groupby(["label", "batch_size"], sort=False)
        for (label, batch_size), lines in groups:
            late = lines[lines["tokens"] >= lines["tokens"].max() / 2]
            late = late.sort_values(["seed", "tokens"])
            if len(late) >= LEAST_NOISE_RECORDS:
                scale = noise_scale(late["trace"].to_list(), late["square"].to_list())
                yield {"label": label, "batch_size": batch_size, "source": source, "scale": scale}


def _steps(policy: Reached) -> Iterator[dict[str, Any]]:
    """Yield the steps to the target of each batch size: means over the seeds that reached it."""
    slopes: dict[Any, float] = {}
    residuals: dict[Any, float] = {}
    if fit := policy.fit:
        slopes = dict(zip(policy.batch_sizes[1:], fit.slopes.tolist(), strict=True))
        residuals = dict(zip(policy.batch_sizes, fit.residuals.mean(0).tolist(), strict=True))
    for batch_size, trials in policy.trials.groupby("batch_size"):
        reached = trials[~trials["is_censored"]]
        yield {
            "label": policy.label,
            "batch_size": batch_size,
            "learning_rate": trials["learning_rate"].iloc[0],
            "seeds": len(trials),
            "reached": len(reached),
            "is_whole": len(reached) == len(trials),
            "bound": trials["steps"].min(),
            "steps_sd": reached["steps"].std(),
            **reached[["tokens", "steps", "seconds"]].mean(),
            "slope": slopes.get(batch_size),
            "residual": residuals.get(batch_size),
        }
