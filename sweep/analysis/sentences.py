"""The answer in sentences, the same on the terminal, in the report, in MLflow and in JSON."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pandas as pd

from sweep.analysis.answer_data import AnswerData, BatchSizeAnswer, OptimizerGap, Ranking, join
from sweep.analysis.published_laws import EXPONENTS
from sweep.analysis.tables import CURVES, SweepTables, final_trials, find_gains, mean_of
from sweep.config.objective import Objective
from sweep.decision.decision import OUTSIDE, UNDECIDED
from sweep.decision.trials import End

BEST = "the best of those tried"
BEST_OF_COMPARED = "the best of those compared"
LONGER = (
    "In pretraining, the best batch size usually grows with the budget: published exponents are "
    f"{EXPONENTS[0]} to {EXPONENTS[1]}, fitted to language models of over 0.1 billion parameters, "
    "so no number is computed from them here."
)


def best_of(rows: Sequence[BatchSizeAnswer]) -> str:
    """Name the best batch size by whether all those tried were compared."""
    return BEST if all(row.mean is not None for row in rows) else BEST_OF_COMPARED


def describe(answer: AnswerData) -> list[str]:
    """Write the answer in a few sentences, the recommendation first, then why it is provisional."""
    lines = _describe_sizes(answer)
    answers = answer.of_all_optimizers
    ranking = answer.optimizers
    if ranking:
        lines += _describe_ranking(ranking, answers)
        lines += [" ".join(_describe_sizes(other)) for other in ranking.answers]

    start = "This is provisional"
    for each in answers:
        for reason in each.reasons:
            lines.append(f"{start}{each.with_optimizer}: {reason}")
            start = "Also"
    validity = f"This holds for {answer.scope} {LONGER}"
    if answer.settle_longer is None and not answer.has_budgets:
        validity += " Sweeps of several budgets, each several times the one before, measure it."
    lines.append(validity)
    return lines


def _describe_ranking(ranking: Ranking, answers: list[AnswerData]) -> list[str]:
    """Write the ranking of optimizers in sentences; `answers` begin with the best optimizer's."""
    objective = answers[0].compared
    rows = chain.from_iterable(answer.batch_sizes for answer in answers)
    rates = " and these rates"
    if any(row.regret_interval for row in rows):  # they were tuned
        rates = ""
    lines = []
    for gap in ranking.gaps:
        text = _describe_gap(gap, objective)
        lines.append(f"At batch size {gap.batch_size}{rates}, {text}.")

    start = "Provisionally, the" if any(answer.reasons for answer in answers) else "The"
    how = {True: "is the same at all", False: "differs between", None: "may differ between"}
    lines.append(f"{start} ranking of the optimizers {how[ranking.is_same]} batch sizes.")
    named = [f"{optimizer} at batch size {size}" for optimizer, size in ranking.candidates]
    verb = "may be" if len(named) > 1 else "is"
    lines.append(f"{start} best of all {verb} {join(named, 'or')}.")
    return lines


def _describe_gap(gap: OptimizerGap, objective: Objective) -> str:
    if not gap.is_decided:
        return f"{gap.better} or {gap.worse} may be better"
    low, high = gap.gap
    least = objective.write(0.0 if low is None else low, np.floor)
    estimate = objective.write(gap.estimate) if gap.estimate is not None else ""
    text = f"{gap.better} is better than {gap.worse} by {estimate}".rstrip()
    if high is None:
        return f"{text} ({least} or more)"
    number = least.split()[0]  # the unit follows once
    return f"{text} ({number} to {objective.write(high, np.ceil)})"


def _describe_sizes(answer: AnswerData) -> list[str]:
    rows = answer.batch_sizes
    is_tuned = any(row.regret_interval for row in rows)
    lines = [f"{answer.headline} {answer.clipping}".rstrip()]
    if is_tuned:
        lines += _describe_rate(answer)
    else:
        lines.insert(0, _describe_losses(answer))
    if any(row.gap_to_best != (None, None) for row in rows):
        lines += _describe_gaps(answer, is_tuned)
    if answer.price_per_device_hour is not None:
        lines.append(_describe_prices(answer))
    if answer.times_are_elsewhere:
        lines.append(
            f"The times are those of steps on {answer.times_device}; the trials ran on another "
            "device or with other settings."
        )
    return lines


