"""The answer of a sweep: which batch sizes may be the best, and which one to use.

The intervals come from `sweep.decision.decision`, which also decides what `--seeds auto` runs next.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Self

import numpy as np
import pandas as pd

from sweep.analysis.frames import Estimate
from sweep.analysis.rates import TunedRate
from sweep.config.arms import Arm
from sweep.config.objective import Objective
from sweep.decision.curves import rate_points, stack_points
from sweep.decision.decision import LOOKS, Decision, decide

BEST = "the best of those tried"
MISSING = "–"  # a value that is not known
WITHIN, OUTSIDE, UNDECIDED = "within", "outside", "undecided"
MOST_TIME_RATIO = 1.25  # longest over shortest training time of equal trials


@dataclass(frozen=True)
class BatchSizeAnswer:
    batch_size: int
    mean: float | None  # metric at the rate used; None if no seed completed or one diverged
    seeds: int  # complete
    gap: float | None  # to the best of the others, at the best rates; the best one's is negative
    gap_to_best: tuple[float | None, float | None]  # its interval; None: unbounded
    may_be_best: bool
    tolerance_verdict: str  # within, outside or undecided
    learning_rate: float | None  # used
    learning_rate_interval: tuple[float, float] | None  # interval of the best rate
    estimated_regret: float | None  # loss that the rate used gives up; None without a fit
    regret_interval: tuple[float, float] | None
    microbatch_size: int | None
    seconds: float | None  # median time of training, or to the target; None if they differ too much


@dataclass(frozen=True)
class Pair:
    """Two batch sizes at the rates used: the larger one minus the smaller one."""

    batch_sizes: tuple[int, int]
    difference: Estimate  # the interval holds for all pairs together
    tolerance: float

    @property
    def verdict(self) -> str:
        if -self.tolerance <= self.difference.low and self.difference.high <= self.tolerance:
            return "equivalent"
        is_different = self.difference.low > 0 or self.difference.high < 0
        return "different" if is_different else UNDECIDED


@dataclass(frozen=True, repr=False)
class Answer:
    """The keys of answer.json."""

    policy: str
    metric: str
    direction: str
    unit: str
    tolerance: float
    candidates: list[int]  # batch sizes that may be the best
    recommended: int
    provisional: bool
    basis: str  # why this one of the batch sizes, a clause
    reasons: list[str]  # why the recommendation is provisional, sentences
    decided: bool
    scope: str
    batch_sizes: list[BatchSizeAnswer]
    settle: str | None  # the command that would settle what is open
    settle_seconds: float | None  # its least time
    settle_reason: str | None  # why no command would, or what to know about it, sentences
    pairs: list[Pair]
    optimizer: str = ""  # if the sweep has several
    optimizers: "Ranking | None" = None  # if the sweep has several

    @property
    def compared(self) -> Objective:
        return Objective(self.metric, self.direction, self.unit, self.tolerance)

    @property
    def headline(self) -> str:
        start = "Provisionally, use" if self.provisional else "Use"
        return f"{start} batch size {self.recommended}{self.with_optimizer}: {self.basis}."

    @property
    def with_optimizer(self) -> str:
        """The end of a clause that names the optimizer; "" if the sweep has one."""
        return f" with {self.optimizer}" if self.optimizer else ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        return "\n".join(describe(self))

    def _repr_html_(self) -> str:
        rows = pd.DataFrame(self.batch_sizes).set_index("batch_size").rename_axis("batch size")
        rows["gap_to_best"] = rows["gap_to_best"].map(self.write_gap)
        columns = ["mean", "seeds", "gap_to_best", "tolerance_verdict", "learning_rate", "seconds"]
        rows = rows[columns].rename(columns=lambda name: name.replace("_", " "))
        return rows.to_html(na_rep=MISSING, float_format="{:.4g}".format)

    def write_gap(self, interval: tuple[float | None, float | None]) -> str:
        """Write an interval, rounded outwards."""
        low, high = (
            end if end is None else self.compared.write(end, rounded, "+")
            for end, rounded in zip(interval, (np.floor, np.ceil), strict=True)
        )
        if low is None:
            return MISSING if high is None else f"{high} or less"
        return f"{low} or more" if high is None else f"{low.split()[0]} to {high}"

    def __getitem__(self, batch_size: int) -> BatchSizeAnswer:
        return next(row for row in self.batch_sizes if row.batch_size == batch_size)


@dataclass(frozen=True)
class OptimizerGap:
    """Two optimizers at one batch size, each at its best rate."""

    batch_size: int
    better: str  # by the estimates
    worse: str
    gap: tuple[float | None, float | None]  # its interval; None: unbounded
    is_decided: bool


@dataclass(frozen=True)
class Ranking:
    """The optimizers of a sweep against each other; the intervals hold for all arms together."""

    is_same: bool | None  # at all batch sizes; None: undecided
    best_first: dict[int, list[str]]  # optimizers by batch size, by the estimates
    gaps: list[OptimizerGap]
    candidates: list[Arm]  # those that may be the best of all
    answers: list[Answer]  # answers for the other optimizers

    @classmethod
    def of(cls, arms: list[Arm], made: Decision, metric: Objective, others: list[Answer]) -> Self:
        """Rank the optimizers; `made` is about these arms, of which each has an optimizer."""
        sizes = sorted({arm.batch_size for arm in arms})
        best_first = {size: list[str]() for size in sizes}
        gaps = []
        compared = [i for i in range(len(arms)) if np.isfinite(made.mean[i])]
        for i in sorted(compared, key=made.best_estimate.item):
            worse = arms[i]
            name = str(worse.optimizer)
            for better in best_first[worse.batch_size]:
                j = arms.index(Arm(better, worse.batch_size))
                low, high = (float(ends[i, j]) for ends in made.differences)
                ends = (_gap(metric, low), _gap(metric, high))
                gaps.append(OptimizerGap(worse.batch_size, better, name, ends, low > 0))
            best_first[worse.batch_size].append(name)
        gaps.sort(key=lambda gap: gap.batch_size)

        candidates = [arms[i] for i in np.flatnonzero(made.may_be_best)]
        names = {arm.optimizer for arm in arms}
        pairs = len(sizes) * math.comb(len(names), 2)
        return cls(_is_same_order(gaps, pairs), best_first, gaps, candidates, others)

    def describe(self, answers: list[Answer]) -> list[str]:
        """Write the ranking in sentences; `answers` begin with the best optimizer's."""
        lines, objective = [], answers[0].compared
        is_tuned = any(row.regret_interval for answer in answers for row in answer.batch_sizes)
        rates = "" if is_tuned else " and these rates"
        start = "Provisionally, the" if any(answer.reasons for answer in answers) else "The"
        for gap in self.gaps:
            low, high = gap.gap
            least, most = objective.write(low or 0.0, np.floor), "or more"
            if high is not None:
                least, most = least.split()[0], f"to {objective.write(high, np.ceil)}"
            text = f"{gap.better} is better than {gap.worse} by {least} {most}"
            text = text if gap.is_decided else f"{gap.better} or {gap.worse} may be better"
            lines.append(f"At batch size {gap.batch_size}{rates}, {text}.")
        how = {True: "is the same at all", False: "differs between", None: "may differ between"}
        lines.append(f"{start} ranking of the optimizers {how[self.is_same]} batch sizes.")
        named = [f"{arm.optimizer} at batch size {arm.batch_size}" for arm in self.candidates]
        verb = "may be" if len(named) > 1 else "is"
        return [*lines, f"{start} best of all {verb} {join(named, 'or')}."]


