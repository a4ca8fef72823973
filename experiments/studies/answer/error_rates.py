"""How often is the answer wrong, and how many trainings does it need?

    python experiments/studies/answer/error_rates.py [--sweeps 10000] [--only TABLE]

Simulated losses take the place of trainings; the code of real sweeps tunes the rates and decides
by the final losses. At each batch size the expected loss is quadratic in the log rate on both sides
of its lowest point, and every training adds noise. The tables are in
docs/log/2026-11-error-rates.md.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from sweep.decision.curves import STEEPNESS, Floats
from sweep.decision.decision import LOOKS, Counts, Decision, decide
from sweep.decision.first_rates import FirstRates, Values, first_rates
from sweep.decision.next import TUNING_SEEDS, next_trainings
from sweep.decision.question import Question
from sweep.decision.rates import (
    RatePoints,
    rate_points,
    rates_between,
    rates_to_use,
    stack_points,
)
from sweep.plan.plan import TUNING_SEED
from sweep.plan.rate_search import RateTrial, next_rates

TOLERANCE = 0.01
CHUNK = 500  # sweeps that are decided at once
MOST_SEEDS = 20
SIZE_RATIO = 4  # of neighbouring batch sizes
SLOPES = (0.1, 0.6)  # of the best log rates over those of the batch sizes
USUAL_SLOPE = 0.3  # of the rule for the second batch size
OFF_LINE = 0.2  # standard deviation of best log rates about their line
Search = list[dict[float, dict[int, float]]]  # losses by batch size, rate and tuning seed
EQUAL = (0.0,) * 5
SPREAD = (0.0, 0.004, 0.02, 0.06, 0.15)  # a typical sweep
EDGE = (0.0, 0.01, 0.01, 0.01, 0.01)  # all others as far from the best as the tolerance


@dataclass(frozen=True)
class Case:
    """One kind of sweep: losses in nats, rates as natural logarithms."""

    seeds: int = 5  # seeds of the final trials; 0: auto
    best: tuple[float, ...] = EQUAL  # expected loss of each batch size at its best rate
    curvature: float = 0.2
    ratio: float = 1.0  # curvature above the best rate over that below
    sigma: float = 0.006
    noisy: float = 1.0  # standard deviation of the last batch size over that of the others
    violation: str = ""  # t3, lognormal, drift, interaction, flat, cusp, corner or cliff
    shift: float = 0.0  # standard deviation of a seed's best log rate
    missing: int = 0  # final trials without a result, of different batch sizes
    finest: float | None = None  # ratio of neighbouring rates at which the search ends
    uses_best_tried: bool = False  # final trials at the best rate tried, as in tables of others
    question: Question = "order"
    is_continued: bool = False  # an answer at three seeds was given first, as for a fixed number

    def describe(self) -> str:
        changed = []
        for name, value in vars(self).items():
            if value != getattr(Case, name):
                changed.append(f"{name} {value}")
        return ", ".join(changed) if changed else "the usual case"

    @property
    def deviations(self) -> Floats:
        return np.asarray(self.sigma * np.r_[np.ones(len(self.best) - 1), self.noisy])

    def expected(self, log_rates: Floats) -> Floats:
        """Return losses at log rates above the seed's best one, (..., k, rates)."""
        side = np.where(log_rates > 0, self.ratio, 1.0)
        distance = np.abs(log_rates)
        if self.violation == "flat":
            distance = np.maximum(distance - 0.35, 0)
        bowl = distance if self.violation == "cusp" else distance**2
        if self.violation == "corner":
            bowl = np.where(log_rates > 0, 3 * distance**1.2, bowl)
        losses = np.array(self.best)[:, None] + self.curvature * side * bowl
        if self.violation == "cliff":
            losses = np.where(log_rates > 0.4, np.inf, losses)
        return losses

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
        """Draw noise of shape (..., k, trainings); the last axis is in the order of seeds."""
        values = rng.standard_normal(shape)
        if self.violation == "t3":
            values = rng.standard_t(3, shape) / 3**0.5
        if self.violation == "lognormal":
            values = (np.exp(rng.standard_normal(shape)) - np.exp(0.5)) / 2.16
        if self.violation == "drift":  # later seeds are noisier
            values = values * np.linspace(1, 3, shape[-1])
        if self.violation == "interaction":  # seeds suit small or large batch sizes
            slope = rng.standard_normal((*shape[:-2], 1, shape[-1]))
            values = values + slope * np.linspace(-1, 1, shape[-2])[:, None]
        return np.asarray(values * self.deviations[:, None])


@dataclass(frozen=True)
class Result:
    """Shares of sweeps, and means over sweeps."""

    not_covered: float  # some interval does not contain its gap
    wrong: float  # the best is said not to be it, or a batch size to be within or outside wrongly
    within: float  # some batch size is within the tolerance
    decided: float  # mean share of batch sizes that are within or outside
    power: float  # the second batch size is worse than the first
    half_width: float  # median over sweeps and batch sizes, of the gaps
    rate_not_covered: float  # share of batch sizes whose best rate lies outside of its interval
    trainings: float