def _describe_rate(answer: AnswerData) -> list[str]:
    """Write the best learning rate of the recommended batch size; no sentence if it is unknown."""
    row = answer[answer.recommended]
    if row.best_learning_rate is None:
        return []
    text = f"The best rate at batch size {row.batch_size} is {row.best_learning_rate:.2g}"
    if row.learning_rate_interval is None:
        return [f"{text}."]
    low, high = row.learning_rate_interval
    return [f"{text} (95 % interval {low:.2g} to {high:.2g})."]


def _describe_gaps(answer: AnswerData, is_tuned: bool) -> list[str]:
    """Write which batch sizes may be the best, which are worse, and which are undecided."""
    rows = answer.batch_sizes
    lines = []
    best = _describe_best(answer)
    if best:
        lines.append(" ".join(best))
    outside = [row for row in rows if row.tolerance_verdict == OUTSIDE]
    if outside:
        lines.append(_describe_worse(outside, answer.compared, is_tuned))

    compared = [row for row in rows if row.mean is not None]
    open_rows = [row for row in compared if row.tolerance_verdict == UNDECIDED]
    if open_rows:
        where = f"at batch size {join(row.batch_size for row in open_rows)}"
        close = answer.compared.write(answer.tolerance)
        text = f"It is undecided {where} whether the gap to the best is within {close}."
        if answer.compared.is_ratio:
            text = f"It is undecided {where} whether the tokens exceed the fewest by over {close}."
        may_matter = [row for row in compared if row in open_rows or row.regret_interval is None]
        unclear = [row.batch_size for row in may_matter if _is_unclear(row, answer)]
        if unclear:
            text += f" At {join(unclear)} the best learning rate is not known well enough."
        lines.append(text)

    for row in rows:
        if row.mean is None:
            lines.append(_describe_uncompared(row, answer.compared))
    return lines


def _describe_prices(answer: AnswerData) -> str:
    """Write what a training costs: with its interval, or as a range of fewer than six times."""
    parts = []
    for row in answer.batch_sizes:
        if row.price is None:
            continue
        text = f"{row.price:.3g}"
        if row.price_interval is not None:
            low, high = row.price_interval
            text += f" ({low:.3g} to {high:.3g})"
        elif row.price_range is not None:
            low, high = row.price_range
            text = f"{low:.3g} to {high:.3g} (a range)"
        else:
            text += " (one training)"
        parts.append(f"{text} at batch size {row.batch_size}")
    if not parts:
        return "What a training costs is not known: its time, or the number of its devices, is not."
    end = "to the target " if answer.compared.is_ratio else ""
    return (
        f"At {answer.price_per_device_hour:g} per device and hour, a training {end}costs "
        f"{join(parts)}."
    )


def _describe_uncompared(row: BatchSizeAnswer, objective: Objective) -> str:
    """Write why a batch size is not compared."""
    start = f"Batch size {row.batch_size} is not compared"
    if not row.missed_seeds:
        return f"{start}: it has no result."
    verb = "missed the target or diverged" if objective.is_ratio else "diverged"
    seeds = row.seeds + row.missed_seeds
    return f"{start}: {row.missed_seeds} of its {seeds} seeds {verb}."


