"""Claims about a GRPO step, published without a measurement (SEED_SYSTEMS.md, 1)."""

import importlib.util
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sweep.config.trial import TrialConfig
from sweep.memory.ablation import (
    BASE,
    CHECKPOINTING,
    DELETED,
    GROUP_ALONE,
    HALF_GROUPS,
    HALF_HEADS,
    HALF_LAYERS,
    HALF_LENGTH,
    HALF_MICROBATCH,
    HALF_PROMPTS,
    HALF_SUPERVISED,
    HALF_WIDTH,
    KEPT,
    NO_COLLECTOR,
    ONE_GROUP,
    PLAIN,
    PLAIN_ATTENTION,
    SAMPLING,
    SUPERVISED,
    TWICE_ACCUMULATED,
    TWICE_GROUPS,
    Row,
)

TOLERANCE = 0.1  # of what is claimed, within which a claim counts as true
SOME = 0.05  # of the peak: what counts where no number was claimed
BYTES_OF_LOGITS = 4
GUIDE_GROUP = 8  # completions of a prompt, in the guide
UTILISATION = 0.7  # of the device, by the guide's supervised step
NO_HALF = "asks for an even number of groups"
NO_KERNEL = "attention has no fused kernel here, or flash-attn is there"


@dataclass(frozen=True)
class Claim:
    """What was published, and what the rows say of it."""

    text: str
    claimed: tuple[float, float] | None  # bounds; None: nothing that a step shows
    measure: Callable[["Rows"], float | tuple[float, ...]]  # several: each turn's
    unit: str  # of what is claimed
    lacking: str = "its rows were not measured"  # why, where nothing is found


class Rows:
    """Rows by name, for claims; what is missing is not a number."""

    def __init__(
        self, rows: list[Row], logits_bytes: int, batch_size: int = 1, group_size: int = 1
    ) -> None:
        self._rows, self.logits_bytes = {row.name: row for row in rows}, logits_bytes
        self._batch, self._group = batch_size, group_size

    def peak(self, name: str) -> float:
        """Return a row's peak in bytes."""
        row = self._rows.get(name)
        return _number(row.peak_bytes if row else None)

    def rest(self, name: str) -> float:
        """Return what a row holds between steps, in bytes."""
        row = self._rows.get(name)
        return _number(row.measured.rest_bytes if row and row.measured else None)

    def more_time(self, name: str) -> tuple[float, ...]:
        """Return by how much a row's step took longer than the base's, in each turn."""
        row = self._rows.get(name)
        return tuple(ratio - 1 for ratio in row.time_ratios) if row else ()

    def saved(self, name: str, base: str = BASE) -> float:
        """Return the share of the base's peak that a row does without."""
        return 1 - self.times(name, base)

    def times(self, name: str, base: str) -> float:
        """Return a row's peak over that of the base."""
        return self.peak(name) / self.peak(base)

    def in_logits(self, name: str, base: str = BASE) -> float:
        """Return what a row's peak is above the base's, over the bytes of the logits."""
        return (self.peak(name) - self.peak(base)) / self.logits_bytes

    def accumulated(self) -> float:
        """Return the update's peak in several microbatches over that in one of them."""
        return self._update(ONE_GROUP) / self._update(GROUP_ALONE)

    def most_effective(self) -> float:
        """Return what half the prompts save over what half of anything else saves at most."""
        halves = (HALF_GROUPS, HALF_LENGTH, HALF_MICROBATCH, HALF_LAYERS, HALF_WIDTH)
        others = [saved for name in halves if math.isfinite(saved := self.saved(name))]
        most = max(others, default=0.0)
        return self.saved(HALF_PROMPTS) / most if most > 0 else math.nan

    def sequences_for_a_prompt(self) -> float:
        """Return supervised sequences over prompts in the same memory, by a line; groups of 8."""
        more = self.peak(BASE) - self.peak(GROUP_ALONE)
        if self._group != GUIDE_GROUP or not more > 0:
            return math.nan
        slope = more / (self._batch - self._group)
        completions = self._batch + (self.peak(SUPERVISED) - self.peak(BASE)) / slope
        return self._batch * self._group / completions

    def fused(self) -> float:
        """Return what attention's fused kernel saves; not a number where there is none."""
        return self.saved(BASE, PLAIN_ATTENTION) or math.nan

    def packages_for_it(self) -> float:
        """Return that the fused kernel ran without flash-attn: 0 packages; else not a number."""
        is_there = importlib.util.find_spec("flash_attn") is not None
        return math.nan if is_there or math.isnan(self.fused()) else 0.0

    def _update(self, name: str) -> float:
        row = self._rows.get(name)
        return _number(row.measured.phases.get("update") if row and row.measured else None)


