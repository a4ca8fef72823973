"""What a sweep cannot show, found in its own data (SCIENCE.md §1 and §5).

Each rule below looks at one sweep and returns a sentence for the report, or nothing.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sweep.analysis.comparison import SEEDS_FOR_SPREAD, not_comparable, short
from sweep.analysis.frames import Sweep
from sweep.config.numbers import format_count
from sweep.plan.commands import ANSWERING_SEEDS
from sweep.plan.plan import Plan

ANSWERING_FLAGS = f"--lr tuned --seeds {ANSWERING_SEEDS}"
MANY_EPOCHS = 4
INITIAL_LOSS_TOLERANCE = 0.25  # nats around ln V; random logits add up to about 0.15
UNEVEN_TIMES = 1.25  # longest over shortest total time of equal trials
MIXABLE = ("device", "torch_version", "git_commit", "devices")
FOLLOW_FROM_MICROBATCH = ("microbatch", "gradient_accumulation", "generation_batch_size")


@dataclass(frozen=True)
class Limit:
    """One thing that the data forbid to conclude, or that weakens a conclusion."""

    code: str
    text: str
    short: str = ""  # a few words, where it makes a recommendation inconclusive
    concerns: tuple[str, ...] = ()  # "quality", "time"
    policies: tuple[str, ...] = ()  # kinds of policy whose cells it concerns; none: all


def find_limits(sweep: Sweep, cells: pd.DataFrame) -> tuple[Limit, ...]:
    """Return every limit that holds, the weightiest first."""
    found = (rule(sweep, cells) for rule in RULES)
    return tuple(limit for limit in found if limit)


def fewest_seeds(cells: pd.DataFrame) -> int:
    """Return the least number of seeds of a comparable cell; 0 where there is none."""
    usable = cells[cells["is_comparable"]]
    return int((usable["complete"] + usable["pruned"]).min()) if len(usable) else 0


def policy_kinds(cells: pd.DataFrame) -> set[str]:
    """Return fixed, sqrt, linear, tuned: those that the sweep's cells have."""
    return {str(policy).partition(":")[0] for policy in cells["policy"]}


