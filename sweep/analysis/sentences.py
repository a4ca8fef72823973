"""The answer in sentences, the same on the terminal, in the report, in MLflow and in JSON."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from sweep.analysis.answer_data import AnswerData, BatchSizeAnswer, Ranking
from sweep.decision.decision import OUTSIDE, UNDECIDED

BEST = "the best of those tried"


def describe(answer: AnswerData) -> list[str]:
    """Write the answer in a few sentences, the recommendation first, then why it is provisional."""
    lines, ranking = _describe_sizes(answer), answer.optimizers
    answers = [answer, *(ranking.answers if ranking else [])]
    if ranking:
        lines += _describe_ranking(ranking, answers)
        lines += [" ".join(_describe_sizes(other)) for other in ranking.answers]
    reasons = [f"{each.with_optimizer}: {reason}" for each in answers for reason in each.reasons]
    lines += [f"This is provisional{reason}" for reason in reasons[:1]]
    return lines + [f"Also{reason}" for reason in reasons[1:]]


def _describe_ranking(ranking: Ranking, answers: list[AnswerData]) -> list[str]:
    """Write the ranking of optimizers in sentences; `answers` begin with the best optimizer's."""
    lines, objective = [], answers[0].compared
    is_tuned = any(row.regret_interval for answer in answers for row in answer.batch_sizes)
    rates = "" if is_tuned else " and these rates"
    start = "Provisionally, the" if any(answer.reasons for answer in answers) else "The"
    for gap in ranking.gaps:
        low, high = gap.gap
        least, most = objective.write(low or 0.0, np.floor), "or more"
        if high is not None:
            least, most = least.split()[0], f"to {objective.write(high, np.ceil)}"
        text = f"{gap.better} is better than {gap.worse} by {least} {most}"
        text = text if gap.is_decided else f"{gap.better} or {gap.worse} may be better"
        lines.append(f"At batch size {gap.batch_size}{rates}, {text}.")
    how = {True: "is the same at all", False: "differs between", None: "may differ between"}
    lines.append(f"{start} ranking of the optimizers {how[ranking.is_same]} batch sizes.")
    named = [f"{arm.optimizer} at batch size {arm.batch_size}" for arm in ranking.candidates]
    verb = "may be" if len(named) > 1 else "is"
    return [*lines, f"{start} best of all {verb} {join(named, 'or')}."]


def _describe_sizes(answer: AnswerData) -> list[str]:
    objective, rows, best = answer.compared, answer.batch_sizes, answer.candidates
    compared = [row for row in rows if row.mean is not None]
    lines = [answer.headline]
    is_tuned = any(row.regret_interval for row in rows)
    if not is_tuned:
        lines.insert(0, _describe_losses(answer))
    if all(row.gap_to_best == (None, None) for row in rows):
        return lines
    texts = [f"The best may be batch size {join(best, 'or')}."]
    if best == [answer.recommended]:
        texts = [] if answer.basis == BEST else ["It is the best of those tried."]
    smallest, largest = rows[0].batch_size, rows[-1].batch_size
    ends = {"smaller": smallest in best and smallest > 1, "larger": largest in best}
    if untried := [side for side, is_best in ends.items() if is_best]:
        texts.append(f"{join(untried).capitalize()} batch sizes were not tried.")
    lines += [" ".join(texts)] if texts else []
    if outside := [row for row in rows if row.tolerance_verdict == OUTSIDE]:
        (size, gap), *others = (
            (row.batch_size, objective.write(row.gap_to_best[0] or 0.0, np.floor))
            for row in outside
        )
        text = f"{'Batch' if is_tuned else 'At these rates, batch'} size {size} is worse than the "
        text += f"best by at least {gap}"
        lines.append("".join([text, *(f", {size} by {gap}" for size, gap in others), "."]))
    open_rows = [row for row in compared if row.tolerance_verdict == UNDECIDED]
    if open_rows:
        where = f"at batch size {join(row.batch_size for row in open_rows)}"
        close = objective.write(answer.tolerance)
        lines.append(f"It is undecided {where} whether the gap to the best is within {close}.")
    may_matter = [row for row in compared if row in open_rows or row.regret_interval is None]
    unclear = [row.batch_size for row in may_matter if _is_unclear(row, answer)]
    if unclear and open_rows:
        lines[-1] += f" At {join(unclear)} the best learning rate is not known well enough."
    if failed := [row.batch_size for row in rows if row.mean is None]:
        where = f"at batch size {join(failed)}"
        lines.append(f"Nothing is compared {where}: a seed diverged or has no result.")
    return lines


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


def join(items: Iterable[Any], word: str = "and") -> str:
    """Write `2, 4 and 8`."""
    *first, last = map(str, items)
    return f"{', '.join(first)} {word} {last}" if first else last
