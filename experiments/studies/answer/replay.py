"""What would a published sweep cost with the present code, and what would it answer?

    python experiments/studies/answer/replay.py FOLDER [--answer order] [--draws 20]

The code of real sweeps searches the rates, prunes and decides; the losses are those that the sweep
recorded. A loss at a rate or a seed that was not recorded is that of the fitted curve, or of the
batch size's mean and the seed's deviation, plus a residual drawn from the recorded ones. Seconds
are the medians of the recorded trials of each batch size, of which only the first compiles.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.studies.answer.error_rates import search_rates
from sweep.analysis.results import Sweep, load_sweep
from sweep.config.arms import Arm
from sweep.decision.decision import LOOKS, Decision, decide
from sweep.decision.first_rates import FirstRates, Values, first_rates_of
from sweep.decision.next import next_trainings
from sweep.decision.question import Question
from sweep.decision.rates import rate_points, rates_between, rates_to_use, stack_points
from sweep.plan.plan import TUNING_SEED
from sweep.plan.policies import parse_policy
from sweep.plan.rate_search import RUNGS, RateTrial, is_in, neighbours, survivors
from sweep.plan.target import PATIENCE
from sweep.trial.status import State

CLOSE = 1e-6  # relative difference of rates that count as one


@dataclass
class Cost:
    """Trainings and seconds by their purpose."""

    trainings: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, purpose: str, seconds: float, share: float = 1.0) -> None:
        self.trainings[purpose] = self.trainings.get(purpose, 0.0) + 1
        self.seconds[purpose] = self.seconds.get(purpose, 0.0) + share * seconds


class Recorded:
    """The losses and times of a sweep with tuned rates, one row per batch size."""

    def __init__(self, sweep: Sweep, rng: np.random.Generator) -> None:
        result = sweep.leading
        assert result is not None and result.answer is not None
        self.rng = rng
        self.rates = list(result.rates)
        self.sizes = [rate.batch_size for rate in self.rates]
        self.objective = result.answer.compared
        self.tolerance = sweep.plan.settings.objective.margin
        policy = parse_policy(str(sweep.plan.tuned_policy))
        self.plan = sweep.plan
        self.policy = policy
        arms = {row.batch_size: row.arm for row in sweep.plan.known_trials}
        self.arms = [arms[size] for size in self.sizes]

        trials = sweep.trials
        is_own = (trials["policy"] == result.policy) & (trials["state"] == State.COMPLETE)
        own = trials[is_own]
        finals = own[own["stage"] == "final"]
        values = finals[self.objective.name].astype(float)
        values = self.objective.sign * values
        if self.objective.is_ratio:
            values = values.map(math.log)
        finals = finals.assign(value=values)
        table = finals.pivot_table("value", "batch_size", "seed").reindex(self.sizes)
        self.finals = table
        self.used = finals.groupby("batch_size")["learning_rate"].first().reindex(self.sizes)
        deviations = table.sub(table.mean(axis=1), axis=0)
        self.of_seeds = deviations.mean(axis=0)
        self.noise = deviations.sub(self.of_seeds, axis=1).stack().dropna().to_numpy()

        compiling = own["seconds_compile"].astype(float).fillna(0.0)
        self.compiling = compiling.groupby(own["batch_size"]).median().reindex(self.sizes)
        seconds = own["seconds_total"].astype(float) - compiling
        if self.objective.is_ratio:
            seconds = seconds / own["tokens_to_target"].astype(float)
        self.seconds = seconds.groupby(own["batch_size"]).median().reindex(self.sizes)
        self._drawn: dict[tuple[int, float, int], float] = {}

    def curve(self, index: int, log_rate: float) -> float:
        return float(self.rates[index].fit.losses_at(np.array(log_rate)))

    def regret(self, index: int, log_rate: float) -> float:
        """Return how far the recorded curve lies above its lowest point."""
        return self.curve(index, log_rate) - self.curve(index, float(self.rates[index].fit.optimum))

    def tuning_loss(self, index: int, rate: float, seed: int) -> float:
        """Return the recorded loss, or one drawn around the curve; the same for the same trial."""
        trials = self.rates[index].trials
        is_here = np.isclose(trials["learning_rate"], rate, rtol=CLOSE) & (trials["seed"] == seed)
        recorded = trials.loc[is_here, "value"].dropna()
        if len(recorded):
            return float(recorded.iloc[0])
        key = index, round(math.log(rate), 6), seed
        if key not in self._drawn:
            residuals = self._residuals(index)
            self._drawn[key] = self.curve(index, math.log(rate)) + self.rng.choice(residuals)
        return self._drawn[key]

    def _residuals(self, index: int) -> np.ndarray:
        points = self.rates[index].points
        fitted = self.rates[index].fit.losses_at(points.log_rates)
        residuals = (points.losses - fitted) * np.sqrt(float(points.seeds))
        return np.concatenate([residuals[np.isfinite(residuals)], self.noise])

    def final_losses(self, log_rates: np.ndarray, seeds: int) -> np.ndarray:
        """Return the losses of final trials at these rates, (k, seeds)."""
        losses = np.empty((len(self.sizes), seeds))
        for index, size in enumerate(self.sizes):
            moved = self.curve(index, log_rates[index])
            moved -= self.curve(index, math.log(self.used[size]))
            for seed in range(seeds):
                value = self.finals.get(seed, pd.Series(dtype=float)).get(size, math.nan)
                if not math.isfinite(value):
                    value = self.finals.loc[size].mean() + self.of_seeds.get(seed, 0.0)
                    value += self.rng.choice(self.noise)
                losses[index, seed] = value + moved
        return losses

    def seconds_of(self, index: int, loss: float) -> float:
        """Return the seconds of a trial that runs to its end."""
        seconds = float(self.seconds.iloc[index])
        if not self.objective.is_ratio:
            return seconds
        most = float(self.finals.iloc[index].mean()) + math.log(PATIENCE)
        return seconds * math.exp(min(loss, most))


def search(recorded: Recorded, cost: Cost) -> list[dict[float, dict[int, float]]]:
    """Search the rates of all batch sizes, in the order of the plan."""
    values: dict[Arm, Values] = {}

    def search_at(index: int, arm: Arm) -> dict[float, float]:
        def first_of(own: Values) -> FirstRates:
            return first_rates_of(recorded.plan, recorded.policy, arm, {**values, arm: own})

        def losses_of(rates: Sequence[float]) -> list[float]:
            return [recorded.tuning_loss(index, rate, TUNING_SEED) for rate in rates]

        losses = search_rates(first_of, losses_of)
        shares = _shares(recorded, losses, first_of(losses))
        for loss, share in zip(losses.values(), shares, strict=True):
            cost.add("search", recorded.seconds_of(index, loss), share)
        return losses

    searches = []
    for index, arm in enumerate(recorded.arms):
        values[arm] = search_at(index, arm)
        searches.append({rate: {TUNING_SEED: loss} for rate, loss in values[arm].items()})
    return searches


def _shares(recorded: Recorded, values: Values, first: FirstRates) -> list[float]:
    """Return the share of each trial that runs before it is pruned.

    Trials of the grid are compared by their final losses, as if these showed at every rung.
    """
    trials = [RateTrial(rate, loss) for rate, loss in values.items()]
    bounds = neighbours(trials)
    shares = [1.0] * len(trials)
    if recorded.objective.is_ratio or not first.may_prune:  # with a target pruned by their tokens
        return shares
    losses = {str(index): pair for index, pair in enumerate(values.items())}
    raced = [str(index) for index, trial in enumerate(trials) if is_in(trial.rate, first.rates)]
    for rung in RUNGS:
        kept = survivors({name: losses[name] for name in raced})
        for name in raced:
            if name not in kept and trials[int(name)] not in bounds:
                shares[int(name)] = float(rung)
        raced = [name for name in raced if name in kept]
    return shares


def replay(
    recorded: Recorded, most_seeds: int, question: Question
) -> tuple[Cost, Decision, list[str], float]:
    """Return the cost, the last decision, the verdicts at every look and what the rates give up.

    The losses count.
    """
    cost = Cost()
    for seconds in recorded.compiling:
        cost.seconds["compilation"] = cost.seconds.get("compilation", 0.0) + seconds
    searches = search(recorded, cost)
    points = [rate_points(losses) for losses in searches]
    used = rates_to_use(stack_points(points), pools_noise=True)
    given_up = max(recorded.regret(index, log_rate) for index, log_rate in enumerate(used))
    losses = recorded.final_losses(used, most_seeds)
    seeds = np.full(len(used), LOOKS[0])
    tuning_seeds = np.ones(len(used), int)
    for index in range(len(used)):
        for seed in range(LOOKS[0]):
            cost.add("seeds", recorded.seconds_of(index, losses[index, seed]))

    looks = []
    while True:
        points = [rate_points(tried) for tried in searches]
        between = [rates_between(row) for row in points]
        has_run = np.arange(most_seeds) < seeds[:, None]
        decision = decide(np.where(has_run, losses, np.nan), stack_points(points), used, LOOKS)
        looks.append(_verdicts(decision, recorded.tolerance))
        is_refinable = np.array([len(rates) > 0 for rates in between])
        more_seeds, more, needs_rates = next_trainings(
            decision=decision,
            seeds=seeds,
            tuning_seeds=tuning_seeds,
            is_refinable=is_refinable,
            tolerance=recorded.tolerance,
            most_seeds=most_seeds,
            question=question,
            pursues="tokens",
        )
        if (more_seeds == seeds).all() and (more == tuning_seeds).all() and not needs_rates.any():
            return cost, decision, looks, given_up

        for index in range(len(used)):
            for seed in range(seeds[index], more_seeds[index]):
                cost.add("seeds", recorded.seconds_of(index, losses[index, seed]))
            near = [rate for rate in searches[index] if _is_near(rate, points[index].log_rates)]
            new = [(r, s) for r in near for s in range(tuning_seeds[index], more[index])]
            if needs_rates[index]:
                new += [(rate, 0) for rate in between[index]]
            for rate, seed in new:
                loss = recorded.tuning_loss(index, rate, TUNING_SEED + seed)
                searches[index].setdefault(rate, {})[TUNING_SEED + seed] = loss
                purpose = "tuning seeds" if seed else "rates"
                cost.add(purpose, recorded.seconds_of(index, loss))
        seeds = more_seeds
        tuning_seeds = more


def _is_near(rate: float, log_rates: np.ndarray) -> bool:
    return bool(np.isclose(math.log(rate), log_rates).any())


def _verdicts(decision: Decision, tolerance: float) -> str:
    """Write a letter per batch size: within, outside or undecided."""
    within = decision.is_within(tolerance)
    outside = decision.is_outside(tolerance)
    return "".join("w" if w else "o" if o else "-" for w, o in zip(within, outside, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answer", choices=("which", "order"), default="which")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--max-seeds", type=int, default=LOOKS[-1])
    arguments = parser.parse_args()
    sweep = load_sweep(arguments.folder)
    hours = []
    for draw in range(arguments.draws):
        recorded = Recorded(sweep, np.random.default_rng(draw))
        cost, decision, looks, given_up = replay(recorded, arguments.max_seeds, arguments.answer)
        best = recorded.sizes[int(np.nanargmin(decision.best_estimate))]
        purposes = ", ".join(
            f"{name} {count:.0f} ({cost.seconds[name] / 3600:.2f} h)"
            for name, count in cost.trainings.items()
        )
        hours.append(sum(cost.seconds.values()) / 3600)
        print(f"{draw}: {hours[-1]:.2f} h; {purposes}; {' '.join(looks)}; best {best}", end="")
        print(f"; the rates give up at most {given_up:.4f}", flush=True)
    print(f"median {np.median(hours):.2f} h, {min(hours):.2f} to {max(hours):.2f}")


if __name__ == "__main__":
    main()