def _seeds(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    poor = {
        str(label): fewest
        for label, group in cells.groupby("label", sort=False)
        if 0 < (fewest := fewest_seeds(group)) < SEEDS_FOR_SPREAD
    }
    if not poor:
        return None
    fewest = min(poor.values())
    own = cells[cells["label"].isin(list(poor))]
    where = "" if own["complete"].max() == fewest else " at some batch sizes"
    if len(poor) < cells["label"].nunique():
        where = f" ({', '.join(poor)})"
    kinds = tuple(policy_kinds(own))
    if fewest == 1:
        reason = (
            f"One seed{where}. Another seed changes the initial weights and the order of the data, "
            "and with them every loss; how much cannot be estimated from one trial. So no "
            "difference between batch sizes can be told from chance, however large it looks."
        )
        return Limit("single_seed", reason, f"one seed{where}", ("quality", "time"), kinds)
    return Limit(
        "few_seeds",
        f"{fewest} seeds{where}. The spread between seeds is known too poorly for a claim about "
        f"differences; at least {SEEDS_FOR_SPREAD} are needed.",
        f"{fewest} seeds{where}",
        ("quality",),
        kinds,
    )


def _fixed_rate(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    if "fixed" not in policy_kinds(cells):
        return None
    rates = sorted(set(cells.loc[cells["policy"] == "fixed", "learning_rate"]))
    shown = " and ".join(short(rate) for rate in rates)
    return Limit(
        "fixed_learning_rate",
        f"A fixed learning rate ({shown} at every batch size). The best rate changes with the "
        "batch size, so trials at one rate compare how well that rate suits each batch size as "
        "much as the batch sizes themselves. It must not be concluded that some batch size is "
        "best, nor that larger batches generalise worse. "
        f"What would answer the question: `{ANSWERING_FLAGS}`.",
        "fixed learning rate",
        ("quality",),
        ("fixed",),
    )


def _scaled_rate(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    kinds = policy_kinds(cells) & {"sqrt", "linear"}
    if not kinds:
        return None
    return Limit(
        "scaled_learning_rate",
        f"A scaling rule ({' and '.join(sorted(kinds))}) sets the learning rate, from one base "
        "point; it was not tuned at each batch size. The comparison tests the rule as much as the "
        f"batch sizes. What would answer the question: `{ANSWERING_FLAGS}`.",
        "rate by a scaling rule, not tuned",
        ("quality",),
        ("sqrt", "linear"),
    )


def _tokens(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    counts = sorted({row.tokens for row in sweep.plan.known_trials if row.stage == "report"})
    if len(counts) < 2:
        return None
    return Limit(
        "tokens_differ",
        f"Token counts are not common: from {counts[0]:,} to {counts[-1]:,} training tokens, "
        "because no common number of whole steps lies near the budget. Small differences of the "
        "loss may come from that.",
        "token counts differ",
        ("quality", "time"),
    )


def _incomplete(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    missing = list(not_comparable(cells))
    if not missing:
        return None
    listed = "; ".join(f"batch size {batch} ({label}): {why}" for label, batch, why in missing)
    return Limit(
        "cells_missing",
        f"Not every planned trial completed: {listed}. These take no part in the recommendations: "
        "a mean over the seeds that survived would flatter them.",
        "cells left out",
        ("quality", "time"),
    )


def _diverged(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    count = int(cells["diverged"].sum())
    tuning = sweep.trials[sweep.trials["stage"] == "tune"]
    also = int((tuning["cause"] == "diverged").sum())
    if not count + also:
        return None
    said = f"{count} of {int(cells['planned'].sum())} reporting trials"
    said += f" and {also} of {len(tuning)} tuning trials" * bool(also)
    return Limit(
        "diverged",
        f"{said} diverged. They are data: at that rate and batch size training is not stable. "
        "Reporting trials are counted in every table and drawn at the top edge of the figures.",
    )


def _epochs(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    measured = sweep.trials["epochs"].astype(float).max()
    epochs = sweep.plan.epochs if math.isnan(measured) else measured
    if not epochs or epochs <= MANY_EPOCHS:
        return None
    return Limit(
        "many_epochs",
        f"The data were repeated {epochs:.3g} times (more than {MANY_EPOCHS} epochs): memorising "
        "plays a part, and the result need not hold for fresh data.",
        "data repeated often",
        ("quality",),
    )


def vocabulary_of_ignorance(sweep: Sweep) -> int | None:
    """Return V where a loss per token starts near ln V; None where losses are of another kind."""
    settings = sweep.plan.settings
    return None if settings.grpo is not None else getattr(settings.model, "vocabulary", None)


def _initial_loss(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    vocabulary, start = vocabulary_of_ignorance(sweep), sweep.trials["initial_train_loss"].dropna()
    if vocabulary is None or not len(start):
        return None
    expected = math.log(vocabulary)
    far = start[(start - expected).abs() > INITIAL_LOSS_TOLERANCE]
    if not len(far):
        return None
    return Limit(
        "initial_loss",
        f"The loss before training should be near ln V = {expected:.3f} for a vocabulary of "
        f"{vocabulary:,}, and was {far.min():.3f} to {far.max():.3f} in {len(far)} "
        "trials: the model did not start from ignorance (pretrained weights, or a fault).",
        "loss at step 0 not near ln V",
        ("quality",),
    )


def mixed_execution(trials: pd.DataFrame) -> dict[str, list[str]]:
    """Return what differs between finished trials and should not, with its values.

    The microbatch size counts as mixed only between trials of one batch size.
    """
    done = trials[trials["execution"].notna() & (trials["state"] == "COMPLETE")]
    seen: dict[str, set[str]] = {name: set(done[name].dropna().map(str)) for name in MIXABLE}
    for text in set(done["execution"]):
        for name, value in json.loads(text).items():
            if not name.startswith(FOLLOW_FROM_MICROBATCH):
                seen.setdefault(f"execution.{name}", set()).add(json.dumps(value))
    mixed = {name: sorted(values) for name, values in seen.items() if len(values) > 1}
    sizes = done.groupby("batch_size")["microbatch_size"].unique()
    for batch, values in sizes.items():
        if len(values) > 1:
            mixed[f"microbatch_size at batch size {batch}"] = [str(v) for v in sorted(values)]
    return mixed


def _mixed(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    mixed = mixed_execution(sweep.trials)
    if not mixed:
        return None
    listed = "; ".join(f"{name}: {', '.join(values)}" for name, values in mixed.items())
    return Limit(
        "mixed_execution",
        f"Execution was mixed between trials ({listed}). Losses then differ by rounding too, and "
        "times cannot be compared where the device, its threads or compilation differ.",
        "mixed execution",
        ("time",),
    )


def _uneven_times(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    if sweep.plan.settings.target is not None:
        return None  # seeds reach the target at different steps
    ratio = (cells["seconds_max"] / cells["seconds_min"]).astype(float)
    if not len(ratio) or not ratio.max() > UNEVEN_TIMES:
        return None
    batch = cells["batch_size"].iloc[int(ratio.argmax())]
    return Limit(
        "uneven_times",
        f"Trials that differ only in their seed took up to {ratio.max():.2f} times as long as one "
        f"another (batch size {batch}). They do equal work, so the times hold something else too, "
        "which was not measured. Times and throughput are no better known than that.",
        "uneven times",
        ("time",),
    )


def _one_batch_size(sweep: Sweep, cells: pd.DataFrame) -> Limit | None:
    usable = cells[cells["is_comparable"]]
    if usable["batch_size"].nunique() > 1:
        return None
    count = "One batch size" if len(usable) else "No batch size"
    text = f"{count} is complete: there is nothing to compare."
    return Limit("nothing_to_compare", text, "nothing to compare", ("quality", "time"))


def _horizon(sweep: Sweep, cells: pd.DataFrame) -> Limit:
    if sweep.plan.settings.target is not None:
        return Limit(
            "one_target",
            f"Steps to one loss, {sweep.plan.settings.target:g}, at a constant rate with averaged "
            "weights or none. The critical batch size rises as the target falls, and with decay "
            "of the rate the same loss takes fewer tokens.",
        )
    return Limit(
        "fixed_horizon",
        "Only final losses, after the planned tokens, are compared. Comparisons at equal steps and "
        f"at equal seconds: NOT APPLICABLE, because {why_no_equal_steps(sweep.plan)}.",
    )


def why_no_equal_steps(plan: Plan) -> str:
    """Say why losses within a trial are not compared, where a sweep has no target."""
    if plan.settings.schedule.name == "constant":
        return "only final losses were measured on the whole validation split"
    return "the schedule knows its end, so a shorter trial would have had another loss there"


def _generalisation(sweep: Sweep, cells: pd.DataFrame) -> Limit:
    return Limit(
        "no_cause",
        "Why losses differ was not measured. The train/valid gap on fixed held-in windows is "
        "printed; a higher loss with the same gap is no sign of worse generalisation.",
    )


def _scope(sweep: Sweep, cells: pd.DataFrame) -> Limit:
    settings, plan = sweep.plan.settings, sweep.plan
    data = f", the data {data_name(plan.data)}" if plan.data else ""
    return Limit(
        "scope",
        f"Nothing beyond this model ({settings.model.name}){data}, this budget "
        f"({format_count(plan.token_budget)} tokens), this optimizer ({settings.optimizer.name}) "
        "and this schedule. Another budget can favour another batch size.",
    )


def data_name(data: dict[str, Any] | None) -> str:
    """Return the name that the data's identity carries."""
    return str((data or {}).get("name", "given by path"))


RULES: tuple[Callable[[Sweep, pd.DataFrame], Limit | None], ...] = (
    *(_one_batch_size, _seeds, _fixed_rate, _scaled_rate, _tokens, _incomplete, _diverged),
    *(_mixed, _uneven_times, _epochs, _initial_loss, _generalisation, _horizon, _scope),
)
