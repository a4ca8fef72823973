"""The eight gates of a claim about batch sizes (SCIENCE.md §5), which a claim needs.

Each gate passes, is inconclusive (with what would settle it), or does not apply. Sentences about
which batch size is better are made only where every gate passes.
"""

import math
from dataclasses import dataclass

import pandas as pd

from sweep.analysis.comparison import SEEDS_FOR_SPREAD, difference_unit, report_trials
from sweep.analysis.estimate import Estimate
from sweep.analysis.frames import Sweep
from sweep.analysis.limits import (
    INITIAL_LOSS_TOLERANCE,
    MANY_EPOCHS,
    data_name,
    vocabulary_of_ignorance,
    why_no_equal_steps,
)
from sweep.analysis.statistics import (
    MOST_SEEDS,
    Comparison,
    Losses,
    Pair,
    compare_pairs,
    minimal_detectable_difference,
    seeds_sd,
    seeds_to_detect,
)
from sweep.analysis.tuned import TunedRate, tuned_rates
from sweep.config.numbers import format_count
from sweep.plan.commands import answering_command
from sweep.plan.plan import TUNING_SEED

PASS, INCONCLUSIVE, NOT_APPLICABLE = "PASS", "INCONCLUSIVE", "NOT APPLICABLE"
WANTED_DIFFERENCE = 0.01  # nats: the margin of equivalence too


@dataclass(frozen=True)
class Gate:
    """One gate, evaluated."""

    number: int
    name: str
    verdict: str  # PASS, INCONCLUSIVE or NOT APPLICABLE
    evidence: str  # one or more sentences
    settle: str = ""  # what would settle it


@dataclass(frozen=True, eq=False)
class Judged:
    """The cells of one policy, compared and judged."""

    label: str
    gates: tuple[Gate, ...]
    comparison: Comparison
    sigma: Estimate | None  # of seeds, nats
    rates: tuple[TunedRate, ...]  # where they were tuned
    best: int | None  # batch size of the least mean loss, where every gate passes
    scope: str  # a sentence

    @property
    def is_tuned(self) -> bool:
        """Whether its rates were tuned."""
        return self.label == "tuned"

    @property
    def passes(self) -> bool:
        """Whether every gate passes."""
        return all(gate.verdict == PASS for gate in self.gates)


def judge(sweep: Sweep, cells: pd.DataFrame) -> tuple[Judged, ...]:
    """Evaluate the gates for each policy of a sweep, in the plan's order."""
    labels = dict.fromkeys(cells["label"])
    return tuple(_judge(sweep, cells[cells["label"] == label], str(label)) for label in labels)


def _judge(sweep: Sweep, cells: pd.DataFrame, label: str) -> Judged:
    trials = report_trials(sweep.trials)
    trials = trials[trials["label"] == label]
    losses = _losses(trials)
    comparison = compare_pairs(losses, unit=difference_unit(sweep))
    sigma = seeds_sd(losses)
    is_tuned = set(cells["policy"]) == {"tuned"}
    rates = tuned_rates(sweep, sigma.value if sigma else None, comparison.degrees_of_freedom)
    found = tuple(rates if is_tuned else ())
    best = _least(losses, comparison.seeds) if comparison.pairs else None
    gates = (
        rate_gate(sweep, cells, found, is_tuned),
        _seed_gate(cells, comparison, sigma),
        _difference_gate(comparison, sigma, best, cells),
        _estimand_gate(sweep, trials),
        _tokens_gate(sweep, cells),
        divergence_gate(cells),
        sanity_gate(sweep, trials),
        scope_gate(sweep, trials),
    )
    is_carried = all(gate.verdict == PASS for gate in gates)
    scope = scope_sentence(sweep, trials)
    return Judged(label, gates, comparison, sigma, found, best if is_carried else None, scope)


def _losses(trials: pd.DataFrame) -> Losses:
    """Return final losses by batch size and seed; not finite where a trial diverged."""
    is_diverged = (trials["state"] == "FAILED") & (trials["cause"] == "diverged")
    ended = trials[(trials["state"] == "COMPLETE") | is_diverged]
    found: dict[int, dict[int, float]] = {int(size): {} for size in trials["batch_size"]}
    for row in ended.to_dict("records"):
        loss = row["final_valid_loss"] if row["state"] == "COMPLETE" else math.inf
        found[int(row["batch_size"])][int(row["seed"])] = float(loss)
    return found