def _number(found: int | None) -> float:
    return math.nan if found is None else float(found)


def _saving(name: str) -> Callable[[Rows], float]:
    return lambda rows: rows.saved(name)


SMALLER = {"Fewer layers": HALF_LAYERS, "Less width": HALF_WIDTH, "Fewer heads": HALF_HEADS}
CLAIMS = (
    Claim(
        "Three forward passes make a step take three times the memory of a supervised one.",
        (3, 3),
        lambda rows: rows.times(BASE, SUPERVISED),
        "times",
    ),
    Claim(
        "Twice the samples and three passes: six times the memory of a supervised step.",
        (6, 6),
        lambda rows: rows.times(BASE, HALF_SUPERVISED),
        "times",
    ),
    Claim(
        "So a batch has a sixth as many prompts (of 8) as a supervised one has sequences.",
        (6, 6),
        Rows.sequences_for_a_prompt,
        "sequences for a prompt in the same memory",
        "asks for two or more groups of 8",
    ),
    Claim(
        "All the same, twice the samples fit where the supervised step took 70 % of the device.",
        (0, 1 / UTILISATION),
        lambda rows: rows.times(BASE, HALF_SUPERVISED),
        "times the supervised peak",
    ),
    Claim(
        "The group size multiplies the memory.",
        (2, 2),
        lambda rows: rows.times(TWICE_GROUPS, BASE),
        "times, at twice the group size",
    ),
    Claim(
        "Large logits are a reason for much memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(BASE, PLAIN),
        "of the peak with plain logits",
    ),
    Claim(
        "Completions, rewards, advantages, log-probabilities and divergence are another.",
        (SOME, math.inf),
        lambda rows: (rows.rest(KEPT) - rows.rest(BASE)) / rows.peak(BASE),
        "of the peak",
    ),
    Claim(
        "Three passes hold three times the logits (B, N, V) in float32.",
        (3, 3),
        lambda rows: rows.in_logits(PLAIN),
        "times the logits, with plain logits",
    ),
    Claim(
        "Gradient accumulation multiplies them by the number of microbatches.",
        (2, math.inf),
        Rows.accumulated,
        "times the peak of one microbatch",
    ),
    Claim(
        "Gradient accumulation has no memory cost.",
        (1, 1),
        Rows.accumulated,
        "times the peak of one microbatch",
    ),
    Claim(
        "A smaller batch with accumulation in its stead takes less memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(HALF_MICROBATCH),
        "of the peak, at half the microbatch",
        NO_HALF,
    ),
    Claim(
        "The most accumulation is the most efficient with memory.",
        (SOME, math.inf),
        lambda rows: rows.saved(TWICE_ACCUMULATED),
        "of the peak, saved by twice the accumulation",
    ),
    Claim(
        "Not returning logits from sampling saves them.",
        (1, 1),
        lambda rows: rows.in_logits(SAMPLING),
        "times the logits",
    ),
    Claim(
        "`del` behind their last use frees the logits at once.",
        (1, math.inf),
        lambda rows: rows.in_logits(PLAIN, DELETED),
        "times the logits",
    ),
    Claim(
        "Compute and discard leaves no logits in memory.",
        (0, 0),
        lambda rows: rows.in_logits(DELETED),
        "times the logits, left",
    ),
    Claim(
        "`del` of a step's other tensors behind its backward pass saves memory.",
        (SOME, math.inf),
        lambda rows: -rows.saved(KEPT),
        "of the peak",
    ),
    Claim(
        "Without `del` they wait for Python's garbage collector.",
        (SOME, math.inf),
        lambda rows: -rows.saved(NO_COLLECTOR),
        "of the peak, more without a collector",
    ),
    Claim(
        "Activation checkpointing saves 30 to 50 % of the memory.",
        (0.3, 0.5),
        lambda rows: rows.saved(CHECKPOINTING),
        "of the peak",
    ),
    Claim(
        "Activation checkpointing costs 20 to 30 % of the time.",
        (0.2, 0.3),
        lambda rows: rows.more_time(CHECKPOINTING),
        "of the time",
    ),
    Claim(
        "bfloat16 halves the memory (mixed precision).",
        (0.5, 0.5),
        lambda rows: rows.saved("bf16", "fp32"),
        "of the peak",
    ),
    Claim(
        "Half the sequence saves half the memory.",
        (0.5, 0.5),
        lambda rows: rows.saved(HALF_LENGTH),
        "of the peak",
    ),
    Claim(
        "Half the group size saves half the memory.",
        (0.5, 0.5),
        lambda rows: rows.saved(HALF_GROUPS),
        "of the peak",
    ),
    Claim(
        "Reducing the batch size is the most effective.",
        (1, math.inf),
        Rows.most_effective,
        "times what half of anything else saves",
        NO_HALF,
    ),
    *(
        Claim(
            f"{what}: less memory.",
            (SOME, math.inf),
            _saving(name),
            "of the peak, at half",
            "the model's settings do not name it",
        )
        for what, name in SMALLER.items()
    ),
    Claim(
        "Flash attention takes less memory.",
        (SOME, math.inf),
        Rows.fused,
        "of the peak with plain attention",
        NO_KERNEL,
    ),
    Claim(
        "It needs the package flash-attn, and a GPU for it.",
        (1, 1),
        Rows.packages_for_it,
        "packages beside torch, whose fused kernel ran",
        NO_KERNEL,
    ),
    Claim(
        "Shorter sequences change the task; smaller groups, and any below 4, unsettle advantages.",
        None,
        lambda rows: math.nan,
        "",
        "of learning, not of memory: `sweep run` with other lengths or group sizes tells",
    ),
)


