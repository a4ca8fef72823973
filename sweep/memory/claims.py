"""Claims about a GRPO step, published without a measurement (SEED_SYSTEMS.md, 1)."""

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
    HALF_LENGTH,
    HALF_SUPERVISED,
    ONE_GROUP,
    PLAIN,
    SAMPLING,
    SUPERVISED,
    Row,
)

TOLERANCE = 0.1  # of what is claimed, within which a claim counts as true
BYTES_OF_LOGITS = 4


@dataclass(frozen=True)
class Claim:
    """What was published, and what the rows say of it."""

    text: str
    claimed: tuple[float, float]  # bounds
    measure: Callable[["Rows"], float | tuple[float, ...]]  # several: each turn's
    unit: str  # of what is claimed


class Rows:
    """Rows by name, for claims; what is missing is not a number."""

    def __init__(self, rows: list[Row], logits_bytes: int) -> None:
        self._rows, self.logits_bytes = {row.name: row for row in rows}, logits_bytes

    def peak(self, name: str) -> float:
        """Return a row's peak in bytes."""
        row = self._rows.get(name)
        return math.nan if row is None or row.peak_bytes is None else float(row.peak_bytes)

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

    def _update(self, name: str) -> float:
        row = self._rows.get(name)
        if row is None or row.measured is None:
            return math.nan
        return float(row.measured.phases.get("update", math.nan))


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
)


def judge_claims(base: TrialConfig, rows: list[Row]) -> list[dict[str, Any]]:
    """Hold what was published against the rows.

    Returns:
        For each claim `claim`, `claimed` (bounds, an open one None), `measured`, `unit`, and
        `verdict`: true, false, `not measured`, or `not resolved` where turns disagree.
    """
    grpo, model = base.science.grpo, base.science.model
    assert grpo is not None and model.kind != "quadratic"
    elements = base.science.batch_size * grpo.new_tokens * model.vocabulary
    as_dtype = replace(rows[0], name=base.science.precision)  # the base is of one of them
    known = Rows([as_dtype, *rows], BYTES_OF_LOGITS * elements)
    return [_judged(claim, claim.measure(known)) for claim in CLAIMS]


def _judged(claim: Claim, found: float | tuple[float, ...]) -> dict[str, Any]:
    low, high = claim.claimed
    turns = found if isinstance(found, tuple) else (found,)
    measured = statistics.median(turns) if turns else math.nan
    verdict = "not measured"
    if math.isfinite(measured):
        places = {_place(one, low * (1 - TOLERANCE), high * (1 + TOLERANCE)) for one in turns}
        verdict = "not resolved" if len(places) > 1 else "true" if places == {0} else "false"
    return {
        "claim": claim.text,
        "claimed": [low, high if math.isfinite(high) else None],
        "measured": measured if math.isfinite(measured) else None,
        "unit": claim.unit,
        "verdict": verdict,
    }


def _place(value: float, low: float, high: float) -> int:
    """Return -1 below the bounds, 0 within them, 1 above."""
    return int(value > high) - int(value < low)