def tune(case: Case, shifts: Floats, rng: np.random.Generator) -> Search:
    """Search the rates of one sweep, in the order of the batch sizes.

    Their best rates lie near a line in logarithms, with a standard deviation of OFF_LINE. Rates are
    those over the best one, so that a batch size sees the others' from where it lies on the line.

    Args:
        case: the kind of sweep.
        shifts: those of the best log rate of the first tuning seed, (k,).
        rng: draws the losses.
    """
    k = len(case.best)
    log_sizes = np.log(SIZE_RATIO) * np.arange(k)
    line = rng.uniform(*SLOPES) * log_sizes
    best_rates = np.exp(line + OFF_LINE * rng.standard_normal(k))
    centre = float(best_rates[0] * np.exp(rng.uniform(-0.35, 0.35)))
    searches: Search = []
    earlier: dict[int, Values] = {}

    def search_at(index: int) -> dict[float, float]:
        def first_of(own: Values) -> FirstRates:
            size = SIZE_RATIO**index
            first = first_rates(
                size, own, earlier, TOLERANCE, centre, rule=lambda size: size**USUAL_SLOPE
            )
            return first if case.finest is None else replace(first, finest=case.finest)

        def losses_of(rates: Sequence[float]) -> list[float]:
            over_best = np.asarray(rates) / best_rates[index]
            log_rates = np.tile(np.log(over_best), (k, 1))
            losses = case.expected(log_rates - shifts[:, None]) + case.draw(log_rates.shape, rng)
            return losses[index].tolist()  # type: ignore[no-any-return]

        return search_rates(first_of, losses_of)

    for index, best_rate in enumerate(best_rates):
        own = search_at(index)
        earlier[SIZE_RATIO**index] = own
        searches.append({rate / best_rate: {TUNING_SEED: loss} for rate, loss in own.items()})
    return searches


def search_rates(
    first_of: Callable[[Values], FirstRates],
    losses_of: Callable[[Sequence[float]], Sequence[float]],
) -> dict[float, float]:
    """Search the rates of one batch size; return their losses, in the order in which they ran.

    Args:
        first_of: returns the first rates, from the losses so far.
        losses_of: returns the losses at some rates.
    """
    losses: dict[float, float] = {}
    while True:
        first = first_of(losses)
        trials = [RateTrial(rate, loss) for rate, loss in losses.items()]
        rates = next_rates(trials, first.rates, first.finest)
        if not rates:
            return losses
        losses |= zip(rates, losses_of(rates), strict=True)


def simulate(case: Case, sweeps: int, seed: int = 0) -> Result:
    rng = np.random.default_rng(seed)
    rows = []
    for done in range(0, sweeps, CHUNK):
        result = _simulate(case, min(CHUNK, sweeps - done), rng)
        rows.append(list(vars(result).values()))
    return Result(*np.average(rows, axis=0).tolist())


def _simulate(case: Case, sweeps: int, rng: np.random.Generator) -> Result:
    k = len(case.best)
    tuning_shifts = case.shift * rng.standard_normal((sweeps, k, TUNING_SEEDS))
    searches = [tune(case, shifts[:, 0], rng) for shifts in tuning_shifts]
    points = stack_points([_points_of(search) for search in searches])
    used = rates_to_use(points, pools_noise=True)
    if case.uses_best_tried:
        best = np.nanargmin(points.losses, -1)[..., None]
        used = np.take_along_axis(points.log_rates, best, -1)[..., 0]

    seeds = case.seeds if case.seeds else MOST_SEEDS
    shifts = case.shift * rng.standard_normal((sweeps, k, seeds))
    losses = case.expected(used[..., None] - shifts) + case.draw(shifts.shape, rng)
    for size in range(case.missing):
        losses[:, size, size] = np.nan
    trainings = float(np.mean([sum(map(len, search)) for search in searches]))

    answers = []
    if case.is_continued:
        answers.append(decide(losses[..., : LOOKS[0]], points, used))
    if case.seeds:
        answers.append(decide(losses, points, used))
        trainings += case.seeds * len(case.best)
    else:
        decision, added = decide_in_looks(case, losses, searches, tuning_shifts, used, rng)
        answers.append(decision)
        trainings += float(added.sum(-1).mean())
    return judge(case, answers, trainings)


def _points_of(search: Search) -> RatePoints:
    return stack_points([rate_points(losses) for losses in search])