def judge_claims(base: TrialConfig, rows: list[Row]) -> list[dict[str, Any]]:
    """Hold what was published against the rows.

    Returns:
        For each claim `claim`, `claimed` (bounds, an open one None; or None), `measured`, `unit`,
        `verdict`: true, false, `not measured`, or `not resolved` where turns disagree; and
        `lacking`: why nothing was measured, or None.
    """
    grpo, model = base.science.grpo, base.science.model
    assert grpo is not None and model.kind != "quadratic"
    elements = base.science.batch_size * grpo.new_tokens * model.vocabulary
    as_dtype = replace(rows[0], name=base.science.precision)  # the base is of one of them
    sizes = base.science.batch_size, base.group_size
    known = Rows([as_dtype, *rows], BYTES_OF_LOGITS * elements, *sizes)
    return [_judged(claim, claim.measure(known)) for claim in CLAIMS]


def _judged(claim: Claim, found: float | tuple[float, ...]) -> dict[str, Any]:
    low, high = claim.claimed or (math.nan, math.nan)
    turns = found if isinstance(found, tuple) else (found,)
    measured = statistics.median(turns) if turns else math.nan
    verdict = "not measured"
    if math.isfinite(measured):
        places = {_place(one, low * (1 - TOLERANCE), high * (1 + TOLERANCE)) for one in turns}
        verdict = "not resolved" if len(places) > 1 else "true" if places == {0} else "false"
    return {
        "claim": claim.text,
        "claimed": claim.claimed and [low, high if math.isfinite(high) else None],
        "measured": measured if math.isfinite(measured) else None,
        "unit": claim.unit,
        "verdict": verdict,
        "lacking": None if math.isfinite(measured) else claim.lacking,
    }


def _place(value: float, low: float, high: float) -> int:
    """Return -1 below the bounds, 0 within them, 1 above."""
    return int(value > high) - int(value < low)