def _least(losses: Losses, seeds: tuple[int, ...]) -> int:
    return min(losses, key=lambda size: sum(losses[size][seed] for seed in seeds))


def rate_gate(
    sweep: Sweep, cells: pd.DataFrame, rates: tuple[TunedRate, ...], is_tuned: bool
) -> Gate:
    """Gate 1: rates were tuned at every batch size, and the best is inside."""
    name = "The best rate is strictly inside its grid"
    if not is_tuned:
        command = answering_command(sweep.plan) or "sweep run … --lr tuned"
        return Gate(1, name, INCONCLUSIVE, "No rate was tuned at any batch size.", command)
    known = {rate.batch_size for rate in rates}
    lacking = sorted(set(cells["batch_size"]) - known)
    outside = [rate for rate in rates if not rate.optimum.is_inside]
    early = [rate for rate in rates if not rate.is_full]
    failed = [rate for rate in rates if rate.failed]
    counts = sorted({rate.tried for rate in rates})
    has_target = sweep.plan.settings.target is not None
    evidence = "; ".join(_rate_words(rate, has_target) for rate in rates) + "."
    if len(counts) > 1:
        evidence += f" Batch sizes had {counts[0]} to {counts[-1]} tuning trials each."
    for rate in failed:
        evidence += f" {rate.failed} tuning trials of batch size {rate.batch_size} failed."
    if lacking or outside or early or failed:
        settle = [f"tune batch size {size}" for size in lacking]
        settle += [_beyond(rate, has_target) for rate in outside]
        settle += [f"confirm batch size {rate.batch_size} at the full budget" for rate in early]
        settle += ["the same command again, which tries failed trials again"] * bool(failed)
        return Gate(1, name, INCONCLUSIVE, evidence, "; ".join(settle))
    return Gate(1, name, PASS, evidence)


def _rate_words(rate: TunedRate, has_target: bool) -> str:
    optimum, where = rate.optimum, "inside" if rate.optimum.is_inside else "AT THE EDGE"
    if optimum.best is None:
        what = "no rate reached the target" if has_target else "every rate diverged"
        return f"batch size {rate.batch_size}: {what}"
    low, high = rate.trials["learning_rate"].min(), rate.trials["learning_rate"].max()
    text = (
        f"batch size {rate.batch_size}: {optimum.best:.3g} {where} {low:.3g} to {high:.3g}, "
        f"{rate.tried} trials"
    )
    if optimum.rate is not None:
        ends = optimum.interval
        spread = f" [{ends[0]:.3g}, {ends[1]:.3g}]" if ends else ""
        text += f", vertex {optimum.rate:.3g}{spread}"
    if optimum.plateau:
        text += f", within one σ {optimum.plateau[0]:.3g} to {optimum.plateau[1]:.3g}"
    if rate.has_other_dimensions:
        text += ", at the β2 and weight decay of the best trial, which are not bracketed"
    return text


def _beyond(rate: TunedRate, has_target: bool) -> str:
    """Say where to look: the search went as far from its grid as it goes."""
    if has_target and rate.optimum.best is None:
        return f"a larger budget, or a higher target, for batch size {rate.batch_size}"
    best, rates = rate.optimum.best, rate.trials["learning_rate"]
    near = rates.min() / 4 if best is None or best <= rates.min() else rates.max()
    return f"another --out with [tuning] centre = {near:.2g}, for batch size {rate.batch_size}"


def _seed_gate(cells: pd.DataFrame, comparison: Comparison, sigma: Estimate | None) -> Gate:
    name = f"At least {SEEDS_FOR_SPREAD} seeds in every cell"
    fewest, count = int(cells["complete"].min()), len(comparison.batch_sizes)
    more = f"--seeds {SEEDS_FOR_SPREAD} or more (5 recommended)"
    if int(cells["planned"].min()) >= SEEDS_FOR_SPREAD:
        more = what_would_end(cells)  # seeds enough were planned
    if sigma is None:
        why = f"{fewest} complete in the poorest cell; σ of seeds is not known."
        return Gate(2, name, INCONCLUSIVE, why, more if count > 1 else "more batch sizes")
    seeds, pairs = len(comparison.seeds), len(comparison.pairs)
    least = minimal_detectable_difference(sigma.value, seeds, count, pairs)
    needed = seeds_to_detect(WANTED_DIFFERENCE, sigma.value, count, pairs)
    wanted = f"{needed} seeds" if needed else "more than 1000 seeds"
    plural, unit = "s" if pairs > 1 else "", comparison.unit
    evidence = (
        f"{fewest} seeds; σ of seeds {sigma.value:.4f} [{sigma.low:.4f}, {sigma.high:.4f}] "
        f"{unit}. {seeds} seeds show a difference of {least or math.nan:.4f} {unit} with power "
        f"0.8 over {pairs} pair{plural}; {WANTED_DIFFERENCE:g} {unit} would need {wanted}."
    )
    verdict = PASS if fewest >= SEEDS_FOR_SPREAD else INCONCLUSIVE
    return Gate(2, name, verdict, evidence, "" if verdict == PASS else more)


