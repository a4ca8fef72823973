"""Which rows of a table without stages are a search of the rates, and which count as its results.

With one training of each rate, all rows are the search. With a grid of rates and seeds, one seed is
the search, and the others count at the rate that it chose, as in a sweep: losses of seeds that
choose the rate would be too low.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sweep.analysis import tables
from sweep.analysis.cells import plain_number
from sweep.config.objective import Objective
from sweep.trial.status import State

ARM = ("label", "batch_size")
LEAST_RATES = 2  # of a batch size in a search
LEAST_SEEDS = 2  # of a table, and next to the search


@dataclass(frozen=True)
class SearchSeed:
    """The seed of a table that is a search of the rates."""

    seed: str
    unused: int  # rows that do not count
    has_finals: bool  # whether other seeds count at the rates that it chose

    def describe(self) -> str:
        text = f"the rows of seed {self.seed} are a search of the rates"
        if not self.has_finals:
            return f"{text}, and those of other seeds do not count ({self.unused} rows)"
        text += ", and the other seeds count at the rates that it chose"
        if self.unused:
            text += f" ({self.unused} rows at other rates do not count)"
        return text


def is_search(trials: pd.DataFrame) -> bool:
    """Return True if no trial is marked as tuning, and each rate of a batch size was tried once."""
    trials = _labelled(trials)
    if _is_marked(trials) or trials.duplicated([*ARM, "learning_rate"]).any():
        return False
    return bool((_count_rates(trials) > 1).any())


def seeds_of_search(trials: pd.DataFrame) -> list[str]:
    """Return the seeds of a grid of rates and seeds that may be the search; none without a grid.

    Each has several rates at each batch size. Those with the most rows come first, then those with
    the lowest number, so that the order of the rows does not count.
    """
    trials = _labelled(trials)
    known = trials["seed"].dropna()
    if _is_marked(trials) or known.nunique() < LEAST_SEEDS or len(known) < len(trials):
        return []
    if trials.duplicated([*ARM, "learning_rate", "seed"]).any():
        return []
    if not (_count_rates(trials) > 1).any():
        return []
    arms = trials[[*ARM]].drop_duplicates()
    seeds = []
    for seed, rows in trials.groupby("seed"):
        rates = _count_rates(rows)
        if len(rates) == len(arms) and (rates >= LEAST_RATES).all():
            seeds.append((-len(rows), plain_number(str(seed)), str(seed)))
    return [seed for *_, seed in sorted(seeds)]


def split_seeds(trials: pd.DataFrame, objective: Objective) -> tuple[pd.DataFrame, SearchSeed]:
    """Return the trials of one seed as a search, and those of the others at its rates as final.

    If no search leaves several other seeds at each batch size, only the first one's trials count,
    as those of a table without seeds.
    """
    seeds = seeds_of_search(trials)
    sizes = trials["batch_size"].nunique()
    for seed in seeds:
        split, unused = _split_by(trials, seed, objective)
        counts = split[split["stage"] == "final"].groupby("batch_size")["seed"].nunique()
        if len(counts) == sizes and counts.min() >= LEAST_SEEDS:
            return split, SearchSeed(seed, unused, has_finals=True)
    search = trials[trials["seed"] == seeds[0]]
    found = SearchSeed(seeds[0], unused=len(trials) - len(search), has_finals=False)
    return with_best_as_final(search, objective), found


def with_best_as_final(trials: pd.DataFrame, objective: Objective) -> pd.DataFrame:
    """Return the trials of grids of rates as a search, and the best of each batch size as final.

    A seed of its own at each rate, or another weight decay, makes noise as anything else does.
    """
    trials = trials.assign(seed="0", weight_decay=math.nan, adam_beta2=math.nan)
    best = _best_of(trials, objective).assign(stage="final")
    return pd.concat([trials.assign(stage="tune"), best], ignore_index=True)


def _split_by(trials: pd.DataFrame, seed: str, objective: Objective) -> tuple[pd.DataFrame, int]:
    """Return the search and the final trials, and how many rows are neither."""
    is_of_search = trials["seed"] == seed
    search = trials[is_of_search]
    others = trials[~is_of_search]
    best = _labelled(_best_of(search, objective))
    keys = [*ARM, "learning_rate"]
    chosen = pd.MultiIndex.from_frame(best[keys])
    is_chosen = pd.MultiIndex.from_frame(_labelled(others)[keys]).isin(chosen)
    parts = [search.assign(stage="tune"), others[is_chosen].assign(stage="final")]
    return pd.concat(parts, ignore_index=True), int((~is_chosen).sum())


def _labelled(trials: pd.DataFrame) -> pd.DataFrame:
    return trials.assign(label=tables.policy_labels)  # which tells fixed rates apart


def _is_marked(trials: pd.DataFrame) -> bool:
    return bool((trials["stage"] == "tune").any())


def _count_rates(trials: pd.DataFrame) -> pd.Series:
    keys: Sequence[str] = ARM
    return trials.groupby([*keys])["learning_rate"].nunique()


def _best_of(trials: pd.DataFrame, objective: Objective) -> pd.DataFrame:
    """Return the trial with the best value of each batch size, complete ones first."""
    is_ascending = objective.direction == "minimize"
    values = trials[objective.name].where(trials["state"] == str(State.COMPLETE))
    ranked = trials.loc[values.sort_values(ascending=is_ascending, kind="stable").index]
    is_later = _labelled(ranked).duplicated([*ARM])
    return ranked[~is_later]