def decide_in_looks(
    case: Case,
    losses: Floats,
    searches: list[Search],
    tuning_shifts: Floats,
    used: Floats,
    rng: np.random.Generator,
) -> tuple[Decision, Counts]:
    """Add trainings as `--seeds auto` does; return the last decision and the trainings added."""
    seeds = np.full(used.shape, LOOKS[0])
    tuning_seeds = np.ones(used.shape, int)
    added = np.zeros(used.shape, int)
    points = np.empty(used.shape, object)
    between = np.empty(used.shape, object)
    is_new = np.ones(used.shape, bool)
    while True:
        for sweep, size in np.argwhere(is_new):
            points[sweep, size] = rate_points(searches[sweep][size])
            between[sweep, size] = rates_between(points[sweep, size])
        stacked = stack_points([stack_points(row) for row in points])
        has_run = np.arange(MOST_SEEDS) < seeds[..., None]
        decision = decide(np.where(has_run, losses, np.nan), stacked, used, LOOKS)

        is_refinable = np.vectorize(len, [int])(between) > 0
        more_seeds, more, needs_rates = next_trainings(
            decision=decision,
            seeds=seeds,
            tuning_seeds=tuning_seeds,
            is_refinable=is_refinable,
            tolerance=TOLERANCE,
            most_seeds=MOST_SEEDS,
            question=case.question,
            pursues="tokens",
        )
        is_new = (more > tuning_seeds) | needs_rates
        if (more_seeds == seeds).all() and not is_new.any():
            return decision, seeds + added

        for sweep, size in np.argwhere(is_new):
            tried = searches[sweep][size]
            log_rates = points[sweep, size].log_rates
            near = [rate for rate in tried if np.isclose(math.log(rate), log_rates).any()]
            first = TUNING_SEED + tuning_seeds[sweep, size]
            end = TUNING_SEED + more[sweep, size]
            new = list(itertools.product(near, range(first, end)))
            if needs_rates[sweep, size]:
                new += [(rate, TUNING_SEED) for rate in between[sweep, size]]
            added[sweep, size] += len(new)

            shifts = [tuning_shifts[sweep, size, seed - TUNING_SEED] for _, seed in new]
            log_rates = np.tile(np.log([rate for rate, _ in new]), (len(case.best), 1))
            values = case.expected(log_rates - shifts) + case.draw(log_rates.shape, rng)
            for (rate, seed), value in zip(new, values[size].tolist(), strict=True):
                tried.setdefault(rate, {})[seed] = value
        seeds = more_seeds
        tuning_seeds = more