def _is_same_order(gaps: list[OptimizerGap], pairs: int) -> bool | None:
    """Return whether the optimizers rank alike at all batch sizes; None: undecided.

    Args:
        pairs: optimizers to tell apart, over all batch sizes.
    """
    decided = [(gap.better, gap.worse) for gap in gaps if gap.is_decided]
    if any((worse, better) in decided for better, worse in decided):
        return False
    return True if len(decided) == pairs else None


def decide_trials(
    finals: pd.DataFrame, rates: Mapping[tuple[str, int], TunedRate]
) -> tuple[pd.Index, Decision] | None:
    """Decide about labels and batch sizes together; None if fewer than two can be compared.

    `finals` has a row per final trial that ended: label, batch_size, seed, learning_rate and value,
    which is better if it is less, and infinite if the trial diverged.
    """
    keys = ["label", "batch_size"]
    table = finals.pivot_table("value", keys, "seed", dropna=False).dropna(how="all")
    if (~np.isinf(table).any(axis=1)).sum() < 2:
        return None
    used = finals.groupby(keys)["learning_rate"].first().reindex(table.index)
    has_looks = finals["has_looks"].astype(str).eq("True").any()
    looks = LOOKS if has_looks or table.notna().sum(axis=1).nunique() > 1 else ()
    untuned, points = rate_points({}), None
    if rates:
        cells = [rates.get(cell) for cell in table.index]
        points = stack_points([rate.points if rate else untuned for rate in cells])
    made = decide(table.to_numpy(float), points, np.log(used.to_numpy(float)), looks)
    return table.index, made