def _describe_best(answer: AnswerData) -> list[str]:
    """Write what may be best beyond the headline, and whether it is at an edge of those tried."""
    is_compared = answer.pursues == answer.compared_side  # else the headline names candidates
    best = answer.candidates if is_compared else answer.sides[answer.pursues].candidates
    texts = []
    if is_compared and best != [answer.recommended]:
        verb = "may be" if len(best) > 1 else "is"
        texts.append(f"The best {verb} batch size {join(best, 'or')}.")
    elif is_compared and not answer.basis.startswith((BEST, BEST_OF_COMPARED)):
        texts.append(f"It is {best_of(answer.batch_sizes)}.")

    smallest = answer.batch_sizes[0].batch_size
    largest = answer.batch_sizes[-1].batch_size
    untried = []
    if smallest in best and smallest > 1:
        untried.append("smaller")
    if largest in best:
        untried.append("larger")
    if untried:
        texts.append(f"{join(untried).capitalize()} batch sizes were not tried.")
    return texts


def _describe_worse(rows: Sequence[BatchSizeAnswer], objective: Objective, is_tuned: bool) -> str:
    """Write by how much batch sizes are worse than the best, at least."""
    text = "Batch size" if is_tuned else "At these rates, batch size"
    parts: list[str] = []
    for row in rows:
        low, _ = row.gap_to_best
        gap = objective.write(0.0 if low is None else low, np.floor)
        if parts:
            parts.append(f"{row.batch_size} by {gap}")
        elif objective.is_ratio:
            parts.append(f"{text} {row.batch_size} exceeds the fewest tokens by at least {gap}")
        else:
            parts.append(f"{text} {row.batch_size} is worse than the best by at least {gap}")
    return f"{', '.join(parts)}."


def _is_unclear(row: BatchSizeAnswer, answer: AnswerData) -> bool:
    """Return True if more seeds alone cannot decide: the rate may give up too much."""
    if row.regret_interval is None:  # no curve fits, if the rates were tuned
        return any(other.regret_interval for other in answer.batch_sizes)
    low, high = row.regret_interval
    return high - low > answer.tolerance / 2


def _describe_losses(answer: AnswerData) -> str:
    """Write the measured means, for rates that were not tuned or whose best is not known."""
    measured = [row for row in answer.batch_sizes if row.mean is not None]
    means = join(f"{row.mean:.4g} at batch size {row.batch_size}" for row in measured)
    cause = "the best rates are not known" if answer.pairs else "its error is not known"
    return f"The {answer.compared.title} was {means}; {cause}."


def describe_without_answer(sweep: SweepTables) -> str:
    """Describe a sweep that has fewer than two batch sizes with results."""
    finals = final_trials(sweep.trials)
    complete = finals[finals["trial_end"] == End.COMPLETE]
    if complete.empty:
        return _without_results(sweep, finals)

    size, label = complete[["batch_size", "label"]].iloc[0]
    complete = complete[(complete["batch_size"] == size) & (complete["label"] == label)]
    unknown = ""
    if sweep.plan.settings.workload.samples:
        gains = find_gains(sweep)
        if gains and gains[0]["difference"] is not None:
            gain = gains[0]["difference"]
            return f"At batch size {size} training changed the mean reward by {gain:+.3f}."
        if sweep.lacks_curves and not gains:
            unknown = f" How training changed the reward is not known: {CURVES} is missing."

    objective = sweep.plan.settings.evaluated
    mean = mean_of(complete[objective.name].astype(float).to_list())
    number = f"{mean:.4f}" if np.isfinite(mean.value) else "not known"
    return f"At batch size {size} the {objective.title} is {number}. Nothing is compared.{unknown}"


def _without_results(sweep: SweepTables, finals: pd.DataFrame) -> str:
    """Describe a sweep without a complete final trial."""
    states = finals["cause"].fillna(finals["state"]).fillna("unknown").value_counts()
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    if not counts:
        is_tuning = (sweep.trials["stage"] == "tune").any()
        counts = "the rates are not tuned yet" if is_tuning else "no trial is planned yet"
    remedy = " Lower the learning rate." if [*states.index] == ["diverged"] else ""
    return nothing_compared(counts) + remedy


def nothing_compared(states: str = "") -> str:
    """Write why there is no answer: by the states of the trials, if they tell."""
    if states:
        return f"Nothing can be compared: {states}."
    return (
        "Nothing can be compared: no policy has results of two batch sizes, which are trials of "
        "stage final and state COMPLETE."
    )