def judge(case: Case, answers: Sequence[Decision], trainings: float) -> Result:
    """Compare the answers of one sweep with the truth; the last one decides and has the power."""
    best = np.array(case.best)
    gap = np.array([best[i] - np.delete(best, i).min() for i in range(len(best))])
    is_outside = gap > TOLERANCE + 1e-12
    is_covered = np.array(True)
    is_wrong = np.array(False)
    for answer in answers:
        within = answer.is_within(TOLERANCE)
        outside = answer.is_outside(TOLERANCE)
        is_covered = is_covered & (answer.gap_low <= gap + 1e-12)
        is_covered = is_covered & (gap - 1e-12 <= answer.gap_high)
        is_wrong = is_wrong | (~answer.may_be_best & (gap <= 0))
        is_wrong |= within & is_outside
        is_wrong |= outside & ~is_outside

    lower, _ = answer.differences
    assert answer.rates is not None
    is_rate_outside = (answer.rates.optimum_low > 0) | (answer.rates.optimum_high < 0)
    return Result(
        not_covered=float((~is_covered).any(-1).mean()),
        wrong=float(is_wrong.any(-1).mean()),
        within=float(within.any(-1).mean()),
        decided=float((within | outside).mean()),
        power=float((lower[..., 1, 0] > 0).mean()),
        half_width=float(np.median(answer.gap_high - answer.gap_low)) / 2,
        rate_not_covered=float(is_rate_outside.mean()),
        trainings=trainings,
    )


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases of SCIENCE.md §9 by table: one factor at a time, then corners."""
    for case in _cases_of_errors():
        yield "errors", case

    for seeds, noisy in itertools.product((3, 5, 8), (1.0, 10.0)):
        yield "power", Case(seeds, best=(0.0, 0.024, 0.0, 0.0, 0.0), noisy=noisy)

    for sigma, seeds in itertools.product((0.002, 0.006), (3, 5, 8, 12, 20, 0)):
        yield "trainings", Case(seeds, best=SPREAD, sigma=sigma)

    for best, sigma in itertools.product((EQUAL, SPREAD, EDGE), (0.003, 0.006)):
        for shift in (0.0, 0.05):
            yield "which", Case(0, best=best, sigma=sigma, shift=shift, question="which")

    for curvature, sigma, k in itertools.product((0.2, 0.8), (0.006, 0.002), (2, 3, 5)):
        case = Case(0, best=EQUAL[:k], curvature=curvature, sigma=sigma, is_continued=True)
        yield "continued", case

    for seeds in (5, 20, 0):
        for violation in ("t3", "lognormal", "drift", "interaction", "flat", "cusp", "cliff"):
            yield "attacks", Case(seeds, violation=violation)
        yield "attacks", Case(seeds, ratio=5.0, sigma=0.002)
        for curvature, sigma in itertools.product((0.05, 0.2), (0.003, 0.006)):
            yield "attacks", Case(seeds, curvature=curvature, sigma=sigma, violation="corner")
        for sigma in (0.003, 0.006):
            yield "attacks", Case(seeds, sigma=sigma, shift=0.1)

    for seeds, sigma, ratio in itertools.product((3, 5, 8, 20), (0.003, 0.006, 0.012), (1.0, 2.5)):
        yield "width", Case(seeds, sigma=sigma, ratio=ratio)

    for case in random_cases(200, seed=0):
        yield "random", case


def _cases_of_errors() -> Iterator[Case]:
    for seeds, best in itertools.product((3, 5, 10, 20, 0), (EQUAL[:3], EQUAL)):
        yield Case(seeds, best=best)

    default = Case()
    one_factor = [
        replace(default, curvature=0.05),
        replace(default, curvature=0.8),
        replace(default, ratio=2.5),
        replace(default, sigma=0.002),
        replace(default, sigma=0.02),
        replace(default, noisy=3.0),
        replace(default, noisy=10.0),
        replace(default, best=EDGE),
        replace(default, best=SPREAD),
    ]
    for case, seeds in itertools.product(one_factor, (5, 0)):
        yield replace(case, seeds=seeds)

    corners = itertools.product((0.05, 0.8), (0.002, 0.02), (1.0, 10.0), (5, 20))
    for curvature, sigma, noisy, seeds in corners:
        yield Case(seeds, curvature=curvature, ratio=2.5, sigma=sigma, noisy=noisy)

    for ratio, seeds in itertools.product((1.0, 1.6), (20, 0)):
        yield Case(seeds, curvature=0.8, ratio=ratio, sigma=0.002)

    for k, seeds in itertools.product((2, 3), (5, 20, 0)):
        yield Case(seeds, best=EQUAL[:k], sigma=0.002)

    yield Case(5, sigma=0.002, missing=1)

    for sigma, seeds in itertools.product((0.003, 0.006), (20, 0)):
        yield Case(seeds, sigma=sigma, shift=0.05)
    for k, sigma in itertools.product((2, 8), (0.003, 0.006)):
        yield Case(20, best=(0.0,) * k, sigma=sigma, shift=0.05)

    tried = Case(20, shift=0.05, uses_best_tried=True)
    yield tried
    for ratio in (1.0, 2.5):
        yield replace(tried, sigma=0.003, ratio=ratio, finest=2.0)


def random_cases(count: int, seed: int) -> list[Case]:
    """Draw cases from the ranges that the intervals are meant for."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(count):
        k = int(rng.integers(2, 9))
        best = np.sort(rng.choice([0.0, 0.01, 0.05]) * rng.random(k))
        case = Case(
            seeds=int(rng.choice([3, 5, 8, 12, 20])),
            best=tuple((best - best[0]).tolist()),
            curvature=float(np.exp(rng.uniform(np.log(0.05), np.log(0.8)))),
            ratio=float(np.exp(rng.uniform(-np.log(STEEPNESS), np.log(STEEPNESS)))),
            sigma=float(np.exp(rng.uniform(np.log(0.002), np.log(0.02)))),
            noisy=float(rng.choice([1.0, 3.0, 10.0])),
            shift=float(rng.uniform(0.0, 0.05)),
        )
        drawn.append(case)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=10_000)
    parser.add_argument("--only", default="", help="table")
    arguments = parser.parse_args()
    chosen = [pair for pair in cases() if arguments.only in pair[0]]
    shares = ["not covered", "wrong", "within", "decided", "power", "best rate not covered"]
    print(f"| table | case | seeds | {' | '.join(shares)} | half-width | trainings |")
    print(f"| :-- | :-- | --: |{' --: |' * len(shares)} --: | --: |")
    with ProcessPoolExecutor() as pool:
        results = pool.map(partial(simulate, sweeps=arguments.sweeps), [case for _, case in chosen])
        for (table, case), result in zip(chosen, results, strict=True):
            seeds = case.seeds if case.seeds else "auto"
            name = replace(case, seeds=Case.seeds).describe()
            values = (
                result.not_covered,
                result.wrong,
                result.within,
                result.decided,
                result.power,
                result.rate_not_covered,
            )
            cells = " | ".join(f"{100 * share:.1f} %" for share in values)
            numbers = f"{result.half_width:.5f} | {result.trainings:.0f}"
            print(f"| {table} | {name} | {seeds} | {cells} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