def _difference_gate(
    comparison: Comparison, sigma: Estimate | None, best: int | None, cells: pd.DataFrame
) -> Gate:
    name = "Every other batch size is told from the best, or found equal to it"
    if comparison.not_applicable or best is None:
        why = comparison.not_applicable or "nothing to compare"
        settle = "--seeds 3 or more" if len(comparison.batch_sizes) > 1 else "more batch sizes"
        if len(comparison.batch_sizes) > 1 and (cells["complete"] < cells["planned"]).any():
            settle = what_would_end(cells)
        return Gate(3, name, NOT_APPLICABLE, f"{why[:1].upper()}{why[1:]}.", settle)
    pairs = pairs_with(comparison, best)
    open_pairs = [pair for pair in pairs if not (pair.is_different or pair.is_equivalent)]
    different = sum(pair.is_different for pair in pairs)
    evidence = (
        f"Paired by seed, Holm over all pairs: beside batch size {best}, {different} of "
        f"{len(pairs)} differ from it, {len(pairs) - different - len(open_pairs)} are equal within "
        f"±{comparison.margin:g} {comparison.unit}, {len(open_pairs)} are undecided. Largest "
        f"over smallest variance {comparison.variance_ratio:.1f}."
    )
    if not open_pairs:
        return Gate(3, name, PASS, evidence)
    nearest = min(abs(pair.difference.value) for pair in open_pairs)
    assert sigma is not None
    count = len(comparison.batch_sizes)
    wanted = max(nearest, comparison.margin)
    needed = seeds_to_detect(wanted, sigma.value, count, len(comparison.pairs))
    more = max(needed or 0, len(comparison.seeds) + 1)
    settle = f"--seeds {more} for a difference of {wanted:.4f} {comparison.unit}"
    if not needed:
        settle = f"more than {MOST_SEEDS} seeds: not to be settled this way"
    return Gate(3, name, INCONCLUSIVE, evidence, settle)


def pairs_with(comparison: Comparison, best: int) -> list[Pair]:
    """Return the pairs that one batch size takes part in."""
    return [pair for pair in comparison.pairs if best in pair.batch_sizes]


def _estimand_gate(sweep: Sweep, trials: pd.DataFrame) -> Gate:
    name = "Final losses, at the end of the schedule, are compared"
    done = trials[trials["state"] == "COMPLETE"]
    lacking = int(done["final_valid_loss"].isna().sum())
    schedule = sweep.plan.settings.schedule.name
    evidence = (
        f"{len(done)} final losses of the whole validation split, after the last step of a "
        f"{schedule} schedule. The least of the evaluations is printed as biased."
    )
    if lacking or not len(done):
        return Gate(4, name, INCONCLUSIVE, f"{lacking} of {len(done)} are missing.", "run again")
    return Gate(4, name, PASS, evidence)


def _tokens_gate(sweep: Sweep, cells: pd.DataFrame) -> Gate:
    name = "Equal tokens, equal steps and equal seconds are kept apart"
    counts = sorted(set(cells["tokens"]))
    apart = (
        f"At equal steps and at equal seconds: NOT APPLICABLE, {why_no_equal_steps(sweep.plan)}."
    )
    if len(counts) > 1:
        why = f"Training tokens differ, {counts[0]:,} to {counts[-1]:,}. {apart}"
        settle = "batch sizes with a small least common multiple, or a larger budget"
        return Gate(5, name, INCONCLUSIVE, why, settle)
    return Gate(5, name, PASS, f"{counts[0]:,} tokens at every batch size. {apart}")


def what_would_end(cells: pd.DataFrame) -> str:
    """Say what would end the trials that have not ended well."""
    if not int(cells["diverged"].sum()):
        return "the same command again"
    if set(cells["policy"]) == {"tuned"}:
        return "a longer warmup or a lower clip: at the rates that won training is not stable"
    return "a lower rate, by --lr RATE"


