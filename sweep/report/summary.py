"""The first and the last word of the report: summary, recommendations, limits.

Every sentence is chosen and filled in from the data; a finding that the data do not carry is
printed as INCONCLUSIVE, with what would settle it.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from sweep.analysis.claims import headline, lacking, open_gates
from sweep.analysis.comparison import (
    Recommendation,
    cell_at,
    cell_records,
    overlapping,
    recommend,
    report_trials,
)
from sweep.analysis.frames import Sweep
from sweep.analysis.gates import Judged
from sweep.analysis.limits import Limit, fewest_seeds, policy_kinds
from sweep.plan.commands import answering_command, answering_cost
from sweep.report import markdown as md

INCONCLUSIVE = "INCONCLUSIVE"
CONCERNS = {"quality", "time"}  # of `balanced`
NO_DATA = "no cell has all of its planned trials complete"


def summary(sweep: Sweep, cells: pd.DataFrame, judged: tuple[Judged, ...]) -> str:
    """Say what was done, what was found, and first of all what carries or forbids a conclusion."""
    claims = [f"**{said}**" for one in judged if (said := headline(one))]
    open_ones = [lacking(one, "which batch size is best") for one in judged if one.is_tuned]
    parts = [*claims, *(f"**{one}**" for one in open_ones if one), unreported(sweep)]
    parts += [standing(sweep, cells), what_was_done(sweep)]
    findings = _findings(cells)
    if findings:
        parts += [findings, _table(cells)]
    return "\n\n".join(part for part in parts if part)


def standing(sweep: Sweep, cells: pd.DataFrame) -> str:
    """Open with what forbids a conclusion, and the command that would answer.

    Where rates were tuned, a conclusion would rest on those cells alone.
    """
    tuned = cells[cells["policy"] == "tuned"]
    basis = tuned if fewest_seeds(tuned) else cells
    fewest, kinds = fewest_seeds(basis), policy_kinds(basis)
    if fewest == 0:
        return f"**Nothing can be compared yet: {NO_DATA}.**"
    names, reasons = [], []
    if fewest == 1:
        some = " at some batch sizes" * bool(basis["complete"].max() > 1)
        names.append(f"one seed{some}")
        reasons.append("With one seed no difference between batch sizes can be told from chance.")
    if "tuned" not in kinds:
        names.append("a fixed learning rate" if kinds == {"fixed"} else "no tuned learning rate")
        reasons.append(
            f"With {names[-1]} it compares how well the rate suits each batch size as much as the "
            "batch sizes; nor does it show that larger batches generalise worse."
        )
    if not names:
        return ""
    first = f"**This sweep has {md.join_words(names)}: it cannot say which batch size is best.**"
    return f"{first} {' '.join(reasons)}\n\n{_answer(sweep, cells)}"


def unreported(sweep: Sweep) -> str:
    """Say at which batch sizes tuning has given no rate, and why."""
    tuned = sweep.trials[sweep.trials["policy"] == "tuned"]
    reported = set(tuned.loc[tuned["stage"] == "report", "batch_size"])
    said = []
    for batch, group in tuned[~tuned["batch_size"].isin(reported)].groupby("batch_size"):
        kinds = group["cause"].where(group["cause"].notna(), group["state"]).str.lower()
        counts = ", ".join(f"{number} {kind}" for kind, number in kinds.value_counts().items())
        said.append(f"**No rate is known yet at batch size {batch}: tuning trials {counts}.**")
    return " ".join(said)


def _answer(sweep: Sweep, cells: pd.DataFrame) -> str:
    """Name the command that answers the question, and what it would still cost here."""
    command = answering_command(sweep.plan)
    if command is None:
        return ""
    known = cells[cells["complete"] > 0]
    seconds = dict(zip(known["batch_size"], known["seconds_total"], strict=True))
    done = sweep.trials[(sweep.trials["policy"] == "tuned") & (sweep.trials["state"] != "WAITING")]
    counts = {int(str(batch)): len(group) for batch, group in done.groupby("batch_size")}
    trainings, total = answering_cost(sweep.plan, seconds, counts)
    time = f", about {md.seconds(total)} by the times measured here" if total else ""
    return (
        f"The command that answers the question costs about {trainings} trainings{time}:\n\n"
        f"```\n{command}\n```"
    )


def what_was_done(sweep: Sweep) -> str:
    """Say what was to be trained, and what came of it."""
    trials, model = report_trials(sweep.trials), sweep.plan.model
    counts = trials["state"].value_counts()
    diverged = int((trials["cause"] == "diverged").sum())
    states = [f"{number} {state}" for state, number in counts.items()]
    told = f" ({diverged} diverged)" if diverged else ""
    tuning = int((sweep.trials["stage"] == "tune").sum())
    also = f" {tuning} tuning trials are not counted here." if tuning else ""
    batches = sorted(set(trials["batch_size"]))
    size = f" ({model['parameters']:,} parameters)" if model.get("parameters") else ""
    if not batches:
        return f"The model {model['name']}{size}: no reporting trial is planned yet.{also}"
    return (
        f"The model {model['name']}{size} was to be trained at {len(batches)} batch "
        f"size{'s' * (len(batches) > 1)} ({', '.join(map(str, batches))}) for "
        f"{_token_range(trials['tokens'], sweep)} tokens each; "
        f"{len(trials)} trials: {', '.join(states)}{told}.{also}"
    )


def _token_range(tokens: Any, sweep: Sweep) -> str:
    planned = sorted({row.tokens for row in sweep.plan.known_trials if row.stage == "report"})
    return " to ".join(md.count(value) for value in dict.fromkeys((planned[0], planned[-1])))


def cell_name(cells: pd.DataFrame, position: int) -> str:
    """Name a cell: by its batch size, and its policy where there are several."""
    cell = cell_at(cells, position)
    label = f" ({cell['label']})" if cells["label"].nunique() > 1 else ""
    return f"batch size {cell['batch_size']}{label}"


def _names(cells: pd.DataFrame, positions: Sequence[int]) -> str:
    return md.join_words([cell_name(cells, position) for position in positions])


def _findings(cells: pd.DataFrame) -> str:
    """Describe the lowest mean, its spread, and the least time; describe, not declare."""
    quality, fastest, _ = recommend(cells)
    if not quality.cells or cells["is_comparable"].sum() < 2:
        return ""
    best = cell_at(cells, quality.cells[0])
    kind = "mean " if best["complete"] > 1 else ""
    value = md.spread_loss(best["final_valid_loss"], best["loss_sd"], best["complete"])
    text = (
        f"The lowest {kind}final validation loss measured is {value}, at "
        f"{_names(cells, quality.cells)}"
    )
    text += f", over {best['complete']} seeds. {_overlap(cells, quality)}" if kind else "."
    quick = cell_at(cells, fastest.cells[0])
    left_out = len(cells) - int(cells["is_comparable"].sum())
    if left_out:
        text += (
            f" {left_out} of {len(cells)} rows below take no part: not all their seeds completed."
        )
    return (
        f"{text} The least time was {md.seconds(quick['seconds_total'])}, at "
        f"{_names(cells, fastest.cells)}, with a final validation loss of "
        f"{md.loss(quick['final_valid_loss'])}."
    )


def _overlap(cells: pd.DataFrame, quality: Recommendation) -> str:
    position = quality.cells[0]
    best = cell_at(cells, position)
    met = [other for other in overlapping(cells, position) if other not in quality.cells]
    span = f"Its seeds range from {md.loss(best['loss_min'])} to {md.loss(best['loss_max'])}"
    if met:
        return (
            f"{span}, and that range overlaps with the range of {_names(cells, met)}: which of "
            "them is lowest may be chance."
        )
    return f"{span}, and that range overlaps with no other; that is a description, not a test."


def _table(cells: pd.DataFrame) -> str:
    rows = []
    for cell in cell_records(cells):
        mean = md.spread_loss(cell["final_valid_loss"], cell["loss_sd"], cell["complete"])
        span = f"{md.loss(cell['loss_min'])} to {md.loss(cell['loss_max'])}"
        rows.append(
            [
                *(str(cell["batch_size"]), cell["label"]),
                f"{cell['complete']} of {cell['planned']}",
                mean,
                span if cell["complete"] > 1 else md.MISSING,
                *(md.seconds(cell["seconds_total"]), md.count(cell["tokens_per_second"])),
            ]
        )
    headers = ["batch size", "policy", "seeds complete", "final valid loss", "range over seeds"]
    return md.table([*headers, "total time", "tokens/s"], rows)


def recommendations(
    sweep: Sweep, cells: pd.DataFrame, limits: Sequence[Limit], judged: tuple[Judged, ...]
) -> str:
    """Print what each rule picks, and whether the data carry it."""
    chosen = recommend(cells)
    rows = []
    for item in chosen:
        carried = item.title == "best quality" and _is_carried(item, cells, judged)
        reasons = [] if carried else _doubts(item, cells, limits, judged)
        standing = f"{INCONCLUSIVE}: {'; '.join(reasons)}" if reasons else "measured, not tested"
        standing = "every gate passes" if carried else standing
        if not item.cells:
            rows.append([item.title, md.MISSING, md.MISSING, md.MISSING, NO_DATA])
            continue
        cell = cell_at(cells, item.cells[0])
        value, time = md.loss(cell["final_valid_loss"]), md.seconds(cell["seconds_total"])
        tie = " (a tie)" if len(item.cells) > 1 else ""
        rows.append([item.title, _names(cells, item.cells) + tie, value, time, standing])
    headers = ["question", "the rule picks", "final valid loss", "total time", "standing"]
    rules = md.bullets(f"*{item.title}*: {item.rule}" for item in chosen)
    parts = [
        md.table(headers, rows),
        "The rules; a cell is one batch size under one policy and rate:",
        rules,
    ]
    if any(row[-1].startswith(INCONCLUSIVE) for row in rows):
        where = "the command of the summary" if answering_command(sweep.plan) else "see the gates"
        parts.append(f"What would settle the {INCONCLUSIVE} rows: {where}.")
    return "\n\n".join(parts)


def _is_carried(item: Recommendation, cells: pd.DataFrame, judged: tuple[Judged, ...]) -> bool:
    labels = {cell_at(cells, position)["label"] for position in item.cells}
    passing = {one.label for one in judged if one.passes}
    return bool(labels) and labels <= passing


def _doubts(
    item: Recommendation,
    cells: pd.DataFrame,
    limits: Sequence[Limit],
    judged: tuple[Judged, ...],
) -> list[str]:
    """Return why a pick is not carried by the data."""
    concerns = {"best quality": {"quality"}, "fastest": {"time"}}.get(item.title, CONCERNS)
    kinds = policy_kinds(cells.loc[list(item.cells)])
    doubts = [
        limit.short
        for limit in limits
        if concerns & set(limit.concerns) and (not limit.policies or kinds & set(limit.policies))
    ]
    measures = ["loss"] * ("quality" in concerns) + ["seconds"] * ("time" in concerns)
    if item.cells and any(overlapping(cells, item.cells[0], measure) for measure in measures):
        doubts.append("seed ranges overlap")
    labels = {cell_at(cells, position)["label"] for position in item.cells}
    for one in judged:
        if "quality" in concerns and one.is_tuned and one.label in labels:
            doubts.append(open_gates(one))
    return list(filter(None, doubts))


def cannot_show(limits: Sequence[Limit]) -> str:
    """List every limit that holds for this sweep."""
    return md.bullets(limit.text for limit in limits)