def build_answer(
    policy: str,
    finals: pd.DataFrame,
    made: Decision,
    objective: Objective,
    reasons: Sequence[str] = (),
    scope: str = "",
    optimizer: str = "",
) -> Answer:
    """Build the answer from a decision; `reasons` say why it can only be provisional."""
    sizes = sorted({*finals["batch_size"].astype(int)})
    rows = [
        _describe_size(index, finals[finals["batch_size"] == size], made, objective)
        for index, size in enumerate(sizes)
    ]
    recommended, basis = _recommend(rows, made, objective)
    verdicts = {row.tolerance_verdict for row in rows}
    return Answer(
        policy=policy,
        metric=objective.name,
        direction=objective.direction,
        unit=objective.unit,
        tolerance=objective.tolerance,
        candidates=[row.batch_size for row in rows if row.may_be_best],
        recommended=recommended,
        provisional=bool(reasons) or WITHIN not in verdicts,
        basis=basis,
        reasons=list(reasons),
        decided=UNDECIDED not in verdicts,
        scope=scope,
        batch_sizes=rows,
        settle=None,
        settle_seconds=None,
        settle_reason=None,
        pairs=_pairs(sizes, made, objective),
        optimizer=optimizer,
    )


def _describe_size(
    index: int, trials: pd.DataFrame, made: Decision, objective: Objective
) -> BatchSizeAnswer:
    mean, low, high = (float(ends[index]) for ends in (made.mean, made.gap_low, made.gap_high))
    is_within = made.is_within(objective.margin)[index]
    is_outside = made.is_outside(objective.margin)[index]
    interval = regret = regret_interval = None
    if made.rates is not None and math.isfinite(made.rates.regret_high[index]):
        bounds = {name: float(values[index]) for name, values in vars(made.rates).items()}
        interval = math.exp(bounds["optimum_low"]), math.exp(bounds["optimum_high"])
        regret = objective.gap(bounds["regret"])
        regret_interval = objective.gap(bounds["regret_low"]), objective.gap(bounds["regret_high"])
    complete = trials[np.isfinite(trials["value"])]
    times, microbatch = complete["seconds_training"], trials["microbatch_size"].min()
    return BatchSizeAnswer(
        batch_size=int(trials["batch_size"].iloc[0]),
        mean=objective.value(mean) if math.isfinite(mean) else None,
        seeds=len(complete),
        gap=_gap(objective, _lead(made, index)),
        gap_to_best=(_gap(objective, low), _gap(objective, high)),
        may_be_best=bool(made.may_be_best[index]),
        tolerance_verdict=WITHIN if is_within else OUTSIDE if is_outside else UNDECIDED,
        learning_rate=float(trials["learning_rate"].iloc[0]),
        learning_rate_interval=interval,
        estimated_regret=regret,
        regret_interval=regret_interval,
        microbatch_size=None if math.isnan(microbatch) else int(microbatch),
        seconds=typical_time(times[times > 0]),
    )


def _lead(made: Decision, index: int) -> float:
    """Return an estimated best loss minus the least of the others; NaN if one is missing."""
    estimates = np.where(np.isfinite(made.mean), made.best_estimate, np.inf)
    least = float(np.delete(estimates, index).min())
    return float(estimates[index]) - least if math.isfinite(least) else math.nan