def divergence_gate(cells: pd.DataFrame) -> Gate:
    """Gate 6: no trial diverged, failed or is open."""
    name = "Diverged trials are counted"
    diverged, failed = int(cells["diverged"].sum()), int(cells["failed"].sum())
    waiting = int(cells["unfinished"].sum())
    evidence = f"{diverged} of {int(cells['planned'].sum())} trials diverged, {failed} failed."
    if diverged or failed or waiting:
        unfinished = f" {waiting} are not finished." if waiting else ""
        return Gate(6, name, INCONCLUSIVE, evidence + unfinished, what_would_end(cells))
    return Gate(6, name, PASS, evidence)


def sanity_gate(sweep: Sweep, trials: pd.DataFrame) -> Gate:
    """Gate 7: counts of tokens add up, and the loss starts at ignorance."""
    name = "The numbers are sane"
    done = trials[trials["state"] == "COMPLETE"]
    product = done["steps"] * done["batch_size"] * sweep.plan.tokens_per_sequence
    faults = []
    planned = {row.id: row.tokens for row in sweep.plan.known_trials}
    is_whole = product == done["id"].map(planned)
    if sweep.plan.settings.target is not None:
        is_whole = product <= done["id"].map(planned)
    if not bool(((product == done["tokens"]) & is_whole).all()):
        faults.append("steps × batch size × tokens per sequence is not the token count")
    if done["bytes_per_token"].dropna().nunique() > 1:
        faults.append("bytes per token differ between trials")
    vocabulary, start = vocabulary_of_ignorance(sweep), done["initial_train_loss"].dropna()
    said = "steps × batch size × tokens per sequence = tokens in every trial"
    if vocabulary and len(start):
        expected = math.log(vocabulary)
        far = (start - expected).abs().max()
        said += f"; loss at step 0 within {far:.3f} of ln V = {expected:.3f}"
        if far > INITIAL_LOSS_TOLERANCE:
            faults.append(f"loss at step 0 is {far:.3f} from ln V")
    if len(ratio := done["bytes_per_token"].dropna()):
        said += f"; {ratio.iloc[0]:.3f} bytes per token"
    if faults or not len(done):
        evidence = "; ".join(faults) or "no trial is complete"
        return Gate(7, name, INCONCLUSIVE, f"{evidence[:1].upper()}{evidence[1:]}.", "find out why")
    return Gate(7, name, PASS, f"{said[:1].upper()}{said[1:]}.")


def scope_sentence(sweep: Sweep, trials: pd.DataFrame) -> str:
    """Say what a claim about these reporting trials holds for."""
    return f"This holds for {_scope(sweep, trials)}."


def _scope(sweep: Sweep, trials: pd.DataFrame) -> str:
    settings, plan = sweep.plan.settings, sweep.plan
    data = f", {data_name(plan.data)}" if plan.data else ""
    seeds = sorted({int(seed) for seed in trials["seed"]})
    tuned = sweep.trials[(sweep.trials["stage"] == "tune") & (sweep.trials["policy"] == "tuned")]
    tuning = ""
    if set(trials["policy"]) == {"tuned"} and len(tuned):
        dimensions = " and ".join(settings.tuning.dimensions)
        counts = tuned.groupby("batch_size").size()
        tried = " to ".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))
        tokens = format_count(int(tuned["tokens"].min()))
        tuning = f", {dimensions} tuned by {tried} trials of {tokens} tokens at seed {TUNING_SEED}"
    return (
        f"{settings.model.name}{data}, {format_count(plan.token_budget)} tokens, "
        f"{settings.optimizer.name}, {settings.schedule.name} schedule{tuning}, reported on seeds "
        f"{', '.join(map(str, seeds))}"
    )


def scope_gate(sweep: Sweep, trials: pd.DataFrame) -> Gate:
    """Gate 8: what a claim holds for, and whether the data were fresh enough."""
    name, scope = "The claim is scoped", _scope(sweep, trials)
    epochs = float(trials["epochs"].astype(float).max())
    if epochs > MANY_EPOCHS:
        why = f"{scope}; the data were repeated {epochs:.3g} times."
        return Gate(8, name, INCONCLUSIVE, why, "more data, or a smaller budget")
    return Gate(8, name, PASS, f"{scope}.")