def typical_time(times: pd.Series) -> float | None:
    """Return the median of the times of equal trials; None without any, or if they differ."""
    is_known = len(times) > 0 and times.max() <= MOST_TIME_RATIO * times.min()
    return float(times.median()) if is_known else None


def _gap(objective: Objective, difference: float) -> float | None:
    return objective.gap(float(difference)) if math.isfinite(difference) else None


def _recommend(
    rows: Sequence[BatchSizeAnswer], made: Decision, objective: Objective
) -> tuple[int, str]:
    """Return the recommended batch size, and why it is this one."""
    close = f"within {objective.write(objective.tolerance)} of the best"
    eligible = [row.batch_size for row in rows if row.tolerance_verdict == WITHIN]
    if not eligible:
        # The worst case of a batch size whose regret is unbounded leaves out that it may be better.
        is_bounded = np.isfinite(0.0 if made.rates is None else made.rates.regret_high)
        worst = np.where(is_bounded & np.isfinite(made.gap_high), made.gap_high, math.inf)
        means = np.where(np.isnan(made.mean), math.inf, made.best_estimate)
        best = min(range(len(rows)), key=lambda i: (worst[i], means[i]))
        reason = (
            "has the best mean" if math.isinf(worst[best]) else "gives up least in the worst case"
        )
        return rows[best].batch_size, f"no batch size is known to be {close}, and this one {reason}"
    if len(eligible) == 1:
        if [row.batch_size for row in rows if row.may_be_best] == eligible:
            return eligible[0], BEST
        return eligible[0], f"the only one that is known to be {close}"
    seconds = {row.batch_size: row.seconds for row in rows if row.seconds is not None}
    if unknown := [size for size in eligible if size not in seconds]:
        why = f"times at batch size {join(unknown)} were not measured or differ too much"
        return eligible[-1], f"the largest, and usually the fastest, of those {close}; {why}"
    return min(eligible, key=seconds.__getitem__), f"the fastest of those {close}"


def _pairs(sizes: Sequence[int], made: Decision, objective: Objective) -> list[Pair]:
    pairs, sign = [], objective.sign
    for i, j in combinations(range(len(sizes)), 2):
        value, half = sign * float(made.difference[j, i]), float(made.half_width[j, i])
        if math.isfinite(value) and math.isfinite(half):
            difference = Estimate(value, value - half, value + half)
            pairs.append(Pair((sizes[i], sizes[j]), difference, objective.margin))
    return pairs


def describe(answer: Answer) -> list[str]:
    """Write the answer in a few sentences, the recommendation first, then why it is provisional."""
    lines, ranking = _describe_sizes(answer), answer.optimizers
    answers = [answer, *(ranking.answers if ranking else [])]
    if ranking:
        lines += ranking.describe(answers)
        lines += [" ".join(_describe_sizes(other)) for other in ranking.answers]
    reasons = [f"{each.with_optimizer}: {reason}" for each in answers for reason in each.reasons]
    lines += [f"This is provisional{reason}" for reason in reasons[:1]]
    return lines + [f"Also{reason}" for reason in reasons[1:]]


def _describe_sizes(answer: Answer) -> list[str]:
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


def _is_unclear(row: BatchSizeAnswer, answer: Answer) -> bool:
    """Return True if more seeds alone cannot decide: the rate may give up too much."""
    if row.regret_interval is None:  # no curve fits, if the rates were tuned
        return any(other.regret_interval for other in answer.batch_sizes)
    low, high = row.regret_interval
    return high - low > answer.tolerance / 2


def _describe_losses(answer: Answer) -> str:
    """Write the measured means, for rates that were not tuned or whose best is not known."""
    measured = [row for row in answer.batch_sizes if row.mean is not None]
    means = join(f"{row.mean:.4g} at batch size {row.batch_size}" for row in measured)
    cause = "the best rates are not known" if answer.pairs else "its error is not known"
    return f"The {answer.compared.title} was {means}; {cause}."


def join(items: Iterable[Any], word: str = "and") -> str:
    """Write `2, 4 and 8`."""
    *first, last = map(str, items)
    return f"{', '.join(first)} {word} {last}" if first else last
